"""fctl's words on batch jobs, as scontrol's: hold, release, requeue, top, update. It speaks HTTP alone."""

import datetime
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from scheduler.contracts import command_line, ports, times

_JOBS = "/forebay/v1/jobs"
_ID = re.compile(r"\d{1,18}(_\d{1,9})?", re.ASCII)
_SAID = {"hold": "held", "release": "released", "requeue": "put back", "top": "on top"}


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise command_line.CommandError(f"{text[:40]!r} is no whole number") from None


def _point(text: str) -> int:
    now = datetime.datetime.now(datetime.UTC)
    try:
        at = times.point(text, now=now, tz=times.local_zone(os.environ))
    except times.TimeError as error:
        raise command_line.CommandError(str(error)) from None
    return round(at.timestamp() * 1_000_000)


def _duration(text: str) -> int:
    try:
        return times.duration(text) or 0
    except times.TimeError as error:
        raise command_line.CommandError(str(error)) from None


# scontrol's names of a job's fields, in lower case, and ours: field of the API, and how it is read.
_FIELDS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "priority": ("priority", _whole),
    "qos": ("qos", str),
    "name": ("name", str),
    "jobname": ("name", str),
    "comment": ("comment", str),
    "dependency": ("dependency", str),
    "begin": ("begin_us", _point),
    "starttime": ("begin_us", _point),
    "deadline": ("deadline_us", _point),
    "time": ("time_limit_s", _duration),
    "timelimit": ("time_limit_s", _duration),
    "arraytaskthrottle": ("array_limit", _whole),
}


def is_jobs(text: str) -> bool:
    """Whether a target names batch jobs: numbers with commas, 12_3 for a task; a model is named otherwise."""
    return all(_ID.fullmatch(word) for word in text.split(","))


def add(commands: Any) -> None:
    """Add the commands that are about batch jobs alone."""
    for name, text in (
        ("requeue", "put running batch jobs back into the queue"),
        ("top", "put waiting batch jobs before their users' others"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("jobs", help="one id, or several with commas; 12_3 for a task")
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(act=_act)


def _act(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> int:
    if not is_jobs(args.jobs):
        raise command_line.CommandError(f"invalid job id {args.jobs[:40]!r}: give 12, or 12_3")
    return act(args.command, args.jobs, api, out, as_json=args.json)


def act(verb: str, jobs: str, api: ports.Api, out: TextIO, *, as_json: bool = False) -> int:
    """Hold, release, requeue or top each of some jobs; one that can't be stops none of the others."""
    return _each(
        jobs,
        lambda job: api.call("POST", f"{_JOBS}/{job}/{verb}"),
        _SAID[verb],
        out,
        as_json=as_json,
    )


def _each(jobs: str, change: Callable[[str], Any], said: str, out: TextIO, *, as_json: bool) -> int:
    """Change each of some jobs, and say which were.

    Raises:
        command_line.CommandError: those that could not be, and why.
    """
    done, faults = [], []
    for job in jobs.split(","):
        try:
            change(job)
        except command_line.CommandError as error:
            faults.append(error.message)
        else:
            done.append(job)
    if as_json:
        command_line.print_json({"jobs": done, "done": said, "errors": faults}, out)
    for job in done if not as_json else ():
        print(f"job {job}: {said}", file=out)
    if faults:
        raise command_line.CommandError("; ".join(faults))
    return 0


def named(pairs: Mapping[str, str]) -> str:
    """Return the jobs that an update is of: ``job=12``, or as scontrol has it ``JobId=12``; "": of none."""
    return pairs.get("job", "") or pairs.get("jobid", "")


def update(pairs: Mapping[str, str], api: ports.Api, out: TextIO, *, as_json: bool = False) -> None:
    """Change jobs: ``job=12 priority=5 time=2-0``, keys as scontrol's or fbatch's, in lower case.

    Raises:
        command_line.CommandError: an unknown key, a value that can't be read, or a refusal.
    """
    jobs = named(pairs)
    if not is_jobs(jobs):
        raise command_line.CommandError(f"invalid job id {jobs[:40]!r}: give 12, or 12_3")
    body = {}
    for key, text in pairs.items():
        if key in {"job", "jobid"}:
            continue
        if key not in _FIELDS:
            known = ", ".join(sorted(_FIELDS))
            raise command_line.CommandError(f"update: unknown key {key[:40]}; known are {known}")
        field, read = _FIELDS[key]
        try:
            body[field] = read(text)
        except command_line.CommandError as error:
            raise command_line.CommandError(f"update: {key}: {error.message}") from None
    _each(
        jobs,
        lambda job: api.call("PATCH", f"{_JOBS}/{job}", json=body),
        "updated",
        out,
        as_json=as_json,
    )

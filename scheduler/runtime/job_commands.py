"""fctl's words on batch jobs, as scontrol's: hold, release, requeue, top, update. It speaks HTTP alone."""

import datetime
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
    now = datetime.datetime.now().astimezone()
    try:
        return round(
            times.point(text, now=now, tz=now.tzinfo or datetime.UTC).timestamp() * 1_000_000
        )
    except times.TimeError as error:
        raise command_line.CommandError(str(error)) from None


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
    return act(args.command, args.jobs, api, out)


def act(verb: str, jobs: str, api: ports.Api, out: TextIO) -> int:
    """Hold, release, requeue or top each of some jobs; one that can't be stops none of the others."""
    faults = []
    for job in jobs.split(","):
        try:
            api.call("POST", f"{_JOBS}/{job}/{verb}")
        except command_line.CommandError as error:
            faults.append(error.message)
        else:
            print(f"job {job}: {_SAID[verb]}", file=out)
    if faults:
        raise command_line.CommandError("; ".join(faults))
    return 0


def update(pairs: Mapping[str, str], api: ports.Api, out: TextIO) -> None:
    """Change a job: ``job=12 priority=5 time=2-0``, keys as scontrol's or fbatch's, any case.

    Raises:
        command_line.CommandError: an unknown key, or a value that can't be read.
    """
    job = pairs["job"]
    if not is_jobs(job):
        raise command_line.CommandError(f"invalid job id {job[:40]!r}: give 12, or 12_3")
    body = {}
    for key, text in pairs.items():
        if key == "job":
            continue
        if key.lower() not in _FIELDS:
            known = ", ".join(sorted(_FIELDS))
            raise command_line.CommandError(f"update: unknown key {key[:40]}; known are {known}")
        field, read = _FIELDS[key.lower()]
        try:
            body[field] = read(text)
        except command_line.CommandError as error:
            raise command_line.CommandError(f"update: {key}: {error.message}") from None
    for each in job.split(","):
        api.call("PATCH", f"{_JOBS}/{each}", json=body)
        print(f"job {each}: updated", file=out)

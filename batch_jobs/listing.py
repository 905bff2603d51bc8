"""fqueue's columns: squeue's format letters over jobs as the API shows them. Pure."""

import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from batch_jobs import arrays, foretold, model
from scheduler.contracts import command_line, times

DEFAULT = "%.18i %.9P %.8j %.8u %.2t %.10M %.6D %R"
START = "%.18i %.8j %.8u %.2t %.19S %.19s %R"
Job = Mapping[str, Any]
_WHOLE = frozenset("MlL")  # times that squeue does not cut: what is left would be another time
_FIELD = re.compile(r"%(\.?)(\d*)(.)")
_BY_NAME = {
    **{state.short: state for state in model.State},
    **{str(state): state for state in model.State},
}


def states(text: str) -> tuple[model.State, ...]:
    """Read ``-t``: short or long names, any case, comma list; ``all`` is every state.

    Raises:
        command_line.CommandError: an unknown one.
    """
    if text.lower() == "all":
        return tuple(model.State)
    found = []
    for word in text.split(","):
        state = _BY_NAME.get(word.strip().upper())
        if state is None:
            known = ", ".join(f"{state.short} ({state})" for state in model.State)
            raise command_line.CommandError(f"unknown state {word!r}: use all or {known}")
        found.append(state)
    return tuple(found)


def _done(job: Job, width: int) -> str:
    lines = job["lines"]
    full = f"{lines['done']}/{lines['total']}"
    if not width or len(full) <= width:
        return full
    return f"{100 * lines['done'] // max(1, lines['total'])}%"  # a number that is cut would lie


def _reason(job: Job) -> str:
    if job["reason"] != model.Reason.NONE:
        flag = ",RQ" if back(job) else ""
        return f"({job['reason']}{flag})"
    failed = job["lines"]["failed"]  # a job whose every line failed is COMPLETED all the same
    return f"({failed} failed)" if failed else ""


def back(job: Job) -> bool:
    """Whether a job waits again after it had run: put back, or all its lines gave their seats back."""
    if job["state"] == model.State.PENDING:
        return bool(job["started_us"])
    blocked = job["state"] == model.State.RUNNING and job["reason"] == model.Reason.RESOURCES
    return bool(blocked and job["lines"]["preempted"])


def state(job: Job) -> model.State:
    """Return a job's state as it is shown: one that waits again is pending."""
    return model.State.PENDING if back(job) else model.State(job["state"])


def asked(wanted: Sequence[model.State]) -> Sequence[model.State]:
    """Return the states in which jobs may be that are shown in ``wanted``; see `within`."""
    more = [model.State.RUNNING] if model.State.PENDING in wanted else []
    return [*wanted, *(each for each in more if each not in wanted)]


def within(jobs: Sequence[Job], wanted: Sequence[model.State]) -> list[Job]:
    """Return the jobs that are shown in one of some states; without any: all of them."""
    return [job for job in jobs if not wanted or state(job) in wanted]


def _start(job: Job, tz: datetime.tzinfo) -> str:
    """When it started, or is expected to."""
    waits = job["state"] == model.State.PENDING and not job["started_us"]
    at = job["expected_us"] if waits else job["started_us"]
    return times.print_point(at, tz).replace("Unknown", "N/A")


def _late_s(job: Job) -> float | None:
    """By how much it started later than was said first."""
    start = foretold.Start(job["submitted_us"], job["estimated_us"], job["started_us"])
    return start.late_s if start.estimated_us and start.started_us else None


def _left(job: Job) -> str:
    limit = job["time_limit_s"]
    return times.print_elapsed(max(0, limit - job["elapsed_s"]) if limit else None)


_LONG = {
    "account": "a", "arrayjobid": "F", "arraytaskid": "K", "command": "o", "comment": "k", "dependency": "E",
    "endtime": "e", "jobarrayid": "i", "jobid": "A", "name": "j", "partition": "P", "prioritylong": "Q",
    "qos": "q", "reason": "r", "reasonlist": "R", "starttime": "S", "state": "T", "statecompact": "t",
    "submittime": "V", "timeleft": "L", "timelimit": "l", "timeused": "M", "username": "u", "fairshare": "f",
    "firstestimate": "s", "lines": "D", "starterror": "X",
}  # fmt: skip
_LONG_FIELD = re.compile(r"([a-z]+)(?::(\.?)(\d{1,3}))?", re.ASCII)
_LONG_WIDTH = 20


def long_format(text: str) -> str:
    """Return squeue's ``-O jobid,name:30,state:.12`` as a format of letters.

    Raises:
        command_line.CommandError: an unknown field, or a width that is none.
    """
    found = []
    for word in text.split(","):
        match = _LONG_FIELD.fullmatch(word.strip().lower())
        letter = _LONG.get(match[1]) if match else None
        if match is None or letter is None:
            raise command_line.CommandError(
                f"Format: unknown {word.strip()[:40]!r}: use {' '.join(sorted(_LONG))}, as in name:30"
            )
        found.append(f"%{match[2] or ''}{match[3] or _LONG_WIDTH}{letter}")
    return "".join(found)


class Format:
    """A parsed format, such as `DEFAULT`.

    Args:
        text: squeue's syntax: ``%8j`` left in eight, ``%.8j`` right; longer values are cut.
        tz: for the points in time.

    Raises:
        command_line.CommandError: an unknown letter.
    """

    def __init__(self, text: str, tz: datetime.tzinfo) -> None:
        def point(name: str) -> Callable[[Job, int], str]:
            return lambda job, _: times.print_point(job[name], tz).replace("Unknown", "N/A")

        self._letters: dict[str, tuple[str, Callable[[Job, int], str]]] = {
            "i": ("JOBID", lambda job, _: job["shown_id"]),
            "A": ("JOBID", lambda job, _: str(job["job_id"])),
            "F": ("ARRAY_JOB_ID", lambda job, _: str(job["array_id"] or job["job_id"])),
            "K": (
                "ARRAY_TASK_ID",
                lambda job, _: str(job["array_task"]) if job["array_id"] else "N/A",
            ),
            "E": ("DEPENDENCY", lambda job, _: job["dependency"] or "(null)"),
            "q": ("QOS", lambda job, _: job["qos"] or "normal"),
            "Q": ("PRIORITY", lambda job, _: str(job["rank"])),
            "f": (
                "FAIRSHARE",
                lambda job, _: "N/A" if job["fairshare"] is None else f"{job['fairshare']:.6f}",
            ),
            "s": ("FIRST_ESTIMATE", point("estimated_us")),
            "X": ("START_ERROR", lambda job, _: foretold.late(_late_s(job))),
            "P": ("TIER", lambda job, _: job["tier"]),
            "j": ("NAME", lambda job, _: job["name"]),
            "u": ("USER", lambda job, _: job["user"]),
            "a": ("ACCOUNT", lambda job, _: job["team"]),
            "k": ("COMMENT", lambda job, _: job["comment"] or "(null)"),
            "o": ("COMMAND", lambda job, _: job["source"] or "(null)"),
            "t": ("ST", lambda job, _: state(job).short),
            "T": ("STATE", lambda job, _: str(state(job))),
            "M": ("TIME", lambda job, _: times.print_elapsed(job["elapsed_s"])),
            "l": ("TIME_LIMIT", lambda job, _: times.print_elapsed(job["time_limit_s"] or None)),
            "L": ("TIME_LEFT", lambda job, _: _left(job)),
            "D": ("LINES", _done),
            "r": ("REASON", lambda job, _: job["reason"]),
            "R": ("(REASON)", lambda job, _: _reason(job)),
            "V": ("SUBMIT_TIME", point("submitted_us")),
            "S": ("START_TIME", lambda job, _: _start(job, tz)),
            "e": ("END_TIME", point("ended_us")),
        }
        self.text = text
        for match in _FIELD.finditer(text):
            if match[3] not in self._letters:
                known = " ".join(f"%{letter}" for letter in self._letters)
                raise command_line.CommandError(f"format: unknown {match[0]!r}: use {known}")

    def sorted(self, jobs: Sequence[Job], keys: str) -> list[Job]:
        """Return jobs in squeue's ``-S`` order: letters with commas, ``-`` for down; "": as they are.

        Raises:
            command_line.CommandError: an unknown letter.
        """
        found = list(jobs)
        for key in reversed([word.strip() for word in keys.split(",") if word.strip()]):
            letter = key.lstrip("+-")
            if letter not in self._letters:
                known = " ".join(self._letters)
                raise command_line.CommandError(f"sort: unknown {key!r}: use letters of {known}")
            cell = self._letters[letter][1]
            found.sort(key=lambda job: _natural(cell(job, 0)), reverse=key.startswith("-"))
        return found

    def header(self) -> str:
        """Return the line of column names."""
        return self._line(lambda letter, _: self._letters[letter][0])

    def row(self, job: Job) -> str:
        """Return one job's line; control characters in names are shown as ?."""
        text = self._line(lambda letter, width: self._letters[letter][1](job, width))
        return "".join(letter if letter.isprintable() else "?" for letter in text)

    def _line(self, cell: Callable[[str, int], str]) -> str:
        def fill(match: re.Match[str]) -> str:
            width = int(match[2] or 0)
            text = cell(match[3], width)
            if not width:
                return text
            if match[3] in _WHOLE and text[0].isdigit():
                width = max(width, len(text))
            return (text.rjust if match[1] else text.ljust)(width)[:width]

        return _FIELD.sub(fill, self.text).rstrip()


def collapsed(jobs: Sequence[Job]) -> list[Job]:
    """Return jobs with an array's tasks that wait for the same reason in one row, as squeue without -r."""
    groups: dict[tuple[object, ...], list[Job]] = {}
    for job in jobs:
        alike = job["array_id"] and job["state"] == model.State.PENDING and not back(job)
        mark = (job["array_id"], job["reason"]) if alike else (job["job_id"],)
        groups.setdefault(mark, []).append(job)
    return [_together(group) for group in groups.values()]


def _together(group: Sequence[Job]) -> Job:
    first = group[0]
    if len(group) == 1:
        return first
    tasks = arrays.show([job["array_task"] for job in group], first["array_limit"])
    lines = {name: sum(job["lines"][name] for job in group) for name in first["lines"]}
    shown = f"{first['array_id']}_[{tasks}]"
    return {**first, "shown_id": shown, "array_task": tasks, "lines": lines}


def _natural(text: str) -> list[tuple[int, float, str]]:
    """Return a sort key in which 9 comes before 10."""
    parts = re.findall(r"\d+(?:\.\d+)?|\D+", text)
    return [(0, float(part), "") if part[0].isdigit() else (1, 0.0, part) for part in parts]


def lines(jobs: Sequence[Job], form: Format, *, header: bool) -> list[str]:
    """Return what fqueue prints."""
    return ([form.header()] if header else []) + [form.row(job) for job in jobs]

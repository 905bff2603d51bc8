"""Reads all jobs out of one answer: ``squeue -o`` with safe separators, and the JSON of squeue and REST.

JSON differs from version to version: numbers became ``{"set": …, "infinite": …, "number": …}`` and states
became lists. Each reader here takes both forms, so one module serves every data-parser version.
"""

import codecs
import json
from collections.abc import Iterator, Mapping
from typing import Any

from scheduler.contracts import ids, slurm
from slurm_plugins import hostlist, parse_sacct, parse_scontrol, stamp, states, tres

# Fields that a user can write (comment, name) stand last, so that nothing is behind them to shift.
_COLUMNS = (
    ("%i", "id"), ("%T", "state"), ("%u", "user"), ("%a", "account"), ("%P", "partition"),
    ("%N", "nodes"), ("%D", "count"), ("%l", "limit"), ("%V", "submit"), ("%S", "start"),
    ("%e", "end"), ("%b", "gres"), ("%r", "reason"), ("%k", "comment"), ("%j", "name"),
)  # fmt: skip


def text_format(mark: str) -> str:
    """Return the ``-o`` format.

    Args:
        mark: text that begins and parts the fields, new for each call: whoever can guess it could
            write a false job into a comment.
    """
    return mark + mark.join(column for column, _ in _COLUMNS) + mark


def text(answer: str, mark: str, *, cluster: str) -> tuple[slurm.Job, ...]:
    """Read ``squeue -o text_format(mark)``.

    Raises:
        slurm.SlurmGarbled: it ends in the middle of a job.
    """
    cells = answer.split(mark)
    width = len(_COLUMNS) + 1
    if (len(cells) - 1) % width or (len(cells) > 1 and not answer.endswith("\n")):
        raise slurm.SlurmGarbled("squeue: the answer was cut in the middle of a job; try again")
    found: list[slurm.Job] = []
    for start in range(1, len(cells), width):
        row = {
            name: cell
            for (_, name), cell in zip(_COLUMNS, cells[start : start + width - 1], strict=True)
        }
        found.extend(_text_jobs(row, cluster))
    return tuple(found)


def _text_jobs(row: Mapping[str, str], cluster: str) -> Iterator[slurm.Job]:
    reading = states.job(row["state"])
    comment = "" if row["comment"] == "(null)" else row["comment"]
    per_node = tres.gres(row["gres"])  # "N/A" where --gpus was asked: not said, not none
    count = int(row["count"]) if row["count"].isdecimal() else 1
    for job_id in parse_sacct.array_tasks(row["id"]):
        yield slurm.Job(
            job_id=ids.SlurmJobId(job_id),
            cluster=cluster,
            name=row["name"],
            user=row["user"],
            account="" if row["account"] == "(null)" else row["account"],
            partition=row["partition"],
            state=reading.state,
            reason=row["reason"],
            comment=comment,
            stamp=stamp.parse(comment),
            flags=reading.flags,
            nodes=_hosts(row["nodes"]),
            gpus=None if per_node is None else per_node.count * count,
            submitted_us=parse_scontrol.point_us(row["submit"]),
            started_us=_started(reading.state, parse_scontrol.point_us(row["start"])),
            ended_us=_ended(reading.state, parse_scontrol.point_us(row["end"])),
            time_limit_s=parse_scontrol.duration_s(row["limit"]) or 0,
        )


def _escape(error: UnicodeError) -> tuple[str, int]:
    r"""Show a byte that is no UTF-8 as ``\\xe9`` once the JSON is read; Slurm passes names on as they are."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    wrong = error.object[error.start : error.end]
    return "".join(f"\\\\x{byte:02x}" for byte in wrong), error.end


# How to decode Slurm's JSON: name of an error handler for `bytes.decode`.
JSON_ERRORS = "forebay-slurm-json"
codecs.register_error(JSON_ERRORS, _escape)


def load(answer: str | bytes, what: str) -> dict[str, Any]:
    """Parse one JSON answer of Slurm and raise what its ``errors`` say.

    Raises:
        slurm.SlurmGarbled: it is empty, cut, or no JSON object.
        slurm.SlurmUnavailable, slurm.SlurmRefused: Slurm reports an error inside.
    """
    raw = answer.decode(errors=JSON_ERRORS) if isinstance(answer, bytes) else answer
    if not raw.strip():
        raise slurm.SlurmGarbled(f"{what}: the answer is empty; try again")
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise slurm.SlurmGarbled(
            f"{what}: the answer is no whole JSON ({error}); try again"
        ) from None
    if not isinstance(value, dict):
        raise slurm.SlurmGarbled(f"{what}: the answer is no JSON object; try again")
    errors = value.get("errors")
    # A job that was taken and held is told as an error beside its id.
    if errors and not number(value.get("job_id")):
        raise fault(what, "; ".join(_error_text(error) for error in errors))
    return value


def _error_text(error: Any) -> str:
    if not isinstance(error, Mapping):
        return str(error)
    parts = (error.get("description"), error.get("error"))
    return ": ".join(dict.fromkeys(str(part) for part in parts if part)) or str(dict(error))


_NO_ANSWER = ("unable to contact", "connection refused", "socket timed out", "connect failure",
              "communication connection failure", "zero bytes", "connection timed out",
              "unable to connect", "communications shutdown", "no route to host",
              "controller is in standby", "problem talking to the database", "unexpected message",
              "database is busy", "failed to open slurmdbd", "slurmdbd: connection",
              "persistent connection", "failed while looking for jobs",
              "protocol authentication error")  # fmt: skip
_NO_ACCOUNTING = ("accounting storage is disabled", "accounting storage isn't enabled",
                  "no slurmdbd", "slurm accounting is not enabled", "only works with slurmdbd",
                  "supported accounting_storage plugin",
                  "without slurmdbd", "slurmdbd is not configured")  # fmt: skip


def fault(what: str, said: str) -> slurm.SlurmError:
    """Turn what Slurm said into an error of the tree."""
    line = " ".join(said.split())[:500]
    low = line.lower()
    if any(text in low for text in _NO_ACCOUNTING):
        return slurm.AccountingOff(f"{what}: {line}")
    if any(text in low for text in _NO_ANSWER):
        return slurm.SlurmUnavailable(f"{what}: {line}; is slurmctld up?")
    return slurm.SlurmRefused(f"{what}: {line}")


def number(value: Any) -> int | None:
    """Read a number in either form; None for not set and for infinite."""
    if isinstance(value, Mapping):
        if not value.get("set", True) or value.get("infinite"):
            return None
        value = value.get("number")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # Old versions print NO_VAL and INFINITE as they stand in the C structure.
    return None if value < 0 or value in _NO_VALUE else int(value)


_NO_VALUE = frozenset(
    {0xFFFFFFFE, 0xFFFFFFFF, 0xFFFE, 0xFFFF, 0xFFFFFFFFFFFFFFFE, 0xFFFFFFFFFFFFFFFF, 0xFFFFFFFD}
)


def jobs(value: Mapping[str, Any], *, cluster: str) -> tuple[slurm.Job, ...]:
    """Read ``squeue --json`` and REST's ``/jobs``, already loaded."""
    raw = value.get("jobs")
    if not isinstance(raw, list):
        raise slurm.SlurmGarbled("Slurm's list of jobs has no member 'jobs'; try again")
    return tuple(job for entry in raw for job in _json_jobs(entry, cluster))


def _json_jobs(raw: Mapping[str, Any], cluster: str) -> Iterator[slurm.Job]:
    reading = states.job(raw.get("job_state") or "UNKNOWN")
    comment = str(raw.get("comment") or "")
    total = _json_gpus(raw)
    limit = number(raw.get("time_limit"))
    for job_id in _json_ids(raw):
        yield slurm.Job(
            job_id=ids.SlurmJobId(job_id),
            cluster=str(raw.get("cluster") or cluster),
            name=str(raw.get("name") or ""),
            user=str(raw.get("user_name") or raw.get("user_id") or ""),
            account=str(raw.get("account") or ""),
            partition=str(raw.get("partition") or ""),
            state=reading.state,
            reason=str(raw.get("state_reason") or ""),
            comment=comment,
            stamp=stamp.parse(comment),
            flags=reading.flags,
            nodes=_hosts(str(raw.get("nodes") or "")),
            gpus=total,
            submitted_us=(number(raw.get("submit_time")) or 0) * 1_000_000,
            started_us=_started(reading.state, (number(raw.get("start_time")) or 0) * 1_000_000),
            ended_us=_ended(reading.state, (number(raw.get("end_time")) or 0) * 1_000_000),
            time_limit_s=(limit or 0) * 60,
            restarts=number(raw.get("restart_cnt")) or 0,
            exit_code=exit_code(raw.get("exit_code")),
        )


def _json_gpus(raw: Mapping[str, Any]) -> int | None:
    """Count a job's GPUs: as allocated, as asked, and where accounting does not track them, as GRES."""
    for text in (raw.get("tres_alloc_str"), raw.get("tres_req_str")):
        counted = tres.gpus(str(text or ""))
        if counted is not None:
            return counted
    details = [tres.gres(str(entry)) for entry in raw.get("gres_detail") or []]
    if any(details):
        return sum(entry.count for entry in details if entry is not None)
    per_node = tres.gres(str(raw.get("tres_per_node") or ""))
    nodes = number(raw.get("node_count"))
    return None if per_node is None or nodes is None else per_node.count * max(1, nodes)


def _json_ids(raw: Mapping[str, Any]) -> tuple[str, ...]:
    array = number(raw.get("array_job_id")) or 0
    task = number(raw.get("array_task_id"))
    tasks = str(raw.get("array_task_string") or "")
    if array and tasks:
        return parse_sacct.array_tasks(f"{array}_[{tasks.strip('[]')}]")
    if array and task is not None:
        return (f"{array}_{task}",)
    return (str(number(raw.get("job_id")) or 0),)


def exit_code(value: Any) -> str:
    """Return ``code:signal`` from a wait status or from the structured form."""
    if isinstance(value, Mapping) and ("return_code" in value or "status" in value):
        signal = value.get("signal")
        signalled = (
            number(signal.get("id", signal.get("signal_id")))
            if isinstance(signal, Mapping)
            else None
        )
        return f"{number(value.get('return_code')) or 0}:{signalled or 0}"
    status = number(value)
    return "" if status is None else f"{status >> 8 & 0xFF}:{status & 0x7F}"


def _hosts(text: str) -> tuple[str, ...]:
    if text in {"", "(null)", "None assigned", "n/a"}:
        return ()
    try:
        return tuple(hostlist.expand(text))
    except hostlist.HostlistError as error:
        raise slurm.SlurmGarbled(
            f"Slurm printed a host list that can't be read: {error}"
        ) from error


def _started(state: slurm.JobState, us: int) -> int:
    """A pending job's start is a forecast, not a start."""
    return 0 if state is slurm.JobState.PENDING else us


def _ended(state: slurm.JobState, us: int) -> int:
    """An open job's end is its limit, not an end."""
    return us if state.final else 0

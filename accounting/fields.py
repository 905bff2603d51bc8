"""The fields of facct and their meaning. A row is a batch job, one of its lines, a request or a lease."""

import dataclasses
import datetime
from collections.abc import Callable, Sequence
from typing import Any

from accounting import gpu_time, layout, money, windows
from scheduler.contracts import times, usage
from scheduler.contracts.command_line import CommandError

# Slurm's word for each outcome of ours.
STATE_OF = {
    "ok": "COMPLETED",
    "client_gone": "CANCELLED",
    "cancelled": "CANCELLED",
    "expired": "DEADLINE",
    "preempted": "PREEMPTED",
    "replica_lost": "NODE_FAIL",
    "refused": "FAILED",
    "error": "FAILED",
    "open": "RUNNING",
}
_STATES = {
    "PD": "PENDING",
    "R": "RUNNING",
    "S": "SUSPENDED",
    "CD": "COMPLETED",
    "CA": "CANCELLED",
    "F": "FAILED",
    "TO": "TIMEOUT",
    "NF": "NODE_FAIL",
    "PR": "PREEMPTED",
    "BF": "BOOT_FAIL",
    "DL": "DEADLINE",
    "OOM": "OUT_OF_MEMORY",
    "CG": "COMPLETING",
    "RQ": "REQUEUED",
}

_NO_FAULT = {"COMPLETED", "COMPLETING", "RUNNING", "PENDING", "Unknown"}

_Text = Callable[[layout.Row, datetime.tzinfo], str]


def states(text: str) -> frozenset[str]:
    """Return the full names of a comma list of states, short or full, in either case.

    Raises:
        CommandError: one is unknown.
    """
    words = [word for part in text.split(",") if (word := part.strip().upper())]
    if not words:
        raise CommandError(f"-s needs at least one state: of {', '.join(_STATES)}")
    found = set()
    for word in words:
        full = _STATES.get(word, word)
        if full not in _STATES.values():
            raise CommandError(f"invalid state {word!r}: one of {', '.join(_STATES)}")
        found.add(full)
    return frozenset(found)


def outcomes(wanted: frozenset[str]) -> tuple[str, ...]:
    """Return the outcomes that these states stand for."""
    return tuple(outcome for outcome, name in STATE_OF.items() if name in wanted)


def state(row: layout.Row) -> str:
    """Return a row's state in Slurm's words; a batch job's is its own, "Unknown" if it was not told."""
    if row["record"] == "job":
        return str(row["state"])
    return STATE_OF.get(row.get("outcome", ""), "")


def _job_id(row: layout.Row, _: datetime.tzinfo) -> str:
    if row["record"] == "job":
        return str(row["batch_job_id"])
    if row["record"] == "line":
        return f"{row['batch_job_id']}.{row['custom_id']}"
    return str(row["slurm_job_id"] if row["record"] == "lease" else row["request_id"])


def _plain(name: str) -> _Text:
    return lambda row, _: str(row.get(name, ""))


def _time(name: str) -> _Text:
    return lambda row, tz: times.print_point(int(row.get(name) or 0), tz)


def _state(row: layout.Row, _: datetime.tzinfo) -> str:
    return state(row)


def _exit_code(row: layout.Row, _: datetime.tzinfo) -> str:
    return "" if row["record"] == "lease" else f"{int(state(row) not in _NO_FAULT)}:0"


def _elapsed_us(row: layout.Row) -> int:
    start, end = int(row.get("started_us") or 0), int(row.get("ended_us") or 0)
    return max(0, end - start) if start and end else 0


def _elapsed(row: layout.Row, _: datetime.tzinfo) -> str:
    return times.print_duration(_elapsed_us(row) // 1_000_000)


def _ttft(row: layout.Row, _: datetime.tzinfo) -> str:
    if not row.get("first_token_us"):
        return ""
    return layout.decimal(int(row["first_token_us"]) - int(row["arrived_us"]), 1_000_000, 3)


def _prompt_tokens(row: layout.Row) -> int:
    return int(row.get("uncached_prompt_tokens", 0)) + int(row.get("cached_prompt_tokens", 0))


def _prompt(row: layout.Row, _: datetime.tzinfo) -> str:
    return "" if row["record"] == "lease" else str(_prompt_tokens(row))


def _cached_share(row: layout.Row, _: datetime.tzinfo) -> str:
    total = _prompt_tokens(row)
    return layout.decimal(100 * int(row["cached_prompt_tokens"]), total, 1) if total else ""


def _tokens_per_s(row: layout.Row, _: datetime.tzinfo) -> str:
    elapsed = _elapsed_us(row)
    if not elapsed or not row.get("output_tokens"):
        return ""
    return layout.decimal(int(row["output_tokens"]) * 1_000_000, elapsed, 1)


def _gpu_seconds(row: layout.Row, _: datetime.tzinfo) -> str:
    return layout.decimal(int(row["gpu_us"]), 1_000_000, 0) if "gpu_us" in row else ""


def _lines_total(row: layout.Row, _: datetime.tzinfo) -> str:
    total = row.get("lines_total", "")
    return "Unknown" if total is None else str(total)


def _cost(row: layout.Row, _: datetime.tzinfo) -> str:
    return money.show(int(row["cost_micro"])) if "cost_micro" in row else ""


def in_units(columns: Sequence[layout.Column], unit: str) -> list[layout.Column]:
    """Return the columns with counts of tokens in K, M, G or T (thousands, two places); "": whole numbers.

    Raises:
        CommandError: there is no such unit.
    """
    if not unit:
        return list(columns)
    scale = _SCALES.get(unit.upper())
    if scale is None:
        raise CommandError(f"invalid unit {unit!r}: K, M, G or T")

    def scaled(text: _Text) -> _Text:
        def converted(row: layout.Row, tz: datetime.tzinfo) -> str:
            cell = text(row, tz)
            return layout.decimal(int(cell), scale, 2) + unit.upper() if cell.isdigit() else cell

        return converted

    return [
        dataclasses.replace(column, text=scaled(column.text)) if column.name in _COUNTS else column
        for column in columns
    ]


def truncated(row: layout.Row, window: windows.Window) -> dict[str, Any]:
    """Return the row with its times clipped to the window, as ``sacct -T`` does; unknown ones stay so."""
    names = ("arrived_us", "started_us", "first_token_us", "ended_us")
    clipped = {
        name: min(max(row[name], window.start_us), window.end_us) for name in names if row.get(name)
    }
    return {**row, **clipped}


_C = layout.Column
FIELDS = (
    _C("JobID", -20, _job_id, "batch job, job.line, request, or (--leases) Slurm job"),
    _C("RequestID", -36, _plain("request_id"), "the request's id, as the client got it"),
    _C("CustomID", -16, _plain("custom_id"), "the batch line's own name"),
    _C("JobName", -16, _plain("job_name"), "the batch job's name"),
    _C("CallerID", -16, _plain("caller_request_id"), "the caller's own request id"),
    _C("Attempt", 7, _plain("attempt"), "number of the last attempt, of each with -D"),
    _C("Attempts", 8, _plain("attempts"), "dispatches to a replica"),
    _C("Cluster", 10, _plain("cluster"), "cluster"),
    _C("Team", 10, _plain("team"), "who pays; one Slurm account"),
    _C("Account", 10, _plain("team"), "the same as Team"),
    _C("User", 9, _plain("user"), "who asked"),
    _C("KeyID", 10, _plain("key_id"), "public part of the API key, or munge"),
    _C("Model", 12, _plain("model"), "served model"),
    _C("Version", 8, _plain("version"), "its version"),
    _C("Adapter", 10, _plain("adapter"), "LoRA adapter"),
    _C("Endpoint", -20, _plain("endpoint"), "API path"),
    _C("Tier", 11, _plain("tier"), "interactive, standard or batch"),
    _C("Partition", 11, _plain("tier"), "the same as Tier"),
    _C("State", 10, _state, "in Slurm's words"),
    _C("Outcome", 12, _plain("outcome"), "in Forebay's words"),
    _C("Reason", -24, _plain("reason"), "why it did not end well"),
    _C("Payer", 8, _plain("payer"), "team, or platform for faults of ours"),
    _C("ExitCode", 8, _exit_code, "code:signal"),
    _C("Submit", 19, _time("arrived_us"), "when the request was read"),
    _C(
        "Start",
        19,
        _time("started_us"),
        "when it was first dispatched; of a lease, its first GPU-second",
    ),
    _C("FirstToken", 19, _time("first_token_us"), "when the first token came"),
    _C("End", 19, _time("ended_us"), "when it ended"),
    _C("Elapsed", 10, _elapsed, "End - Start"),
    _C("TTFT", 8, _ttft, "seconds from Submit to FirstToken"),
    _C("PromptTokens", 12, _prompt, "uncached and cached prompt tokens, the platform's too"),
    _C("UncachedTokens", 14, _plain("uncached_prompt_tokens"), "prompt tokens computed"),
    _C("CachedTokens", 12, _plain("cached_prompt_tokens"), "prompt tokens from the prefix cache"),
    _C("CachedShare", 11, _cached_share, "percent of prompt tokens that were cached"),
    _C(
        "OutputTokens",
        12,
        _plain("output_tokens"),
        "tokens sampled, of all attempts, the platform's too",
    ),
    _C(
        "PlatformTokens",
        9,
        _plain("platform_tokens"),
        "tokens that the platform pays: its attempts, and what was computed again",
    ),
    _C("TokensPerSec", 12, _tokens_per_s, "OutputTokens / Elapsed"),
    _C("Lines", 7, _lines_total, "lines of the batch job"),
    _C("Dispatched", 10, _plain("lines"), "of these, sent to a replica at least once"),
    _C("LinesOK", 7, _plain("ok"), "of these, ended well"),
    _C("Preempted", 9, _plain("preempted"), "attempts of the batch job that were preempted"),
    _C("Replica", -14, _plain("replica_id"), "replica of the last attempt"),
    _C("Lease", -14, _plain("lease_id"), "lease"),
    _C("SlurmJobID", 10, _plain("slurm_job_id"), "Slurm job of the lease"),
    _C("Kind", 8, _plain("kind"), "lease: serve or backfill"),
    _C("GPUs", 5, _plain("gpus"), "lease: GPUs held"),
    _C("Runs", 4, _plain("runs"), "lease: runs of its Slurm job"),
    _C(
        "GPUSeconds",
        10,
        _gpu_seconds,
        "lease: held in the window, all runs; else: the share of the busy time",
    ),
    _C("Cost", 12, _cost, "tokens that the team pays, at the rates of their arrival"),
)
_OF_ALL: dict[str, type] = {"record": str, "started_us": int, "ended_us": int}
_OF_REQUESTS: dict[str, type] = {
    **dict.fromkeys(("attempts", "platform_tokens", "cost_micro", "gpu_us"), int),
    **dict.fromkeys(("lines", "lines_total", "ok", "open", "preempted"), int),
    **dict.fromkeys(("state", "job_name"), str),
}


def stored(*, leases: bool) -> dict[str, type]:
    """Return the columns of ``--parquet``, which are the same whatever was found."""
    if leases:
        known = layout.types_of(gpu_time.LeaseTime)  # not its runs' spans: they are a list
        return {**known, **_OF_ALL}
    return {**layout.types_of(usage.Identity, usage.UsageRow), **_OF_REQUESTS, **_OF_ALL}


_COUNTS = {
    "PromptTokens",
    "UncachedTokens",
    "CachedTokens",
    "OutputTokens",
    "PlatformTokens",
}
_SCALES = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
DEFAULT = "JobID,Team,User,Model,Tier,State,PromptTokens,CachedTokens,OutputTokens,TTFT,Elapsed"
LEASES = "Lease,SlurmJobID,Cluster,Team,Kind,GPUs,Runs,Start,End,GPUSeconds"

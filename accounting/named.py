"""What ``facct -j`` names and has no record: jobs whose lines all wait become rows, the rest is told."""

import argparse
from collections.abc import Sequence
from typing import Any

from accounting import asking, windows
from scheduler.contracts import ports
from scheduler.contracts.command_line import CommandError

_NOTHING = (
    "attempts", "uncached_prompt_tokens", "cached_prompt_tokens", "output_tokens", "platform_tokens",
    "cost_micro", "lines", "ok", "open", "preempted",
)  # fmt: skip


def job_and_line(item: str) -> tuple[str, str]:
    """Split ``12.line-7``; a request id has no dot."""
    job, dot, line = item.strip().partition(".")
    return (job, line) if dot and job.isascii() and job.isdigit() else (item.strip(), "")


def complete(
    api: ports.Api,
    options: argparse.Namespace,
    window: windows.Window,
    answers: Sequence[dict[str, Any]],
    rows: list[dict[str, Any]],
) -> list[str]:
    """Add the jobs of -j whose lines all wait, as sacct has them; return the names that nothing bears.

    Nothing is added or missed where a filter, or what could not be read, may have left it out.
    """
    unread = any(answer.get("truncated") or answer.get("problems") for answer in answers)
    filters = (options.user, options.accounts, options.clusters, options.model, options.tier)
    if unread or any(filters) or options.state is not None:
        return []
    missing = _missing(rows, options)
    if options.leases or not missing:
        return missing
    try:
        found = _waiting(api, missing, window)
    except CommandError as error:
        answers[0]["problems"] = [f"batch jobs that wait: {error.message}"]
        return []
    rows += found
    known = {str(row["batch_job_id"]) for row in found}
    return [name for name in missing if name not in known]


def _missing(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> list[str]:
    fields = ("lease_id", "slurm_job_id") if options.leases else ("batch_job_id", "request_id")
    known = {str(row[field]) for row in rows for field in fields if row.get(field)}
    known |= {f"{row['batch_job_id']}.{row['custom_id']}" for row in rows if row.get("custom_id")}
    names = [each.strip() for each in asking.names(options.jobs or "") if each.strip()]
    if options.allocations:
        names = [each for each in names if not job_and_line(each)[1]]
    return [each for each in names if each not in known]


def _waiting(api: ports.Api, names: Sequence[str], window: windows.Window) -> list[dict[str, Any]]:
    numbers = [each for each in names if each.isascii() and each.isdigit() and len(each) < 19]
    if not numbers:
        return []
    told = api.call("GET", "/forebay/v1/jobs", params={"ids": ",".join(numbers)}).json["jobs"]
    return [
        {
            **dict.fromkeys(_NOTHING, 0),
            **{name: job[name] for name in ("team", "user", "model", "state", "reason")},
            "record": "job",
            "batch_job_id": job["job_id"],
            "cluster": "",
            "tier": "batch",
            "job_name": job["name"],
            "lines_total": job["lines"]["total"],
            "arrived_us": job["submitted_us"],
            "started_us": 0,
            "ended_us": job["ended_us"],
        }
        for job in told
        if window.start_us <= job["submitted_us"] < window.end_us
    ]


def tell(names: Sequence[str], options: argparse.Namespace) -> None:
    """Refuse names of nothing.

    Raises:
        CommandError: there are some.
    """
    if names:
        what = "lease" if options.leases else "batch job, line or request"
        windowed = options.starttime is not None or options.endtime is not None
        where = "in this window" if windowed else "here"
        raise CommandError(f"{', '.join(names)}: no {what} of yours has this id {where}")

"""``fbatch --wait``: follows a job until it ends, with a bar on a terminal and plain lines elsewhere."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from batch_jobs import model, patterns
from scheduler.contracts import command_line, ports

_EACH_S = 0.5
_MOST_S = 10.0  # between two looks, where nobody watches

Show = Callable[[Mapping[str, Any]], None]
Say = Callable[[str], None]
Ask = Callable[[], ports.ApiResponse]
Patiently = Callable[[Ask], Any]
"""Asks again for a minute; returns the answer's JSON."""


def until_done(
    job_id: int,
    *,
    api: ports.Api,
    err: TextIO,
    pause: Callable[[float], None],
    folder: Path | None,
    quiet: bool = False,
    follow: TextIO | None = None,
) -> int:
    """Wait for a job's end; return 0 only if every line succeeded, else 1.

    Args:
        job_id: the job.
        api: the gateway.
        err: for the progress and the last word.
        pause: waits for so many seconds.
        folder: for results that Forebay itself could not put anywhere; None: they stay where they are.
        quiet: nothing on ``err``.
        follow: where answers are printed as they come.

    Raises:
        command_line.CommandError: there was no answer for a minute, or a refusal; where the gateway could
            not be asked, its code is `command_line.UNANSWERED`.
    """
    watched = follow is not None or command_line.colour(err)
    waited_s = 0.0
    after = 0
    ask = functools.partial(api.call, "GET", f"/forebay/v1/jobs/{job_id}")
    with _display(err, quiet=quiet) as (show, say):

        def patiently(ask: Ask) -> Any:
            return command_line.patiently(
                ask, pause, tell=lambda words: say(f"job {job_id}: {words}")
            ).json

        while True:
            job: Mapping[str, Any] = patiently(ask)
            after = _follow(job_id, after, api, follow, patiently)
            show(job)
            if model.State(job["state"]).final:
                break
            each_s = _EACH_S if watched else pace_s(waited_s)
            pause(each_s)
            waited_s += each_s
        written = [] if folder is None else fetch(job, api=api, folder=folder, patiently=patiently)
    if not quiet:
        print(summary(job), file=err)
        for path in written:
            print(f"wrote {path}", file=err)
    good = job["state"] == model.State.COMPLETED and job["lines"]["ok"] == job["lines"]["total"]
    return 0 if good else 1


def pace_s(waited_s: float) -> float:
    """Return how long to wait between two looks that nobody watches: thousands may wait for hours."""
    return min(_MOST_S, max(_EACH_S, waited_s / 50))


def _follow(
    job_id: int,
    after: int,
    api: ports.Api,
    out: TextIO | None,
    patiently: Patiently,
) -> int:
    """Print the answers that have come since; returns the place behind what is printed."""
    while out is not None:
        params = {"after": str(after)}
        ask = functools.partial(api.call, "GET", f"/forebay/v1/jobs/{job_id}/follow", params=params)
        said = patiently(ask)
        after = said["next"]
        for line in said["lines"]:
            out.write(line)
        out.flush()
        if not said["lines"]:
            break
    return after


def fetch(
    job: Mapping[str, Any], *, api: ports.Api, folder: Path, patiently: Patiently
) -> list[Path]:
    """Download the results that Forebay could not publish, since the caller is no Unix user there.

    Returns:
        The files that were written, by atomic rename, into ``folder``.

    Raises:
        command_line.CommandError: the folder can't be written, or the gateway does not answer.
    """
    written = []
    for part, count, pattern in (
        ("output", job["lines"]["ok"], f"fbatch-%j.{job['format']}"),
        ("errors", job["lines"]["failed"], "fbatch-%j.err.jsonl"),
    ):
        if not count or job["output_path"]:
            continue
        name = patterns.expand(pattern, job_id=job["job_id"], name=job["name"], user=job["user"])
        target, unfinished = folder / name, folder / f".{name}.part"
        try:
            path = f"/forebay/v1/jobs/{job['job_id']}/{part}"
            # They were waited for for hours: a gateway that restarts now must not cost them.
            patiently(functools.partial(api.call, "GET", path, download=unfinished))
            unfinished.replace(target)
        except OSError as error:
            raise command_line.CommandError(f"{target}: {error.strerror}") from None
        finally:
            unfinished.unlink(missing_ok=True)
        written.append(target)
    return written


def speed(job: Mapping[str, Any]) -> str:
    """Return a job's tokens a second since its start, or -."""
    used = job["used"]
    tokens = used["prompt_tokens"] + used["output_tokens"]
    return f"{tokens / job['elapsed_s']:.0f}" if job["elapsed_s"] and tokens else "-"


def summary(job: Mapping[str, Any]) -> str:
    """Return one line on how a job ended."""
    lines = job["lines"]
    words = f"job {job['job_id']} {job['state']}: {lines['ok']} of {lines['total']} lines answered"
    if lines["failed"]:
        where = f", see {job['error_path']}" if job["error_path"] else ""
        words += f", {lines['failed']} failed{where}"
    if job["detail"]:
        words += f"; {job['reason']}: {job['detail']}"
    return words


@contextlib.contextmanager
def _display(err: TextIO, *, quiet: bool) -> Iterator[tuple[Show, Say]]:
    """Give what shows a job's state, and what says a line beside it."""
    if quiet:
        yield lambda job: None, lambda words: None
    elif command_line.colour(err):
        with _bar(err) as both:
            yield both
    else:
        yield _Plain(err), functools.partial(command_line.say, out=err)


@contextlib.contextmanager
def _bar(err: TextIO) -> Iterator[tuple[Show, Say]]:
    from rich import console, progress

    with progress.Progress(
        progress.TextColumn("job {task.fields[job]} {task.fields[state]}"),
        progress.BarColumn(bar_width=None),  # what the words leave of the line
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[speed]} tokens/s"),
        progress.TextColumn("{task.fields[preempted]} preempted"),
        console=console.Console(file=err),
        transient=True,
        expand=True,
    ) as shown:
        task = shown.add_task("", total=None, job="", state="", preempted=0, speed="-")

        def show(job: Mapping[str, Any]) -> None:
            lines = job["lines"]
            shown.update(
                task,
                total=lines["total"],
                completed=lines["done"],
                job=job["job_id"],
                state=job["state"],
                preempted=lines["preempted"],
                speed=speed(job),
            )

        def say(words: str) -> None:
            # The bar stands below it; nothing in it is markup.
            shown.console.print(command_line.printable(words), markup=False, highlight=False)

        yield show, say


class _Plain:
    """A line when the state changes and at each tenth of the lines."""

    def __init__(self, err: TextIO) -> None:
        self._err = err
        self._last: tuple[str, int] | None = None

    def __call__(self, job: Mapping[str, Any]) -> None:
        lines = job["lines"]
        now = (job["state"], 10 * lines["done"] // max(1, lines["total"]))
        if now != self._last and not model.State(job["state"]).final:
            print(
                f"job {job['job_id']} {job['state']} {lines['done']}/{lines['total']}",
                file=self._err,
            )
        self._last = now

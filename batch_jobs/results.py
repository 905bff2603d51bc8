"""The lines of the output and error files, and the files themselves, built from the journal alone.

Building is repeatable: a journal that is sealed gives the same two files every time, so a runner that
died in between starts over. Both files are written under a temporary name, synced, then renamed.
"""

import dataclasses
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from batch_jobs import checkpoint, journal, jsontext, lines, model

INPUT = "input.jsonl"
JOURNAL = "journal"
OUTPUT = "output.jsonl"
ERRORS = "errors.jsonl"
_CHUNK = 1 << 20
_FOLLOWED = 500  # results in one answer to who follows a job
_FOLLOWED_BYTES = 4 << 20  # and no more of them than this, but for one: some are megabytes each

_ENDED = {
    model.Ending.CANCELLED: (
        "batch_cancelled",
        "the batch job was cancelled before this line was answered",
    ),
    model.Ending.EXPIRED: (
        "batch_expired",
        "the batch job's time was over before this line was answered",
    ),
}


def _line(
    job_id: int, number: int, custom_id: str | None, *, response: bytes, error: bytes
) -> bytes:
    head = b'{"id":"batch_req_%d_%d","custom_id":%s' % (job_id, number, jsontext.write(custom_id))
    return head + b',"response":' + response + b',"error":' + error + b"}\n"


def _response(status: int, request_id: str, body: bytes) -> bytes:
    return b'{"status_code":%d,"request_id":%s,"body":%s}' % (
        status,
        jsontext.write(request_id),
        body,
    )


def answered(job_id: int, line: lines.Line, request_id: str, body: dict[str, Any]) -> bytes:
    """Return the output file's line for an answer."""
    response = _response(200, request_id, jsontext.write(body))
    return _line(job_id, line.number, line.custom_id, response=response, error=b"null")


def failed(  # noqa: PLR0913 - an error line has that many independent parts
    job_id: int,
    number: int,
    custom_id: str | None,
    code: str,
    message: str,
    *,
    status: int = 0,
    request_id: str = "",
    body: dict[str, Any] | None = None,
) -> bytes:
    """Return the error file's line: always with an `error`, and with the response if there was one."""
    response = _response(status, request_id, jsontext.write(body)) if status > 0 else b"null"
    error = jsontext.write({"code": code, "message": f"line {number}: {message}", "line": number})
    return _line(job_id, number, custom_id, response=response, error=error)


def read_input(
    path: Path, max_line_bytes: int, marks: "array[int] | None" = None, first: int = 1
) -> Iterator[lines.RawLine]:
    """Yield a submitted file's lines in bounded memory.

    Args:
        path: the file.
        max_line_bytes: a longer line is given out empty.
        marks: where every `checkpoint.MARK_LINES`th line begins, from the first on; grows as they are seen.
        first: lines before this one are of no interest; some may come all the same.
    """
    known = array("Q", [0]) if marks is None else marks
    block = min((first - 1) // checkpoint.MARK_LINES, len(known) - 1)
    splitter = lines.Splitter(max_line_bytes, block * checkpoint.MARK_LINES, known[block])
    with path.open("rb") as file:
        file.seek(known[block])
        while chunk := file.read(_CHUNK):
            for raw in splitter.feed(chunk):
                if not raw.number % checkpoint.MARK_LINES:
                    done = raw.number // checkpoint.MARK_LINES
                    if done == len(known):
                        known.append(splitter.at)
                yield raw
        yield from splitter.close()


@dataclasses.dataclass(frozen=True, slots=True)
class Built:
    """How many lines each file has."""

    ok: int
    failed: int


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """What `build` reads."""

    folder: Path
    job_id: int
    last_line: int
    rules: lines.Rules
    max_line_bytes: int


def build(source: Source, ending: model.Ending, order: model.Order) -> Built:
    """Write the output and error files of a sealed job into its folder.

    A file without lines is not written, and removed if an earlier version had it.

    Raises:
        OSError: the disk refused; neither file was changed by half.
        journal.JournalError: a line has no result though the journal says that all have.
    """
    counts = {journal.Kind.SUCCEEDED: 0, journal.Kind.FAILED: 0}
    names = {journal.Kind.SUCCEEDED: OUTPUT, journal.Kind.FAILED: ERRORS}
    parts = {kind: source.folder / f".{name}.part" for kind, name in names.items()}
    with (
        parts[journal.Kind.SUCCEEDED].open("wb") as good,
        parts[journal.Kind.FAILED].open("wb") as bad,
    ):
        files = {journal.Kind.SUCCEEDED: good, journal.Kind.FAILED: bad}
        ordered = _in_input_order if order is model.Order.INPUT else _as_completed
        for kind, data in ordered(source, ending):
            files[kind].write(data)
            counts[kind] += 1
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    for kind, name in names.items():
        if counts[kind]:
            parts[kind].replace(source.folder / name)
        else:
            parts[kind].unlink()
            (source.folder / name).unlink(missing_ok=True)
    sync_folder(source.folder)
    return Built(counts[journal.Kind.SUCCEEDED], counts[journal.Kind.FAILED])


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _as_completed(source: Source, ending: model.Ending) -> Iterator[tuple[journal.Kind, bytes]]:
    recovered = journal.Recovered(bytearray(source.last_line + 1))
    with (source.folder / JOURNAL).open("rb") as file:
        for _, entry in journal.entries(file):
            if recovered.add(entry) and entry.kind in journal.RESULTS:
                yield entry.kind, entry.data
    for raw in read_input(source.folder / INPUT, source.max_line_bytes):
        if not recovered.states[raw.number]:
            yield from _without_result(source, raw, ending)


def _in_input_order(source: Source, ending: model.Ending) -> Iterator[tuple[journal.Kind, bytes]]:
    offsets = array("Q", bytes(8 * (source.last_line + 1)))
    with (source.folder / JOURNAL).open("rb") as file:
        for at, entry in journal.entries(file):
            if entry.kind in journal.RESULTS and not offsets[entry.line]:
                offsets[entry.line] = at
        for raw in read_input(source.folder / INPUT, source.max_line_bytes):
            if offsets[raw.number]:
                entry = journal.read_at(file, offsets[raw.number])
                yield entry.kind, entry.data
            else:
                yield from _without_result(source, raw, ending)


def _without_result(
    source: Source, raw: lines.RawLine, ending: model.Ending
) -> Iterator[tuple[journal.Kind, bytes]]:
    line = lines.parse(raw, source.rules)
    if line is None:
        return
    if ending is model.Ending.DRAINED:
        raise journal.JournalError(f"job {source.job_id}: line {raw.number} has no result")
    code, message = _ENDED[ending]
    yield (
        journal.Kind.FAILED,
        failed(source.job_id, raw.number, line.custom_id, code, message),
    )


def following(folder: Path, after: int) -> tuple[list[str], int]:
    """Return results of a job that runs, behind a place in its journal, and the place behind them.

    Args:
        folder: the job's.
        after: 0, or the place that an earlier call returned.
    """
    found: list[str] = []
    size = 0
    try:
        with (folder / JOURNAL).open("rb") as file:
            for at, entry in journal.entries(file, after):
                after = at + entry.size
                if entry.kind in journal.RESULTS:
                    found.append(entry.data.decode())
                    size += len(entry.data)
                if len(found) >= _FOLLOWED or size >= _FOLLOWED_BYTES:
                    break
    except FileNotFoundError:
        pass
    return found, after

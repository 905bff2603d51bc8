"""Spool segments become Parquet files, each row's place known at every moment.

One pass, by the leader alone (a lock file keeps a second one out):

1. choose segments: sealed ones, and those whose writer is dead or has been silent for long. The latter
   are taken over first: a marker is put beside the segment *before* it is read. A writer looks for that
   marker *after* each fdatasync and before it acknowledges. So either we read what it acknowledged, or
   it sees the marker and writes those rows again elsewhere.
2. write Parquet files (invisible: the manifest does not name them);
3. swap the manifest, which names the files and the segments that they hold;
4. remove the segments; one with a damaged part goes to ``spool/quarantine/`` instead, and is named.

Killed anywhere, the next pass starts from the manifest: files it does not name are set aside, segments
it names are removed. Readers read segments first and the manifest second (`accounting.books`).
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from accounting import columns, decoding, schema, segment
from accounting import manifest as manifests
from scheduler.contracts import clock as clocks
from scheduler.contracts import ids, usage

BATCH_BYTES = 64 * 1024 * 1024
TAKEOVER_S = 300.0
_IDLE_EMPTY_S = 86_400.0
LOST = "gateway died before the answer"
RETIRED_US = 900_000_000  # a reading takes seconds; its files stay for a quarter of an hour
_REMEMBER_US = 3_600_000_000  # a reader that has read a segment needs its name for seconds
_REMEMBERED = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Shipped:
    """What one pass did; `busy` if another process was at it.

    `problems` has one line for each thing that was found damaged and set aside.
    """

    segments: int = 0
    rows: int = 0
    files: int = 0
    generation: int = 0
    problems: tuple[str, ...] = ()
    busy: bool = False


def ship(
    state_dir: Path,
    clock: clocks.Clock,
    *,
    takeover_s: float = TAKEOVER_S,
    batch_bytes: int = BATCH_BYTES,
) -> Shipped:
    """Move every finished segment into Parquet. Blocks; safe to kill at any point and to repeat.

    Args:
        state_dir: has ``spool/`` (any depth) and ``parquet/``.
        clock: for the age of silent segments.
        takeover_s: seconds of silence after which a living writer's segment is taken over.
        batch_bytes: segments of about this size make one generation; bounds memory.

    Raises:
        manifests.ManifestDamaged: nothing was touched.
        OSError: the disk refused; nothing is lost, the next pass repeats it.
    """
    folder = state_dir / "parquet"
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder) as ours:
        if not ours:
            return Shipped(busy=True)
        current = settled(folder, clock)
        total = Shipped(generation=current.generation)
        problems = list(_clear(state_dir, current))
        for batch in _batches(state_dir, clock, takeover_s, batch_bytes, problems):
            problems += [read.problem for _, read in batch if read.problem]
            files = [*_write(folder, [read for _, read in batch], current.generation + 1)]
            current = _publish(folder, current, files, [path.name for path, _ in batch], clock)
            for path, read in batch:
                _remove(state_dir, path, damaged=bool(read.problem))
            total = dataclasses.replace(
                total,
                segments=total.segments + len(batch),
                rows=total.rows + sum(read.count for _, read in batch),
                files=total.files + len(files),
                generation=current.generation,
            )
        return dataclasses.replace(total, problems=tuple(problems))


def unreadable(path: Path, error: OSError) -> str:
    """Return one line on a path in the spool that can't be read; it is left where it is."""
    why = error.strerror or error
    return f"{path}: not read, its rows are not counted: {why}: mend it or move it out of the spool"


def segments(state_dir: Path) -> list[Path]:
    """List every spool segment; names never change, so a listing misses only what came or went."""
    return sorted((state_dir / "spool").rglob(f"*{segment.SUFFIX}"))


def waiting(state_dir: Path, before_us: int) -> list[str]:
    """Name the segments that began before a moment and hold rows that are not in Parquet; blocks.

    One that can't be read is among them, since nobody knows what it holds.

    Raises:
        manifests.ManifestDamaged: nothing can be said.
    """
    found = []
    for path in segments(state_dir):
        try:
            read = segment.scan_segment(path)
        except FileNotFoundError:
            continue  # shipped since the listing
        except OSError:
            found.append(str(path))
            continue
        held = bool(read.payloads or read.faults)
        if held and int(read.header.get("created_us", 0)) < before_us:
            found.append(str(path))
    shipped = (manifests.load(state_dir / "parquet") or manifests.Manifest()).segments
    return [path for path in found if Path(path).name not in shipped]


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[bool]:
    """Hold the right to write in a parquet folder; False if another process has it."""
    handle = os.open(folder / ".ship.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)


def settled(folder: Path, clock: clocks.Clock) -> manifests.Manifest:
    """Return the manifest, after undoing what a killed pass left and ending the retired files.

    The lock must be held.

    Raises:
        manifests.ManifestDamaged: nothing was touched.
    """
    manifests.clear(folder)
    current = manifests.load(folder)
    if current is None:
        current = manifests.Manifest()
        manifests.save(
            folder, current
        )  # from now on, files without a manifest mean that it was lost
    now = clock.wall_us()
    retired = _not_later(current.retired, now)
    ended = {name for name, at in retired.items() if now - at > RETIRED_US}
    for name in ended:
        (folder / name).unlink(missing_ok=True)
    kept = {name: at for name, at in retired.items() if name not in ended}
    known = {each.path for each in current.files} | set(kept)
    for path in folder.glob("*/day=*/*"):
        if str(path.relative_to(folder)) in known:
            continue
        if (
            path.suffix == ".parquet"
        ):  # rows of a killed pass: still in their segments, or shipped anew
            aside = folder / "orphans"
            aside.mkdir(exist_ok=True)
            path.rename(aside / path.name)
        else:
            path.unlink()
    return dataclasses.replace(current, retired=kept)


def _clear(state_dir: Path, current: manifests.Manifest) -> Iterator[str]:
    """Remove segments that the manifest already holds, and markers whose segment is gone."""
    for path in segments(state_dir):
        if path.name in current.segments:
            try:
                read = decoding.read_segment(path)
            except OSError as error:
                yield unreadable(path, error)
                continue
            _remove(state_dir, path, damaged=bool(read.problem))
            if read.problem:
                yield read.problem
    for marker in (state_dir / "spool").rglob(f"*{segment.TAKEN}"):
        if not marker.with_suffix(segment.SUFFIX).exists():
            marker.unlink(missing_ok=True)


def _batches(
    state_dir: Path,
    clock: clocks.Clock,
    takeover_s: float,
    batch_bytes: int,
    problems: list[str],
) -> Iterator[list[tuple[Path, columns.Rows]]]:
    batch: list[tuple[Path, columns.Rows]] = []
    size = 0
    for path in segments(state_dir):
        try:
            found = _finished(path, clock, takeover_s)
            held = path.stat().st_size
        except FileNotFoundError:
            continue  # its writer closed without a row
        except OSError as error:
            problems.append(unreadable(path, error))
            continue
        if found is None:
            continue
        read = _ended(found)
        batch.append((path, read))
        size += held
        if size >= batch_bytes:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _finished(path: Path, clock: clocks.Clock, takeover_s: float) -> segment.Scan | None:
    """Return a segment if nothing more will be acknowledged in it, after taking it over if need be."""
    header, closed = segment.peek(path)
    if not closed and segment.writer_alive(header) is not False:
        silent_s = clock.wall_us() / 1e6 - path.stat().st_mtime
        if silent_s < takeover_s:
            return None
        if silent_s < _IDLE_EMPTY_S and not segment.scan_segment(path).payloads:
            return None
    if closed:
        return segment.scan_segment(path)
    path.with_suffix(segment.TAKEN).touch()
    manifests.sync_folder(path.parent)
    return segment.scan_segment(path)


def _ended(found: segment.Scan) -> columns.Rows:
    """Decode a segment; attempts that its dead writer left open are recorded as lost.

    They stay OPEN rows, so that a CLOSE or the replica's own row counts whenever one comes.
    """
    if found.sealed or segment.writer_alive(found.header) is not False:
        return columns.read(found)
    read = decoding.decode(found)
    closed = {
        (row.identity.request_id, row.identity.attempt)
        for row in read.rows
        if isinstance(row, usage.UsageRow) and row.kind is not usage.RowKind.OPEN
    }
    rows = [_lost(row, closed) for row in read.rows]
    return columns.Rows(columns.of_rows(rows), len(rows), read.problem)


def _lost(row: usage.Row, closed: Set[tuple[str, int]]) -> usage.Row:
    if not isinstance(row, usage.UsageRow) or row.kind is not usage.RowKind.OPEN:
        return row
    its = row.identity
    if (its.request_id, its.attempt) in closed:
        return row
    return dataclasses.replace(
        row,
        outcome=usage.Outcome.ERROR,
        ended_us=max(its.arrived_us, its.started_us),
        payer=usage.Payer.PLATFORM,
        reason=LOST,
    )


def _write(folder: Path, parts: Sequence[columns.Rows], since: int) -> Iterator[manifests.File]:
    for table in schema.TABLES:
        held = [part.tables[table] for part in parts if table in part.tables]
        if not held:
            continue
        everything = columns.newest(table, columns.joined(table, held))
        for day, rows in columns.by_day(table, everything):
            file = write_file(folder, table, day, rows, columns.span(table, rows))
            yield dataclasses.replace(file, since=since)


def partition(folder: Path, table: str, day: str) -> Path:
    """Return a day's folder, made if it is not there."""
    path = folder / table / f"day={day}"
    if not path.is_dir():
        path.mkdir(parents=True)
        manifests.sync_folder(path.parent)
        manifests.sync_folder(folder)
    return path


def write_file(
    folder: Path, table: str, day: str, arrow: pa.Table, span_us: tuple[int, int]
) -> manifests.File:
    """Write one Parquet file durably and return its manifest entry; nobody sees it before the swap."""
    sink = pa.BufferOutputStream()
    pq.write_table(arrow, sink, **schema.layout(table))
    data = sink.getvalue().to_pybytes()
    path = partition(folder, table, day) / f"{ids.uuid7()}.parquet"
    manifests.write_durably(path, data)
    return manifests.File(
        path=str(path.relative_to(folder)),
        table=table,
        day=day,
        rows=arrow.num_rows,
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        first_us=span_us[0],
        last_us=span_us[1],
    )


def _publish(
    folder: Path,
    current: manifests.Manifest,
    files: Sequence[manifests.File],
    names: Sequence[str],
    clock: clocks.Clock,
) -> manifests.Manifest:
    now = clock.wall_us()
    shipped = _not_later(current.segments, now)
    newest = sorted(shipped, key=shipped.__getitem__)[-_REMEMBERED:]  # whatever the clock says
    remembered = {
        name: at for name, at in shipped.items() if now - at < _REMEMBER_US or name in newest
    }
    fresh = dataclasses.replace(
        current,
        generation=current.generation + 1,
        files=(*current.files, *files),
        segments={**remembered, **dict.fromkeys(names, now)},
    )
    manifests.save(folder, fresh)
    return fresh


def _not_later(times: Mapping[str, int], now: int) -> dict[str, int]:
    """Return times as they are after the clock was set back: none lies ahead, so none waits for long."""
    return {name: min(at, now) for name, at in times.items()}


def _remove(state_dir: Path, path: Path, *, damaged: bool) -> None:
    """Remove a shipped segment, then its marker: in this order, see `OpenSegment.taken`."""
    if damaged:
        aside = state_dir / "spool" / "quarantine"
        aside.mkdir(exist_ok=True)
        path.rename(aside / f"{path.name}.damaged")
    else:
        path.unlink(missing_ok=True)
    manifests.sync_folder(path.parent)
    path.with_suffix(segment.TAKEN).unlink(missing_ok=True)

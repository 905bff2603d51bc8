"""The table ``gpu_minutes``: where each minute of each replica's GPU time went, an hour to a file.

Made from the recorded rows by the leading broker (`roll`), and from them alone: whoever deletes the folder
gets it again. An hour is written once it is over; when rows of it come later it is written again as its
next revision, unless that says the same. A file is never changed; the day's ``index.json`` names the one
that counts, is swapped atomically, and has its SHA-256. What is not (yet) in the table is shared out from
the rows themselves, so a report is whole at any moment.

| column | meaning |
| --- | --- |
| ``minute_us`` | begin of the UTC minute |
| ``cluster lease_id replica_id`` | ``replica_id`` is "" for GPUs of a lease that no replica held |
| ``model version`` | attributed: the model that was asked for; else the replica's own |
| ``team user tier endpoint`` | whose it is; ``team`` alone for idle and start-up of its own floor; "" |
| ``kind`` | ``attributed``, ``idle``, ``start-up`` or ``waste``: they add up to what was allocated |
| ``why`` | of idle: "", ``asleep``, ``unassigned``; of waste: ``recomputed``, ``unclaimed``, ``lost`` |
| ``gpu_us`` | GPU-µs, a whole number |
"""

import dataclasses
import datetime
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from accounting import books, gpu_lines, schema, ship, stepcost
from accounting import manifest as manifests
from scheduler.contracts import clock as clocks
from scheduler.contracts import stored

FOLDER = "gpu_minutes"
HOUR_US = 3_600_000_000
LONGEST_REQUEST_US = 6 * HOUR_US  # an attempt that began earlier is not seen
SETTLE_US = 300_000_000  # rows are shipped within a minute or two of the hour's end
FIT_HOURS = 168  # a week of step times: what a token costs changes with the engine's version


@dataclasses.dataclass(frozen=True, slots=True)
class Hour:
    """One hour of the table.

    Attributes:
        file: relative to the folder.
        revision: 0, 1, 2 …; how often rows came that changed it.
        inputs: a digest of the recorded files that it was made from.
        sums: what step costs can be fitted from, by model (`stepcost.Sums`, as a list).
        costs: what a token was taken to cost, by model (`stepcost.Cost`, as a list).
    """

    file: str
    rows: int
    revision: int
    inputs: str
    sha256: str
    at_us: int
    sums: Mapping[str, Sequence[float]]
    costs: Mapping[str, Sequence[float]]


@dataclasses.dataclass(frozen=True, slots=True)
class Rolled:
    """What a pass did; `busy` if another process was at it."""

    hours: int = 0
    revisions: int = 0
    problems: tuple[str, ...] = ()
    busy: bool = False


def roll(
    state_dir: Path,
    clock: clocks.Clock,
    otherwise: stepcost.Cost,
    *,
    records: books.Books | None = None,
) -> Rolled:
    """Write every hour that is over and whose rows have changed. Blocks; safe to kill and to repeat.

    Raises:
        manifests.ManifestDamaged: nothing was touched.
        OSError: the disk refused; the next pass repeats it.
    """
    folder = state_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    read = records or books.Books(state_dir)
    with ship.lock(folder) as ours:
        if not ours:
            return Rolled(busy=True)
        done = Rolled()
        over = clock.wall_us() - SETTLE_US
        for hour_us, inputs in sorted(_inputs(state_dir / "parquet").items()):
            known = load_day(folder, hour_us).get(hour_us)
            if hour_us + HOUR_US > over or (known is not None and known.inputs == inputs):
                continue
            try:
                done = _one(read, folder, hour_us, inputs, clock.wall_us(), otherwise, done)
            except (duckdb.Error, ValueError, ArithmeticError) as error:  # the other hours go on
                name = f"{schema.day_of(hour_us)} {hour_us // HOUR_US % 24:02}:00Z"
                why = f"GPU time of {name} can't be shared out: {str(error).partition(chr(10))[0]}"
                done = dataclasses.replace(done, problems=(*done.problems, why))
        return done


def _one(
    records: books.Books,
    folder: Path,
    hour_us: int,
    inputs: str,
    now_us: int,
    otherwise: stepcost.Cost,
    done: Rolled,
) -> Rolled:
    """Make one hour anew and write it if it says something else than before."""
    known = load_day(folder, hour_us).get(hour_us)
    end_us = hour_us + HOUR_US
    with records.reading(_arrivals_from(records.state_dir / "parquet", hour_us), end_us) as reading:
        if reading.problems:  # an hour that lacks rows must not replace a whole one
            return dataclasses.replace(done, problems=(*done.problems, *reading.problems))
        found = gpu_lines.find(
            reading,
            gpu_lines.minutes(hour_us, end_us),
            otherwise,
            before=sums_before(folder, hour_us),
        )
    data = _encoded(gpu_lines.to_arrow(found))
    digest = hashlib.sha256(data).hexdigest()
    if known is not None and known.sha256 == digest:
        _index(folder, hour_us, dataclasses.replace(known, inputs=inputs))
        return dataclasses.replace(done, hours=done.hours + 1)
    revision = 0 if known is None else known.revision + 1
    name = f"day={schema.day_of(hour_us)}/{hour_us // HOUR_US % 24:02}.{revision}.parquet"
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    manifests.write_durably(folder / name, data)
    fresh = Hour(
        file=name,
        rows=len(found.lines.gpu_us),
        revision=revision,
        inputs=inputs,
        sha256=digest,
        at_us=now_us,
        sums={model: dataclasses.astuple(each) for model, each in found.sums.items()},
        costs={model: dataclasses.astuple(each) for model, each in found.costs.items()},
    )
    _index(folder, hour_us, fresh)
    if revision > 1:  # the one before may be read at this moment; that before it is not
        (folder / name.replace(f".{revision}.", f".{revision - 2}.")).unlink(missing_ok=True)
    return dataclasses.replace(
        done, hours=done.hours + 1, revisions=done.revisions + (revision > 0)
    )


def _inputs(parquet: Path, first_us: int = 0, last_us: int = books.MAX_US) -> dict[int, str]:
    """Return a digest of the files that touch each hour of a window in which a lease held anything."""
    files = [
        file
        for file in (manifests.load(parquet) or manifests.Manifest()).files
        if file.first_us < last_us and file.last_us >= first_us
    ]
    touching: dict[int, list[str]] = {}
    for file in files:
        if file.table == schema.GPU:
            for hour_us in _hours_of(parquet, file):
                if not first_us <= hour_us < last_us:
                    continue
                touching.setdefault(hour_us, []).append(file.path)
    for file in files:
        if file.table != schema.GPU:
            for hour_us, paths in touching.items():
                if file.first_us < hour_us + HOUR_US and file.last_us >= hour_us:
                    paths.append(file.path)
    return {
        hour_us: hashlib.sha256("\n".join(sorted(paths)).encode()).hexdigest()
        for hour_us, paths in touching.items()
    }


def _hours_of(parquet: Path, file: manifests.File) -> set[int]:
    """Return the hours that a file's rows touch; its span alone says little where a clock was wrong."""
    first, last = file.first_us // HOUR_US, file.last_us // HOUR_US
    if last - first <= 2 * 24:
        return {hour * HOUR_US for hour in range(first, last + 1)}
    try:
        rows = pq.read_table(parquet / file.path, columns=["start_us", "end_us"])
    except OSError:  # damaged or gone: the reading names it
        return set()
    found: set[int] = set()
    for start, end in zip(rows["start_us"].to_pylist(), rows["end_us"].to_pylist(), strict=True):
        if start <= end <= start + 24 * HOUR_US:
            found.update(hour * HOUR_US for hour in range(start // HOUR_US, end // HOUR_US + 1))
    return found


def _arrivals_from(parquet: Path, hour_us: int) -> int:
    """Return when the earliest request arrived that may have run in an hour, by the files' own spans."""
    begins = [
        file.first_us
        for file in (manifests.load(parquet) or manifests.Manifest()).files
        if file.table == schema.USAGE and file.last_us >= hour_us and file.first_us < hour_us
    ]
    return max(0, hour_us - LONGEST_REQUEST_US, min(begins, default=hour_us))


def _encoded(table: Any) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _day_file(folder: Path, hour_us: int) -> Path:
    return folder / f"day={schema.day_of(hour_us)}" / "index.json"


def load_day(folder: Path, at_us: int) -> dict[int, Hour]:
    """Return the hours of a UTC day by their beginnings; one that can't be read is made again."""
    try:
        found = json.loads(_day_file(folder, at_us).read_text())
        return {int(hour_us): stored.read(Hour, fields) for hour_us, fields in found.items()}
    except (OSError, ValueError, TypeError):
        return {}


def _index(folder: Path, hour_us: int, fresh: Hour) -> None:
    path = _day_file(folder, hour_us)
    hours = {**load_day(folder, hour_us), hour_us: fresh}
    text = json.dumps({str(hour): dataclasses.asdict(each) for hour, each in sorted(hours.items())})
    manifests.write_durably(path, text.encode())


def hours(folder: Path, first_us: int, last_us: int) -> Iterator[tuple[int, Hour]]:
    """Yield the hours of the table that lie wholly in a window, in order."""
    days = sorted(path.parent.name.removeprefix("day=") for path in folder.glob("day=*/index.json"))
    for day in days:
        begin = _begin_of(day)
        if begin + 24 * HOUR_US <= first_us or begin >= last_us:
            continue
        for hour_us, hour in sorted(load_day(folder, begin).items()):
            if first_us <= hour_us and hour_us + HOUR_US <= last_us:
                yield hour_us, hour


def sums_before(folder: Path, hour_us: int) -> dict[str, stepcost.Sums]:
    """Return what the week before an hour says of each model's step costs."""
    total: dict[str, stepcost.Sums] = {}
    for _, hour in hours(folder, hour_us - FIT_HOURS * HOUR_US, hour_us):
        for model, values in hour.sums.items():
            total[model] = total.get(model, stepcost.Sums()) + stepcost.Sums(
                int(values[0]), *values[1:]
            )
    return total


def current(state_dir: Path, first_us: int, last_us: int) -> dict[int, Hour]:
    """Return the hours of a window that may be read for its rows: whole, and made from all that is recorded.

    Rows that came since (shipped and not yet rolled, say) make an hour out of date: it is shared out live.

    Raises:
        manifests.ManifestDamaged: nothing can be said.
    """
    folder = state_dir / FOLDER
    found = dict(hours(folder, first_us, last_us))
    inputs: dict[int, str] = {}
    if found:
        inputs = _inputs(state_dir / "parquet", min(found), max(found) + HOUR_US)
    return {
        hour_us: hour
        for hour_us, hour in found.items()
        if hour.inputs == inputs.get(hour_us) and _whole(folder, hour)
    }


def _whole(folder: Path, hour: Hour) -> bool:
    try:
        return manifests.digest(folder / hour.file) == hour.sha256
    except OSError:
        return False


def _begin_of(day: str) -> int:
    midnight = datetime.datetime.fromisoformat(day).replace(tzinfo=datetime.UTC)
    return round(midnight.timestamp()) * 1_000_000

"""The measurements of `make bench-accounting`; each runs in a process of its own, so that memory is its own.

``python -m tests.bench.accounting_stages NAME STATE [ARGUMENT]`` prints one JSON object.
"""

import asyncio
import dataclasses
import datetime
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq

from accounting import (
    books,
    compact,
    manifest,
    owner_runs,
    quantities,
    rates,
    reports,
    rolling,
    rollup,
    runs,
    schema,
    ship,
    spool,
    summaries,
    windows,
)
from scheduler.contracts import clock, usage
from tests.bench import accounting_data as data
from tests.bench.accounting_questions import BILLING, DAY, TEAM_DAY, TOKENS, segments

CLIENTS = 4
GROUP = 32  # requests that share a sync on the request path, at some thousands a second


def report(records: books.Books, first_us: int, last_us: int) -> list[tuple[Any, ...]]:
    """Return the month by team and day as freport's rows have it; last columns as of `TOKENS`."""
    cuts = windows.periods(windows.Window(first_us, last_us), "day", datetime.UTC)
    with records.reading(first_us, last_us) as reading:

        def made(rolled_us: int) -> list[dict[str, Any]]:
            everything = reports.Scope(), reports.Filter()
            told = summaries.told("team", *everything)
            taken = quantities.take(reading, cuts, rates.Rates(), None, rolled_us, told)
            return summaries.summary(
                reading, *everything, by="team", cuts=cuts, taken=taken, rolled_us=rolled_us
            )

        rows = quantities.with_rollups(reading, first_us, made)
        _whole(reading)
    return [
        (row["start_us"], row["team"], row["requests"], *(row[name] for name in runs.SUMS))
        for row in rows
    ]


def requests(number: int) -> list[tuple[usage.UsageRow, usage.UsageRow]]:
    """Return OPEN and CLOSE of that many requests, shared out as the month's are (`accounting_data`)."""
    made = []
    chance = random.Random(7)
    for n in range(number):
        start = 1_795_780_800_000_000 + n * 300
        team = int(data.TEAMS * chance.random() ** 2.5)
        user = chance.randrange(10)
        model = chance.randrange(4) if chance.random() < 1 / 16 else user % 4
        identity = usage.Identity(
            request_id=f"{start // 1000:012x}"[:8] + f"-{n % 65536:04x}-7abc-8def-{n:012x}",
            attempt=1,
            cluster="site",
            team=f"team{team}",
            user=f"user{team * 10 + user}",
            key_id=f"fb_{team * 20 + user + 10 * chance.randrange(2)}",
            model=f"model-{(team * 7 + model * (1 + team % 5)) % data.MODELS}",
            version="2026-10",
            adapter="" if team % 10 else f"lora-{team}",
            endpoint="/v1/chat/completions",
            tier="interactive",
            replica_id=f"r-{n % 300:012d}",
            lease_id=f"l-{n % 150:012d}",
            slurm_job_id=str(700000 + n % 150),
            arrived_us=start,
            started_us=start + 9000,
        )
        close = usage.UsageRow(
            usage.RowKind.CLOSE,
            identity,
            usage.Outcome.OK,
            500 + n % 1500,
            1024,
            n % 700,
            start + 90_000,
            start + 4_000_000,
        )
        made.append((usage.UsageRow(usage.RowKind.OPEN, identity), close))
    return made


def request_path(state: Path) -> dict[str, Any]:
    """CPU of the event loop's thread for `ready`, OPEN and CLOSE; the sync apart, in its own thread."""
    made = requests(20_000)
    rounds, waits = [], []
    cpu = 0.0

    async def run() -> None:
        nonlocal cpu
        sink = spool.Spool(state / "spool" / "path", "path", clock=clock.SystemClock())
        for first in range(0, len(made), GROUP):
            some = made[first : first + GROUP]
            began = time.thread_time_ns()
            for begin, end in some:
                sink.ready()
                sink.append(begin)
                sink.append(end)
            rounds.append((time.thread_time_ns() - began) / len(some) / 1000)
            began = time.perf_counter_ns()
            await sink.sync()
            waits.append((time.perf_counter_ns() - began) / 1e6)
        cpu = time.process_time()
        sink.close()

    before = time.process_time()
    asyncio.run(run())
    whole = (cpu - before) / len(made) * 1e6
    own = statistics.mean(rounds)
    waits.sort()
    return {
        "spool_us_per_request": round(own, 2),
        "spool_us_median": round(statistics.median(rounds), 2),
        "sync_cpu_us_per_request": round(max(0.0, whole - own), 2),
        "sync_ms_p50": round(statistics.median(waits), 3),
        "sync_ms_p99": round(waits[int(len(waits) * 0.99)], 3),
    }


def writer(state: Path, rows: int) -> dict[str, Any]:
    """Append and sync rows as fast as one process can: each of `CLIENTS` waits for its 1,000 rows.

    As in a gateway, others append while one waits. Every row is on disk before it is counted.
    """
    made = requests(20_000)
    durable = 0

    async def client(sink: spool.Spool, number: int) -> None:
        nonlocal durable
        at = number * 500
        while durable < rows:
            for begin, end in made[at : at + 500]:
                sink.append(begin)
                sink.append(end)
            await sink.sync()
            durable += 1000
            at = (at + CLIENTS * 500) % len(made)

    async def run() -> tuple[float, float]:
        sink = spool.Spool(state / "spool" / "bulk", "bulk", clock=clock.SystemClock())
        began, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*[client(sink, number) for number in range(CLIENTS)])
        took, spent = time.perf_counter() - began, time.process_time() - cpu
        sink.close()
        return took, spent

    took, spent = asyncio.run(run())
    return {
        "writer_rows_per_s": round(durable / took),
        "writer_cpu_us_per_row": round(spent / durable * 1e6, 2),
        "writer_rows": durable,
    }


def ingest(state: Path, rows: int) -> dict[str, Any]:
    """One writer, and the shipper beside it: rows a second from the first append to the last in Parquet."""
    began = time.perf_counter()
    argv = [sys.executable, "-m", "tests.bench.accounting_stages", "writer", str(state), str(rows)]
    shipped, busy = 0, 0.0
    cpu = time.process_time()
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        while True:
            ended = process.poll() is not None
            pass_began = time.perf_counter()
            done = ship.ship(state, clock.SystemClock())
            if done.problems:
                raise RuntimeError("; ".join(done.problems))
            shipped += done.rows
            if done.rows:
                busy += time.perf_counter() - pass_began
            elif not ended:
                time.sleep(0.05)
            if ended:
                break
        assert process.stdout is not None
        told = json.loads(process.stdout.read())
    took = time.perf_counter() - began
    if shipped != told["writer_rows"]:
        raise RuntimeError(f"{told['writer_rows']} rows acknowledged, {shipped} shipped")
    return {
        **told,
        "rows": shipped,
        "ship_cpu_us_per_row": round((time.process_time() - cpu) / shipped * 1e6, 2),
        "ingest_rows_per_s": round(shipped / took),
        "ship_rows_per_s": round(shipped / busy),
    }


def compaction(state: Path, rows: int) -> dict[str, Any]:
    """OPEN, CLOSE and REPLICA rows of a day in a file for each quarter of an hour, made into one file."""
    folder = state / "parquet"
    folder.mkdir(parents=True)
    day = data.Day(3, 0, rows // 3)
    files = []
    with duckdb.connect(config={"memory_limit": "1GB"}) as session:
        for part in range(96):
            first, last = day.rows * part // 96, day.rows * (part + 1) // 96
            made = session.sql(data.as_written(data.attempts(day, first, last))).to_arrow_table()
            table = made.select(schema.columns(schema.USAGE)).cast(schema.schema(schema.USAGE))
            span = day.start_us, day.start_us + data.DAY_US
            files.append(ship.write_file(folder, schema.USAGE, day.name, table, span))
    manifest.save(folder, manifest.Manifest(1, tuple(files)))
    before = sum(each.rows for each in files)
    began, cpu = time.perf_counter(), time.process_time()
    done = compact.compact(state, clock.SystemClock())
    took, spent = time.perf_counter() - began, time.process_time() - cpu
    if done.files_after != 1 or done.repeated_rows != before - day.rows:
        raise RuntimeError(f"compaction went wrong: {done}")
    return {
        "compact_rows_per_s": round(before / took),
        "compact_cpu_us_per_row": round(spent / before * 1e6, 2),
        "rows": before,
    }


def bulk(state: Path, part: int, parts: int, rows: int) -> dict[str, Any]:
    """Write every ``parts``-th day as a compaction leaves it."""
    chosen = [day for day in data.days(rows) if day.number % parts == part]
    found = [data.compacted(state / "parquet", day) for day in chosen]
    return {"files": [dataclasses.asdict(each) for each in found]}


def sizes(state: Path) -> dict[str, Any]:
    """Bytes a row of the compacted files: in all, and of what a bill needs, which rows are whose among it."""
    current = manifest.load(state / "parquet")
    assert current is not None
    whole = billing = rows = owners = 0
    for each in current.files[:3]:
        about = pq.ParquetFile(state / "parquet" / each.path).metadata
        rows += about.num_rows
        whole += each.bytes
        notes = (about.metadata or {}).items()
        owners += sum(len(text) for name, text in notes if name.startswith(owner_runs.NAME))
        for group in range(about.num_row_groups):
            for number in range(about.num_columns):
                column = about.row_group(group).column(number)
                billing += column.total_compressed_size * (column.path_in_schema in BILLING)
    return {
        "bytes_per_row": round((billing + owners) / rows, 2),
        "bytes_per_row_all": round(whole / rows, 2),
        "bytes_per_row_owners": round(owners / rows, 3),
    }


def rebuild(state: Path) -> dict[str, Any]:
    """Make the rollups of the month from the compacted files."""
    began = time.perf_counter()
    done = rolling.rebuild(books.Books(state), clock.SystemClock())
    if done.problems:
        raise RuntimeError("; ".join(done.problems))
    with rollup.opened(rollup.path_of(state)) as session:
        counts = {
            level: session.execute(f"SELECT count(*) FROM usage_{level}").fetchall()[0][0]
            for level in ("hours", "days")
        }
    return {
        "rebuild_s": round(time.perf_counter() - began, 1),
        "rollup_rows": counts,
        "rollup_mb": round(rollup.path_of(state).stat().st_size / 1e6, 1),
    }


def bill(state: Path, way: str) -> dict[str, Any]:
    """The month by team, model and tier, cold and then five times warm, in one process.

    ``way``: rollup, segments, ``sql`` for the same by the view ``usage``, ``day`` for a team's day by it,
    ``report`` for freport's month by team and day.
    """
    first, last = data.month_us()
    records = books.Books(state)

    def once() -> tuple[float, list[tuple[Any, ...]]]:
        began = time.perf_counter()
        if way == "rollup":
            with rollup.sums(state, [(first, last)]) as session:
                rows = session.execute(TOKENS.format(source="usage_sums")).fetchall()
        elif way == "segments":
            rows = segments(records, first, last)
        elif way == "report":
            rows = report(records, first, last)
        elif way == "sql":
            with records.reading(first, last) as reading:
                rows = reading.session.execute(TOKENS.format(source="usage")).fetchall()
                _whole(reading)
        else:
            with records.reading(DAY.start_us, DAY.start_us + data.DAY_US) as reading:
                rows = reading.session.execute(TEAM_DAY.format(source="usage")).fetchall()
                _whole(reading)
        return time.perf_counter() - began, rows

    dropped = drop_caches()
    cold, rows = once()
    warm = [once()[0] for _ in range(3 if way in {"sql", "report"} else 5)]
    return {
        "cold_s": round(cold, 3),
        "cache_dropped": dropped,
        "warm_s": round(statistics.median(warm), 3),
        "warm_spread_s": [round(min(warm), 3), round(max(warm), 3)],
        "lines": len(rows),
        "sum": [sum(row[place] for row in rows) for place in range(3, 6)],
    }


def _whole(reading: books.Reading) -> None:
    if reading.problems:
        raise RuntimeError("; ".join(reading.problems))


def drop_caches() -> bool:
    """Drop the page cache if this process may."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return False
    return True


def most_memory_mb() -> int:
    """Return the most memory that this process held; `getrusage` has that of its parent in it as well."""
    told = Path("/proc/self/status").read_text()
    kb = next(line.split()[1] for line in told.splitlines() if line.startswith("VmHWM:"))
    return round(int(kb) / 1024)


def main() -> None:
    """Run one stage and print what it measured, with the most memory that it held."""
    name, state, *rest = sys.argv[1:]
    stages: dict[str, Callable[..., dict[str, Any]]] = {
        "request_path": request_path,
        "writer": writer,
        "ingest": ingest,
        "compaction": compaction,
        "bulk": bulk,
        "sizes": sizes,
        "rebuild": rebuild,
        "bill": bill,
    }
    given = [int(each) if each.isdigit() else each for each in rest]
    found = stages[name](Path(state), *given)
    print(json.dumps({**found, "rss_mb": most_memory_mb()}))


if __name__ == "__main__":
    main()

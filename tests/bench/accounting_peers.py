"""The same bill, and one team's day, by the obvious alternatives, over the same rows, in the same run.

- PostgreSQL: one table with the primary key (request id, attempt), which is its deduplication, and the
  usual indexes on (team, arrival) and arrival; loaded by COPY, vacuumed and analysed.
- SQLite: the same table and indexes.
- plain DuckDB: Parquet files as they were written, one row in fifty twice, deduplicated by the query.
- ours: the same rows in compacted files, as a bill takes them (`accounting.tokens`), and by the SQL view.

Only the billing columns go into the other tables: narrower rows are in their favour.
"""

import argparse
import contextlib
import json
import os
import shutil
import sqlite3
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import psycopg

from accounting import books, manifest, schema
from tests import realpostgres
from tests.bench import accounting_data as data
from tests.bench.accounting_questions import (
    BILLING,
    DAY,
    TEAM_DAY,
    TOKENS,
    segments,
    team_day,
)

# How often each is asked; the slow ones are asked in the first rounds.
ROUNDS = {"segments": 9, "segments_sql": 9, "postgres": 9, "sqlite": 3, "duckdb_plain": 3}
FAULTS = (psycopg.Error, sqlite3.Error, duckdb.Error)  # by which a peer breaks
QUESTIONS = {"bill": TOKENS, "day": TEAM_DAY}
Answer = list[tuple[Any, ...]]
Ask = Callable[[str], Answer]  # one of `QUESTIONS`, by name
_TYPES = {
    name: "BIGINT" if name.endswith(("_us", "_tokens")) or name == "attempt" else "TEXT"
    for name in BILLING
}
_COLUMNS = ", ".join(f'"{name}" {kind} NOT NULL' for name, kind in _TYPES.items())
_NAMES = ", ".join(f'"{name}"' for name in BILLING)
_TABLE = f"CREATE TABLE usage ({_COLUMNS}, PRIMARY KEY (request_id, attempt))"
_INDEXES = (
    "CREATE INDEX usage_team ON usage (team, arrived_us)",
    "CREATE INDEX usage_arrived ON usage (arrived_us)",
)


def ours(folder: Path, rows: int) -> tuple[books.Books, list[str]]:
    """Write the rows as compacted files, a manifest beside them; returns the paths as well."""
    state = folder / "ours"
    files = tuple(data.compacted(state / "parquet", day) for day in data.days(rows) if day.rows)
    manifest.save(state / "parquet", manifest.Manifest(len(files), files))
    return books.Books(state), [str(state / "parquet" / each.path) for each in files]


def undeduplicated(folder: Path, paths: list[str]) -> str:
    """Write the rows as shipped, every fiftieth twice; returns the pattern that finds them."""
    target = folder / "plain"
    target.mkdir()
    with duckdb.connect(config={"memory_limit": "1GB"}) as session:
        for number, path in enumerate(paths):
            session.read_parquet(path).create_view("day", replace=True)
            out = target / f"{number}.parquet"
            session.execute(
                "COPY (SELECT * FROM day UNION ALL SELECT * FROM day WHERE hash(request_id) % 50 = 0) "
                f"TO '{out}' (COMPRESSION zstd)"
            )
    return str(target / "*.parquet")


def plain_duckdb(pattern: str) -> Ask:
    """Return who answers by DuckDB over files that hold rows twice."""
    once = f"(SELECT DISTINCT ON (request_id, attempt) {_NAMES} FROM read_parquet('{pattern}'))"
    session = duckdb.connect(config={"threads": 2, "memory_limit": "2GB"})
    return lambda name: session.execute(QUESTIONS[name].format(source=once)).fetchall()


def sqlite(folder: Path, paths: list[str]) -> Ask:
    """Load SQLite and return who asks it."""
    base = sqlite3.connect(folder / "usage.sqlite")
    base.execute("PRAGMA journal_mode = OFF")
    base.execute("PRAGMA synchronous = OFF")
    base.execute(_TABLE)
    marks = ", ".join("?" for _ in BILLING)
    with duckdb.connect() as session:
        for path in paths:
            reader = session.execute(f"SELECT {_NAMES} FROM read_parquet('{path}')")
            while some := reader.fetchmany(50_000):
                base.executemany(f"INSERT INTO usage VALUES ({marks})", some)
    for text in (*_INDEXES, "ANALYZE"):
        base.execute(text)
    base.commit()
    texts = {
        name: text.format(source="usage").replace("::BIGINT", "")
        for name, text in QUESTIONS.items()
    }
    return lambda name: base.execute(texts[name]).fetchall()


@contextlib.contextmanager
def postgres(folder: Path, paths: list[str]) -> Iterator[tuple[Ask, str]]:
    """Run a PostgreSQL server with the rows in it; yields who asks it, and its version."""
    where = realpostgres.binaries()
    if where is None:
        raise RuntimeError("PostgreSQL is not here: apt-get install postgresql")
    home = folder / "postgres"
    home.mkdir()
    root = os.geteuid() == 0
    who: dict[str, Any] = (
        {"user": "postgres", "group": "postgres", "extra_groups": []} if root else {}
    )
    if root:
        shutil.chown(home, "postgres")
        folder.chmod(0o755)
    argv: list[str | Path] = [
        where / "initdb",
        "-D",
        home / "data",
        "-U",
        "postgres",
        "-A",
        "trust",
        "-E",
        "UTF8",
    ]
    subprocess.run(argv, check=True, capture_output=True, cwd=home, **who)
    options = {
        "listen_addresses": "",
        "shared_buffers": "1GB",
        "work_mem": "256MB",
        "maintenance_work_mem": "1GB",
        "max_wal_size": "8GB",
        "max_parallel_workers_per_gather": "2",
        "jit": "off",
    }
    settings = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
    server = subprocess.Popen(
        [where / "postgres", "-D", home / "data", "-k", home, *settings],
        stderr=subprocess.DEVNULL,
        cwd=home,
        **who,
    )
    try:
        with _connected(home) as base:
            _fill(base, paths)
            version = str(base.execute("SHOW server_version").fetchall()[0][0])
            texts = {name: text.format(source="usage") for name, text in QUESTIONS.items()}
            yield lambda name: base.execute(texts[name].encode()).fetchall(), version
    finally:
        server.terminate()
        server.wait()


def _connected(home: Path) -> psycopg.Connection[tuple[Any, ...]]:
    until = time.monotonic() + 30
    while True:
        try:
            return psycopg.connect(
                host=str(home), user="postgres", dbname="postgres", autocommit=True
            )
        except psycopg.OperationalError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def _fill(base: psycopg.Connection[tuple[Any, ...]], paths: list[str]) -> None:
    base.execute(_TABLE.encode())
    with duckdb.connect() as session:
        for path in paths:
            reader = session.execute(f"SELECT {_NAMES} FROM read_parquet('{path}')")
            with base.cursor().copy(f"COPY usage ({_NAMES}) FROM STDIN".encode()) as copy:
                while some := reader.fetchmany(50_000):
                    copy.write("".join("\t".join(map(str, row)) + "\n" for row in some))
    for text in (*_INDEXES, "VACUUM ANALYZE usage"):
        base.execute(text.encode())


def compare(folder: Path, rows: int, chosen: Sequence[str] = tuple(ROUNDS)) -> dict[str, Any]:
    """Ask everybody for the bill and for a team's day, in turn; medians, spreads, and that all say the same.

    Args:
        folder: for their files; PostgreSQL, which runs as another user, must get into it.
        rows: of the month.
        chosen: of `ROUNDS`, `segments` among them.
    """
    records, paths = ours(folder, rows)
    windows = {"bill": data.month_us(), "day": (DAY.start_us, DAY.start_us + data.DAY_US)}

    def by_sql(name: str) -> Answer:
        with records.reading(*windows[name]) as reading:
            text = QUESTIONS[name].format(source="usage")
            found: Answer = reading.session.execute(text).fetchall()
            return found

    def by_sums(name: str) -> Answer:
        return segments(records, *windows["bill"]) if name == "bill" else team_day(records)

    versions = {"sqlite": sqlite3.sqlite_version, "duckdb": duckdb.__version__}
    with contextlib.ExitStack() as stack:
        ways: dict[str, Ask] = {"segments": by_sums}
        if "segments_sql" in chosen:
            ways["segments_sql"] = by_sql
        if "postgres" in chosen:
            ways["postgres"], versions["postgres"] = stack.enter_context(postgres(folder, paths))
        if "sqlite" in chosen:
            ways["sqlite"] = sqlite(folder, paths)
        if "duckdb_plain" in chosen:
            ways["duckdb_plain"] = plain_duckdb(undeduplicated(folder, paths))
        took = {name: _in_turn(ways, name) for name in QUESTIONS}
    answer: dict[str, Any] = {
        "rows_5m": rows,
        "versions": versions,
        "columns": len(schema.columns(schema.USAGE)),
    }
    for name, found in took.items():
        places = 3 if name == "bill" else 4
        answer[f"{name}_5m_s"] = {
            way: round(statistics.median(each), places) for way, each in found.items()
        }
        answer[f"{name}_5m_spread_s"] = {
            way: [round(min(each), places), round(max(each), places)] for way, each in found.items()
        }
    if "postgres" in ways:
        bills = took["bill"]
        ratios = [p / s for p, s in zip(bills["postgres"], bills["segments"], strict=True)]
        answer["postgres_over_segments"] = round(statistics.median(ratios), 1)
    return answer


def _in_turn(ways: Mapping[str, Ask], name: str) -> dict[str, list[float]]:
    """Ask each way, after once to warm it up, as often as it is asked; returns the seconds that it took."""
    answers = {way: sorted(tuple(row) for row in ask(name)) for way, ask in ways.items()}
    wrong = [way for way, answer in answers.items() if answer != answers["segments"]]
    if wrong:
        raise RuntimeError(f"answers on the {name} differ: {', '.join(wrong)}")
    took: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(max(ROUNDS.values())):
        for way, ask in ways.items():
            if number >= ROUNDS[way]:
                continue
            began = time.perf_counter()
            ask(name)
            took[way].append(time.perf_counter() - began)
    return took


def main() -> None:
    """Compare alone, with some or all of the peers; prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000, help="rows of the month")
    parser.add_argument("--peers", nargs="*", choices=[*ROUNDS], default=[*ROUNDS])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="forebay-bench-accounting-") as folder:
        Path(folder).chmod(0o755)
        print(json.dumps(compare(Path(folder), args.rows, args.peers)))


if __name__ == "__main__":
    main()

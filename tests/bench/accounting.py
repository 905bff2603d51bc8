"""`make bench-accounting`: what usage records cost to write, keep and bill, at 100 million rows.

The tables are printed, and written with ``--report``; the last line is JSON.
"""

import argparse
import datetime
import functools
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

from accounting import manifest
from tests.bench import accounting_peers, accounting_report

_BYTES_A_ROW = 45  # of Parquet, and as much again for what is beside it at a time
_ROOT = Path(__file__).parents[2]
_SMALL = 5_000_000


def stage(name: str, state: Path, *given: object) -> dict[str, Any]:
    """Run one stage in a process of its own."""
    argv = [sys.executable, "-m", "tests.bench.accounting_stages", name, str(state)]
    done = subprocess.run([*argv, *map(str, given)], check=True, stdout=subprocess.PIPE, cwd=_ROOT)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"  {name} {' '.join(map(str, given))}: {json.dumps(found)[:300]}", file=sys.stderr)
    return found


def fill(state: Path, rows: int) -> dict[str, Any]:
    """Write the month as compactions leave it, by two processes."""
    (state / "parquet").mkdir(parents=True)
    with futures.ThreadPoolExecutor(2) as pool:
        parts = [pool.submit(stage, "bulk", state, part, 2, rows) for part in range(2)]
        made = [part.result() for part in parts]
    files = [manifest.File(**each) for part in made for each in part["files"]]
    files.sort(key=lambda each: each.day)
    manifest.save(state / "parquet", manifest.Manifest(len(files), tuple(files)))
    return {"files": len(files)}


class Measured:
    """What was measured so far: a part that breaks is named, and the others go on without it."""

    def __init__(self) -> None:
        self.load_before = os.getloadavg()[0]
        self.parts: dict[str, dict[str, Any]] = {}
        self.broken: dict[str, str] = {}

    def part(self, name: str, work: Callable[[], dict[str, Any]]) -> bool:
        """Measure a part; returns whether there are figures of it."""
        try:
            self.parts[name] = work()
        except (
            OSError,
            RuntimeError,
            subprocess.SubprocessError,
            *accounting_peers.FAULTS,
        ) as error:
            self.broken[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
            print(f"  {name} broke: {self.broken[name]}", file=sys.stderr)
        return name in self.parts

    def figure(self, part: str, name: str) -> Any:
        """Return a figure, None if its part has none."""
        return self.parts.get(part, {}).get(name)


def measure(done: Measured, folder: Path, rows: int, peer_rows: int) -> None:
    """Measure every part, the short ones first; nothing but the part runs meanwhile."""
    for part, name, most in (
        ("path", "request_path", None),
        ("ingest", "ingest", min(rows, 2_000_000)),
        ("compaction", "compaction", min(rows, 3_000_000)),
    ):
        given = () if most is None else (most,)
        done.part(part, functools.partial(stage, name, folder / part, *given))
        shutil.rmtree(folder / part, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder) as peers:
        done.part("peers", lambda: accounting_peers.compare(Path(peers), peer_rows))
    month = folder / "month"
    if not done.part("month", lambda: fill(month, rows)):
        return
    for name in ("sizes", "rebuild"):
        done.part(name, functools.partial(stage, name, month))
    for way in ("rollup", "segments", "sql", "day", "report"):
        done.part(way, functools.partial(bill, done, month, way))


def bill(done: Measured, month: Path, way: str) -> dict[str, Any]:
    """Measure a way to the month's bill, whose sum must be that of the ways before."""
    found = stage("bill", month, way)
    for name in ("rollup", "segments", "sql"):
        known = done.figure(name, "sum")
        if way != "day" and known is not None and known != found["sum"]:
            raise RuntimeError(f"the bill from {way} is not the bill from {name}")
    return found


def figures(done: Measured, rows: int, started: datetime.datetime) -> dict[str, Any]:
    """Return what the last line holds: null for what was not measured, and why in ``broken``."""
    ran = datetime.datetime.now(datetime.UTC) - started
    memory = [each["rss_mb"] for each in done.parts.values() if "rss_mb" in each]
    return {
        "rows": rows,
        "ingest_rows_per_s": done.figure("ingest", "ingest_rows_per_s"),
        "compact_rows_per_s": done.figure("compaction", "compact_rows_per_s"),
        "bill_s": {way: done.figure(way, "cold_s") for way in ("rollup", "segments")},
        "bill_warm_s": {way: done.figure(way, "warm_s") for way in ("rollup", "segments")},
        "team_day_s": done.figure("day", "warm_s"),
        "report_s": done.figure("report", "warm_s"),
        "bill_5m_s": done.figure("peers", "bill_5m_s"),
        "day_5m_s": done.figure("peers", "day_5m_s"),
        "rss_mb": max(memory, default=None),
        "bytes_per_row": done.figure("sizes", "bytes_per_row"),
        "spool_us_per_request": done.figure("path", "spool_us_per_request"),
        "broken": done.broken,
        "stages": done.parts,
        "machine": {
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "kernel": platform.release(),
            "load_before": done.load_before,
            "minutes": round(ran.total_seconds() / 60, 1),
            "date": started.date().isoformat(),
        },
    }


def main() -> None:
    """Measure, print, and write the report if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000_000, help="rows of the month")
    parser.add_argument("--report", type=Path, help="write the tables into this file")
    parser.add_argument("--folder", type=Path, help="where the files go; the default is TMPDIR")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was written goes away
    base = args.folder or Path(tempfile.gettempdir())
    needed = args.rows * _BYTES_A_ROW * 3 // 2 + 6_000_000_000 * min(args.rows, _SMALL) // _SMALL
    free = shutil.disk_usage(base).free
    if free < needed:
        sys.exit(
            f"bench-accounting: {base} has {free >> 30} GiB free and {needed >> 30} are needed: "
            "set TMPDIR to another disk, or ask for fewer --rows"
        )
    folder = Path(tempfile.mkdtemp(prefix="forebay-bench-accounting-", dir=base))
    folder.chmod(0o755)  # PostgreSQL runs as another user below it
    started, done = datetime.datetime.now(datetime.UTC), Measured()
    try:
        measure(done, folder, args.rows, min(args.rows, _SMALL))
    finally:  # also where it is ended before its time
        shutil.rmtree(folder)
        found = figures(done, args.rows, started)
        text = accounting_report.text(found)
        print(text)
        if args.report and done.parts:
            accounting_report.write(args.report, text)
        print(json.dumps(found))
    sys.exit(1 if done.broken else 0)


if __name__ == "__main__":
    main()

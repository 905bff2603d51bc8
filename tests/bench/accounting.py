"""`make bench-accounting`: what usage records cost to write, keep and bill, at 100 million rows.

The tables are printed, and written with ``--report``; the last line is JSON.
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
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


def fill(state: Path, rows: int) -> None:
    """Write the month as compactions leave it, by two processes."""
    (state / "parquet").mkdir(parents=True)
    with futures.ThreadPoolExecutor(2) as pool:
        parts = [pool.submit(stage, "bulk", state, part, 2, rows) for part in range(2)]
        files = [manifest.File(**each) for part in parts for each in part.result()["files"]]
    files.sort(key=lambda each: each.day)
    manifest.save(state / "parquet", manifest.Manifest(len(files), tuple(files)))


def measure(folder: Path, rows: int, peer_rows: int) -> dict[str, Any]:
    """Run every stage; nothing but the stage runs meanwhile."""
    started = datetime.datetime.now(datetime.UTC)
    path = stage("request_path", folder / "path")
    ingest = stage("ingest", folder / "ingest", min(rows, 2_000_000))
    compaction = stage("compaction", folder / "compaction", min(rows, 3_000_000))
    for name in ("path", "ingest", "compaction"):
        shutil.rmtree(folder / name)
    month = folder / "month"
    fill(month, rows)
    size = stage("sizes", month)
    rebuilt = stage("rebuild", month)
    asked = {way: stage("bill", month, way) for way in ("rollup", "segments", "day")}
    if asked["rollup"]["sum"] != asked["segments"]["sum"]:
        raise RuntimeError("the bill from rollups is not the bill from segments")
    shutil.rmtree(month)
    with tempfile.TemporaryDirectory(dir=folder) as peers:
        compared = accounting_peers.compare(Path(peers), peer_rows)
    stages = {"path": path, "ingest": ingest, "compaction": compaction, "rebuild": rebuilt, **asked}
    return {
        "rows": rows,
        "ingest_rows_per_s": ingest["ingest_rows_per_s"],
        "compact_rows_per_s": compaction["compact_rows_per_s"],
        "bill_s": {way: asked[way]["cold_s"] for way in ("rollup", "segments")},
        "bill_warm_s": {way: asked[way]["warm_s"] for way in ("rollup", "segments")},
        "team_day_s": asked["day"]["warm_s"],
        "bill_5m_s": compared["bill_5m_s"],
        "rss_mb": max(each["rss_mb"] for each in stages.values()),
        "bytes_per_row": size["bytes_per_row"],
        "spool_us_per_request": path["spool_us_per_request"],
        "stages": {**stages, "sizes": size, "peers": compared},
        "machine": {
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "kernel": platform.release(),
            "load_before": os.getloadavg()[0],
            "minutes": round(
                (datetime.datetime.now(datetime.UTC) - started).total_seconds() / 60, 1
            ),
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
    try:
        found = measure(folder, args.rows, min(args.rows, _SMALL))
    finally:
        shutil.rmtree(folder)
    text = accounting_report.text(found)
    print(text)
    if args.report:
        accounting_report.write(args.report, text)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

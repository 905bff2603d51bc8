"""How long a day of GPU minutes takes: 1,000 replicas, a row a minute each, a million requests.

Writes the day as the shipper would leave it, makes its 24 hours of the table, then asks for the day by
owner from the table and, for comparison, from the rows. Prints one line of JSON.
"""

import argparse
import json
import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from accounting import books, gpu_minutes, gpu_sums, manifest, schema, ship, stepcost
from scheduler.contracts import clock as clocks

START = 1_795_737_600_000_000  # 2026-11-27T00:00Z
MINUTE = 60_000_000
DAY = 1440 * MINUTE
GIVEN = stepcost.Cost(1.0, 4.0)


def main() -> None:
    """Run it; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=1_000_000)
    asked = parser.parse_args()
    state = Path(tempfile.mkdtemp(prefix="gpu-minutes-"))
    try:
        _write(state, asked.replicas, asked.requests)
        began = time.perf_counter()
        done = gpu_minutes.roll(state, clocks.FakeClock(START + DAY + gpu_minutes.HOUR_US), GIVEN)
        rolled = time.perf_counter() - began
        records = books.Books(state)
        cuts = [START, START + DAY]
        began = time.perf_counter()
        (share,), _ = gpu_sums.by_owner(records, cuts, GIVEN)
        asked_table = time.perf_counter() - began
        files = list((state / gpu_minutes.FOLDER).rglob("*.parquet"))
        size = sum(path.stat().st_size for path in files)
        shutil.rmtree(state / gpu_minutes.FOLDER)
        began = time.perf_counter()
        (again,), _ = gpu_sums.by_owner(records, cuts, GIVEN)
        asked_rows = time.perf_counter() - began
        assert share.allocated == again.allocated == 4 * asked.replicas * DAY
        result = {
            "replicas": asked.replicas,
            "requests": asked.requests,
            "hours": done.hours,
            "roll_day_s": round(rolled, 2),
            "report_from_table_s": round(asked_table, 3),
            "report_from_rows_s": round(asked_rows, 2),
            "table_mb": round(size / 1e6, 1),
            "rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        }
        print(json.dumps(result))
    finally:
        shutil.rmtree(state)


def _write(state: Path, replicas: int, requests: int) -> None:
    draw = np.random.default_rng(7)
    folder = state / "parquet"
    folder.mkdir()
    leases = np.arange(replicas) // 2  # eight GPUs a lease, four a replica
    spans = START + np.arange(1440) * MINUTE
    files = []
    for hour in range(24):
        start = np.tile(spans[hour * 60 : hour * 60 + 60], replicas)
        who = np.repeat(np.arange(replicas), 60)
        prefill, decode = draw.integers(0, 300_000, len(who)), draw.integers(1, 20_000, len(who))
        busy = np.minimum(80 * prefill + 1200 * decode, MINUTE)
        times = {"start_us": start, "end_us": start + MINUTE, "seq": (start - START) // MINUTE}
        held = {
            **times, "lease_id": _names("l", leases[who]), "replica_id": _names("r", who), "gpus": 4,
            "model": _names("m", who % 5), "state": "serving", "measured": 1, "steps": decode,
            "busy_us": busy, "prefill_tokens": prefill, "decode_tokens": decode,
        }  # fmt: skip
        files.append(_file(folder, schema.REPLICA_TIME, held, START + hour * 60 * MINUTE))
        mine = who % 2 == 0
        leased = {
            **{name: values[mine] for name, values in times.items()},
            "lease_id": _names("l", leases[who[mine]]), "gpus": 8, "kind": "serve", "team": "forebay",
        }  # fmt: skip
        files.append(_file(folder, schema.GPU, leased, START + hour * 60 * MINUTE))
        number = requests // 24
        at = np.sort(START + hour * 60 * MINUTE + draw.integers(0, 60 * MINUTE, number))
        lasts = draw.integers(MINUTE // 60, MINUTE, number)
        where = draw.integers(0, replicas, number)
        work = {
            "request_id": _names(f"q{hour}-", np.arange(number)), "attempt": 1, "arrived_us": at,
            "started_us": at, "first_token_us": at + lasts // 5, "ended_us": at + lasts,
            "replica_id": _names("r", where), "lease_id": _names("l", leases[where]),
            "team": _names("t", draw.integers(0, 200, number)), "model": _names("m", where % 5),
            "user": _names("u", draw.integers(0, 5, number)), "tier": "interactive",
            "uncached_prompt_tokens": draw.integers(1, 4000, number), "kind": "close", "outcome": "ok",
            "output_tokens": draw.integers(1, 600, number), "payer": "team", "endpoint": "/v1/c",
        }  # fmt: skip
        files.append(_file(folder, schema.USAGE, work, START + hour * 60 * MINUTE))
    manifest.save(folder, manifest.Manifest(generation=1, files=tuple(files)))


def _names(prefix: str, numbers: Any) -> Any:
    return pa.array([f"{prefix}{number}" for number in numbers.tolist()])


def _file(folder: Path, table: str, given: dict[str, Any], first_us: int) -> manifest.File:
    size = max(len(values) for values in given.values() if not isinstance(values, int | str))
    columns = {}
    for field in schema.schema(table):
        value = given.get(
            field.name, "c" if field.name == "cluster" else schema.default(table, field.name)
        )
        if isinstance(value, int | str):
            value = pa.repeat(pa.scalar(value, field.type), size)
        columns[field.name] = (
            pa.array(value, field.type) if not isinstance(value, pa.Array) else value
        )
    arrow = pa.table(columns).cast(schema.schema(table))
    return ship.write_file(
        folder, table, schema.day_of(first_us), arrow, (first_us, first_us + 61 * MINUTE)
    )


if __name__ == "__main__":
    main()

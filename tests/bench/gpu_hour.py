"""A real hour on a real Slurm cluster: does every replica-minute add up, and does `sacct -D` agree?

Brings up a cluster of this machine (root and Slurm's packages are needed), serves a simulated model under a
mixed load, kills a replica and an agent on the way, gives every lease back, and then checks

- the table of GPU minutes against the agents' raw rows, added up here again in plain Python;
- each lease's GPU-seconds against `sacct -D`, within 1 % or one second for each GPU.

With ``--batch-tokens`` a batch job of so many output tokens runs beside the callers, and `gaps` in the JSON
says how much of the GPU time that callers left it got, from the table alone: busy time of batch over that and
idle time, in the minutes in which the job ran from beginning to end; start-up apart.

Prints what it found, and one line of JSON at the end; exits with 1 if anything is off.
"""

import argparse
import collections
import dataclasses
import json
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accounting import books, gpu_minutes, gpu_sums, reconcile, reports, ship, stepcost
from scheduler.contracts import clock as clocks
from slurm_plugins import cli, devcluster
from tests.integration.whole import clients, running
from tests.realslurm import ACCOUNTS

MINUTE = 60_000_000
GIVEN = stepcost.Cost(1.0, 4.0)
LINE_TOKENS = 400  # of a batch line's answer
Key = tuple[str, str, int]  # lease, replica ("": the lease's own), minute


def main() -> int:
    """Run it; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--batch-tokens", type=int, default=0)
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="gpu-hour-"))
    try:
        site = devcluster.up(folder / "slurm", accounts=ACCOUNTS)
        house = _house(folder / "house", site)
        try:
            began = time.time()
            done = _live(house, asked)
        finally:
            house.close()
        return _judge(house.state, site, done | {"wall_s": round(time.time() - began)})
    finally:
        devcluster.down(folder / "slurm", purge=True)
        shutil.rmtree(folder, ignore_errors=True)


def _house(folder: Path, site: devcluster.Site) -> running.Running:
    folder.mkdir()
    slurm = {
        "conf": str(site.slurm_conf),
        "rest_url": site.rest_url,
        "rest_user": site.rest_user,
        "jwt_key_file": str(site.jwt_key),
        "account": "physics",
    }
    return running.Running(folder, slurm, str(site.munge_socket), site.env())


def _live(house: running.Running, asked: argparse.Namespace) -> dict[str, Any]:
    """Serve for a while under load, with two crashes; returns what was asked and answered."""
    house.up()
    if asked.batch_tokens:
        _submit(house, asked.batch_tokens)
    key, over = house.key, threading.Event()
    counts: collections.Counter[str] = collections.Counter()
    threads = [
        threading.Thread(target=_client, args=(house, key, asked.seed + n, over, counts))
        for n in range(asked.clients)
    ]
    for thread in threads:
        thread.start()
    until = time.monotonic() + asked.minutes * 60
    crashes = {0.3: "replica", 0.6: "agent"}
    for share, part in crashes.items():
        over.wait(max(0.0, until - (1 - share) * asked.minutes * 60 - time.monotonic()))
        victims = [each for each in house.processes() if each.part == part]
        if victims:
            victims[0].kill()
            print(f"{part} {victims[0].pid} killed", flush=True)
    over.wait(max(0.0, until - time.monotonic()))
    over.set()
    for thread in threads:
        thread.join()
    return {"minutes": asked.minutes, **{name: counts[name] for name in sorted(counts)}}


def _submit(house: running.Running, tokens: int) -> None:
    """Submit a batch job that keeps every seat busy for longer than the run."""
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": clients.chat(LINE_TOKENS),
        }
        for number in range(-(-tokens // LINE_TOKENS))
    ]
    file = house.folder / "requests.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = house.command("fbatch", "--parsable", "--account=physics", str(file))
    if done.code:
        raise SystemExit(f"fbatch: {done.err}")


def _client(
    house: running.Running,
    key: str,
    seed: int,
    over: threading.Event,
    counts: "collections.Counter[str]",
) -> None:
    draw = random.Random(seed)
    while not over.is_set():
        words = " ".join(str(draw.randrange(10**6)) for _ in range(draw.randrange(10, 150)))
        body = clients.chat(draw.randrange(1, 200), messages=[{"role": "user", "content": words}])
        try:
            answer = clients.post(house, key, body)
            counts[f"status_{answer.status_code}"] += 1
        except Exception as error:
            counts[type(error).__name__] += 1
        over.wait(draw.expovariate(0.4))


def _judge(state: Path, site: devcluster.Site, done: dict[str, Any]) -> int:
    """Compare the three books; returns the exit code."""
    later = clocks.FakeClock(time.time_ns() // 1_000 + 2 * gpu_minutes.HOUR_US)
    problems = list(ship.ship(state, later, takeover_s=10).problems)
    problems += gpu_minutes.roll(state, later, GIVEN).problems
    records = books.Books(state)
    with records.reading() as reading:
        wanted = expected(reading)
        leases = reports.lease_times(reading, reports.Scope(), reports.Filter())
        rows = reading.query("SELECT count(*) AS n, sum(output_tokens) AS out FROM usage")[0]
        found, kinds, costs, gaps = _table(state)
    wrong = {key for key in {*wanted, *found} if wanted[key] != found[key]}
    for key in sorted(wrong)[:20]:
        print(f"{key}: allocated {wanted[key]}, in the table {found[key]}")
    port = cli.CliClient(site.slurm_conf)
    compared = reconcile.reconcile(port, leases)
    for each in compared:
        print(
            f"lease {each.lease_id} job {each.slurm_job_id}: {each.gpus} GPUs, Forebay "
            f"{each.forebay_us / 1e6:.3f} s, sacct {(each.sacct_us or 0) / 1e6:.0f} s, allowed "
            f"{each.allowed_us / 1e6:.1f} s, agrees: {each.agrees} {each.note}"
        )
    apart = [each for each in compared if each.agrees is not True]
    plainly = [
        each for each in compared if abs(each.forebay_us - (each.sacct_us or 0)) > each.allowed_us
    ]
    result = {
        **done,
        "attempts": rows["n"],
        "output_tokens": int(rows["out"] or 0),
        "replica_minutes": len(wanted),
        "wrong_minutes": len(wrong),
        "gpu_s": {kind: round(amount / 1e6, 3) for kind, amount in sorted(kinds.items())},
        "allocated_s": round(sum(wanted.values()) / 1e6, 3),
        "leases": len(compared),
        "leases_apart": [each.lease_id for each in apart],
        "leases_apart_before_launch_and_teardown": [each.lease_id for each in plainly],
        "costs": costs,
        "gaps": gaps,
        "problems": problems,
    }
    print(json.dumps(result))
    return 1 if wrong or apart or problems or not compared else 0


def expected(reading: books.Reading) -> "collections.Counter[Key]":
    """Add up what the agents' rows say was held, by replica and minute, in plain Python."""
    sums: collections.Counter[Key] = collections.Counter()

    def add(lease: str, replica: str, row: dict[str, Any], sign: int) -> None:
        minute = row["start_us"] // MINUTE * MINUTE
        while minute < row["end_us"]:
            length = min(row["end_us"], minute + MINUTE) - max(row["start_us"], minute)
            sums[lease, replica, minute] += sign * row["gpus"] * length
            minute += MINUTE

    spans: dict[str, tuple[int, int]] = {}
    for row in reading.query("SELECT * FROM gpu_rows"):
        add(row["lease_id"], "", row, 1)
        first, last = spans.get(row["lease_id"], (row["start_us"], row["end_us"]))
        spans[row["lease_id"]] = min(first, row["start_us"]), max(last, row["end_us"])
    for row in reading.query("SELECT * FROM replica_rows"):
        first, last = spans.get(row["lease_id"], (0, 0))
        inside = dict(row, start_us=max(first, row["start_us"]), end_us=min(last, row["end_us"]))
        add(row["lease_id"], row["replica_id"], inside, 1)
        add(row["lease_id"], "", inside, -1)
    return collections.Counter({key: amount for key, amount in sums.items() if amount})


def in_gaps(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return what batch got of the GPU time that callers left, by the table; None if it never ran.

    Args:
        rows: of the table `gpu_minutes`. The minutes in which batch began and ended are left out.
    """
    minutes = {
        row["minute_us"]
        for row in rows
        if row["kind"] == "attributed" and row["tier"] == "batch" and row["gpu_us"]
    }
    within = {at for at in minutes if min(minutes) < at < max(minutes)}
    sums: collections.Counter[str] = collections.Counter()
    for row in rows:
        if row["minute_us"] in within:
            batch = row["kind"] == "attributed" and row["tier"] == "batch"
            sums["batch" if batch else row["kind"]] += row["gpu_us"]
    left = sums["batch"] + sums["idle"]
    if not left:
        return None
    return {
        "minutes": len(within),
        "lent_gpu_s": round(sums["batch"] / 1e6, 3),
        "left_gpu_s": round(left / 1e6, 3),
        "share": round(sums["batch"] / left, 4),
        "callers_gpu_s": round(sums["attributed"] / 1e6, 3),
        "start_gpu_s": round(sums["start-up"] / 1e6, 3),
        "waste_gpu_s": round(sums["waste"] / 1e6, 3),
    }


def _table(
    state: Path,
) -> tuple["collections.Counter[Key]", dict[str, int], dict[str, Any], dict[str, Any] | None]:
    folder = state / gpu_minutes.FOLDER
    hours = dict(gpu_minutes.hours(folder, 0, books.MAX_US))
    found: collections.Counter[Key] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    rows = gpu_sums.lines(folder, hours.values())
    for row in rows:
        found[row["lease_id"], row["replica_id"], row["minute_us"]] += row["gpu_us"]
        kinds[row["kind"] + (f" ({row['why']})" if row["why"] else "")] += row["gpu_us"]
    newest = hours[max(hours)].costs if hours else {}
    names = [field.name for field in dataclasses.fields(stepcost.Cost)]
    return (
        found,
        kinds,
        {model: dict(zip(names, cost, strict=True)) for model, cost in newest.items()},
        in_gaps(rows),
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())

"""`make bench-reclaim`: how fast batch GPUs come back, by rung; real Slurm, real vLLM on CPUs.

Batch runs on every GPU of the fleet, then callers come. Rung 0: as many as one shared replica has to
abort batch for. Rung 3: more than it has seats for, so that the broker takes the backfill lease back and
asks for a serve lease at the same time; its clock stops when Slurm has given the GPUs to the new lease.
The peer is Slurm's own preemption (partition priority, REQUEUE) on the like cluster, with GraceTime 0 and
3: from sbatch to running. The last line is JSON. Rungs 1 and 2 have no trials here yet.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slurm_plugins import cli, devcluster
from tests.bench import gateway_report, reclaim_site
from tests.integration.whole import batches

CALM_S = 60.0


def main() -> int:
    """Run it; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rung0", type=int, default=100, help="trials")
    parser.add_argument("--rung3", type=int, default=20, help="trials")
    parser.add_argument("--peers", type=int, default=20, help="trials with each GraceTime")
    parser.add_argument("--report", type=Path, default=None)
    asked = parser.parse_args()
    result: dict[str, Any] = {"machine": gateway_report.machine()}
    with reclaim_site.opened() as (house, site):
        house.up()
        key = house.key
        quiet = [reclaim_site.spike(house, key, 1).ttft_ms for _ in range(20)]
        result["interactive_ttft_ms"] = {"quiet": _spread([ms for each in quiet for ms in each])}
        job = batches.Job.accepted(house, key, 4_000, 200)
        say(f"batch job {job.job_id}: waiting for a backfill lease")
        until(
            lambda: _kinds(house) == ["backfill", "serve"],
            "a backfill lease beside the serve lease",
        )
        until(lambda: house.batch_seats() >= reclaim_site.SEATS, "batch in both replicas")
        result |= _rung0(house, key, asked.rung0)
        result["rung3"] = _rung3(house, key, asked.rung3)
        result["batch"] = job.state()
    with reclaim_site.opened() as (_, site):
        result["slurm_preemption_s"] = {
            f"grace{grace}": _peer(site, grace, asked.peers) for grace in (0, 3)
        }
    print(json.dumps(result))
    return 0


def _rung0(house: reclaim_site.House, key: str, trials: int) -> dict[str, Any]:
    """Five callers at once: more than the reserved seat, less than what a replica has."""
    ready: list[float] = []
    ttft: list[float] = []
    failed = 0
    for trial in range(trials):
        found = reclaim_site.spike(house, key, 5, tokens=4)
        failed += found.failed
        ttft += found.ttft_ms
        for each in house.replicas():
            ready += (each["stats"] or {}).get("reclaim_ms", [])[-4:]
        if trial % 20 == 0:
            say(f"rung 0: {trial} of {trials}")
        time.sleep(0.3)
    return {
        "rung0": {
            "ready_s": _spread([ms / 1_000 for ms in ready]),
            "first_token_s": _spread([ms / 1_000 for ms in ttft]),
            "failed": failed,
        }
    }


def _rung3(house: reclaim_site.House, key: str, trials: int) -> dict[str, Any]:
    """More callers than seats, until the second serve lease runs; then calm until batch is back."""
    decided: list[float] = []
    allocated: list[float] = []
    for trial in range(trials):
        # Whatever came before may have moved roles and leases: each trial begins in calm.
        until(lambda: _kinds(house) == ["backfill", "serve"], "batch back on its lease", CALM_S)
        until(lambda: house.batch_seats() >= reclaim_site.SEATS, "batch in both replicas", CALM_S)
        began_us = time.time_ns() // 1_000
        held = {lease["lease_id"] for lease in house.leases()}
        over = time.monotonic() + 60
        done = 0.0
        while not done and time.monotonic() < over:
            reclaim_site.spike(house, key, 3 * reclaim_site.SEATS, tokens=60)
            for lease in house.leases(ended=True):
                fresh = lease["lease_id"] not in held and lease["kind"] == "serve"
                if fresh and lease["started_us"]:
                    done = (lease["started_us"] - began_us) / 1e6
        plans = [
            (plan["at_us"] - began_us) / 1e6
            for plan in house.plans(began_us)
            if any("rung 3" in action["what"] for action in plan["actions"])
        ]
        if plans:
            decided.append(plans[0])
        if done and plans:
            allocated.append(done - plans[0])
        say(f"rung 3: trial {trial}: decided {plans[:1]}, allocated {done:.2f} s after the spike")
    return {"decision_s": _spread(decided), "ready_s": _spread(allocated), "trials": trials}


def _peer(site: devcluster.Site, grace: int, trials: int) -> dict[str, float]:
    """Slurm preempts by itself: a job that holds every GPU, and one of a higher partition."""
    env = site.env()
    _run(["scontrol", "update", "PartitionName=backfill", f"GraceTime={grace}"], env)
    port = cli.CliClient(site.slurm_conf)
    took: list[float] = []
    for _ in range(trials):
        low = _sbatch(env, "backfill", "--nodes=2", f"--gres=gpu:{reclaim_site.GPUS}", "--requeue")
        _state(port, low, "running")
        began = time.monotonic()
        high = _sbatch(env, "serve", "--nodes=1", f"--gres=gpu:{reclaim_site.GPUS}")
        _state(port, high, "running")
        took.append(time.monotonic() - began)
        for job in (high, low):
            _run(["scancel", job], env)
        until(lambda: not [j for j in port.jobs() if not j.state.final], "an empty queue", 60)
    return _spread(took)


def _sbatch(env: dict[str, str], partition: str, *options: str) -> str:
    argv = ["sbatch", "--parsable", f"--partition={partition}", "--output=/dev/null", *options]
    return _run([*argv, "--wrap", "exec sleep 600"], env).strip().split(";")[0]


def _run(argv: Sequence[str], env: dict[str, str]) -> str:
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout


def _state(port: cli.CliClient, job: str, wanted: str) -> None:
    def there() -> bool:
        return any(j.job_id == job and str(j.state).lower() == wanted for j in port.jobs())

    until(there, f"job {job} {wanted}", 60, every_s=0.02)


def _kinds(house: reclaim_site.House) -> list[str]:
    return sorted(lease["kind"] for lease in house.leases() if lease["state"] == "running")


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    ranked = sorted(values)
    return {
        "n": len(ranked),
        "p50": round(statistics.median(ranked), 3),
        "p95": round(ranked[int(0.95 * (len(ranked) - 1))], 3),
        "p99": round(ranked[int(0.99 * (len(ranked) - 1))], 3),
        "max": round(ranked[-1], 3),
    }


def until(
    condition: Callable[[], bool], what: str, within_s: float = 180.0, every_s: float = 0.2
) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {within_s:g} s")
        time.sleep(every_s)


def say(text: str) -> None:
    """Tell how far it is."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""The peers of bench-reclaim: Slurm's own preemption, and `vllm run-batch` on the same file.

Preemption: a cluster of its own, with the same settings, on the same machine and in the same run. A job of a
low partition holds a node's GPUs (it ends at once when it is told to, and journals nothing); one of a higher
partition is submitted, and the clock runs from sbatch until squeue shows it running.
"""

import asyncio
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slurm_plugins import devcluster
from tests.bench import batch, reclaim_site
from tests.contract import engine_vllm, vllm_sink

WAITED_S = 0.5  # the scheduler has seen the waiting job by then
_SHOWN = ("SchedulerParameters", "KillWait", "PreemptType", "PreemptMode", "SchedulerType")


class Preemption:
    """Slurm takes a job's GPUs for another one, by itself."""

    def __init__(self, site: devcluster.Site) -> None:
        self._slurm = reclaim_site.Slurm(site)
        self._env = site.env() | {"PATH": os.environ["PATH"]}

    def settings(self) -> dict[str, str]:
        """Return what of the cluster's configuration decides how fast it is."""
        found: dict[str, str] = {}
        for line in self._run(["scontrol", "show", "config"]).splitlines():
            name, _, value = line.partition("=")
            if name.strip() in _SHOWN:
                found[name.strip()] = value.strip()
        return found

    def trial(self, grace_s: int) -> float:
        """Return seconds from sbatch until the GPUs are the new job's."""
        self._run(["scontrol", "update", "PartitionName=backfill", f"GraceTime={grace_s}"])
        low = self._victim()
        began_us = time.time_ns() / 1_000
        high = self._sbatch("serve")
        return self._won(began_us, "serve", high, low)

    def floor(self) -> float:
        """Return seconds from scancel until the GPUs are those of a job that waited for them.

        Nobody decides anything here, and the victim ends at once: less can't be had of this Slurm.
        """
        low = self._victim()
        high = self._sbatch("backfill")
        time.sleep(WAITED_S)
        began_us = time.time_ns() / 1_000
        self._run(["scancel", low])
        return self._won(began_us, "backfill", high, low)

    def _victim(self) -> str:
        low = self._sbatch("backfill", "--requeue")
        reclaim_site.until(lambda: low in self._slurm.running("backfill"), "victim", 60)
        return low

    def _won(self, began_us: float, partition: str, high: str, low: str) -> float:
        """Wait until the second job runs; then clear the cluster."""
        ready_us = reclaim_site.until(
            lambda: high in self._slurm.running(partition), "winner", 60, reclaim_site.POLL_S
        )
        for job in (high, low):
            self._run(["scancel", job])
        reclaim_site.until(lambda: not self._slurm.busy(), "an empty queue", 60)
        return (ready_us - began_us) / 1e6

    def _sbatch(self, partition: str, *options: str) -> str:
        gpus = f"--gres=gpu:{reclaim_site.GPUS}"
        argv = ["sbatch", "--parsable", f"--partition={partition}", "--output=/dev/null", gpus]
        return self._run([*argv, *options, "--wrap", "exec sleep 600"]).strip().split(";")[0]

    def _run(self, argv: Sequence[str]) -> str:
        return subprocess.run(
            argv, env=self._env, capture_output=True, text=True, check=True
        ).stdout


def throughput(lines: int, rounds: int) -> dict[str, Any]:
    """Run a file with run-batch and as a batch job, in turn; return tokens/s of each round, and losses."""
    return asyncio.run(_throughput(lines, rounds))


async def _throughput(lines: int, rounds: int) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"run_batch": [], "forebay": []}
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="reclaim-batch-") as name:
        folder = Path(name)
        data = folder / "requests.jsonl"
        data.write_bytes(batch.written(lines, 11))
        server = engine_vllm.ForkServer(engine_vllm.NEWEST, folder)
        try:
            engine = {**batch.ARGUMENTS, "kv-cache-memory-bytes": "16M"}
            spec = engine_vllm.spec(
                folder,
                seats=batch.SEATS,
                reserved_seats=0,
                engine_args=engine,
            )
            for number, arm in enumerate(_turns(rounds)):
                home = folder / f"{arm}-{number}"
                home.mkdir()
                if arm == "run_batch":
                    got = await batch.run_batch(home, data, Path(spec.weights), engine)
                else:
                    rows = {vllm_sink.ROWS: str(home / "rows.jsonl")}
                    replica = engine_vllm.listening(server, engine_vllm.begin(server, spec, rows))
                    replica.rows_file = home / "rows.jsonl"
                    try:
                        got = await batch.forebay(home, data, replica, 0)
                    finally:
                        os.kill(replica.pid, signal.SIGTERM)
                    wrong += got["lost"] + got["duplicated"]
                rates[arm].append(round(got["tokens"] / got["seconds"], 1))
        finally:
            server.close()
    return {"tokens_per_s": rates, "wrong": wrong}


def _turns(rounds: int) -> Iterator[str]:
    """Yield the arms, each first as often as the other."""
    for number in range(rounds):
        yield from ("run_batch", "forebay") if number % 2 == 0 else ("forebay", "run_batch")

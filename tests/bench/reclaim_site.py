"""What bench-reclaim stands on: a real Slurm cluster of this machine, and Forebay with real vLLM on it."""

import contextlib
import dataclasses
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from engines import tinymodel
from slurm_plugins import devcluster
from tests.contract import engine_vllm
from tests.integration.whole import running
from tests.realslurm import ACCOUNTS

GPUS = 4  # of a replica, and of a lease
SEATS = 8
_MODEL = """
[[models]]
name = "chat"
weights = "{weights}"
seats = {seats}
reserved_seats = 1
max_context = 1024
gpus = {gpus}
replicas = 1
itl_slo_ms = 1000
scaling = {{ floor = 1, maximum = 2, concurrency = {seats} }}
[models.engine_args]
dtype = "float32"
enforce-eager = true
kv-cache-memory-bytes = 33554432
"""
_TABLES: dict[str, dict[str, Any]] = {
    "scheduler": {
        "fleet_gpus": 2 * GPUS,
        "lend_every_s": 0.0,
        "min_run_s": 0.0,
        "scale_down_s": 5.0,
        "calm_s": 2.0,
        "idle_lease_s": 2.0,
        "ttft_slo_ms": 2000.0,
    },
}


class House(running.Running):
    """One installation whose model is vLLM's and whose replicas the planner counts."""

    def __init__(self, folder: Path, site: devcluster.Site) -> None:
        slurm = {
            "conf": str(site.slurm_conf),
            "rest_url": site.rest_url,
            "rest_user": site.rest_user,
            "jwt_key_file": str(site.jwt_key),
            "account": "physics",
        }
        super().__init__(folder, slurm, str(site.munge_socket), site.env())
        weights = folder / "tiny"
        tinymodel.main([str(weights)])
        text = self.config_file.read_text()
        tables, _, _ = text.partition("[[models]]")
        lines = []
        for line in tables.splitlines():
            lines.append(line)
            if line == "[engines]":
                python = engine_vllm.python(engine_vllm.NEWEST)
                lines.append(f"vllm_python = {json.dumps(str(python))}")
            if line == "[scheduler]":
                lines += [f"{key} = {json.dumps(v)}" for key, v in _TABLES["scheduler"].items()]
        kept = _last_wins(lines)
        model = _MODEL.format(weights=weights, seats=SEATS, gpus=GPUS)
        self.config_file.write_text("\n".join(kept) + model)

    def _settled(self) -> bool:
        try:
            assert self.replicas(), "no replica serves yet"
        except (httpx.TransportError, FileNotFoundError) as error:
            raise AssertionError(f"the gateway does not answer: {error}") from error
        return True

    def plans(self, since_us: int) -> list[dict[str, Any]]:
        """Return the plans with actions since a moment, oldest first."""
        found = self.call("GET", "/admin/plan", limit="50")["plans"]
        return sorted(
            (plan for plan in found if plan["at_us"] >= since_us), key=lambda plan: plan["at_us"]
        )


def _last_wins(lines: list[str]) -> list[str]:
    """Drop keys of a table that come again later in it."""
    kept: list[str] = []
    seen: set[str] = set()
    for line in reversed(lines):
        if line.startswith("["):
            seen = set()
        key = line.partition(" =")[0]
        if "=" in line and key in seen:
            continue
        seen.add(key)
        kept.append(line)
    return kept[::-1]


@contextlib.contextmanager
def opened() -> Iterator[tuple[House, devcluster.Site]]:
    """Bring all of it up; nothing is left at the end."""
    folder = Path(tempfile.mkdtemp(prefix="reclaim-"))
    try:
        site = devcluster.up(folder / "slurm", accounts=ACCOUNTS, nodes=2, gpus_per_node=GPUS)
        (folder / "house").mkdir()
        house = House(folder / "house", site)
        try:
            yield house, site
        finally:
            house.close()
    finally:
        devcluster.down(folder / "slurm", purge=True)
        shutil.rmtree(folder, ignore_errors=True)


@dataclasses.dataclass
class Spike:
    """Requests at once, and when each had its first token; times are seconds of one monotonic clock."""

    began: float
    first: list[float]
    failed: int = 0

    @property
    def ttft_ms(self) -> list[float]:
        """Milliseconds from the spike to each first token."""
        return [1_000 * (at - self.began) for at in sorted(self.first)]


def spike(house: House, key: str, count: int, tokens: int = 8) -> Spike:
    """Send ``count`` streams at once and read them to their ends."""
    found = Spike(time.monotonic(), [])
    lock = threading.Lock()

    def one(number: int) -> None:
        body = {
            "model": running.MODEL,
            "messages": [{"role": "user", "content": f"Tell me of river {number}"}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
        headers = {"Authorization": f"Bearer {key}"}
        try:
            with house.client.stream(
                "POST", house.http + "/v1/chat/completions", json=body, headers=headers
            ) as answer:
                seen = False
                for line in answer.iter_lines():
                    if not seen and '"content"' in line:
                        seen = True
                        with lock:
                            found.first.append(time.monotonic())
                if answer.status_code != 200 or not seen:
                    raise httpx.HTTPError(f"status {answer.status_code}")
        except httpx.HTTPError:
            with lock:
                found.failed += 1

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found

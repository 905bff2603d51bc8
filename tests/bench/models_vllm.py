"""Rollouts between real vLLM versions on a real Slurm cluster, under load; nobody notices.

``python -m tests.bench.models_vllm [--rounds 3] [--report PAGE]``; as root, JSON on the last line. Each
version has a replica of its own in a lease of its own: `good` serves the same tiny Llama as the old one,
`slow` the same layers many times over, `failing` has an engine that is killed whenever it answers. Streaming
clients ask all along; an answer that is not whole has failed.
"""

import argparse
import json
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines import tinymodel
from slurm_plugins import devcluster
from tests.bench import models, reclaim_site, report_marks
from tests.contract import engine_vllm
from tests.integration.whole import running

CLIENTS = 4
GPUS = 4
TIMES = 20  # the slow version's layers over the others'
START_S = 600.0
_MODEL = """
[[models]]
name = "{name}"
version = "{version}"
weight = {weight}
weights = "{weights}"
seats = 8
reserved_seats = 1
itl_slo_ms = 1000
max_context = 1024
gpus = {gpus}
replicas = {weight}
scaling = {scaling}
[models.engine_args]
dtype = "float32"
enforce-eager = true
kv-cache-memory-bytes = 134217728
"""


def deepened(tiny: Path, folder: Path, times: int) -> None:
    """Write the tiny model with its layers ``times`` over: as good as it was, and as much slower."""
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers * times}))
    (file,) = folder.glob("*.safetensors")
    raw = file.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    head = json.loads(raw[8 : 8 + length])
    body, made, parts, at = raw[8 + length :], {}, [], 0
    for name, tensor in head.items():
        if name == "__metadata__":
            made[name] = tensor
            continue
        first, last = tensor["data_offsets"]
        for copy in _copies(name, layers, times):
            made[copy] = {**tensor, "data_offsets": [at, at + last - first]}
            parts.append(body[first:last])
            at += last - first
    text = json.dumps(made).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


def _copies(name: str, layers: int, times: int) -> list[str]:
    """Return the names that a tensor has in the deeper model."""
    before, sign, rest = name.partition(".layers.")
    if not sign:
        return [name]
    number, _, rest = rest.partition(".")
    return [f"{before}.layers.{int(number) + layers * n}.{rest}" for n in range(times)]


class House(running.Running):
    """One installation with a vLLM replica on a real cluster."""

    def __init__(self, folder: Path, site: devcluster.Site) -> None:
        tinymodel.main([str(folder / "tiny")])
        deepened(folder / "tiny", folder / "deep", TIMES)
        slurm = {"client": "cli", "conf": str(site.slurm_conf), "account": "physics"}
        scheduler = {"restart_backoff_s": 0.2, "idle_lease_s": 5.0, "start_timeout_s": 900.0}
        # A version without a share has replicas only while it is rolled out; in the file, since vLLM's own
        # parser, an import of vLLM, looks at each that is added later.
        made = [
            _MODEL.format(
                name=running.MODEL,
                version=version,
                weight=int(version == "v1"),
                weights=folder / ("deep" if version == "slow" else "tiny"),
                gpus=GPUS,
                scaling="{}" if version == "v1" else "{ floor = 0, maximum = 1 }",
            )
            for version in ("good", "failing", "slow", "v1")
        ]
        super().__init__(
            folder,
            slurm,
            str(site.munge_socket),
            site.env(),
            scheduler=scheduler,
            models="".join(made),
            replicas=1,
        )
        python = json.dumps(str(engine_vllm.python(engine_vllm.NEWEST)))
        text = self.config_file.read_text()
        self.config_file.write_text(
            text.replace("[engines]\n", f"[engines]\nvllm_python = {python}\n")
        )

    def settled(self, within_s: float = START_S) -> None:
        """Wait until the first replica serves; a busy machine takes minutes to import vLLM."""
        super().settled(max(within_s, START_S))


class Bench(models.Bench):
    """The installation and its load.

    Args:
        house: where.
        rounds: how often the good version is rolled out and back.
    """

    wait_s = START_S

    def __init__(self, house: House, rounds: int) -> None:
        super().__init__(house)
        self.load = models.Load(house.http, house.admin_key, CLIENTS)
        self._rounds = rounds

    def rows(self, version: str, since_us: int) -> list[dict[str, Any]]:
        """Return the attempts of requests that came since a moment and went to a version."""
        params = {"start_us": str(since_us), "end_us": str(2**53)}
        return [row for row in self.house.attempts(**params) if row["version"] == version]

    def automatic(self, name: str) -> dict[str, Any]:
        """Roll a bad version out until it is taken back by itself."""
        since_us = time.time_ns() // 1_000
        self.rollout(name, [20, 100], least=100_000, keep_s=3600)
        self.wait("stepping")
        began = time.monotonic()
        with self._killed(name) if name == "failing" else _nothing():
            over = self.wait("over")
        seconds = time.monotonic() - began
        time.sleep(2.0)  # the last of its answers end
        rows = self.rows(name, since_us)
        return {
            "seconds": round(seconds, 2),
            "requests": len({row["request_id"] for row in rows}),
            "reason": over["reason"],
            "outcome": over["outcome"],
        }

    def back_and_forth_s(self) -> float:
        """Roll all requests onto the good version and back; returns seconds to its last new request."""
        since_us = time.time_ns() // 1_000
        self.rollout("good", [50, 100], keep_s=3600)
        self.wait("keeping")
        time.sleep(1.0)
        began_us = time.time_ns() // 1_000
        self.house.call("POST", f"/admin/models/{running.MODEL}/rollback", {"reason": "bench"})
        self.wait("over")
        time.sleep(3.0)
        late = [row["started_us"] - began_us for row in self.rows("good", since_us)]
        return max(0.0, max(late, default=0) / 1e6)

    def all_of_it(self) -> dict[str, Any]:
        """Return all figures."""
        self.load.start()
        time.sleep(2.0)
        automatic = {name: self.automatic(name) for name in ("failing", "slow")}
        back = [self.back_and_forth_s() for _ in range(self._rounds)]
        self.rollout("good", [50, 100], keep_s=1.0)
        done = self.wait("over")
        time.sleep(2.0)
        self.load.stop()
        return {
            "rounds": self._rounds,
            "rollback_s": models.spread(back),
            "automatic": automatic,
            "rollout": done["outcome"],
            "requests": self.load.asked,
            "failed_requests": len(self.load.failures),
            "failures": self.load.failures[:5],
        }

    @contextmanager
    def _killed(self, name: str) -> Iterator[None]:
        """Kill the version's replica again and again as long as the block lasts."""
        over = threading.Event()

        def kill() -> None:
            while not over.wait(1.0):
                for replica in self._replicas(name):
                    for process in self.house.processes():
                        if any(replica in word for word in process.argv):
                            process.kill()

        thread = threading.Thread(target=kill)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _replicas(self, name: str) -> list[str]:
        """Return the version's replicas that hold a request now."""
        return [
            each["replica_id"]
            for each in self.house.replicas()
            if each["spec"]["version"] == name and (each["stats"] or {}).get("interactive")
        ]


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def measure(rounds: int) -> dict[str, Any]:
    """Bring it all up, run it, and leave nothing; returns the figures."""
    with reclaim_site.cluster(3) as site, tempfile.TemporaryDirectory(prefix="models-") as name:
        house = House(Path(name), site)
        try:
            house.up()
            return Bench(house, rounds).all_of_it()
        except BaseException:
            kept = engine_vllm.REPOSITORY / "build" / "models-failed"
            shutil.rmtree(kept, ignore_errors=True)
            kept.mkdir(parents=True)
            for path in house.folder.rglob("*.log"):
                shutil.copy(path, kept / f"{path.parent.name}-{path.name}")
            raise
        finally:
            house.close()


def section(found: dict[str, Any]) -> str:
    """Return the figures as a table."""
    back = found["rollback_s"]
    lines = [
        "| what | unit | median | least | most |",
        "| --- | --- | --- | --- | --- |",
        "| a rollback from the command to the last new request on the new version | s | "
        f"{back['median']} | {back['least']} | {back['most']} |",
        "",
        *models.judged(found["automatic"]),
        "",
        f"{found['requests']} requests by {CLIENTS} streaming clients through all of it, "
        f"{found['failed_requests']} of them failed; {found['rounds']} rollbacks, and a rollout to 100 "
        f"percent that is {found['rollout']}.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, and print JSON on the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--report", type=Path, default=None, help="page to put the figures into")
    args = parser.parse_args()
    found = measure(args.rounds)
    if args.report is not None:
        report_marks.put(args.report, "rollouts on vLLM", section(found))
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""What bench-reclaim stands on: a real Slurm cluster of this machine, and Forebay with real vLLM on it.

Three nodes of four GPUs. A model that people call (`chat`): one replica in a protected lease, one lent to
batch in a backfill lease. One that only batch uses (`digest`): one replica in a backfill lease.
"""

import contextlib
import dataclasses
import http.client
import json
import os
import random
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from engines import processes as marks
from engines import tinymodel
from slurm_plugins import cli, devcluster
from tests.contract import engine_vllm
from tests.integration.whole import batches, running
from tests.realslurm import ACCOUNTS

GPUS = 4  # of a replica, of a lease and of a node
SEATS = 8
POLL_S = 0.02
START_S = 600.0
NICE = 10  # of a process that gives way
DIGEST = "digest"
_MODEL = """
[[models]]
name = "{name}"
seats = {seats}
reserved_seats = 1
max_context = 1024
gpus = {gpus}
itl_slo_ms = 1000
scaling = {{ floor = {floor}, maximum = {maximum}, batch_maximum = 1, concurrency = {seats} }}
{engine}"""
_VLLM = """
weights = "{weights}"
[models.engine_args]
dtype = "float32"
enforce-eager = true
kv-cache-memory-bytes = 33554432
"""
_SIMULATED = """
engine = "simulated"
engine_args = {"step-base-ms" = 20.0}
"""
_SCHEDULER: Mapping[str, Any] = {
    "fleet_gpus": 3 * GPUS,
    # A replica takes as many callers as it has seats: which rung a spike needs follows from its size.
    "scale_fill": 1.0,
    "itl_slo_ms": 0.0,
    "ttft_slo_ms": 2000.0,
    # Calm is short, so that trials follow each other; it is no part of any figure.
    "scale_down_s": 0.5,
    "calm_s": 0.5,
    "idle_lease_s": 0.5,
    "plan_history": 100_000,
}


class House(running.Running):
    """One installation whose models are vLLM's and whose replicas the planner counts."""

    def __init__(self, folder: Path, site: devcluster.Site, *, rehearsed: bool = False) -> None:
        # By Slurm's commands: slurmrestd of this age can't name nodes that a submission keeps away from.
        slurm = {"client": "cli", "conf": str(site.slurm_conf), "account": "physics"}
        super().__init__(folder, slurm, str(site.munge_socket), site.env())
        engine = _SIMULATED
        if not rehearsed:
            tinymodel.main([str(folder / "tiny")])
            engine = _VLLM.format(weights=folder / "tiny")
        text = self.config_file.read_text()
        tables, _, _ = text.partition("[[models]]")
        lines = []
        for line in tables.splitlines():
            lines.append(line)
            if line == "[engines]":
                python = engine_vllm.python(engine_vllm.NEWEST)
                lines.append(f"vllm_python = {json.dumps(str(python))}")
            if line == "[scheduler]":
                lines += [f"{key} = {json.dumps(v)}" for key, v in _SCHEDULER.items()]
        models = [
            _MODEL.format(
                name=name, engine=engine, seats=SEATS, gpus=GPUS, floor=floor, maximum=maximum
            )
            for name, floor, maximum in ((running.MODEL, 1, 3), (DIGEST, 0, 1))
        ]
        self.config_file.write_text("\n".join([*_first_wins(lines), *models]))
        self.site = site

    def settled(self, within_s: float = START_S) -> None:
        """Wait until a replica serves; a busy machine takes minutes to import vLLM."""
        super().settled(max(within_s, START_S))

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

    def kinds(self) -> dict[str, str]:
        """Return the kind of each running lease."""
        return {
            lease["lease_id"]: lease["kind"]
            for lease in self.leases()
            if lease["state"] == "running"
        }

    def secret(self, replica: Mapping[str, Any]) -> str:
        """Return a replica's secret."""
        folder = self.state / "leases" / str(replica["lease_id"])
        return (folder / f"{replica['replica_id']}.secret").read_text().strip()

    def give_way(self) -> None:
        """Let the processes in leases of the model that people call leave the cores to others first.

        Slurm's daemons, the broker and a lease that starts anew share no cores with them on a cluster.
        """
        called = {r["lease_id"] for r in self.replicas() if r["spec"]["model"] == running.MODEL}
        for lease_id in called:
            for pid in marks.marked({marks.LEASE: lease_id}):
                with contextlib.suppress(OSError):  # it has ended
                    for task in Path(f"/proc/{pid}/task").iterdir():
                        os.setpriority(os.PRIO_PROCESS, int(task.name), NICE)

    def submit(self, key: str, model: str, lines: int, tokens: int) -> "Job":
        """Submit a batch job."""
        text = batches.text(lines, tokens).replace(f'"{running.MODEL}"', f'"{model}"')
        answer = self.client.post(
            self.http + batches.JOBS,
            params={"options": "{}"},
            content=text.encode(),
            headers={"Authorization": f"Bearer {key}"},
        )
        assert answer.is_success, answer.text
        return Job(self, answer.json()["job_id"], lines)


def _first_wins(lines: Sequence[str]) -> list[str]:
    """Drop keys of a table that came already in it: ours stand at its beginning."""
    kept: list[str] = []
    seen: set[str] = set()
    for line in lines:
        if line.startswith("["):
            seen = set()
        key = line.partition(" =")[0]
        if "=" in line and key in seen:
            continue
        seen.add(key)
        kept.append(line)
    return kept


class Job(batches.Job):
    """A batch job whose every line is accounted for, also after it was cancelled."""

    def ended(self) -> dict[str, int]:
        """Cancel what is left of it; count lines, lines lost and lines told twice over both its files."""
        self._house.call("POST", f"{batches.JOBS}/{self.job_id}/cancel")
        until(lambda: bool(self.state()["ended_us"]), f"the end of job {self.job_id}", 60)
        told: list[str] = []
        for name in ("output", "errors"):
            answer = self._house.client.get(
                f"{self._house.http}{batches.JOBS}/{self.job_id}/{name}",
                headers={"Authorization": f"Bearer {self._house.admin_key}"},
            )
            if answer.status_code != 404:
                told += [json.loads(line)["custom_id"] for line in answer.text.splitlines()]
        return {
            "lines": self.lines,
            "lost": self.lines - len(set(told)),
            "duplicated": len(told) - len(set(told)),
        }


@contextlib.contextmanager
def opened(*, rehearsed: bool = False) -> Iterator[House]:
    """Bring all of it up, with simulated engines if rehearsed; nothing is left at the end."""
    with cluster(3) as site:
        folder = Path(tempfile.mkdtemp(prefix="reclaim-house-"))
        try:
            house = House(folder, site, rehearsed=rehearsed)
            try:
                yield house
            except Exception:
                _keep(house, site)
                raise
            finally:
                house.close()
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _keep(house: House, site: devcluster.Site) -> None:
    """Keep what tells why a run broke off: the last plans and every log."""
    kept = engine_vllm.REPOSITORY / "build" / "reclaim-failed"
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    shutil.copytree(site.logs, kept / "slurm")
    for path in (*house.folder.rglob("*.log"), house.config_file):
        shutil.copy(path, kept / f"{path.parent.name}-{path.name}")
    with contextlib.suppress(Exception):
        (kept / "plans.json").write_text(json.dumps(house.plans(0), indent=1))
        (kept / "replicas.json").write_text(json.dumps(house.replicas(), indent=1))


@contextlib.contextmanager
def cluster(nodes: int) -> Iterator[devcluster.Site]:
    """Bring a Slurm cluster up; nothing is left at the end."""
    folder = Path(tempfile.mkdtemp(prefix="reclaim-slurm-"))
    try:
        yield devcluster.up(
            folder,
            accounts=ACCOUNTS,
            nodes=nodes,
            gpus_per_node=GPUS,
            extra_conf={"SlurmctldDebug": "debug2"},  # says when a job's script and epilog ended
        )
    finally:
        devcluster.down(folder, purge=True)
        shutil.rmtree(folder, ignore_errors=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Heard:
    """One answer as its caller saw it; moments are wall clock, microseconds."""

    caller_id: str
    sent_us: int
    first_us: int


class Crowd:
    """Callers who come at once; each asks again and again, or once, and notes its times to first token.

    Plain sockets: a client library would take more of the machine than the gateway does.

    Args:
        house: where.
        key: whose.
        count: how many.
        tokens: of each answer.
        words: of each prompt, no two of them alike, so that no prefix cache helps; 0: a few words.
        again: whether they go on until `leave`.
    """

    def __init__(
        self,
        house: House,
        key: str,
        count: int,
        tokens: int,
        *,
        words: int = 0,
        again: bool = False,
    ) -> None:
        self._address = house.http.removeprefix("http://")
        self._key = key
        self._tokens = tokens
        self._words = words
        self._again = again
        self._over = threading.Event()
        self._lock = threading.Lock()
        self.heard: list[Heard] = []
        self.failed = 0
        self.began_us = time.time_ns() // 1_000
        self._threads = [threading.Thread(target=self._call, args=(n,)) for n in range(count)]
        for thread in self._threads:
            thread.start()

    @property
    def ttft_ms(self) -> list[float]:
        """Times to first token."""
        return [(each.first_us - each.sent_us) / 1_000 for each in self.heard]

    def leave(self) -> None:
        """Let everybody's answer end, and wait for that."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _call(self, number: int) -> None:
        while True:
            try:
                self._ask(number)
            except (OSError, http.client.HTTPException):
                with self._lock:
                    self.failed += 1
            if not self._again or self._over.is_set():
                return

    def _ask(self, number: int) -> None:
        caller_id = uuid.uuid4().hex
        text = f"Tell me of river {number}"
        if self._words:
            text += "".join(
                f" {word:x}" for word in random.Random(caller_id).randbytes(self._words)
            )
        body = {
            "model": running.MODEL,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self._tokens,
            "ignore_eos": True,
            "stream": True,
        }
        headers = {
            "Authorization": f"Bearer {self._key}",
            "Content-Type": "application/json",
            "X-Request-Id": caller_id,
        }
        sent, first, whole = time.time_ns() // 1_000, 0, False
        connection = http.client.HTTPConnection(self._address, timeout=90)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            for line in answer:
                if not first and b'"content"' in line:
                    first = time.time_ns() // 1_000
                whole = whole or line.startswith(b"data: [DONE]")
        finally:
            connection.close()
        if answer.status != 200 or not whole or not first:
            raise http.client.HTTPException(f"status {answer.status}, whole: {whole}")
        with self._lock:
            self.heard.append(Heard(caller_id, sent, first))


class Peek:
    """A replica's own word on itself, over one connection."""

    def __init__(self, house: House, replica: Mapping[str, Any]) -> None:
        self._connection = http.client.HTTPConnection(str(replica["address"]), timeout=5)
        self._headers = {"authorization": f"Bearer {house.secret(replica)}"}

    def state(self) -> dict[str, Any]:
        """Return its state."""
        self._connection.request("GET", "/forebay/state", headers=self._headers)
        found: dict[str, Any] = json.loads(self._connection.getresponse().read())
        return found

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


@dataclasses.dataclass
class Slurm:
    """Slurm's own word on jobs, by squeue."""

    site: devcluster.Site

    def __post_init__(self) -> None:
        self._port = cli.CliClient(self.site.slurm_conf)

    def running(self, partition: str) -> set[str]:
        """Return the jobs of a partition that hold what they asked for."""
        return {
            str(job.job_id)
            for job in self._port.jobs()
            if job.partition == partition and str(job.state).lower() == "running"
        }

    def busy(self) -> bool:
        """Return whether any job is not at its end."""
        return any(not job.state.final for job in self._port.jobs())


def until(
    condition: Callable[[], bool], what: str, within_s: float = 180.0, every_s: float = 0.1
) -> float:
    """Wait for a condition; return the moment (wall clock, microseconds) at which it was seen."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {within_s:g} s")
        time.sleep(every_s)
    return time.time_ns() / 1_000

"""A lease without Slurm: a broker that a test plays, a real agent, real slots, simulated replicas."""

import asyncio
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio

from engines import private, processes, settings
from engines.agent import spec
from engines.slot import children
from scheduler.contracts import frames, wire
from scheduler.contracts.v1 import control_pb2 as pb
from scheduler.contracts.v1 import control_pb2_grpc
from slurm_plugins import steps
from tests.unit.engines import asgi

TOKEN = "control-token"
PATIENCE_S = 30.0


class Broker(control_pb2_grpc.AgentLinkServicer):
    """Takes reports and sends what the test desires."""

    def __init__(self) -> None:
        self.reports: list[tuple[float, pb.LeaseReport]] = []
        self.news = asyncio.Event()
        self.desired: pb.LeaseDesired | None = None
        self._push = asyncio.Event()
        self.refused = 0

    @property
    def last(self) -> pb.LeaseReport:
        return self.reports[-1][1]

    def want(self, desired: pb.LeaseDesired) -> None:
        self.desired = desired
        self._push.set()
        self._push = asyncio.Event()

    async def Connect(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.LeaseDesired]:
        if dict(context.invocation_metadata())["authorization"] != f"Bearer {TOKEN}":
            self.refused += 1
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no")

        async def read() -> None:
            async for report in request_iterator:
                self.reports.append((time.monotonic(), report))
                self.news.set()
                self.news = asyncio.Event()

        reader = asyncio.create_task(read())
        try:
            sent: pb.LeaseDesired | None = None
            while not reader.done():
                push = self._push
                if self.desired is not None and self.desired is not sent:
                    sent = self.desired
                    yield sent
                    continue
                waits = [asyncio.ensure_future(push.wait()), reader]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                waits[0].cancel()
        finally:
            reader.cancel()

    async def until(self, condition: Callable[[pb.LeaseReport], bool]) -> pb.LeaseReport:
        """Return the first report from now on that fulfils ``condition``."""
        async with asyncio.timeout(PATIENCE_S):
            while not (self.reports and condition(self.last)):
                await self.news.wait()
        return self.last


@dataclasses.dataclass(slots=True)
class Site:
    """The lease, and handles on its parts."""

    broker: Broker
    agent: "subprocess.Popen[bytes]"
    folder: Path
    session: aiohttp.ClientSession
    server: grpc.aio.Server
    revision: int = 0

    @property
    def rows(self) -> Path:
        return self.folder / "rows"

    @property
    def lease_id(self) -> str:
        return f"l-{self.folder.name}"

    def want(
        self,
        *replicas: pb.ReplicaDesired,
        gpus: int = 2,
        epoch: int = 1,
        slot: str = "s0",
        close_slot: bool = False,
        close: bool = False,
    ) -> None:
        """Desire one slot with ``replicas``."""
        self.revision += 1
        wanted = pb.SlotDesired(
            epoch=epoch,
            slot_id=f"{self.lease_id}.{slot}",
            gpus=gpus,
            cpus=1,
            replicas=replicas,
            close=close_slot,
        )
        self.broker.want(
            pb.LeaseDesired(
                epoch=epoch,
                revision=self.revision,
                lease_id=self.lease_id,
                slots=[wanted],
                close=close,
            )
        )

    async def serving(self, replica_id: str = "r-1") -> pb.ReplicaReport:
        """Wait until a replica serves."""
        await self.broker.until(lambda report: state(report, replica_id) == "serving")
        found = replica(self.broker.last, replica_id)
        assert found is not None
        return found

    async def post(self, to: pb.ReplicaReport, path: str, body: Any, **headers: str) -> Any:
        """POST to a replica; returns the response with its body read."""
        secret = private.read(Path(to.secret_file))
        sent = {"authorization": f"Bearer {secret}", **headers}
        url = f"http://{to.address}{path}"
        async with self.session.post(url, json=body, headers=sent) as response:
            return response.status, await response.read()

    async def ask(
        self,
        to: pb.ReplicaReport,
        request_id: str,
        tier: str = "interactive",
        tokens: int = 8,
        **more: Any,
    ) -> list[frames.Frame]:
        """Send a streamed completion and return its frames, as far as they came."""
        who = asgi.identity(request_id, tier)
        given = asgi.headers(who, secret=private.read(Path(to.secret_file)))
        body = {"prompt": "x", "stream": True, "max_tokens": tokens, "ignore_eos": True, **more}
        url = f"http://{to.address}/v1/completions"
        decoder = frames.Decoder()
        found: list[frames.Frame] = []
        with contextlib.suppress(aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
            async with self.session.post(url, json=body, headers=given) as response:
                assert response.status == 200, await response.text()
                async for chunk in response.content.iter_any():
                    found += decoder.feed(chunk)
        return found

    def alive(self) -> list[int]:
        """Return the lease's living processes."""
        return sorted(processes.marked({processes.LEASE: self.lease_id}))

    async def until_dead(self, seconds: float, spare: frozenset[int] = frozenset()) -> None:
        """Wait until none of the lease's processes lives; fails after ``seconds``."""
        deadline = time.monotonic() + seconds
        while left := [pid for pid in self.alive() if pid not in spare]:
            assert time.monotonic() < deadline, [
                Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left if processes.alive(pid)
            ]
            await asyncio.sleep(0.05)

    async def agent_exit(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            return await children.wait_pid(self.agent)


def replica(report: pb.LeaseReport, replica_id: str) -> pb.ReplicaReport | None:
    found = [r for slot in report.slots for r in slot.replicas if r.replica_id == replica_id]
    return found[0] if found else None


def state(report: pb.LeaseReport, replica_id: str) -> str:
    found = replica(report, replica_id)
    return found.state if found is not None else ""


def desired(
    replica_id: str = "r-1",
    *,
    role: str = "shared",
    run: bool = True,
    drain_s: float = 5.0,
    gpus: int = 2,
    weights: str = "",
    model: str = "m",
    asleep: bool = False,
    parking: str = "",
    **args: Any,
) -> pb.ReplicaDesired:
    """Return a simulated replica that takes 5 ms a step; with ``weights`` it is vLLM's."""
    arguments: Mapping[str, Any] = args if weights else {"step-base-ms": 5, **args}
    engine = pb.ReplicaSpec(
        model=model,
        version="1",
        engine="vllm" if weights else "simulated",
        weights=weights,
        engine_args_json=json.dumps(arguments),
        seats=4,
        reserved_seats=1,
        max_context=2048,
        gpus=gpus,
        tuning_json=json.dumps({"parking": parking}) if parking else "",
    )
    return pb.ReplicaDesired(
        replica_id=replica_id, spec=engine, role=role, run=run, drain_s=drain_s, asleep=asleep
    )


@contextlib.asynccontextmanager
async def opened(
    folder: Path,
    *,
    devices: str = "0,1",
    nodes: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> AsyncIterator[Site]:
    """Start a broker and an agent; at the end nothing of them lives.

    Args:
        folder: everything lies there.
        devices: the lease's two GPUs.
        nodes: pretended ones and the GPUs of each, of a lease over several.
        env: more of the agent's environment.
        **options: [engines] settings.
    """
    several = (
        {} if nodes is None else {steps.NODES: json.dumps(nodes), "SLURMD_NODENAME": min(nodes)}
    )
    broker = Broker()
    server = grpc.aio.server(options=wire.SERVER_OPTIONS)
    control_pb2_grpc.add_AgentLinkServicer_to_server(broker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    (folder / "broker.json").write_text(json.dumps({"address": f"127.0.0.1:{port}", "epoch": 1}))
    private.write(folder / "control.token", TOKEN)
    (folder / "rows").mkdir()
    python = [sys.executable, "-P", "-m"]
    lease_id = f"l-{folder.name}"
    told = spec.AgentSpec(
        cluster="test",
        lease_id=lease_id,
        kind="backfill",
        team="physics",
        gpus=2,
        broker_file=str(folder / "broker.json"),
        token_file=str(folder / "control.token"),
        run_dir=str(folder / "run"),
        slot_argv=(*python, "engines.slot"),
        replica_argv=(*python, "engines.replica"),
        sink_factory="tests.integration.file_sink:factory",
        nodes=len(nodes or "1"),
        options=settings.EnginesSettings(
            gpu_lock_dir=folder / "gpus", **{"term_s": 2.0, "grace_s": 10.0, **options}
        ),
    )
    path = folder / "agent.json"
    path.write_text(json.dumps(told.to_json()))
    environment = {
        **os.environ,
        "PYTHONPATH": str(children.ROOT),
        "CUDA_VISIBLE_DEVICES": devices,
        processes.LEASE: lease_id,
        "FOREBAY_LEASE_STARTED_US": str(time.time_ns() // 1_000),
        "FOREBAY_TEST_ROWS": str(folder / "rows"),
        "SLURM_JOB_ID": "4711",
        **several,
        **(env or {}),
    }
    with (folder / "agent.log").open("wb") as log:
        agent = subprocess.Popen(  # noqa: ASYNC220 - it only starts it
            [*python, "tests.integration.agent_process", str(path)],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    site: Site | None = None
    try:
        async with aiohttp.ClientSession(trust_env=False) as session:
            site = Site(broker, agent, folder, session, server)
            yield site
    finally:
        agent.kill()
        agent.wait()
        await server.stop(None)
        if site is not None:
            await site.until_dead(10.0)

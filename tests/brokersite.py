"""A whole broker for tests: real registry, real gRPC, fake time, fake Slurm, fake agents."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from grpc import aio

from scheduler.contracts import clock, fleet, ids, slurm, wire
from scheduler.contracts.v1 import control_pb2_grpc
from scheduler.core import plan
from scheduler.runtime import broker, config, guard, leadership, settings
from scheduler.runtime.registry import database, store
from tests import fakeagent, fakeslurm, registries

Fenced = database.Fenced
CHAT = config.ModelSettings(
    name="chat", engine=fleet.EngineKind.SIMULATED, gpus=4, seats=4, replicas=1
)


def render(lease: fleet.Lease) -> slurm.JobSpec:
    """Make a lease's job as the composition root does, without a script worth running."""
    return slurm.JobSpec(
        name=f"forebay-{lease.lease_id}",
        script="#!/bin/sh\n",
        partitions=("serve",),
        time_limit_s=lease.walltime_s,
        output="/dev/null",
        directory="/",
        stamp=slurm.Stamp(lease.cluster, lease.lease_id, lease.kind.value, lease.team),
        account=lease.team,
        gpus_per_node=lease.gpus,
        exclude=lease.exclude,
    )


class Site:
    """One state folder with its Slurm and agents; brokers come and go.

    Attributes:
        url: the registry's; SQLite in the folder if not given.
        before: a site whose state folder was lost: its Slurm, agents and clock go on.
        agents: lease id to the agent in it; `heal` adds one to each lease that runs.
    """

    def __init__(
        self,
        folder: Path,
        *models: config.ModelSettings,
        options: settings.Settings | None = None,
        before: "Site | None" = None,
        url: str = "",
    ) -> None:
        self.folder = folder
        self.clock: clock.FakeClock = before.clock if before else clock.FakeClock()
        self.slurm: fakeslurm.FakeSlurm = (
            before.slurm if before else fakeslurm.FakeSlurm(self.clock)
        )
        self.registry = store.Registry.open(url) if url else registries.opened(folder)
        self.options = options or settings.Settings()
        self.parts = broker.Parts(
            options=self.options,
            registry=self.registry,
            slurm=self.slurm,
            lease_renderer=render,
            state_dir=folder,
            time=self.clock,
            cluster="alpha",
            models=models or (CHAT,),
        )
        self.agents: dict[str, fakeagent.FakeAgent] = before.agents if before else {}
        self.broken = ""
        self.slow_slots = False

    @asynccontextmanager
    async def lead(self) -> AsyncIterator[broker.Leader]:
        """Lead with a new broker until the block ends, without the loop: tests tick by hand."""
        claim = leadership.Leadership(self.registry.lead, self.options, self.clock)
        leader = broker.Leader(self.parts, await claim.acquire())
        await leader.start()
        for agent in self.agents.values():
            agent.connect(leader.address, guard.token(self.folder))
        try:
            yield leader
        finally:
            for agent in self.agents.values():
                await agent.disconnect()
            await leader.stop()
            await claim.release()

    async def step(self, leader: broker.Leader, seconds: float = 0.2) -> plan.Plan:
        """Let time pass, let agents speak, poll Slurm, plan and apply once."""
        await self.clock.advance(seconds)
        await self.heard(leader)
        await leader.poller.poll()
        made = await leader.tick()
        await leader.applier.settle()
        await leader.applier.flush()
        await self.heal(leader)
        return made

    async def heard(self, leader: broker.Leader) -> None:
        """Return when each agent has read what its lease should hold, and has been heard since."""
        for lease_id, agent in self.agents.items():
            entry = leader.live.leases.get(ids.LeaseId(lease_id))
            if entry is None or agent.ended or not agent.connected:
                continue
            before = agent.report.at_us
            agent.say()
            async with asyncio.timeout(10):
                while entry.reported_us <= before or entry.acked < entry.revision:
                    await leader.live.heard.wait()

    async def heal(self, leader: broker.Leader) -> None:
        """Put an agent into each running lease that has none, and let it come."""
        self.slurm.start_all()
        for lease_id, entry in list(leader.live.leases.items()):
            if lease_id in self.agents or entry.lease.state is fleet.LeaseState.CLOSING:
                continue
            if not entry.lease.slurm_job_id:
                continue
            job = self.slurm.job_of(lease_id)
            if job.state is not slurm.JobState.RUNNING:
                continue
            agent = fakeagent.FakeAgent(lease_id, job.job_id, job.nodes[0], entry.lease.gpus)
            agent.broken, agent.slow_slots = self.broken, self.slow_slots
            self.agents[lease_id] = agent
            agent.connect(leader.address, guard.token(self.folder))
        await self.heard(leader)

    async def settle(self, leader: broker.Leader, *, most: int = 20) -> None:
        """Step until a plan asks for nothing."""
        for _ in range(most):
            if not (await self.step(leader)).actions:
                return
        raise AssertionError(f"still planning after {most} steps: {leader.notes}")

    async def cut(self, leader: broker.Leader, lease_id: str) -> None:
        """Cut an agent's link and return when the broker has noticed."""
        await self.agents[lease_id].disconnect()
        entry = leader.live.leases[ids.LeaseId(lease_id)]
        async with asyncio.timeout(10):
            while entry.connection is not None:
                await leader.live.heard.wait()

    def running(self) -> dict[str, str]:
        """Return replica id to state, over all agents, without those that ended."""
        return {
            replica_id: item.state
            for agent in self.agents.values()
            for replica_id, item in agent.replicas().items()
            if item.state not in {"lost", "stopped"} and not agent.ended
        }


def channel(address: str) -> aio.Channel:
    """Open a channel to a broker."""
    return aio.insecure_channel(address, options=wire.CHANNEL_OPTIONS)


def calls(link: aio.Channel, token: str | None) -> list[Any]:
    """Begin both of a broker's calls with a token."""
    metadata = guard.metadata(token) if token is not None else ()

    async def nothing() -> AsyncIterator[Any]:
        return
        yield

    return [
        control_pb2_grpc.AgentLinkStub(link).Connect(nothing(), metadata=metadata),
        control_pb2_grpc.FleetStub(link).Watch(nothing(), metadata=metadata),
    ]


async def refusal(call: Any) -> str:
    """Return the status with which a call ends."""
    try:
        async for _ in call:
            pass
    except aio.AioRpcError as error:
        return error.code().name
    return "OK"

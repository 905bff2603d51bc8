"""Agents that send nonsense, come twice, or speak of what is over; and a broker on PostgreSQL."""

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc import aio

from scheduler.contracts import fleet, ids, observed, slurm, wire_told
from scheduler.contracts.v1 import control_pb2 as pb
from scheduler.contracts.v1 import control_pb2_grpc
from scheduler.core import actions
from scheduler.runtime import guard
from tests import brokersite


@pytest.fixture
def site(tmp_path: Path) -> brokersite.Site:
    return brokersite.Site(tmp_path)


class Link:
    """One raw agent link."""

    def __init__(self, channel: aio.Channel, folder: Path) -> None:
        stub = control_pb2_grpc.AgentLinkStub(channel)
        self.call = stub.Connect(metadata=guard.metadata(guard.token(folder)))

    async def say(self, report: pb.LeaseReport) -> None:
        await self.call.write(report)

    async def end(self) -> grpc.StatusCode:
        """Read until the broker ends the call; return the status."""
        async with asyncio.timeout(10):
            while True:
                try:
                    if await self.call.read() is aio.EOF:
                        break
                except aio.AioRpcError:
                    break
            return await self.call.code()


async def test_nonsense_ends_its_own_link_and_nothing_else(site: brokersite.Site) -> None:
    async with site.lead() as leader, brokersite.channel(leader.address) as channel:
        await site.settle(leader)
        before = site.running()
        ((lease_id, agent),) = site.agents.items()
        bad = pb.LeaseReport()
        bad.CopyFrom(agent.report)
        stranger = bad.slots[0].replicas.add(replica_id="r-x", state="serving")
        stranger.spec.engine, stranger.spec.engine_args_json = "simulated", "on fire"
        link = Link(channel, site.folder)
        await link.say(bad)
        assert await link.end() is grpc.StatusCode.INVALID_ARGUMENT
        other = Link(channel, site.folder)
        await other.say(pb.LeaseReport(lease_id="l-unknown"))
        await other.say(pb.LeaseReport(lease_id=lease_id))
        assert await other.end() is grpc.StatusCode.INVALID_ARGUMENT
        await agent.disconnect()
        agent.connect(leader.address, guard.token(site.folder))
        await site.settle(leader)
        assert site.running() == before


async def test_a_gateways_report_that_can_not_be_taken_ends_nothing_and_is_counted(
    site: brokersite.Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended the link in silence: the gateway lost its view and came back to the same end."""
    taken = wire_told.trial_from_pb

    def odd(message: pb.Trial) -> observed.Trial:
        if message.model == "odd":
            raise KeyError("a word that nobody knows")
        return taken(message)

    monkeypatch.setattr(wire_told, "trial_from_pb", odd)
    async with site.lead() as leader, brokersite.channel(leader.address) as channel:
        await site.settle(leader)
        stub = control_pb2_grpc.FleetStub(channel)
        call = stub.Watch(metadata=guard.metadata(guard.token(site.folder)))

        async def report(waiting: int, *models: str) -> None:
            demand = pb.Demand(model="chat", waiting={"interactive": waiting})
            trials = [pb.Trial(model=model, version="v1") for model in models]
            await call.write(pb.GatewayReport(gateway_id="g1", demand=[demand], trials=trials))

        async with asyncio.timeout(10):
            await report(1)
            view = await call.read()
            assert isinstance(view, pb.FleetView)
            assert view.epoch == leader.live.epoch
            await report(2, "chat", "odd")
            await report(2, "odd")
            await report(3, "chat")
            while leader.live.demand["g1"][1]["chat"].waiting != {"interactive": 3}:
                await leader.live.heard.wait()
        assert leader.live.reports_refused == 2
        assert [trial.model for trial in leader.live.trials] == [
            "chat"
        ]  # all of a report, or nothing
        (said,) = [line for line in caplog.messages if "left out" in line]
        assert "gateway g1" in said
        call.cancel()


async def test_the_newer_of_two_links_of_a_lease_counts(site: brokersite.Site) -> None:
    async with site.lead() as leader, brokersite.channel(leader.address) as channel:
        await site.settle(leader)
        ((lease_id, agent),) = site.agents.items()
        first, second = Link(channel, site.folder), Link(channel, site.folder)
        await first.say(agent.report)
        assert await first.call.read() is not aio.EOF
        await second.say(agent.report)
        assert await first.end() is grpc.StatusCode.OK
        entry = leader.live.leases[ids.LeaseId(lease_id)]
        assert entry.connection is not None
        second.call.cancel()
        while entry.connection is not None:
            await leader.live.heard.wait()


async def test_an_agent_whose_lease_has_ended_is_told_to_leave(site: brokersite.Site) -> None:
    """Its slurmstepd was killed: Slurm ends the job and finds no process to end."""
    async with site.lead() as leader:
        await site.settle(leader)
        ((lease_id, agent),) = site.agents.items()
        site.slurm.end(agent.report.slurm_job_id, slurm.JobState.FAILED)
        await site.step(leader, 2.1)
        assert ids.LeaseId(lease_id) not in leader.live.leases
        async with asyncio.timeout(10):
            while not agent.told[-1].close:
                agent.say()
                await leader.live.heard.wait()
        assert agent.told[-1].lease_id == lease_id


async def test_what_is_over_stays_over(site: brokersite.Site) -> None:
    async with site.lead() as leader:
        await site.settle(leader)
        (replica_id,) = site.running()
        (agent,) = site.agents.values()
        agent.kill(replica_id)
        await site.step(leader)
        item = agent.report.slots[0].replicas.add(replica_id=replica_id, state="serving")
        item.spec.engine = "simulated"
        await site.step(leader)
        assert ids.ReplicaId(replica_id) not in leader.live.replicas
        assert leader.view().replicas == ()


@pytest.mark.postgres
async def test_a_broker_on_postgres_starts_restarts_and_fences(
    tmp_path: Path, postgres_url: str
) -> None:
    site = brokersite.Site(tmp_path, url=postgres_url)
    async with site.lead() as leader:
        await site.settle(leader)
        before = site.running()
    async with site.lead() as leader:
        await site.settle(leader)
        assert site.running() == before
        assert leader.live.epoch == 2
        site.registry.lead.release(2)
        assert site.registry.lead.take("other", site.clock.wall_us(), 60_000_000) == 3
        (agent,) = site.agents.values()
        agent.kill(next(iter(before)))
        with pytest.raises(brokersite.Fenced):
            await site.step(leader)
    site.registry.close()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def paused(request: pytest.FixtureRequest, tmp_path: Path) -> brokersite.Site:
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else ""
    return brokersite.Site(tmp_path, url=url)


async def test_a_leader_that_wakes_up_late_asks_and_cancels_nothing_in_slurm(
    paused: brokersite.Site,
) -> None:
    """What Slurm is told is fenced too, though Slurm knows no epochs."""
    async with paused.lead() as old:
        await paused.settle(old)
        ((lease_id, agent),) = paused.agents.items()
        lease = old.live.leases[ids.LeaseId(lease_id)].lease
        job_id = ids.SlurmJobId(lease.slurm_job_id)
        # It had written down that it asks for one more when it was stopped.
        await old.applier._leases.request_lease(
            actions.RequestLease(fleet.LeaseKind.SERVE, 4, "one more")
        )
        paused.registry.lead.release(old.live.epoch)
        assert paused.registry.lead.take("other", paused.clock.wall_us(), 60_000_000) == 2
        await old.applier._leases.cancel_job(actions.CancelJob(lease.lease_id, job_id, "stale"))
        await old.applier.settle()
        assert paused.slurm.cancelled == []
        assert len(paused.slurm.submitted) == 1
        agent.kill(next(iter(paused.running())))
        started = list(agent.started)
        with pytest.raises(brokersite.Fenced):
            await paused.step(old)
        assert agent.started == started, "a wish that could not be written reaches no agent"
    paused.registry.close()

"""The broker and its leases on a Slurm that a test plays: adopted, uncertain, refused, preempted."""

import threading
from pathlib import Path
from unittest import mock

import pytest

from scheduler.contracts import fleet
from scheduler.contracts import slurm as port
from scheduler.runtime import guard
from scheduler.runtime.registry import database
from tests import brokersite


@pytest.fixture
def site(tmp_path: Path) -> brokersite.Site:
    return brokersite.Site(tmp_path)


async def test_a_new_broker_adopts_what_runs_and_restarts_nothing(site: brokersite.Site) -> None:
    async with site.lead() as leader:
        await site.settle(leader)
        before = site.running()
        told = leader.view().replicas
    async with site.lead() as leader:
        assert leader.live.epoch == 2
        assert not leader.live.settled
        assert [entry.replica.replica_id for entry in leader.live.replicas.values()] == list(before)
        made = await site.step(leader)
        assert made.actions == ()
        await site.settle(leader)
        assert site.running() == before
        (agent,) = site.agents.values()
        assert agent.started == list(before)
        assert agent.told[-1].epoch == 2
        assert all(each.phases_s for each in told)
        assert list(leader.view().replicas) == list(told)
        assert len(site.slurm.submitted) == 1
        assert site.slurm.cancelled == []


async def test_a_registry_that_was_lost_is_filled_from_stamps_and_reports(tmp_path: Path) -> None:
    site = brokersite.Site(tmp_path)
    for _ in range(3):
        async with site.lead() as leader:
            await site.settle(leader)
            before = site.running()
    empty = tmp_path / "empty"
    empty.mkdir()
    other = brokersite.Site(empty, before=site)
    async with other.lead() as leader:
        assert leader.live.epoch == 1
        (agent,) = other.agents.values()
        while leader.live.outranked_by == 1:
            await leader.live.heard.wait()
        with pytest.raises(database.Fenced, match="agents follow epoch 3"):
            await leader.tick()
    async with other.lead() as leader:
        assert leader.live.epoch == 4
        await other.settle(leader)
        assert other.running() == before
        (agent,) = other.agents.values()
        assert agent.started == list(before)
        assert agent.report.epoch == 4
        (row,) = other.registry.holdings.replica_rows()
        assert [row.replica.replica_id] == list(before)
    assert len(site.slurm.submitted) == 1


async def test_slurm_down_for_a_minute_ends_nothing(site: brokersite.Site) -> None:
    async with site.lead() as leader:
        await site.settle(leader)
        before = site.running()
        site.slurm.down = True
        for _ in range(60):
            made = await site.step(leader, 1.0)
            assert made.actions == ()
        assert leader.poller.error.startswith("slurmctld does not answer")
        assert any(note.startswith("Slurm does not answer") for note in leader.notes)
        (agent,) = site.agents.values()
        agent.kill(next(iter(before)))
        await site.step(leader, 0.2)
        await site.step(leader, 1.1)
        await site.step(leader, 0.2)
        assert len(site.running()) == 1  # restarted in its slot: that needs no controller
        assert site.running() != before
        site.slurm.down = False
        await site.settle(leader)
        assert leader.poller.error == ""
        assert len(site.slurm.submitted) == 1
        assert site.slurm.cancelled == []


async def test_a_lease_cancelled_behind_our_back_is_replaced(site: brokersite.Site) -> None:
    async with site.lead() as leader:
        await site.settle(leader)
        (old,) = site.agents
        site.slurm.end("100", port.JobState.CANCELLED)
        await site.agents[old].disconnect()
        site.agents[old].ended = True
        await site.step(leader, 2.1)
        await site.settle(leader)
        assert len(site.agents) == 2
        assert len(site.running()) == 1
        assert leader.view().replicas[0].slurm_job_id == "101"
        ended = [
            lease
            for lease in site.registry.holdings.leases()
            if lease.state is fleet.LeaseState.ENDED
        ]
        assert [lease.lease_id for lease in ended] == [old]
        assert "CANCELLED" in ended[0].reason


async def test_a_job_that_slurm_forgets_is_unknown_while_its_agent_speaks(
    site: brokersite.Site,
) -> None:
    async with site.lead() as leader:
        await site.settle(leader)
        before = site.running()
        site.slurm.hidden.add("100")
        for _ in range(10):
            await site.step(leader, 2.1)
        states = [entry.lease.state for entry in leader.live.leases.values()]
        assert states == [fleet.LeaseState.UNKNOWN]
        assert site.running() == before
        assert len(site.slurm.submitted) == 1
        site.slurm.hidden.clear()
        await site.settle(leader)
        states = [entry.lease.state for entry in leader.live.leases.values()]
        assert states == [fleet.LeaseState.RUNNING]
        assert site.running() == before


async def test_a_silent_agent_is_unrouted_then_its_lease_is_replaced(
    site: brokersite.Site,
) -> None:
    async with site.lead() as leader:
        await site.settle(leader)
        (lease_id,) = site.agents
        await site.cut(leader, lease_id)
        await site.step(leader, 4.0)
        assert len(leader.view().replicas) == 1
        await site.step(leader, 2.0)
        assert leader.view().replicas == ()
        assert site.slurm.cancelled == []
        site.agents[lease_id].connect(leader.address, guard.token(site.folder))
        await site.step(leader, 0.2)
        assert len(leader.view().replicas) == 1  # it was the network: nothing was restarted
        await site.cut(leader, lease_id)
        await site.step(leader, 31.0)
        await site.step(leader, 0.2)
        assert site.slurm.cancelled == ["100"]
        await site.step(leader, 2.1)
        await site.settle(leader)
        assert [item.slurm_job_id for item in leader.view().replicas] == ["101"]


async def test_an_uncertain_submission_is_found_by_its_stamp(site: brokersite.Site) -> None:
    site.slurm.uncertain = True
    async with site.lead() as leader:
        await site.settle(leader)
        assert len(site.slurm.submitted) == 1
        (entry,) = leader.live.leases.values()
        assert (entry.lease.state, entry.lease.slurm_job_id) == (fleet.LeaseState.RUNNING, "100")


async def test_a_submission_that_never_arrived_is_given_up_and_repeated(
    site: brokersite.Site,
) -> None:
    site.slurm.lost = True
    async with site.lead() as leader:
        await site.settle(leader)
        for _ in range(4):
            await site.step(leader, 2.1)
        await site.step(leader, 5.1)
        await site.settle(leader)
        stamps = [spec.stamp for spec in site.slurm.submitted]
        assert len(stamps) == 2
        assert stamps[0] != stamps[1]
        assert len(site.running()) == 1


async def test_a_refused_lease_is_asked_for_again_after_a_pause(site: brokersite.Site) -> None:
    site.slurm.refuse = "invalid account"
    async with site.lead() as leader:
        await site.step(leader)
        await site.step(leader)
        made = await site.step(leader)
        assert made.actions == ()
        assert any("invalid account" in note for note in made.notes)
        await site.step(leader, 5.1)
        await site.settle(leader)
        assert len(site.running()) == 1


async def test_scaling_down_to_nothing_gives_the_lease_back(site: brokersite.Site) -> None:
    async with site.lead() as leader:
        await site.settle(leader)
        site.registry.catalog.scale("chat", 0)
        await site.step(leader, 1.1)
        await site.settle(leader)
        assert site.running() == {}
        assert len(leader.live.leases) == 1
        await site.step(leader, 30.1)
        await site.step(leader, 0.2)
        (agent,) = site.agents.values()
        assert agent.ended
        site.slurm.end("100", port.JobState.COMPLETED)
        await site.step(leader, 2.1)
        assert leader.live.leases == {}
        assert site.slurm.cancelled == []  # the agent left by itself


async def test_a_preempted_lease_is_no_fault_of_the_model(site: brokersite.Site) -> None:
    site.slow_slots = True
    async with site.lead() as leader:
        for _ in range(4):
            for agent in site.agents.values():
                agent.report.closing = "sigterm"
                agent.lose_slots("sigterm")
            await site.step(leader, 1.0)
            for agent in site.agents.values():
                if agent.report.closing and not agent.ended:
                    agent.ended = True
                    site.slurm.end(agent.report.slurm_job_id, port.JobState.PREEMPTED)
            await site.step(leader, 2.1)
            await site.settle(leader)
        assert len(site.agents) > 3
        assert leader.live.failures == {}
        assert leader.live.deployments[0].quarantined_until_us == 0


async def test_a_controller_that_hangs_delays_no_tick(site: brokersite.Site) -> None:
    async with site.lead() as leader:
        await site.settle(leader)
        hang = threading.Event()

        def jobs() -> tuple[port.Job, ...]:
            hang.wait()
            return ()

        with mock.patch.object(site.slurm, "jobs", jobs):
            await site.clock.advance(2.1)
            made = await leader.tick()  # begins a poll that does not end
            assert made.actions == ()
            (agent,) = site.agents.values()
            agent.kill(next(iter(site.running())))
            await site.heard(leader)
            await leader.tick()
            await site.clock.advance(1.1)
            made = await leader.tick()
            assert [type(action).__name__ for action in made.actions] == ["StartReplica"]
            hang.set()

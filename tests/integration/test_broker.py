"""The broker end to end: Slurm, agents, registry and gateways, with time in the test's hand."""

import threading
from pathlib import Path
from unittest import mock

import pytest

from scheduler.contracts import clock, fleet, observed
from scheduler.contracts import slurm as port
from scheduler.runtime import client, guard
from scheduler.runtime.registry import database
from tests import brokersite


@pytest.fixture
def site(tmp_path: Path) -> brokersite.Site:
    return brokersite.Site(tmp_path)


async def test_a_wanted_replica_comes_up_and_gateways_see_it(site: brokersite.Site) -> None:
    async with site.lead() as leader:
        await site.settle(leader)
        (lease,) = leader.live.leases.values()
        assert lease.lease.state is fleet.LeaseState.RUNNING
        assert (lease.lease.gpus, lease.lease.slurm_job_id) == (4, "100")
        assert list(site.running().values()) == ["serving"]
        watcher = client.FleetClient(site.folder, "g1", clock.SystemClock())
        watcher.start()
        await watcher.changed(-1)
        view = watcher.view()
        await watcher.close()
        assert view is not None
        assert view.epoch == 1
        assert view.routes["chat"].weights == {"v1": 100}
        (replica,) = view.replicas
        assert (replica.state, replica.address) == (fleet.ReplicaState.SERVING, "127.0.0.1:9001")
        assert replica.slurm_job_id == "100"
        assert watcher.view() is view


async def test_a_killed_replica_is_made_anew_in_its_slot(site: brokersite.Site) -> None:
    async with site.lead() as leader:
        await site.settle(leader)
        (first,) = site.running()
        (agent,) = site.agents.values()
        agent.kill(first)
        await site.step(leader)
        assert [item.replica_id for item in leader.view().replicas] == []
        await site.step(leader, 1.1)  # the pause before a new start
        await site.settle(leader)
        (second,) = site.running()
        assert second != first
        assert len(agent.report.slots) == 1
        rows = {
            row.replica.replica_id: row.replica for row in site.registry.holdings.replica_rows()
        }
        assert rows[first].state is fleet.ReplicaState.LOST  # type: ignore[index] # str is ReplicaId
        assert rows[first].reason == "signal 9"  # type: ignore[index] # str is ReplicaId


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


async def test_three_failed_starts_lead_to_quarantine_with_the_reason(
    site: brokersite.Site,
) -> None:
    site.broken = "weights: no such folder"
    async with site.lead() as leader:
        for _ in range(12):
            await site.step(leader, 4.0)
        (agent,) = site.agents.values()
        assert len(agent.started) == 3
        (deployment,) = site.registry.catalog.deployments()
        assert "weights: no such folder" in deployment.quarantine_reason
        assert any("quarantined" in note for note in leader.notes)
        agent.broken = site.broken = ""
        site.registry.catalog.resume("chat")
        await site.step(leader, 1.1)
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


async def test_an_admins_drain_replaces_a_replica(site: brokersite.Site) -> None:
    async with site.lead() as leader:
        await site.settle(leader)
        (first,) = site.running()
        site.registry.holdings.ask_drain(first)
        await site.step(leader, 1.1)
        await site.settle(leader)
        await site.settle(leader)
        (second,) = site.running()
        assert second != first


async def test_a_spike_turns_a_shared_replica_interactive_and_calm_turns_it_back(
    site: brokersite.Site,
) -> None:
    async with site.lead() as leader:
        await site.settle(leader)
        (agent,) = site.agents.values()
        (replica,) = site.running()

        async def tick(waiting: int, wait_s: float, seconds: float) -> None:
            agent.load(replica, interactive=1, batch=3)
            await site.clock.advance(seconds)
            demand = observed.Demand("chat", {"interactive": waiting}, {}, wait_s)
            leader.live.absorb_demand("g1", {"chat": demand}, site.clock.monotonic())
            await site.step(leader, 0.0)

        await tick(2, 0.3, 0.2)
        await site.heard(leader)
        assert agent.replicas()[replica].role == "shared"
        await tick(2, 0.5, 0.2)
        await site.heard(leader)
        assert agent.replicas()[replica].role == "interactive"
        assert leader.view().replicas[0].role is fleet.Role.INTERACTIVE
        await tick(0, 0.0, 0.2)
        await tick(0, 0.0, 29.0)
        await site.heard(leader)
        assert agent.replicas()[replica].role == "interactive"
        await tick(0, 0.0, 1.1)
        await site.heard(leader)
        assert agent.replicas()[replica].role == "shared"
        plans = site.registry.journal.plans(10)
        assert any("rung 1" in action["what"] for plan in plans for action in plan.body["actions"])


async def test_a_wrong_control_token_is_refused(site: brokersite.Site) -> None:
    async with site.lead() as leader:
        async with brokersite.channel(leader.address) as channel:
            for call in brokersite.calls(channel, "wrong"):
                assert await brokersite.refusal(call) == "UNAUTHENTICATED"
            for call in brokersite.calls(channel, None):
                assert await brokersite.refusal(call) == "UNAUTHENTICATED"
        assert (site.folder / "secrets" / "control.token").stat().st_mode & 0o777 == 0o600


async def test_a_fenced_broker_writes_nothing_more(site: brokersite.Site) -> None:
    async with site.lead() as old:
        await site.settle(old)
        await site.clock.advance(site.options.leader_ttl_s + 1)
        epoch = site.registry.lead.take("other", site.clock.wall_us(), 60_000_000)
        assert epoch == 2
        (agent,) = site.agents.values()
        agent.kill(next(iter(site.running())))
        with pytest.raises(database.Fenced):
            await site.step(old)
        (row,) = site.registry.holdings.replica_rows()
        assert row.replica.state is not fleet.ReplicaState.LOST


async def test_a_slot_that_takes_long_to_start_is_waited_for(site: brokersite.Site) -> None:
    site.slow_slots = True
    async with site.lead() as leader:
        for _ in range(60):
            await site.step(leader, 1.0)
        (agent,) = site.agents.values()
        assert agent.started == []
        assert len(leader.live.replicas) == 1
        agent.slow_slots = False
        agent.catch_up()
        await site.settle(leader)
        assert list(site.running().values()) == ["serving"]


async def test_a_slot_that_can_not_start_counts_as_a_failed_start(site: brokersite.Site) -> None:
    site.slow_slots = True
    async with site.lead() as leader:
        for _ in range(30):
            for agent in site.agents.values():
                agent.lose_slots("GPU 0 is held by pid 7")
            await site.step(leader, 1.0)
        (deployment,) = site.registry.catalog.deployments()
        assert "GPU 0 is held by pid 7" in deployment.quarantine_reason
        rows = site.registry.holdings.replica_rows()
        assert len(rows) == 3


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

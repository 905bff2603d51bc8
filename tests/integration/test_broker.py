"""The broker end to end: Slurm, agents, registry and gateways, with time in the test's hand."""

from pathlib import Path

import pytest

from scheduler.contracts import clock, fleet, observed
from scheduler.runtime import client
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

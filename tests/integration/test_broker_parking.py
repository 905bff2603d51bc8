"""Rung 2 at the broker: a parked replica keeps its id and its slot, and gives its place to another."""

import dataclasses
from pathlib import Path

import pytest

from scheduler.contracts import fleet, ids, observed
from scheduler.core import actions, plan
from scheduler.runtime import broker, config, settings, snapshots
from tests import brokersite

PAIR = (
    dataclasses.replace(brokersite.CHAT, replicas=1),
    config.ModelSettings(name="night", engine=fleet.EngineKind.SIMULATED, gpus=4, replicas=0),
)


async def apply(leader: broker.Leader, *todo: actions.Action) -> list[str]:
    made = plan.Plan(todo, (), leader.live.ladder_memory)
    return [result.outcome for result in await leader.applier.apply(made)]


async def test_parked_it_leaves_the_routes_and_woken_it_is_back_under_its_id(
    tmp_path: Path,
) -> None:
    site = brokersite.Site(tmp_path, *PAIR)
    async with site.lead() as leader:
        await site.settle(leader)
        (name,) = map(ids.ReplicaId, site.running())
        park = actions.ParkReplica(name, 1.0, "its GPUs are wanted")
        assert await apply(leader, park, park) == [
            "done",
            "skipped: it is to be parked, or to stop, by now",
        ]
        await site.heard(leader)
        known = leader.live.replicas[name]
        assert (known.replica.state, known.replica.address) == (fleet.ReplicaState.ASLEEP, "")
        assert known.parked

        # The next planner wakes it, since it is the one that is wanted: nothing else is started.
        made = await site.step(leader)
        assert [type(each) for each in made.actions] == [actions.WakeReplica]
        await site.settle(leader)
        known = leader.live.replicas[name]
        assert (known.replica.state, known.replica.incarnation) == (fleet.ReplicaState.SERVING, 2)
        (agent,) = site.agents.values()
        assert agent.started == [name]


async def test_another_replica_runs_in_the_slot_meanwhile(tmp_path: Path) -> None:
    site = brokersite.Site(tmp_path, *PAIR)
    async with site.lead() as leader:
        await site.settle(leader)
        (name,) = map(ids.ReplicaId, site.running())
        known = leader.live.replicas[name]
        await apply(leader, actions.ParkReplica(name, 1.0, "swap"))
        await site.heard(leader)
        night = PAIR[1].spec()
        lease, slot = known.replica.lease_id, known.replica.slot_id
        start = actions.StartReplica(lease, slot, night, fleet.Role.BATCH, "swap")
        assert await apply(leader, start) == ["done"]
        await site.heard(leader)
        assert sorted(site.running().values()) == ["asleep", "serving"]
        wake = actions.WakeReplica(name, fleet.Role.INTERACTIVE, "spike")
        (outcome,) = await apply(leader, wake)
        assert outcome.startswith("skipped: its slot is not free: r-")


async def test_a_new_broker_knows_what_is_parked(tmp_path: Path) -> None:
    site = brokersite.Site(tmp_path, *PAIR)
    async with site.lead() as leader:
        await site.settle(leader)
        (name,) = map(ids.ReplicaId, site.running())
        await apply(leader, actions.ParkReplica(name, 1.0, "swap"))
        await site.heard(leader)
        await leader.applier.flush()
    async with site.lead() as leader:
        known = leader.live.replicas[name]
        assert known.parked
        await site.heard(leader)
        assert site.running() == {name: "asleep"}


async def test_a_model_that_nobody_asks_for_is_parked_where_the_lease_has_memory_for_it(
    tmp_path: Path,
) -> None:
    """Rung 2 from the planner on: host memory is counted per lease, and a spike only has to wake it."""
    rare = dataclasses.replace(
        brokersite.CHAT, scaling={"maximum": 1, "idle_to_zero_s": 60.0, "park_gb": 15.0}
    )
    options = settings.Settings(
        rungs=(0, 1, 2),
        scale_down_s=10.0,
        idle_lease_s=3600.0,
        lease_gb_per_gpu=8.0,
        park_gb_per_gpu=5.0,
    )
    site = brokersite.Site(tmp_path, rare, options=options)

    async def asked(leader: broker.Leader, requests_s: int, ticks: int) -> None:
        for tick in range(ticks):
            load = observed.Demand(
                "chat", {}, {"interactive": requests_s}, 0.0, (), requests_s * tick
            )
            leader.live.absorb_demand("g1", {"chat": load}, site.clock.monotonic())
            await site.step(leader, 1.0)

    async with site.lead() as leader:
        await asked(leader, 2, 10)
        assert list(site.running().values()) == ["serving"]
        (held,) = snapshots.collect(leader.live, site.clock, options).leases
        assert held.park_gb == 20.0
        (entry,) = leader.live.leases.values()
        whole = entry.lease
        entry.lease = dataclasses.replace(whole, hardware=fleet.Hardware("shard", parts=4))
        (parts,) = snapshots.collect(leader.live, site.clock, options).leases
        assert parts.park_gb == 5.0, "four shards are one GPU, and Slurm was asked for its memory"
        entry.lease = whole
        await asked(leader, 0, 120)
        assert list(site.running().values()) == ["asleep"]
        (held,) = snapshots.collect(leader.live, site.clock, options).leases
        assert held.park_gb == 5.0
        await asked(leader, 2, 10)
        assert list(site.running().values()) == ["serving"]
        (agent,) = site.agents.values()
        assert len(agent.started) == 1


def test_what_is_parked_is_asked_for_on_top_of_what_runs() -> None:
    with pytest.raises(ValueError, match="lease_gb_per_gpu, which is 0: set that too"):
        settings.Settings(park_gb_per_gpu=5.0)

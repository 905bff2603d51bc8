"""Rung 2 at the broker: a parked replica keeps its id and its slot, and gives its place to another."""

import dataclasses
from pathlib import Path

from scheduler.contracts import fleet, ids
from scheduler.core import actions, plan
from scheduler.runtime import broker, config
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

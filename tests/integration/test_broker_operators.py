"""What operators do to a running fleet, at the broker: drain, preempt, hold batch; and what a start took."""

import dataclasses
from pathlib import Path

import pytest

from scheduler.contracts import fleet, ports
from scheduler.core import actions, startup
from scheduler.runtime import settings
from scheduler.runtime.registry import cordons, wishes
from tests import brokersite

QUICK = settings.Settings(idle_lease_s=5.0, lease_backoff_s=0.0, drain_s=1.0)
ELASTIC = dataclasses.replace(brokersite.CHAT, scaling={"floor": 1, "maximum": 3})
MARK = wishes.Mark("root", "fan noise", 1)


async def test_a_drained_lease_is_replaced_first_and_given_back_then(tmp_path: Path) -> None:
    site = brokersite.Site(tmp_path, options=QUICK)
    async with site.lead() as leader:
        await site.settle(leader)
        (old,) = leader.live.leases
        site.registry.wishes.drain(old, MARK)
        fewest = 1
        reasons: list[str] = []
        for _ in range(20):
            made = await site.step(leader, 1.0)
            reasons += [each.reason for each in made.actions]
            fewest = min(fewest, list(site.running().values()).count("serving"))
        assert old not in leader.live.leases
        assert list(site.running().values()) == ["serving"]
        assert fewest == 1  # never without one
        assert f"lease {old} is drained by root: fan noise, others serve" in reasons


async def test_a_drained_node_gets_nothing_new_and_what_is_there_moves(tmp_path: Path) -> None:
    site = brokersite.Site(tmp_path, options=QUICK)
    async with site.lead() as leader:
        await site.settle(leader)
        ((old, entry),) = leader.live.leases.items()
        (node,) = entry.lease.nodes
        site.registry.cordons.add(cordons.Cordon(node, "fan noise", "root", 1))
        site.registry.wishes.drain(node, MARK)
        for _ in range(20):
            await site.step(leader, 1.0)
        assert old not in leader.live.leases
        assert list(site.running().values()) == ["serving"]
        assert site.slurm.submitted[-1].exclude == (node,)


async def test_a_preempted_replica_stops_at_once_and_another_one_comes(tmp_path: Path) -> None:
    site = brokersite.Site(tmp_path, options=QUICK)
    async with site.lead() as leader:
        await site.settle(leader)
        (victim,) = leader.live.replicas
        site.registry.wishes.preempt(victim, MARK)
        stops = []
        for _ in range(10):
            made = await site.step(leader, 1.0)
            stops += [each for each in made.actions if isinstance(each, actions.StopReplica)]
        assert [(stop.replica_id, stop.drain_s) for stop in stops] == [(victim, 0.0)]
        assert "root: fan noise" in stops[0].reason
        assert victim not in leader.live.replicas
        assert list(site.running().values()) == ["serving"]


async def test_held_batch_gives_back_what_it_was_lent_until_it_is_released(tmp_path: Path) -> None:
    site = brokersite.Site(
        tmp_path,
        ELASTIC,
        options=dataclasses.replace(QUICK, fleet_gpus=8, lend_every_s=0.0, min_run_s=0.0),
    )
    work = {"chat": ports.BatchWork(10_000, 2_560_000)}
    site.parts = dataclasses.replace(site.parts, batch_work=lambda: work)
    async with site.lead() as leader:

        async def kinds() -> list[str]:
            for _ in range(20):
                await site.step(leader, 1.0)
            roles = {known.wanted_role for known in leader.live.replicas.values()}
            held = sorted(entry.lease.kind for entry in leader.live.leases.values())
            return [*held, *sorted(roles)]

        assert await kinds() == ["backfill", "serve", "batch", "shared"], leader.notes
        site.registry.wishes.hold_batch(MARK)
        assert await kinds() == ["serve", "interactive"]
        site.registry.wishes.release_batch("root", 2)
        assert (await kinds())[:3] == ["backfill", "serve", "batch"], leader.notes


async def test_a_start_is_timed_by_phase_and_the_next_leader_knows_the_medians(
    tmp_path: Path,
) -> None:
    site = brokersite.Site(tmp_path, ELASTIC, options=QUICK)
    async with site.lead() as leader:
        await site.settle(leader)
        (replica,) = (known.replica for known in leader.live.replicas.values())
        assert replica.state is fleet.ReplicaState.SERVING
        assert {"queue", "allocate", "warm-up"} <= replica.phases_s.keys() <= set(startup.PHASES)
        leader.live.starts.note(("chat", "v1"), {"queue": 3.0, "load": 4.0}, woken=False)
        for _ in range(3):
            await site.step(leader, 1.0)
        fact = site.registry.journal.fact("starts")
        assert fact is not None
        usual = fact.body["chat v1"]
        assert usual["start_s"] == pytest.approx(
            3.5
        )  # between the one that took no time and this one
        assert usual["phases_s"]["load"] == pytest.approx(2.0)
    again = brokersite.Site(tmp_path, ELASTIC, options=QUICK, before=site)
    async with again.lead() as leader:
        assert leader.live.starts.cold()["chat", "v1"] == pytest.approx(3.5)

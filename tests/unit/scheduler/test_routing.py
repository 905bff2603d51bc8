"""Routing: who may take a request, who does, and what stale statistics change."""

import collections
import dataclasses
import random
from typing import Any

import pytest

from scheduler.contracts import fleet, ids, requests
from scheduler.core import load, routing

I, B = requests.Tier.INTERACTIVE, requests.Tier.BATCH  # noqa: E741 - tiers
ASK = routing.Ask("chat", "1", I)
BATCH = dataclasses.replace(ASK, tier=B)


def replica(name: str, **changes: Any) -> fleet.Replica:
    names = {field.name for field in dataclasses.fields(fleet.ReplicaSpec)}
    spec: dict[str, Any] = {"model": "chat", "version": "1", "engine": fleet.EngineKind.VLLM}
    spec |= {key: changes.pop(key) for key in list(changes) if key in names}
    fields: dict[str, Any] = {
        "replica_id": ids.ReplicaId(name),
        "cluster": "c",
        "lease_id": ids.LeaseId("l"),
        "slot_id": ids.SlotId("l.s0"),
        "slurm_job_id": "1",
        "node": "n",
        "state": fleet.ReplicaState.SERVING,
        "role": fleet.Role.SHARED,
        "address": "127.0.0.1:1",
        "incarnation": 1,
        "stats": fleet.ReplicaStats(at_us=1, seats=8),
        **changes,
    }
    return fleet.Replica(spec=fleet.ReplicaSpec(**spec), **fields)


def situation(
    *replicas: fleet.Replica, loads: load.Loads | None = None, age_s: float = 0.1, **fields: Any
) -> routing.Situation:
    heard = fields.pop("heard", {one.replica_id: routing.Heard(age_s) for one in replicas})
    return routing.Situation(replicas, loads or load.Loads(), heard, **fields)


def chosen(ask: routing.Ask, known: routing.Situation) -> str | None:
    choice = routing.choose(ask, known)
    return None if choice is None else choice.replica.replica_id


def fill(loads: load.Loads, name: str, count: int, tier: requests.Tier = I) -> list[load.Guard]:
    return [loads.open("chat", ids.ReplicaId(name), tier) for _ in range(count)]


@pytest.mark.parametrize(
    "changes",
    [
        {"state": fleet.ReplicaState.DRAINING},
        {"state": fleet.ReplicaState.WARM},
        {"address": ""},
        {"model": "other"},
        {"version": "2"},
        {"role": fleet.Role.BATCH},
        {"max_context": 100},
        {"seats": 1},
    ],
)
def test_filters(changes: dict[str, Any]) -> None:
    ask = dataclasses.replace(ASK, context_tokens=101, seats=2)
    good = replica("r2")
    assert chosen(ask, situation(replica("r1", **changes), good)) == "r2"
    assert chosen(ask, situation(replica("r1", **changes))) is None


def test_adapters_and_dead_incarnations() -> None:
    poet = replica("r2", adapters={"poet": "/p"})
    ask = dataclasses.replace(ASK, adapter="poet")
    assert chosen(ask, situation(replica("r1"), poet)) == "r2"
    dead = {ids.ReplicaId("r2"): 1}
    assert chosen(ask, situation(poet, dead=dead)) is None
    again = dataclasses.replace(poet, incarnation=2)
    assert chosen(ask, situation(again, dead=dead)) == "r2"


def test_roles_divide_batch_and_interactive() -> None:
    replicas = [replica(role.value, role=role) for role in fleet.Role]
    took = {chosen(BATCH, situation(*replicas, draw=n / 10)) for n in range(10)}
    assert took == {"shared", "batch"}
    took = {chosen(ASK, situation(*replicas, draw=n / 10)) for n in range(10)}
    assert took == {"shared", "interactive"}


def test_saturated_small_index_loses_to_idle_big_one_s2() -> None:
    """Case S2: whoever comes first in the list has no advantage."""
    loads = load.Loads()
    fill(loads, "r1", 8)
    for draw in (0.0, 0.5, 0.999):
        assert chosen(ASK, situation(replica("r1"), replica("r2"), loads=loads, draw=draw)) == "r2"


def test_new_prompts_spread_evenly_and_repeatably_s2() -> None:
    """Case S2: 1,000 new prompts on four equal replicas: 25 % ± 5 each, the same for the same seed."""

    def run(seed: int) -> list[str | None]:
        draws, replicas = random.Random(seed), [replica(f"r{n}") for n in range(4)]
        return [chosen(ASK, situation(*replicas, draw=draws.random())) for _ in range(1000)]

    counts = collections.Counter(run(7))
    assert len(counts) == 4
    assert all(200 <= count <= 300 for count in counts.values())
    assert run(7) == run(7) != run(8)


def test_load_survives_probes_and_statistics_s1() -> None:
    """Case S1: 20 streams on r1; no probe or report resets them; the next prompt goes to r2."""
    loads, fresh = load.Loads(), routing.Freshness()
    guards = fill(loads, "r1", 20)
    replicas: list[fleet.Replica] = []
    for cycle in range(10):
        stats = fleet.ReplicaStats(at_us=cycle, seats=64)  # a report that says "idle"
        replicas = [replica(name, stats=stats, seats=64) for name in ("r1", "r2")]
        fresh.observe(replicas, loads, cycle * 0.2)
        assert loads.total(ids.ReplicaId("r1")) == 20
    known = routing.Situation(replicas, loads, fresh.heard(2.0), draw=0.0)
    assert chosen(ASK, known) == "r2"
    for guard in guards:
        guard.close()
    assert loads.idle


def test_stale_statistics_mean_round_robin_under_caps_s5() -> None:
    """Case S5: all statistics freeze for 5 s with 500 batch lines waiting."""
    loads = load.Loads()
    stats = fleet.ReplicaStats(at_us=1, seats=8, interactive=1, batch=3)
    replicas = [replica(name, stats=stats) for name in ("r1", "r2", "r3")]
    order = []
    for turn in range(24):
        known = situation(*replicas, loads=loads, age_s=5.0, turn=turn)
        choice = routing.choose(ASK, known)
        assert choice is not None
        assert "stale" in choice.reason
        order.append(choice.replica.replica_id)
        loads.open("chat", choice.replica.replica_id, I)
    assert order[:6] == ["r1", "r2", "r3", "r1", "r2", "r3"]
    assert chosen(ASK, situation(*replicas, loads=loads, age_s=5.0)) is None  # 8 each: the cap


@pytest.mark.parametrize("ours", [0, 3])
def test_batch_adds_no_more_than_the_seats_known_to_be_free_s5(ours: int) -> None:
    """Case S5: 8 seats - 1 reserved - 1 interactive - 3 batch leave 3, whoever the others are."""
    loads = load.Loads()
    stats = fleet.ReplicaStats(at_us=1, seats=8, interactive=1, batch=3)
    one = replica("r1", stats=stats)
    guards = fill(loads, "r1", ours, B)
    fresh = routing.Freshness()
    fresh.observe([one], loads, 0.0)
    known = situation(one, loads=loads, heard=fresh.heard(5.0))
    added = 0
    for _ in range(500):
        if routing.choose(BATCH, known) is not None:
            loads.open("chat", one.replica_id, B)
            added += 1
    assert added == 3
    for guard in guards:
        guard.close()  # seats that we gave back ourselves are known to be free
    for _ in range(500):
        if routing.choose(BATCH, known) is not None:
            loads.open("chat", one.replica_id, B)
    assert loads.batch(one.replica_id) == 3 + ours


def test_batch_without_any_statistics_waits() -> None:
    silent = replica("r1", stats=None)
    assert chosen(BATCH, routing.Situation([silent], load.Loads(), {})) is None
    assert chosen(ASK, routing.Situation([silent], load.Loads(), {})) == "r1"


def test_batch_leaves_the_reserved_seats_and_interactive_does_not_count_batch() -> None:
    loads = load.Loads()
    one = replica("r1", seats=4, reserved_seats=1)
    fill(loads, "r1", 3, B)
    assert chosen(BATCH, situation(one, loads=loads)) is None
    assert chosen(BATCH, situation(dataclasses.replace(one, role=fleet.Role.BATCH), loads=loads))
    fill(loads, "r1", 3)
    assert chosen(ASK, situation(one, loads=loads)) == "r1"  # the replica makes batch give way
    fill(loads, "r1", 1)
    assert chosen(ASK, situation(one, loads=loads)) is None


def test_a_replica_that_said_full_is_passed_over() -> None:
    known = situation(replica("r1"), replica("r2"), full=frozenset({ids.ReplicaId("r1")}))
    assert chosen(ASK, known) == "r2"


def test_prefix_home_is_kept_until_it_is_loaded_beyond_the_bound() -> None:
    loads = load.Loads()
    replicas = [replica("r1"), replica("r2")]
    ask = dataclasses.replace(ASK, home=ids.ReplicaId("r2"))
    took = []
    for _ in range(3):
        took.append(chosen(ask, situation(*replicas, loads=loads)))
        fill(loads, str(took[-1]), 1)
    assert took == ["r2", "r2", "r1"]  # 2 of 2 in flight is more than 1.25 of the mean
    assert chosen(dataclasses.replace(ask, home=ids.ReplicaId("gone")), situation(*replicas))


def test_cache_hint_is_one_replica_and_few_hints_move_when_one_goes() -> None:
    replicas = [replica(f"r{n}") for n in range(5)]

    def place(count: int) -> dict[str, str | None]:
        known = situation(*replicas[:count])
        return {
            str(key): chosen(dataclasses.replace(ASK, hint=str(key)), known) for key in range(200)
        }

    five, four = place(5), place(4)
    assert five == place(5)
    assert len(set(five.values())) == 5
    assert all(four[key] == five[key] for key in five if five[key] != "r4")


def test_versions_follow_the_routes_weights() -> None:
    route = fleet.Route("chat", {"1": 90, "2": 10, "3": 0})
    draws = [n / 1000 for n in range(1000)]
    counts = collections.Counter(routing.pick_version(route, draw) for draw in draws)
    assert counts == {"1": 900, "2": 100}
    assert routing.pick_version(fleet.Route("chat", {"1": 0}), 0.5) is None


def test_outlook() -> None:
    up, soon = replica("r1"), replica("r2", state=fleet.ReplicaState.STARTING, version="2")
    assert routing.outlook([up, soon], "chat", None) is routing.Outlook.SERVING
    assert routing.outlook([up, soon], "chat", "2") is routing.Outlook.COMING
    assert routing.outlook([up], "chat", "2") is routing.Outlook.NONE
    lost = dataclasses.replace(up, state=fleet.ReplicaState.LOST)
    assert routing.outlook([lost], "chat", "1") is routing.Outlook.NONE
    dead = {up.replica_id: 1}
    assert routing.outlook([up], "chat", "1", dead) is routing.Outlook.NONE


def test_freshness_looks_at_change_not_at_the_other_machines_clock() -> None:
    fresh, one = routing.Freshness(), replica("r1")
    none = load.Loads()
    fresh.observe([one], none, 10.0)
    fresh.observe([one], none, 14.0)  # the view came again, the statistics in it are the same
    assert fresh.heard(15.0) == {"r1": routing.Heard(5.0)}
    newer = dataclasses.replace(one, stats=fleet.ReplicaStats(at_us=-99, seats=8))
    fresh.observe([newer], none, 15.0)
    assert fresh.heard(15.5) == {"r1": routing.Heard(0.5)}
    fresh.observe([dataclasses.replace(one, stats=None)], none, 16.0)
    assert fresh.heard(16.0) == {}

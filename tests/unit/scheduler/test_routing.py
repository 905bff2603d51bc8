"""Routing: who may take a request, who does, and what stale statistics change."""

import collections
import dataclasses
import random
from typing import Any

import pytest

from scheduler.contracts import fleet, ids, requests
from scheduler.core import candidates, contenders, holders, load, routing

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
    """Return what is known ``age_s`` seconds after the replicas' statistics came."""
    known = candidates.Fleet(loads or load.Loads())
    known.observe(replicas, 0.0)
    return routing.Situation(known, age_s, **fields)


def chosen(ask: routing.Ask, known: routing.Situation) -> str | None:
    choice = routing.choose(ask, known)
    return None if choice is None else choice.replica.replica_id


def fill(
    loads: load.Loads, name: str, count: int, tier: requests.Tier = I, **tokens: int
) -> list[load.Guard]:
    return [loads.open("chat", ids.ReplicaId(name), tier, **tokens) for _ in range(count)]


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
    """S1: 20 streams on r1; no probe or report resets them; the next unseen prompt goes to r2."""
    loads = load.Loads()
    known = candidates.Fleet(loads)
    guards = fill(loads, "r1", 20)
    for cycle in range(10):
        stats = fleet.ReplicaStats(at_us=cycle, seats=64)  # a report that says "idle"
        known.observe([replica(n, stats=stats, seats=64) for n in ("r1", "r2")], cycle * 0.2)
        assert loads.total(ids.ReplicaId("r1")) == 20
        for draw in (0.0, 0.99):
            assert chosen(ASK, routing.Situation(known, cycle * 0.2, draw=draw)) == "r2"
    for guard in guards:
        guard.close()
    assert loads.idle


def test_stale_statistics_mean_round_robin_under_caps_s5() -> None:
    """Case S5: all statistics freeze for 5 s with 500 batch lines waiting."""
    loads = load.Loads()
    stats = fleet.ReplicaStats(at_us=1, seats=8, interactive=1, batch=3)
    replicas = [replica(name, stats=stats) for name in ("r1", "r2", "r3")]
    order = [""]
    for _ in range(24):
        known = situation(*replicas, loads=loads, age_s=5.0, after=order[-1])
        choice = routing.choose(ASK, known)
        assert choice is not None
        assert "stale" in choice.reason
        order.append(choice.replica.replica_id)
        loads.open("chat", choice.replica.replica_id, I)
    assert order[1:7] == ["r1", "r2", "r3", "r1", "r2", "r3"]
    assert chosen(ASK, situation(*replicas, loads=loads, age_s=5.0)) is None  # 8 each: the cap


@pytest.mark.parametrize("ours", [0, 3])
def test_batch_adds_no_more_than_the_seats_known_to_be_free_s5(ours: int) -> None:
    """Case S5: 8 seats - 1 reserved - 1 interactive - 3 batch leave 3, whoever the others are."""
    loads = load.Loads()
    stats = fleet.ReplicaStats(at_us=1, seats=8, interactive=1, batch=3)
    one = replica("r1", stats=stats)
    guards = fill(loads, "r1", ours, B)
    known = situation(one, loads=loads, age_s=5.0)
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
    assert chosen(BATCH, situation(silent)) is None
    assert chosen(ASK, situation(silent)) == "r1"


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


def test_the_longest_prefix_is_kept_until_its_replica_is_saturated() -> None:
    """Bounded load in tokens: slack first, then 1.25 of the mean."""
    loads = load.Loads()
    replicas = [replica("r1"), replica("r2"), replica("r3")]
    known = situation(*replicas, loads=loads)
    ask = dataclasses.replace(ASK, prompt_tokens=2000, output_tokens=100)
    held = {ids.ReplicaId("r1"): 0.5, ids.ReplicaId("r2"): 0.9, ids.ReplicaId("gone"): 1.0}
    known = dataclasses.replace(known, held=holders.Holders.of(held))
    choice = routing.choose(ask, known)
    assert choice is not None
    assert (choice.replica.replica_id, choice.reason) == ("r2", "prefix is there")
    assert choice.cached_share == 0.9
    fill(loads, "r2", 1, tokens=2000)  # with this one, 2,300: over 2,048 and over 1.25 x 4,100 / 3
    assert chosen(ask, known) == "r1"  # the second longest: its 1,100 are within the slack
    fill(loads, "r1", 1, tokens=1200)
    assert chosen(ask, known) == "r3"  # both saturated: the least work
    fill(loads, "r3", 1, tokens=9000)
    assert chosen(ask, known) == "r2"  # now the mean is higher than both


def test_an_idle_replica_is_never_saturated() -> None:
    ask = dataclasses.replace(ASK, prompt_tokens=100_000)
    held = {ids.ReplicaId("r2"): 0.5}
    assert (
        chosen(
            ask, situation(replica("r1"), replica("r2"), held=holders.Holders.of(held), draw=0.0)
        )
        == "r2"
    )


def test_a_prefix_that_all_share_draws_nobody() -> None:
    """A system prompt of less than a tenth of the prompt must not bring every conversation to one replica."""
    held = {ids.ReplicaId("r1"): 0.09}
    took = {
        chosen(
            ASK, situation(replica("r1"), replica("r2"), held=holders.Holders.of(held), draw=draw)
        )
        for draw in (0.0, 0.9)
    }
    assert took == {"r1", "r2"}


def test_new_prefixes_go_where_every_worker_would_send_them() -> None:
    """Rendezvous: equal load, no holder; another worker with another draw decides alike."""
    replicas = [replica(f"r{n}") for n in range(4)]
    keys = [contenders.hash_of(str(n)) for n in range(1000)]
    first = [chosen(ASK, situation(*replicas, key=key, draw=0.1)) for key in keys]
    second = [chosen(ASK, situation(*reversed(replicas), key=key, draw=0.8)) for key in keys]
    assert first == second
    counts = collections.Counter(first)
    assert len(counts) == 4
    assert all(200 <= count <= 300 for count in counts.values())


def test_least_work_counts_tokens_not_requests() -> None:
    loads = load.Loads()
    fill(loads, "r1", 3, tokens=100)
    fill(loads, "r2", 1, tokens=5000)
    assert chosen(ASK, situation(replica("r1"), replica("r2"), loads=loads)) == "r1"


def test_kv_room_is_kept_in_tokens_and_what_others_hold_counts() -> None:
    loads = load.Loads()
    stats = fleet.ReplicaStats(at_us=1, seats=8, kv_blocks=100, kv_free=60, kv_block_tokens=16)
    one = replica("r1", stats=stats)
    known = situation(one, loads=loads)  # 1,600 tokens, of which 640 are somebody else's
    ask = dataclasses.replace(ASK, prompt_tokens=400, output_tokens=100)
    assert (
        chosen(dataclasses.replace(ask, prompt_tokens=9000), known) == "r1"
    )  # idle: the engine says
    guards = fill(loads, "r1", 1, kv_tokens=500)
    assert chosen(ask, known) is None  # 500 + 500 > 960
    assert chosen(dataclasses.replace(ask, prompt_tokens=300), known) == "r1"
    fill(loads, "r1", 1, B, kv_tokens=900)
    assert chosen(dataclasses.replace(ask, prompt_tokens=300), known) == "r1"  # batch gives way
    assert chosen(dataclasses.replace(ask, tier=B, prompt_tokens=300), known) is None
    guards[0].close()


def test_adapters_keep_to_as_many_replicas_as_their_traffic_needs() -> None:
    adapters = {f"a{n}": "/p" for n in range(10)}
    replicas = [replica(f"r{n}", adapters=adapters) for n in range(20)]
    loads = load.Loads()
    for share, width in ((0.0, 1), (0.1, 2), (0.4, 10)):
        known = situation(*replicas, loads=loads, adapter_share=share)
        took = set()
        for draw in range(100):
            ask = dataclasses.replace(ASK, adapter="a1")
            took.add(chosen(ask, dataclasses.replace(known, draw=draw / 100)))
        assert len(took) == width
    alone = chosen(dataclasses.replace(ASK, adapter="a1"), situation(*replicas, loads=loads))
    fill(loads, str(alone), 1, tokens=9000)
    ask = dataclasses.replace(ASK, adapter="a1", prompt_tokens=100)
    assert chosen(ask, situation(*replicas, loads=loads)) != alone  # saturated: not waited for


def test_long_prompts_keep_to_their_pool_and_the_largest_contexts_are_it() -> None:
    replicas = [replica(f"r{n}", max_context=4096 if n else 32768) for n in range(8)]
    ask = dataclasses.replace(ASK, long=True, prompt_tokens=1)
    took = {chosen(ask, situation(*replicas, draw=n / 50)) for n in range(50)}
    assert len(took) == 2
    assert "r0" in took
    assert len({chosen(ASK, situation(*replicas, draw=n / 50)) for n in range(50)}) == 8


def test_a_decision_looks_at_each_member_once() -> None:
    """350 replicas and 50 adapters: what a view prepares is not built again for a request."""
    adapters = {f"a{n}": "/p" for n in range(50)}
    replicas = [replica(f"r{n:03}", adapters=adapters) for n in range(350)]
    known = candidates.Fleet(load.Loads())
    known.observe(replicas, 0.0)
    groups = {id(known.group("chat", "1", name, batch=False)) for name in (None, *adapters)}
    assert len(groups) == 1  # equal membership is one group, not 51
    before = known.group("chat", "1", None, batch=False)
    newer = [dataclasses.replace(r, stats=fleet.ReplicaStats(2, 8)) for r in replicas]
    known.observe(newer, 0.2)
    assert known.group("chat", "1", None, batch=False) is before  # statistics move nobody
    known.observe([dataclasses.replace(newer[0], role=fleet.Role.BATCH), *newer[1:]], 0.4)
    after = known.group("chat", "1", None, batch=False)
    assert after is not None
    assert len(after.members) == 349


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
    one = replica("r1")
    known = candidates.Fleet(load.Loads())

    def stale(at: float) -> bool:
        member = known.member(one.replica_id)
        assert member is not None
        return member.stale(at)

    known.observe([one], 10.0)
    known.observe([one], 14.0)  # the view came again, the statistics in it are the same
    assert stale(15.0)
    known.observe([dataclasses.replace(one, stats=fleet.ReplicaStats(at_us=-99, seats=8))], 15.0)
    assert not stale(15.5)
    known.observe([dataclasses.replace(one, stats=None)], 16.0)
    assert stale(16.0)


def test_what_waits_for_its_prefill_waits_here_and_not_in_an_engine() -> None:
    loads = load.Loads()
    small = replica("r1", engine_args={"max-num-batched-tokens": 512})
    known = situation(small, loads=loads)
    first = loads.open("chat", ids.ReplicaId("r1"), I, tokens=1_000, prefill=1_000)
    assert chosen(ASK, known) == "r1"
    second = loads.open("chat", ids.ReplicaId("r1"), I, tokens=100, prefill=24)
    assert chosen(ASK, known) is None
    assert chosen(BATCH, known) is None
    first.prefilled()
    first.prefilled()
    assert chosen(ASK, known) == chosen(BATCH, known) == "r1"
    second.close()
    second.prefilled()
    first.close()
    assert loads.idle


def test_the_step_of_an_engine_that_says_nothing_is_vllms_own() -> None:
    assert contenders.step_tokens(replica("r").spec) == contenders.STEP_TOKENS
    odd = replica("r", engine_args={"max-num-batched-tokens": "many"})
    assert contenders.step_tokens(odd.spec) == contenders.STEP_TOKENS
    unknown = replica("r", engine=fleet.EngineKind.HTTP)
    assert contenders.step_tokens(unknown.spec) == float("inf")

"""The router over time: what it learns from dispatches, answers, views and losses."""

import dataclasses
from collections.abc import Iterable

import pytest

from scheduler.contracts import fleet, ids, requests
from scheduler.core import load, prefixes, router, routing
from tests.unit.scheduler.test_routing import replica

TIER = requests.Tier.INTERACTIVE
NOW = router.Moment(0.1)


def prompt(talk: int, chunks: int = 6) -> prefixes.Prefix:
    """Return the first chunks of a conversation."""
    chain = tuple(talk * 1000 + depth for depth in range(chunks))
    return prefixes.Prefix(chain, prefixes.ends(chunks)[-1])


def ask(prefix: prefixes.Prefix, **changes: object) -> routing.Ask:
    return dataclasses.replace(
        routing.Ask("chat", "1", TIER, prompt_tokens=prefix.size // 4, prefix=prefix),
        **changes,  # type: ignore[arg-type]
    )


def serve(unit: router.Router, prefix: prefixes.Prefix, cached: float | None = None) -> str:
    """Place a request and let its answer come; returns where."""
    placed = unit.place(ask(prefix), NOW, 0.0)
    assert placed is not None
    placed.guard.close()
    share = placed.claimed if cached is None else cached
    unit.returned(placed, prompt_tokens=1000, cached_tokens=round(1000 * share))
    return placed.replica.replica_id


@pytest.fixture
def unit() -> router.Router:
    made = router.Router(load.Loads())
    made.observe([replica(f"r{n}", seats=64) for n in (1, 2)], 0.0)
    return made


def test_a_conversation_stays_and_new_ones_spread(unit: router.Router) -> None:
    homes = {talk: serve(unit, prompt(talk)) for talk in range(40)}
    assert {serve(unit, prompt(talk, 8)) == home for talk, home in homes.items()} == {True}
    assert 10 <= list(homes.values()).count("r1") <= 30


def test_a_saturated_small_index_loses_to_an_idle_big_one_s2(unit: router.Router) -> None:
    """S2: an unseen prompt goes where there is less work, however many prefixes are there."""
    for talk in range(200):
        placed = unit.place(ask(prompt(talk)), NOW, 0.0)
        assert placed is not None
        if placed.replica.replica_id == "r1":
            unit.index("chat").gone(ids.ReplicaId("r1"))  # r1's index stays small
        placed.guard.close()
    for _ in range(20):
        unit.loads.open("chat", ids.ReplicaId("r1"), TIER, tokens=500)
    for talk in range(1000, 1020):
        placed = unit.place(ask(prompt(talk)), NOW, 0.0)
        assert placed is not None
        assert placed.replica.replica_id == "r2"
        placed.guard.close()


def test_only_what_is_not_cached_counts_as_work(unit: router.Router) -> None:
    home = ids.ReplicaId(serve(unit, prompt(1)))
    placed = unit.place(ask(prompt(1), output_tokens=50), NOW, 0.0)
    assert placed is not None
    assert placed.replica.replica_id == home
    assert (placed.claimed, placed.guard.tokens) == (1.0, 50)
    assert placed.guard.kv_tokens == prompt(1).size // 4 + 50
    placed.guard.close()
    assert unit.loads.idle


def test_what_the_engine_has_evicted_no_longer_attracts(unit: router.Router) -> None:
    old, new = prompt(1), prompt(2)
    homes = {serve(unit, old), serve(unit, new)}
    while len(homes) == 2:  # two conversations at one replica
        new = prompt(new.chain[0] // 1000 + 1)
        homes = {serve(unit, old), serve(unit, new)}
    serve(unit, new, cached=0.0)  # so what was used before it must be gone as well
    assert unit.index("chat").longest(old) == {}


def test_a_replica_that_returns_anew_or_not_at_all_holds_nothing(unit: router.Router) -> None:
    home = serve(unit, prompt(1))
    left = [replica(name, seats=64) for name in ("r1", "r2") if name != home]
    unit.observe(left, 0.2)
    assert len(unit.index("chat")) == 0
    other = serve(unit, prompt(1))
    unit.observe([dataclasses.replace(left[0], incarnation=2)], 0.4)
    assert other != home
    assert len(unit.index("chat")) == 0


def test_the_kv_cache_of_the_statistics_bounds_what_is_thought_to_be_held() -> None:
    stats = fleet.ReplicaStats(1, 64, kv_blocks=128, kv_free=128, kv_block_tokens=16)
    unit = router.Router(load.Loads())
    unit.observe([replica("r1", seats=64, stats=stats)], 0.0)
    for talk in range(20):
        serve(unit, prompt(talk))
    held = unit.index("chat")
    assert held.longest(prompt(0)) == {}
    assert held.longest(prompt(19)) == {ids.ReplicaId("r1"): 1.0}


def test_a_request_that_runs_already_is_counted_where_it_is(unit: router.Router) -> None:
    guard = unit.adopt(ask(prompt(3), output_tokens=70), ids.ReplicaId("r2"))
    assert unit.loads.tokens(ids.ReplicaId("r2")) == 70  # its prompt is thought to be computed
    assert unit.index("chat").longest(prompt(3)) == {ids.ReplicaId("r2"): 1.0}
    guard.close()
    assert unit.loads.idle


def test_batch_lines_that_begin_alike_hold_their_beginning_together() -> None:
    """Where one text fits, dozens of lines that begin with it run; interactive ones find all their cache."""
    stats = fleet.ReplicaStats(1, 64, kv_blocks=128, kv_free=128, kv_block_tokens=16)
    one = replica("r1", seats=64, reserved_seats=0, stats=stats)

    def taken(tier: requests.Tier, talks: Iterable[int]) -> int:
        """Return how many requests run before one finds no room, and that all of them give it back."""
        unit = router.Router(load.Loads())
        unit.observe([one], 0.0)
        guards = []
        for talk in talks:
            placed = unit.place(ask(prompt(talk), tier=tier, output_tokens=20), NOW, 0.0)
            if placed is None:
                break
            guards.append(placed.guard)
        assert unit.loads.at(ids.ReplicaId("r1")).batch_kv <= 2_048
        for guard in guards:
            guard.close()
        assert unit.loads.idle
        return len(guards)

    whole = prompt(1).size // 4 + 20
    apart = 2_048 // whole
    assert taken(requests.Tier.BATCH, range(64)) == apart
    assert taken(requests.Tier.BATCH, [1] * 64) == min(64, 1 + (2_048 - whole) // 20) > 4 * apart
    assert taken(TIER, [1] * 64) == apart

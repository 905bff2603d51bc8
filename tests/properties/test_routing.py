"""A choice may take the request whatever the fleet is, and the same calls choose alike."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.contracts import fleet, ids, requests
from scheduler.core import candidates, contenders, load, prefixes, router, routing
from tests.unit.scheduler.test_routing import replica

MEMBERS: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    version=st.sampled_from(["1", "2"]),
    role=st.sampled_from(list(fleet.Role)),
    state=st.sampled_from([fleet.ReplicaState.SERVING, fleet.ReplicaState.DRAINING]),
    seats=st.integers(1, 4),
    max_context=st.sampled_from([100, 1000]),
    adapters=st.sampled_from([{}, {"a": "/p"}]),
)
ASKS = st.builds(
    routing.Ask,
    model=st.just("chat"),
    version=st.sampled_from(["1", "2"]),
    tier=st.sampled_from(list(requests.Tier)),
    adapter=st.sampled_from([None, "a"]),
    context_tokens=st.sampled_from([0, 50, 500]),
    seats=st.integers(1, 3),
    prompt_tokens=st.integers(0, 3000),
    output_tokens=st.integers(0, 500),
    long=st.booleans(),
    prefix=st.builds(
        lambda chain, rest: prefixes.Prefix(tuple(chain), prefixes.ends(9)[len(chain)] + rest),
        st.lists(st.integers(0, 5), max_size=6, unique=True),
        st.integers(0, 300),
    ),
    hint=st.sampled_from([None, "h"]),
)


@settings(deadline=None)  # a busy machine is no fault
@given(
    members=st.lists(MEMBERS, max_size=6),
    asks=st.lists(ASKS, min_size=1, max_size=30),
    ends=st.lists(st.tuples(st.integers(0, 29), st.floats(0, 1)), max_size=30),
    draw=st.floats(0, 1, exclude_max=True),
    age_s=st.sampled_from([0.1, 5.0]),
)
def test_choices_are_allowed_repeatable_and_given_back(
    members: Sequence[dict[str, Any]],
    asks: Sequence[routing.Ask],
    ends: Sequence[tuple[int, float]],
    draw: float,
    age_s: float,
) -> None:
    replicas = [replica(f"r{n}", **fields) for n, fields in enumerate(members)]

    def run() -> list[str | None]:
        loads = load.Loads()
        unit = router.Router(loads, limit=40)
        unit.observe(replicas, 0.0)
        placed = []
        for ask in asks:
            one = unit.place(ask, router.Moment(age_s), draw)
            placed.append(one)
            if one is not None:
                _may(ask, one.replica, loads)
        for number, cached in ends:
            one = placed[number % len(placed)]
            if one is not None:
                one.guard.close()
                unit.returned(one, prompt_tokens=100, cached_tokens=round(100 * cached))
        for one in placed:
            if one is not None:
                one.guard.close()
        assert loads.idle
        return [None if one is None else one.replica.replica_id for one in placed]

    assert run() == run()


@settings(deadline=None)  # a busy machine is no fault
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 400), st.integers(1, 60), st.booleans()),
        max_size=60,
    )
)
def test_the_index_never_exceeds_its_limit(steps: list[tuple[int, int, int, bool]]) -> None:
    """Whoever joins or leaves when: what earlier replicas held gives way to what later ones do."""
    limit = 200
    index = prefixes.Index(limit=limit)
    there: set[ids.ReplicaId] = set()
    for number, first, length, leaves in steps:
        name = ids.ReplicaId(f"r{number}")
        if leaves:
            index.gone(name)
            there.discard(name)
        else:
            chain = tuple(range(first, first + length))
            index.dispatched(prefixes.Prefix(chain, prefixes.ends(length)[-1]), name)
            there.add(name)
        assert len(index) <= max(limit, 64 * len(there))
    for name in there:
        index.gone(name)
    assert len(index) == 0


def _may(ask: routing.Ask, chosen: fleet.Replica, loads: load.Loads) -> None:
    spec = chosen.spec
    assert chosen.state is fleet.ReplicaState.SERVING
    assert spec.version == ask.version
    assert ask.adapter is None or ask.adapter in spec.adapters
    assert ask.context_tokens <= spec.max_context
    if ask.tier is requests.Tier.BATCH:
        assert chosen.role is not fleet.Role.INTERACTIVE
    else:
        assert chosen.role is not fleet.Role.BATCH
        assert loads.urgent(chosen.replica_id) <= spec.seats


@settings(deadline=None)  # a busy machine is no fault
@given(st.lists(st.integers(0, 7), max_size=40), st.integers(1, 8))
def test_rendezvous_moves_only_what_was_on_the_replica_that_went(
    keys: list[int], count: int
) -> None:
    known = candidates.Fleet(load.Loads())
    replicas = [replica(f"r{n}") for n in range(count + 1)]

    def place(left: Sequence[fleet.Replica]) -> dict[int, ids.ReplicaId]:
        known.observe(left, 0.0)
        found = {}
        for key in keys:
            at = routing.Situation(known, 0.1, key=contenders.hash_of(str(key)))
            choice = routing.choose(routing.Ask("chat", "1", requests.Tier.INTERACTIVE), at)
            assert choice is not None
            found[key] = choice.replica.replica_id
        return found

    whole, less = place(replicas), place(replicas[:-1])
    gone = replicas[-1].replica_id
    assert all(less[key] == whole[key] for key in whole if whole[key] != gone)


def test_an_older_incarnations_prefixes_are_forgotten() -> None:
    unit = router.Router(load.Loads())
    one = replica("r1")
    unit.observe([one], 0.0)
    ask = routing.Ask("chat", "1", requests.Tier.INTERACTIVE, prefix=prefixes.Prefix((1, 2), 512))
    placed = unit.place(ask, router.Moment(0.1), 0.0)
    assert placed is not None
    assert len(unit.index("chat")) == 2
    unit.observe([dataclasses.replace(one, incarnation=2)], 0.2)
    assert len(unit.index("chat")) == 0
    unit.observe([], 0.4)
    unit.returned(placed, prompt_tokens=128, cached_tokens=0)
    placed.guard.close()
    assert len(unit.index("chat")) == 0

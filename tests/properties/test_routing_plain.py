"""What is kept up to date in steps decides as looking at every replica anew would."""

import dataclasses
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.contracts import fleet, ids
from scheduler.core import candidates, holders, load, routing
from tests import plain_routing
from tests.properties.test_routing import ASKS
from tests.unit.scheduler.test_routing import replica

NAMES = [f"r{n}" for n in range(6)]
STATS = st.none() | st.builds(
    fleet.ReplicaStats,
    at_us=st.integers(1, 3),
    seats=st.just(4),
    interactive=st.integers(0, 2),
    batch=st.integers(0, 2),
    kv_blocks=st.sampled_from([0, 100]),
    kv_free=st.integers(0, 100),
    kv_block_tokens=st.just(32),
)
REPLICA: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    version=st.sampled_from(["1", "1", "1", "2"]),
    role=st.sampled_from(list(fleet.Role)),
    state=st.sampled_from([fleet.ReplicaState.SERVING] * 4 + [fleet.ReplicaState.DRAINING]),
    seats=st.integers(1, 4),
    reserved_seats=st.integers(0, 1),
    max_context=st.sampled_from([100, 1000]),
    adapters=st.sampled_from([{}, {"a": "/p"}, {"a": "/p", "b": "/q"}]),
    incarnation=st.integers(1, 2),
    stats=STATS,
)
VIEW: st.SearchStrategy[dict[str, dict[str, Any]]] = st.dictionaries(
    st.sampled_from(NAMES), REPLICA, max_size=6
)
NAMED = st.sampled_from(NAMES).map(ids.ReplicaId)
PLACE = st.fixed_dictionaries(
    {
        "ask": ASKS,
        "left": st.sampled_from([0.0, 0.0, 0.4]),
        "held": st.dictionaries(NAMED, st.sampled_from([0.05, 0.3, 0.9]), max_size=4),
        "key": st.none() | st.integers(0, 2**64 - 1),
        "adapter_share": st.sampled_from([0.0, 0.3, 1.0]),
        "dead": st.dictionaries(NAMED, st.integers(0, 2), max_size=1),
        "full": st.frozensets(NAMED, max_size=2),
        "draw": st.floats(0, 1, exclude_max=True),
        "after": st.sampled_from(["", *NAMES]),
        "opens": st.booleans(),
    }
)
STEP = st.one_of(
    PLACE,
    PLACE,
    PLACE,
    VIEW,
    st.tuples(st.sampled_from(["prefilled", "close"]), st.integers(0, 30)),
    st.floats(0, 1.5),
)


@settings(deadline=None, max_examples=300)  # a busy machine is no fault
@given(first=VIEW, steps=st.lists(STEP, max_size=40))
def test_decisions_are_those_of_the_plain_way(first: dict[str, Any], steps: list[Any]) -> None:
    loads = load.Loads()
    known = candidates.Fleet(loads)
    guards: list[load.Guard] = []
    now = 0.0
    known.observe([replica(name, **fields) for name, fields in first.items()], now)
    for step in steps:
        if isinstance(step, float):
            now += step
        elif isinstance(step, tuple):
            if guards:
                getattr(guards[step[1] % len(guards)], step[0])()
        elif "ask" in step:
            guards += _placed(known, loads, dict(step), now)
        else:
            known.observe([replica(name, **fields) for name, fields in step.items()], now)
    for guard in guards:
        guard.close()
    assert loads.idle


def _placed(
    known: candidates.Fleet, loads: load.Loads, step: dict[str, Any], now: float
) -> list[load.Guard]:
    """Decide both ways, compare, and count the request where it went."""
    opens, ask = step.pop("opens"), dataclasses.replace(step.pop("ask"), left=step.pop("left"))
    held = holders.Holders.of(step.pop("held"))
    at = routing.Situation(known, now, held, **step)
    choice = routing.choose(ask, at)
    assert choice == plain_routing.choose(ask, at)
    if choice is None or not opens:
        return []
    prefill = round(ask.prompt_tokens * (1 - choice.cached_share))
    name = choice.replica.replica_id
    tokens = prefill + ask.output_tokens
    return [
        loads.open(
            ask.model, name, ask.tier, ask.seats,
            tokens=tokens, prefill=prefill, kv_tokens=ask.kv_tokens,
        )
    ]  # fmt: skip

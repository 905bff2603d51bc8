"""Routing's promises, each for any fleet and traffic: going round without statistics, bounded load, pools."""

import collections
import math
import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.contracts import fleet, ids, requests
from scheduler.core import holders, load, prefixes, router, routing
from tests.unit.scheduler.test_routing import replica, situation

I = requests.Tier.INTERACTIVE  # noqa: E741 - a tier
POLICY = routing.Policy(slack_tokens=500)


@settings(deadline=None)  # a busy machine is no fault
@given(
    seats=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    silent=st.booleans(),
    ends=st.lists(st.integers(0, 30), max_size=30),
)
def test_without_statistics_requests_go_round_and_no_replica_gets_more_than_its_seats(
    seats: list[int], silent: bool, ends: list[int]
) -> None:
    """Old statistics, or none at all: n turns reach all n that have room, and the cap is each one's own."""
    stats = None if silent else fleet.ReplicaStats(at_us=1, seats=99)
    unit = router.Router(load.Loads())
    unit.observe([replica(f"r{n}", seats=s, stats=stats) for n, s in enumerate(seats)], 0.0)
    room = {f"r{n}": s for n, s in enumerate(seats)}
    ask, at = routing.Ask("chat", "1", I, prompt_tokens=100), router.Moment(5.0)
    guards: list[load.Guard] = []

    def one() -> str | None:
        placed = unit.place(ask, at, 0.9)
        if placed is None:
            return None
        assert placed.reason == routing.STALE
        guards.append(placed.guard)
        placed.guard.prefilled()
        room[placed.replica.replica_id] -= 1
        return placed.replica.replica_id

    while free := {name for name, left in room.items() if left}:
        turn = [one() for _ in free]
        assert set(turn) == free  # nobody twice before everybody once
        assert min(room.values()) >= 0
    assert one() is None
    for number in ends:
        if guards:
            gone = guards.pop(number % len(guards))
            gone.close()
            room[gone.replica_id] += 1
            assert one() == gone.replica_id  # the only one with room
    for guard in guards:
        guard.close()
    assert unit.loads.idle


@settings(deadline=None)  # a busy machine is no fault
@given(seed=st.integers(0, 2**32), count=st.integers(2, 8))
def test_a_prefix_draws_until_its_holder_is_saturated_and_never_beyond(
    seed: int, count: int
) -> None:
    """Sticky to the longest prefix of those within the bound, in tokens; nobody is sent over it."""
    draws = random.Random(seed)
    loads = load.Loads()
    unit = router.Router(loads, POLICY)
    names = [ids.ReplicaId(f"r{n}") for n in range(count)]
    unit.observe([replica(name, seats=99) for name in names], 0.0)
    running: list[router.Placed] = []
    for _ in range(60):
        chain = tuple(draws.randrange(3) * 100 + depth for depth in range(draws.randint(1, 5)))
        prefix = prefixes.Prefix(chain, prefixes.ends(5)[len(chain) - 1] + draws.randint(0, 99))
        ask = routing.Ask(
            "chat", "1", I, prompt_tokens=prefix.size // 4, output_tokens=draws.randint(0, 300),
            prefix=prefix,
        )  # fmt: skip
        held = {
            name: share
            for name, share in unit.index("chat").longest(prefix).items()
            if share >= POLICY.least_share
        }
        work = {name: loads.tokens(name) for name in names}
        total = sum(work.values()) + ask.prompt_tokens + ask.output_tokens
        bound = max(POLICY.slack_tokens, POLICY.factor * total / count)

        def within(name: ids.ReplicaId) -> bool:
            own = ask.prompt_tokens * (1 - held.get(name, 0.0)) + ask.output_tokens  # noqa: B023
            return not work[name] or work[name] + own <= bound + 1e-6  # noqa: B023

        placed = unit.place(ask, router.Moment(0.1), draws.random())
        assert placed is not None
        chosen, fit = placed.replica.replica_id, [name for name in held if within(name)]
        if fit:
            most = max(held[name] for name in fit)
            assert held.get(chosen) == most
            assert work[chosen] == min(work[name] for name in fit if held[name] == most)
        else:
            assert work[chosen] == min(work.values())
        running.append(placed)
        if draws.random() < 0.4:
            draws.choice(running).guard.prefilled()
        if draws.random() < 0.5:
            running.pop(draws.randrange(len(running))).guard.close()
    for each in running:
        each.guard.close()
    assert loads.idle


@settings(deadline=None)  # a busy machine is no fault
@given(
    count=st.integers(2, 30),
    asked=st.lists(st.sampled_from("aaaabc"), min_size=1, max_size=60),
    seed=st.integers(0, 2**32),
)
def test_an_adapter_keeps_to_as_many_replicas_as_its_traffic_is_worth(
    count: int, asked: Sequence[str], seed: int
) -> None:
    draws = random.Random(seed)
    unit = router.Router(load.Loads())
    adapters = dict.fromkeys("abc", "/p")
    unit.observe([replica(f"r{n:02}", adapters=adapters) for n in range(count)], 0.0)
    went: dict[str, set[str]] = collections.defaultdict(set)
    widest: dict[str, int] = collections.defaultdict(int)
    seen: collections.Counter[str] = collections.Counter()
    for number, adapter in enumerate(asked):
        share = seen[adapter] / number if number else 0.0
        width = max(1, round(share * routing.DEFAULT.factor * count))
        widest[adapter] = max(widest[adapter], min(width, count))
        ask = routing.Ask("chat", "1", I, adapter=adapter, prompt_tokens=10)
        placed = unit.place(ask, router.Moment(0.1), draws.random())
        assert placed is not None
        assert (placed.reason == "adapter is there") == (width < count)
        placed.guard.close()
        seen[adapter] += 1
        went[adapter].add(placed.replica.replica_id)
        assert len(went[adapter]) <= widest[adapter]


@settings(deadline=None)  # a busy machine is no fault
@given(
    contexts=st.lists(st.sampled_from([1000, 2000, 4000]), min_size=1, max_size=12),
    asked=st.lists(st.booleans(), max_size=60),
    draw=st.floats(0, 1, exclude_max=True),
)
def test_long_prompts_never_leave_their_pool_though_others_are_idle(
    contexts: list[int], asked: list[bool], draw: float
) -> None:
    """The pool: a quarter, rounded up, of those with the largest contexts; two seats each."""
    loads = load.Loads()
    replicas = [replica(f"r{n:02}", max_context=c, seats=2) for n, c in enumerate(contexts)]
    size = math.ceil(len(contexts) * routing.DEFAULT.long_share)
    least = sorted(contexts)[-size]
    used: set[str] = set()
    longs = 0
    for long in asked:
        ask = routing.Ask("chat", "1", I, prompt_tokens=1, long=long)
        choice = routing.choose(ask, situation(*replicas, loads=loads, draw=draw))
        if not long:
            assert (choice is None) == (sum(map(loads.total, _ids(replicas))) == 2 * len(replicas))
            continue  # others fill nothing here
        assert (choice is None) == (longs == 2 * size)
        if choice is not None:
            assert choice.replica.spec.max_context >= least
            loads.open("chat", choice.replica.replica_id, I, tokens=1)
            used.add(choice.replica.replica_id)
            longs += 1
    assert len(used) <= size


@settings(deadline=None)  # a busy machine is no fault
@given(
    shares=st.dictionaries(st.integers(0, 9), st.floats(0.01, 1.0), max_size=8),
    least=st.floats(0.0, 1.0),
)
def test_levels_fall_and_name_each_holder_once(shares: dict[int, float], least: float) -> None:
    named = {ids.ReplicaId(f"r{n}"): share for n, share in shares.items() if share >= least}
    found = holders.Holders.of(named)
    levels = [share for share, _ in found.levels()]
    assert levels == sorted(set(levels), reverse=True)
    assert found.shares() == named
    assert all(found.share(name) == share for name, share in named.items())


def _ids(replicas: Sequence[fleet.Replica]) -> list[ids.ReplicaId]:
    return [one.replica_id for one in replicas]

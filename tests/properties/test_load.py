"""Whatever order guards open, close and fail in, the load ends at zero and is never negative."""

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from scheduler.contracts import ids, requests
from scheduler.core import load

REPLICAS = [ids.ReplicaId(name) for name in ("r1", "r2", "r3")]
OPENS = st.tuples(
    st.sampled_from(REPLICAS), st.sampled_from(list(requests.Tier)), st.integers(1, 5)
)


@given(
    opens=st.lists(OPENS, max_size=40),
    closes=st.lists(st.integers(0, 39), max_size=80),
)
def test_load_returns_to_zero(
    opens: list[tuple[ids.ReplicaId, requests.Tier, int]], closes: list[int]
) -> None:
    loads = load.Loads()
    guards = [loads.open("chat", replica, tier, seats) for replica, tier, seats in opens]
    held = dict(enumerate(guards))
    for index in closes:  # in any order, some twice, some never opened
        if index < len(guards):
            guards[index].close()
            held.pop(index, None)
        for replica in REPLICAS:
            expected = sum(g.seats for g in held.values() if g.replica_id == replica)
            assert loads.total(replica) == expected
            assert loads.total(replica) == loads.batch(replica) + loads.urgent(replica)
        assert sum(loads.by_tier("chat").values()) == len(held)
    for guard in guards:
        guard.close()
    assert loads.idle
    assert set(loads.by_tier("chat").values()) == {0}


@given(opens=st.lists(OPENS, max_size=20), failing=st.integers(0, 20))
def test_load_is_given_back_on_any_error(
    opens: list[tuple[ids.ReplicaId, requests.Tier, int]], failing: int
) -> None:
    loads = load.Loads()
    for index, (replica, tier, seats) in enumerate(opens):
        with contextlib.suppress(RuntimeError), loads.open("chat", replica, tier, seats) as guard:
            assert not guard.closed
            if index >= failing:
                raise RuntimeError
    assert loads.idle

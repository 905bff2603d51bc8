"""Whatever order guards open, close and fail in, the load ends at zero and is never negative."""

import asyncio
import contextlib

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.contracts import ids, requests
from scheduler.core import load

REPLICAS = [ids.ReplicaId(name) for name in ("r1", "r2", "r3")]
OPENS = st.tuples(
    st.sampled_from(REPLICAS),
    st.sampled_from(list(requests.Tier)),
    st.integers(1, 5),
    st.integers(0, 5000),
    st.integers(0, 9000),
)
Open = tuple[ids.ReplicaId, requests.Tier, int, int, int]


@settings(deadline=None)  # a busy machine is no fault
@given(
    opens=st.lists(OPENS, max_size=40),
    closes=st.lists(st.integers(0, 39), max_size=80),
)
def test_load_returns_to_zero(opens: list[Open], closes: list[int]) -> None:
    loads = load.Loads()
    kept = {replica: loads.at(replica) for replica in REPLICAS}  # as routing keeps them
    guards = [open_(loads, each) for each in opens]
    held = dict(enumerate(guards))
    for index in closes:  # in any order, some twice, some never opened
        if index < len(guards):
            if index % 2:  # an answer's first token, or an end before it
                guards[index].prefilled()
            if index % 3:  # some answer, some go before they do
                guards[index].close()
                held.pop(index, None)
        for replica in REPLICAS:
            mine = [g for g in held.values() if g.replica_id == replica]
            assert loads.total(replica) == sum(g.seats for g in mine)
            assert loads.tokens(replica) == sum(g.tokens for g in mine)
            assert loads.tokens(replica) >= loads.total(replica)  # a seat is a token at least
            kv = kept[replica].urgent_kv + kept[replica].batch_kv
            assert kv == sum(g.kv_tokens for g in mine)
            assert kept[replica].prefill == sum(g.prefill for g in mine)
            assert loads.at(replica) is kept[replica]
            assert loads.total(replica) == loads.batch(replica) + loads.urgent(replica)
        assert sum(loads.by_tier("chat").values()) == len(held)
        loads.forget({g.replica_id for g in held.values()} | set(REPLICAS[:1]))
        for replica in REPLICAS:
            kept[replica] = loads.at(replica)
    for guard in guards:
        guard.close()
    assert loads.idle
    assert set(loads.by_tier("chat").values()) == {0}


@settings(deadline=None)  # a busy machine is no fault
@given(opens=st.lists(OPENS, max_size=20), failing=st.integers(0, 20))
def test_load_is_given_back_on_any_error(opens: list[Open], failing: int) -> None:
    loads = load.Loads()
    for index, each in enumerate(opens):
        with contextlib.suppress(RuntimeError), open_(loads, each) as guard:
            assert not guard.closed
            if index >= failing:
                raise RuntimeError
    assert loads.idle


@settings(deadline=None)  # a busy machine is no fault
@given(opens=st.lists(OPENS, max_size=12), cancelled=st.sets(st.integers(0, 11)))
def test_load_is_given_back_on_cancellation(opens: list[Open], cancelled: set[int]) -> None:
    """Tasks that hold a place, cancelled at any point, some twice: nothing stays counted."""
    loads = load.Loads()

    async def serve(each: Open) -> None:
        with open_(loads, each):
            await asyncio.sleep(0)
            await asyncio.Event().wait() if each[2] == 5 else await asyncio.sleep(0)

    async def run() -> None:
        tasks = [asyncio.create_task(serve(each)) for each in opens]
        await asyncio.sleep(0)
        for index in cancelled:
            if index < len(tasks):
                tasks[index].cancel()
                tasks[index].cancel()
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    assert loads.idle
    assert all(loads.tokens(replica) == 0 for replica in REPLICAS)


def open_(loads: load.Loads, each: Open) -> load.Guard:
    replica, tier, seats, tokens, kv_tokens = each
    return loads.open(
        "chat", replica, tier, seats, tokens=tokens, prefill=tokens // 2, kv_tokens=kv_tokens
    )

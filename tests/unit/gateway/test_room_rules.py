"""What the waiting room does with its rules: a flood, room in tokens, holdback, stale statistics."""

import collections
import contextlib
import dataclasses
from typing import Any

import msgspec
import pytest

from gateway import asks, dependencies, local_room, local_waiter, settings
from scheduler.contracts import clock, errors, fleet, ids, ports, quota, requests, usage
from scheduler.core import quota as books
from scheduler.core import quota_limits as limits
from tests.unit.gateway import fleets, harness

I, S, B = requests.Tier.INTERACTIVE, requests.Tier.STANDARD, requests.Tier.BATCH  # noqa: E741 - tiers
NOW_US = clock.FakeClock().wall_us()


def ask(name: str, tier: requests.Tier = I, team: str = "physics", **fields: Any) -> asks.Asking:
    return asks.Asking(
        request_id=name,
        model=fields.pop("model", "chat"),
        tier=tier,
        team=team,
        user="u",
        key_id="k",
        arrived_us=NOW_US,
        **fields,
    )


class Book:
    """Quotas that remember."""

    def __init__(self) -> None:
        self.claims: list[quota.Claim] = []
        self.settled: list[quota.Spent] = []

    def reserve(self, claim: quota.Claim) -> quota.Hold:
        if claim.team == "poor":
            raise errors.QuotaExceeded("used up")
        self.claims.append(claim)
        return _Hold(self)

    def adopt(self, claim: quota.Claim) -> quota.Hold:
        return self.reserve(claim)


@dataclasses.dataclass
class _Hold:
    book: Book
    done: bool = False

    def headers(self, now_us: int) -> quota.Headers:
        return ()

    def settle(self, spent: quota.Spent, now_us: int) -> None:
        if not self.done:
            self.book.settled.append(spent)
        self.done = True


def room(
    time: clock.FakeClock,
    *replicas: fleet.Replica,
    book: quota.Quotas | None = None,
    **options: Any,
) -> tuple[local_room.LocalRoom, ports.StaticFleet]:
    source = ports.StaticFleet(fleets.make_view(replicas, max_context=65536))
    deps = dependencies.Dependencies(
        settings.GatewaySettings(**options),
        ports.StaticKeys(harness.KEYS),
        source,
        usage.MemorySink(),
        time,
        "c1",
        quotas=book or quota.Unlimited(),
    )
    return local_room.LocalRoom(deps, lambda: 0.5), source


def granted(waiters: list[local_waiter.LocalWaiter]) -> list[local_waiter.LocalWaiter]:
    return [waiter for waiter in waiters if waiter.open is not None]


async def test_a_team_that_floods_waits_for_itself_alone(fake_clock: clock.FakeClock) -> None:
    """One seat, 200 of one team before one of another: the other has the second turn, not the 201st."""
    made, _ = room(fake_clock, fleets.make_replica("r1", seats=1))
    flood = [made.enter(ask(f"f{n}", team="flood")) for n in range(200)]
    other = made.enter(ask("o", team="other"))
    served = 0
    while other.open is None:
        (now,) = granted(flood)
        made.leave(now, quota.Spent(100, 0, 200))
        flood.remove(now)
        served += 1
        await fake_clock.advance(0)
    assert served == 1
    for waiter in (*flood, other):
        made.leave(waiter)
    assert made.loads.idle


async def test_a_flood_that_fills_the_band_gives_way_to_others(fake_clock: clock.FakeClock) -> None:
    made, _ = room(fake_clock, fleets.make_replica("r1", seats=1), queue_interactive=10)
    flood = [made.enter(ask(f"f{n}", team="flood")) for n in range(11)]
    with pytest.raises(errors.Shed):
        made.enter(ask("f11", team="flood"))
    made.enter(ask("o", team="other"))
    with pytest.raises(errors.Shed) as told:
        flood[-1].collect()  # the newest of the flood had to go
    assert told.value.retry_after_s is not None
    assert made.waiting("chat")["interactive"] == 10


async def test_shapes_do_not_block_each_other(fake_clock: clock.FakeClock) -> None:
    made, _ = room(
        fake_clock,
        fleets.make_replica("r1", seats=2),
        fleets.make_replica("r2", seats=2, adapters={}),
    )
    poets = [made.enter(ask(f"p{n}", adapter="poet")) for n in range(5)]
    plain = [made.enter(ask(f"n{n}")) for n in range(2)]
    wide = made.enter(ask("w", seats=2))
    assert len(granted(poets)) == 2
    assert len(granted(plain)) == 2
    assert wide.open is None
    for waiter in (*poets, *plain, wide):
        made.leave(waiter)


async def test_a_request_waits_until_its_blocks_fit(fake_clock: clock.FakeClock) -> None:
    """Eight seats are free; the KV cache holds two prompts of 3,000 tokens with their answers, not three."""
    stats = fleet.ReplicaStats(at_us=1, seats=8, kv_blocks=500, kv_free=500, kv_block_tokens=16)
    made, _ = room(fake_clock, fleets.make_replica("r1", stats=stats, max_context=8192))
    big = [made.enter(ask(f"b{n}", prompt_tokens=3000, max_tokens=500)) for n in range(3)]
    for waiter in big:
        if waiter.open is not None:
            waiter.open.prefilled()
    await fake_clock.advance(0)
    assert len(granted(big)) == 2
    small = made.enter(ask("s", prompt_tokens=100, max_tokens=50))
    assert small.open is not None  # another shape: it passes by
    made.leave(big[0])
    await fake_clock.advance(0)
    assert big[2].open is not None


async def test_estimates_follow_what_a_team_samples(fake_clock: clock.FakeClock) -> None:
    book = Book()
    made, _ = room(fake_clock, fleets.make_replica("r1"), book=book)
    first = made.enter(ask("a", chars=4000))
    assert first.needs.output_tokens == 256
    for n in range(70):
        waiter = made.enter(ask(f"l{n}", chars=4000))
        made.leave(waiter, quota.Spent(1500, 500, 40))
        await fake_clock.advance(0)
    assert made.enter(ask("b", chars=4000)).needs.output_tokens == 40
    later = made.enter(ask("c", chars=4000, max_tokens=30))
    assert later.needs.output_tokens == 30
    assert later.needs.prompt_tokens == pytest.approx(2000, rel=0.1)
    assert made.enter(ask("d", team="other", chars=4000)).needs.output_tokens == 256


async def test_quotas_are_reserved_before_the_wait_and_settled_once(
    fake_clock: clock.FakeClock,
) -> None:
    book = Book()
    made, _ = room(fake_clock, fleets.make_replica("r1", seats=1), book=book, queue_interactive=1)
    first = made.enter(ask("a", prompt_tokens=10, max_tokens=7))
    assert (book.claims[0].output_tokens, book.claims[0].team) == (7, "physics")
    second = made.enter(ask("b"))
    with pytest.raises(errors.Shed):
        made.enter(ask("c"))
    with pytest.raises(errors.QuotaExceeded):
        made.enter(ask("d", team="poor"))
    assert book.settled == [quota.NOTHING]  # c's
    made.leave(first, quota.Spent(10, 0, 5))
    made.leave(first, quota.Spent(10, 0, 5))
    made.leave(second)
    assert book.settled == [quota.NOTHING, quota.Spent(10, 0, 5), quota.NOTHING]
    assert len(book.claims) == 3


async def test_standard_leaves_seats_to_interactive_while_these_come(
    fake_clock: clock.FakeClock,
) -> None:
    made, _ = room(fake_clock, fleets.make_replica("r1", seats=20), holdback=0.1)
    alone = [made.enter(ask(f"x{n}", S)) for n in range(20)]
    assert len(granted(alone)) == 20  # nobody interactive has come
    for waiter in alone:
        made.leave(waiter)
    await fake_clock.advance(0)
    made.leave(made.enter(ask("i")))
    await fake_clock.advance(0)
    standard = [made.enter(ask(f"s{n}", S)) for n in range(20)]
    assert len(granted(standard)) == 18
    urgent = [made.enter(ask(f"u{n}")) for n in range(2)]
    assert len(granted(urgent)) == 2
    await fake_clock.advance(61)
    made.leave(urgent[0])
    made.leave(urgent[1])
    await fake_clock.advance(0)
    made.tick()
    assert len(granted(standard)) == 20


async def test_long_prompts_stay_in_their_pool_and_a_team_has_few(
    fake_clock: clock.FakeClock,
) -> None:
    replicas = [fleets.make_replica(f"r{n}", max_context=65536) for n in range(4)]
    made, _ = room(fake_clock, *replicas, long_prompt_tokens=1000, long_per_team=2)
    long = [
        made.enter(ask(f"{team}{n}", team=team, prompt_tokens=2000, max_tokens=10))
        for team in ("a", "b")
        for n in range(3)
    ]
    for waiter in long:
        if waiter.open is not None:
            waiter.open.prefilled()
    await fake_clock.advance(0)
    assert collections.Counter(waiter.asking.team for waiter in granted(long)) == {"a": 2, "b": 2}
    pool = {waiter.open.replica.replica_id for waiter in long if waiter.open is not None}
    assert len(pool) == 1  # a quarter of four
    short = [made.enter(ask(f"s{n}", prompt_tokens=10, max_tokens=10)) for n in range(12)]
    assert len(granted(short)) == 12
    made.leave(long[0])
    await fake_clock.advance(0)
    assert long[2].open is not None
    for waiter in (*long, *short):
        made.leave(waiter)
    assert made.loads.idle


async def test_frozen_statistics_s5(fake_clock: clock.FakeClock) -> None:
    """S5: all statistics freeze for 5 s: interactive goes round under caps, batch takes known seats."""
    stats = fleet.ReplicaStats(at_us=1, seats=8, interactive=1, batch=2)
    replicas = [
        fleets.make_replica(f"r{n}", stats=stats, seats=8, reserved_seats=1) for n in range(3)
    ]
    made, source = room(fake_clock, *replicas, queue_batch=500)
    made.tick()
    assert made.stale() == {}
    source.set(dataclasses.replace(source.view() or pytest.fail("no view"), revision=2))
    await fake_clock.advance(5)
    made.tick()
    assert made.stale() == {"chat": 3}  # what the metric forebay_stale_replicas shows
    lines = [made.enter(ask(f"b{n}", B)) for n in range(500)]
    per_replica = collections.Counter(
        waiter.open.replica.replica_id for waiter in lines if waiter.open is not None
    )
    # 8 seats, 1 reserved, 1 interactive and 2 batch of others: 4 known to be free on each.
    assert per_replica == {f"r{n}": 4 for n in range(3)}
    urgent = [made.enter(ask(f"i{n}")) for n in range(12)]
    went = [waiter.open.replica.replica_id for waiter in urgent if waiter.open is not None]
    assert collections.Counter(went) == {f"r{n}": 4 for n in range(3)}  # in turn
    assert went[:3] == went[3:6] == went[6:9]
    more = [made.enter(ask(f"j{n}")) for n in range(100)]
    assert made.loads.urgent(ids.ReplicaId("r0")) <= 8  # the cap
    for waiter in (*lines, *urgent, *more):
        made.leave(waiter)
    await fake_clock.advance(0)
    assert made.loads.idle


async def test_batch_that_is_shed_hears_when_to_come_back(fake_clock: clock.FakeClock) -> None:
    one = fleets.make_replica("r1", seats=1, reserved_seats=0)
    made, _ = room(fake_clock, one, queue_total=2)
    made.enter(ask("running"))
    line = made.enter(ask("b", B))
    made.enter(ask("i1"))
    made.enter(ask("i2"))
    with pytest.raises(errors.Shed) as told:
        line.collect()
    assert told.value.retry_after_s == 1.0


async def test_thousands_wait_and_a_tick_asks_about_shapes_not_about_them(
    fake_clock: clock.FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = room(
        fake_clock, fleets.make_replica("r1", seats=1), queue_interactive=10**6, queue_total=10**6
    )
    for n in range(3_000):
        made.enter(ask(f"q{n}", team=f"t{n % 50}"))
    asked = 0
    inner = made.outlook

    def counted(model: str, version: str | None = None) -> Any:
        nonlocal asked
        asked += 1
        return inner(model, version)

    monkeypatch.setattr(made, "outlook", counted)
    made.tick()
    assert asked <= 2


async def test_standard_that_has_waited_too_long_takes_a_seat_that_is_kept(
    fake_clock: clock.FakeClock,
) -> None:
    made, _ = room(fake_clock, fleets.make_replica("r1", seats=20), age_standard_s=30.0)
    running = [await made.wait(made.enter(ask(f"i{n}"))) for n in range(20)]
    old = made.enter(ask("old", S))
    granted = False
    for turn in range(
        100
    ):  # one seat comes free at a time, and an interactive request waits for it
        made.enter(ask(f"w{turn}"))
        await fake_clock.advance(0.5)
        running.pop(0).close()
        await fake_clock.advance(0)
        granted = old.open is not None
        if granted:
            break
        newest = made._waiters[f"w{turn}"].collect()
        assert newest is not None
        running.append(newest)
    assert granted
    assert turn >= 59  # not before its time


def body_ask(endpoint: requests.Endpoint, **body: Any) -> asks.Asking:
    return asks.of(
        requests.InferenceRequest(
            ids.RequestId("x"),
            endpoint,
            {"model": "chat", **body},
            "chat",
            I,
            harness.ANN,
            False,
            1,
        )
    )


_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "a" * 40_000}}


@pytest.mark.parametrize(
    ("asked", "least"),
    [
        (body_ask(requests.Endpoint.EMBEDDINGS, input=["x" * 4000] * 100), 100_000),
        (body_ask(requests.Endpoint.EMBEDDINGS, input=[[1] * 1000] * 100), 100_000),
        (body_ask(requests.Endpoint.EMBEDDINGS, input=[1] * 1000), 1000),
        (body_ask(requests.Endpoint.COMPLETIONS, prompt=[[1] * 100] * 8, max_tokens=1), 800 + 8),
        (body_ask(requests.Endpoint.COMPLETIONS, prompt=["x" * 400] * 8, max_tokens=1), 800 + 8),
        (
            body_ask(
                requests.Endpoint.CHAT,
                messages=[{"role": "assistant", "content": None, "tool_calls": [_CALL]}],
                max_tokens=1,
            ),
            10_000,
        ),
        (
            body_ask(
                requests.Endpoint.CHAT,
                messages=[{"role": "user", "content": "x"}],
                functions=[_CALL],
                max_tokens=1,
            ),
            10_000,
        ),
        (body_ask(requests.Endpoint.CHAT, messages=[{"role": "user", "content": "x"}]), 256),
    ],
)
async def test_two_hundred_at_once_overspend_by_no_more_than_one(
    fake_clock: clock.FakeClock, asked: asks.Asking, least: int
) -> None:
    """Whatever the shape: what each reserves covers what each uses, also where answers were short so far."""
    short = quota.Spent(2, 0, 1)
    limits_ = [limits.Limit(_DAY, 3 * least)]
    book = books.Book()
    made, _ = room(fake_clock, fleets.make_replica("r1", seats=8), book=book)
    for n in range(70):
        made.leave(made.enter(ask(f"l{n}", team=asked.team, chars=4000, size=4000)), short)
        await fake_clock.advance(0)
    book.set_limits(limits_)
    taken: list[local_waiter.LocalWaiter] = []
    for n in range(200):
        with contextlib.suppress(errors.QuotaExceeded):
            one = msgspec.structs.replace(asked, request_id=str(n), arrived_us=NOW_US)
            taken.append(made.enter(one))
    for waiter in taken:
        made.leave(waiter, quota.Spent(least, 0, 0))
    assert 1 <= len(taken) <= 3
    assert sum(amount for amount in book.collect().values()) <= 3 * least + least


_DAY = limits.Key(limits.Scope.TEAM, "physics", "", "", "", limits.Kind.TOKENS_PER_DAY)

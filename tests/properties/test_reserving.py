"""Whatever could be placed at all is placed in bounded time, however many smaller requests come meanwhile."""

import asyncio
import collections
import itertools
import math
from collections.abc import Iterator

import hypothesis
import pytest
from hypothesis import strategies as st

from gateway import asks, dependencies, local_room, local_waiter, settings
from scheduler.contracts import clock, ids, ports, quota, requests, usage
from tests.unit.gateway import fleets, harness

I, S, B = requests.Tier.INTERACTIVE, requests.Tier.STANDARD, requests.Tier.BATCH  # noqa: E741 - tiers
AFTER_S = 5.0
STEP_S = 0.25


class Model:
    """One model under a flood of single sequences that never lets a seat stay free.

    Args:
        time: the clock.
        replicas: seats of each.
        lengths: seconds that the answers run, again and again.
        options: of the [gateway] table.
    """

    def __init__(
        self, time: clock.FakeClock, replicas: list[int], lengths: list[float], **options: float
    ) -> None:
        self.time = time
        self.lengths: Iterator[float] = itertools.cycle(lengths)
        self.names = itertools.count()
        made = [
            fleets.make_replica(f"r{number}", seats=seats) for number, seats in enumerate(replicas)
        ]
        self.source = ports.StaticFleet(fleets.make_view(made, max_context=65536))
        deps = dependencies.Dependencies(
            settings.GatewaySettings(**options),  # type: ignore[arg-type]  # names of numbers
            ports.StaticKeys(harness.KEYS),
            self.source,
            usage.MemorySink(),
            time,
            "c1",
            quotas=quota.Unlimited(),
        )
        self.room = local_room.LocalRoom(deps, lambda: 0.5)
        self.flood: list[local_waiter.LocalWaiter] = []
        self.ends: dict[str, float] = {}
        self.behind = sum(replicas)

    def ask(self, tier: requests.Tier, team: str, seats: int = 1) -> local_waiter.LocalWaiter:
        return self.room.enter(
            asks.Asking(
                f"q{next(self.names)}",
                "chat",
                tier,
                team,
                "u",
                "k",
                self.time.wall_us(),
                seats=seats,
                deadline_us=self.time.wall_us() + 3_600_000_000,
            )
        )

    async def step(self, tier: requests.Tier, team: str) -> None:
        """Let the flood go on for a moment."""
        now = self.time.monotonic()
        for waiter in list(self.flood):
            name = waiter.asking.request_id
            if waiter.open is not None and name not in self.ends:
                self.ends[name] = now + next(self.lengths)
            if self.ends.get(name, math.inf) <= now:
                self.flood.remove(waiter)
                self.room.leave(waiter, quota.Spent(10, 0, 10))
        while sum(waiter.open is None for waiter in self.flood) < self.behind:
            self.flood.append(self.ask(tier, team))
        await self.time.advance(STEP_S)
        await asyncio.sleep(0)
        self.room.tick()

    async def waited_s(
        self, wide: local_waiter.LocalWaiter, tier: requests.Tier, team: str, most_s: float
    ) -> float:
        """Return how long a request waited under the flood; infinite past ``most_s``."""
        begun = self.time.monotonic()
        while wide.open is None:
            if self.time.monotonic() - begun > most_s:
                return math.inf
            await self.step(tier, team)
        return self.time.monotonic() - begun


def staggered(longest: int) -> list[float]:
    """Return lengths by which never two answers end at once."""
    return [1.0 + STEP_S * (number % (4 * longest)) for number in range(0, 64, 3)]


@hypothesis.settings(deadline=None)
@hypothesis.given(
    replicas=st.lists(st.integers(2, 6), min_size=1, max_size=3),
    lengths=st.lists(st.floats(0.5, 6.0), min_size=1, max_size=20),
    tier=st.sampled_from([I, S]),
    same_team=st.booleans(),
    data=st.data(),
)
def test_whatever_fits_a_replica_at_all_is_placed_in_bounded_time(
    replicas: list[int],
    lengths: list[float],
    tier: requests.Tier,
    same_team: bool,
    data: st.DataObject,
) -> None:
    """Of one band: within the set time, and the longest answer that its replica still runs."""
    seats = data.draw(st.integers(2, max(replicas)))

    async def run() -> None:
        model = Model(clock.FakeClock(), replicas, lengths, reserve_after_s=AFTER_S)
        for _ in range(20):
            await model.step(tier, "flood")
        wide = model.ask(tier, "flood" if same_team else "wide", seats)
        # Its turn by deadline or service comes behind those of the flood that waited before it.
        before_s = max(lengths) * (1 + model.behind / sum(replicas))
        bound_s = before_s + AFTER_S + max(lengths) + 8 * STEP_S
        assert await model.waited_s(wide, tier, "flood", bound_s) <= bound_s
        kept = model.room.leave
        for waiter in (wide, *model.flood):
            kept(waiter)
        assert model.room.loads.idle

    asyncio.run(run())


@pytest.mark.parametrize(("after_s", "placed"), [(AFTER_S, True), (1e9, False)])
async def test_without_a_reservation_it_would_wait_for_ever(
    fake_clock: clock.FakeClock, after_s: float, placed: bool
) -> None:
    model = Model(fake_clock, [4, 4], staggered(4), reserve_after_s=after_s)
    for _ in range(20):
        await model.step(I, "flood")
    wide = model.ask(I, "wide", 4)
    waited_s = await model.waited_s(wide, I, "flood", 120.0)
    assert math.isfinite(waited_s) is placed


async def test_a_team_that_leaves_room_to_others_is_not_passed_by_by_itself(
    fake_clock: clock.FakeClock,
) -> None:
    """It crowds the model, so its wide request leaves room; its own small ones take what it leaves."""
    model = Model(fake_clock, [4, 4, 4, 4], staggered(4), reserve_after_s=AFTER_S)
    wide: local_waiter.LocalWaiter | None = None
    others: list[local_waiter.LocalWaiter] = []
    for step in range(400):
        if not step % 8:
            others.append(model.ask(I, "other"))
        for waiter in [waiter for waiter in others if waiter.open is not None]:
            others.remove(waiter)
            model.room.leave(waiter, quota.Spent(10, 0, 10))
        await model.step(I, "flood")
        if step == 20:
            wide = model.ask(I, "flood", 4)
        if wide is not None and wide.open is not None:
            break
    assert wide is not None
    assert wide.open is not None
    assert step < 140  # 30 s


async def test_standard_gets_its_room_under_a_flood_of_interactive(
    fake_clock: clock.FakeClock,
) -> None:
    """Ageing gives it turns, the reservation makes one of them of use."""
    model = Model(fake_clock, [4, 4], staggered(4), reserve_after_s=AFTER_S, age_standard_s=10.0)
    for _ in range(20):
        await model.step(I, "flood")
    wide = model.ask(S, "wide", 4)
    assert await model.waited_s(wide, I, "flood", 60.0) < 40.0


async def test_one_replica_is_kept_and_the_others_serve_on(fake_clock: clock.FakeClock) -> None:
    model = Model(fake_clock, [4, 4, 4], [20.0 + 0.25 * n for n in range(7)], reserve_after_s=2.0)
    for _ in range(140):
        await model.step(I, "flood")
    wide = model.ask(I, "wide", 4)
    fewest = collections.Counter[str]()
    while wide.open is None:
        await model.step(I, "flood")
        for number in range(3):
            held = model.room.loads.urgent(ids.ReplicaId(f"r{number}"))
            fewest[f"r{number}"] = max(fewest[f"r{number}"], 4 - held)
    assert sorted(fewest.values())[-1] >= 3  # the kept one ran empty
    assert sorted(fewest.values())[0] <= 1  # and no other did
    kept = wide.open.replica.replica_id
    model.room.leave(wide)
    for _ in range(8):
        await model.step(I, "flood")
    assert model.room.loads.urgent(kept) == 4  # nobody waits for it: it serves all again


async def test_a_kept_replica_is_given_back_when_nobody_waits_for_it_any_more(
    fake_clock: clock.FakeClock,
) -> None:
    model = Model(fake_clock, [4], staggered(4), reserve_after_s=1.0)
    for _ in range(20):
        await model.step(I, "flood")
    wide = model.ask(I, "wide", 4)
    while model.room.loads.urgent(ids.ReplicaId("r0")) > 2:
        await model.step(I, "flood")  # it is being kept: it runs empty
    assert wide.open is None
    model.room.leave(wide)
    model.room.tick()
    assert model.room.loads.urgent(ids.ReplicaId("r0")) == 4


async def test_batch_keeps_no_replica_from_interactive(fake_clock: clock.FakeClock) -> None:
    model = Model(fake_clock, [4], staggered(4), reserve_after_s=1.0)
    for _ in range(20):
        await model.step(B, "flood")
    wide = model.ask(B, "wide", 3)  # one seat is reserved
    while model.room.loads.batch(ids.ReplicaId("r0")) > 1:
        await model.step(B, "flood")
    urgent = model.ask(I, "people")
    assert urgent.open is not None
    model.room.leave(urgent)
    assert await model.waited_s(wide, B, "flood", 30.0) < 30.0

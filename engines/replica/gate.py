"""The moving part of rung 0: waits while victims leave, and gives every seat back on every path."""

import asyncio
import collections
import collections.abc
import enum
from types import TracebackType

from engines.replica import arrivals, seats, steptime, throttle
from scheduler.contracts import clock, fleet, requests

PATIENCE_S = 2.0  # rung 0 is budgeted at 0.3 s; past this the engine hangs and "full" is the truth
REMEMBERED = 32  # reclaim times kept for the stats, as `fleet.ReplicaStats` says
ROUND_TRIP_S = 0.1  # assumed before the first reclaim was measured
RESERVE_S = 1.0  # between two looks at how many seats to keep free
CALM_S = 10.0  # without interactive work: what batch slowed down before says nothing any more


class Full(Exception):
    """No seat can be had; the message is the reason."""


class NoAdapter(Full):
    """The adapter is not loaded here: others have seats."""


class Leave(enum.Enum):
    """Why a seated request must leave."""

    PREEMPTED = "preempted"
    CANCELLED = "cancelled"
    DRAINING = "draining"


class Seat:
    """A held seat: a context manager that gives it back, once, whatever happens inside."""

    def __init__(self, gate: "Gate", key: str) -> None:
        self._gate = gate
        self.key = key
        self.must_leave = asyncio.Event()
        self.why: Leave | None = None

    def order_out(self, why: Leave) -> None:
        """Tell the holder to leave; the first reason stays."""
        if self.why is None:
            self.why = why
            self.must_leave.set()

    def release(self) -> None:
        """Give the seat back; again does nothing."""
        self._gate.release(self)

    def __enter__(self) -> "Seat":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Gate:
    """Seats, and the requests that sit on them.

    Args:
        table: the seats; its reserve is the least that is kept free, arrivals may ask for more.
        time: the clock.
        limits: what batch must leave to interactive work.
    """

    def __init__(
        self, table: seats.Seats, time: clock.Clock, limits: throttle.Limits | None = None
    ) -> None:
        self.table = table
        self.throttle = throttle.Throttle(table.total, limits or throttle.Limits())
        self.reclaim_ms: collections.deque[float] = collections.deque(maxlen=REMEMBERED)
        self._clock = time
        self._floor = table.reserved
        self._arrivals = arrivals.Arrivals(time.monotonic())
        self._reserve_due = time.monotonic() + RESERVE_S
        self._urgent_at = time.monotonic()
        self._held: dict[str, Seat] = {}
        self._changed = asyncio.Event()

    async def enter(
        self,
        key: str,
        tier: requests.Tier,
        need: int = 1,
        *,
        prompt_tokens: int = 0,
        preempted: int = 0,
    ) -> Seat:
        """Return a seat, after waiting for batch victims to leave if need be.

        Args:
            key: the holder's name.
            tier: its tier.
            need: seats that it takes.
            prompt_tokens: about how many it brings; batch's are bounded while they are computed.
            preempted: how often its batch line was preempted before.

        Raises:
            Full: there is none, or the victims did not leave within `PATIENCE_S`.
            ValueError: ``key`` is seated already.
        """
        ordered = self._clock.monotonic()
        self._look(ordered)
        if tier is requests.Tier.BATCH:
            why = self._batch_refused(need)
            if why:
                raise Full(why)
            self.throttle.entered(key, prompt_tokens)
        else:
            self._arrivals.note(ordered, need)
            self.throttle.arrived(key)
        try:
            return await self._enter(key, self.table.ask(key, tier, need, preempted), ordered)
        except BaseException:
            self.throttle.prefilled(key)
            raise

    async def _enter(self, key: str, answer: seats.Answer, ordered: float) -> Seat:
        if answer.verdict is seats.Verdict.FULL:
            raise Full(answer.reason)
        seat = self._held[key] = Seat(self, key)
        self._order_out(answer.victims, Leave.PREEMPTED)
        if answer.verdict is seats.Verdict.WAIT:
            try:
                await self._until_seated(key)
            except BaseException:
                seat.release()
                raise
            self.reclaim_ms.append((self._clock.monotonic() - ordered) * 1_000)
        return seat

    def release(self, seat: Seat) -> None:
        """Give ``seat`` back and wake who waits for one."""
        if self._held.get(seat.key) is seat:
            del self._held[seat.key]
            self.throttle.prefilled(seat.key)
            self.table.give_back(seat.key)
            self._wake()

    def cancel(self, key: str) -> bool:
        """Tell one request to leave; returns whether it was here."""
        seat = self._held.get(key)
        if seat is not None:
            seat.order_out(Leave.CANCELLED)
        return seat is not None

    def step(self, figures: steptime.Step) -> None:
        """Take a step of the engine; the youngest batch sequences leave if it shows that they must."""
        table = self.table
        count = self.throttle.step(figures, interactive=table.interactive, batch=table.batch)
        if count and table.role is fleet.Role.SHARED:
            self._order_out(table.shed(count), Leave.PREEMPTED)

    def batch_room(self) -> int:
        """Return how many more batch sequences would be let in now."""
        table = self.table
        self._look(self._clock.monotonic())
        free = table.batch_free
        if table.role is fleet.Role.SHARED:
            free = min(free, self.throttle.most(table.interactive) - table.batch)
            free = 0 if self.throttle.urgent else free
        return max(0, free)

    def _look(self, now: float) -> None:
        """Follow the arrivals: how many seats are kept free, and whether it has been calm."""
        if self.table.interactive:
            self._urgent_at = now
        elif now - self._urgent_at >= CALM_S:
            self._urgent_at = now
            self.throttle.calm()
        if now >= self._reserve_due:
            self._reserve_due = now + RESERVE_S
            trips = sorted(self.reclaim_ms)
            trip_s = trips[len(trips) * 9 // 10] / 1_000 if trips else ROUND_TRIP_S
            wanted = self._arrivals.reserve(now, trip_s)
            self.table.reserved = min(self.table.total, max(self._floor, wanted))

    def _batch_refused(self, need: int) -> str:
        table = self.table
        return self.throttle.refuses(table.role, table.interactive, table.batch, need)

    async def set_role(self, role: fleet.Role) -> int:
        """Change the role; returns how many batch sequences left, once they have (or `PATIENCE_S` passed)."""
        victims = self.table.set_role(role)
        leaving = [self._held[name] for name in victims]
        self._order_out(victims, Leave.PREEMPTED)
        await self._wait(lambda: not any(self._held.get(s.key) is s for s in leaving))
        return len(victims)

    async def evict(self) -> int:
        """Order everybody out: the time to drain is up; returns how many left, as `set_role` does."""
        leaving = list(self._held.values())
        self._order_out(tuple(self._held), Leave.DRAINING)
        await self._wait(lambda: not any(self._held.get(s.key) is s for s in leaving))
        return len(leaving)

    async def until_empty(self) -> None:
        """Return once nobody sits here."""
        while len(self.table):
            await self._changed.wait()

    def _order_out(self, names: tuple[str, ...], why: Leave) -> None:
        for name in names:
            self._held[name].order_out(why)

    async def _until_seated(self, key: str) -> None:
        if not await self._wait(lambda: self.table.try_seat(key)):
            raise Full(f"batch did not leave within {PATIENCE_S:g} s")

    async def _wait(self, condition: collections.abc.Callable[[], bool]) -> bool:
        """Wait until ``condition`` holds, checked at each release; False if patience ran out."""
        if condition():
            return True
        patience = asyncio.ensure_future(self._clock.sleep(PATIENCE_S))
        try:
            while not condition():
                if patience.done():
                    return False
                change = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait({change, patience}, return_when=asyncio.FIRST_COMPLETED)
                change.cancel()
            return True
        finally:
            patience.cancel()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

"""The owner's book of quotas: claims are taken from all counters or from none, and settled once.

It knows no clock and no registry: times come with each call, and whoever keeps the book loads limits
and sums into it and carries the news away (`scheduler.runtime.quota_keeper`).
"""

import dataclasses
import enum
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from scheduler.contracts import errors, quota
from scheduler.core import quota_limits as limits
from scheduler.core import quota_meters as meters

STEP_US = 2_000_000  # a clock that goes back by more was set; by less, messages came out of order
NOTICE_US = 3_600_000_000  # refusals by a minute's quota are told once in so long
PLANS = 20_000  # (team, user, key, model, tier) remembered with their counters


class Level(enum.StrEnum):
    """What a notice tells."""

    WARNING = "warning"  # the share at which to warn is used
    OVER = "over"  # a soft limit is passed
    REFUSED = "refused"  # a hard limit has refused a request


@dataclasses.dataclass(frozen=True, slots=True)
class Notice:
    """Something that people should hear of; each once for a counter's window."""

    level: Level
    key: limits.Key
    used: int
    amount: int
    at_us: int

    def __str__(self) -> str:
        """Return one line."""
        show = self.key.kind.show
        said = {
            Level.WARNING: "nearly used up",
            Level.OVER: "soft limit passed",
            Level.REFUSED: "used up, requests are refused",
        }
        return f"{self.key} {show(self.amount)}: {said[self.level]} ({show(self.used)} used)"


class Ticket:
    """A reservation; it ends once."""

    __slots__ = ("_book", "_open", "asked", "claim", "places", "priced")

    def __init__(
        self,
        book: "Book",
        claim: quota.Claim,
        asked: tuple[int, int, int],
        places: list[tuple[meters.Meter, Any]],
        priced: bool,
    ) -> None:
        self._book = book
        self._open = True
        self.claim = claim
        self.asked = asked
        self.places = places
        self.priced = priced  # whether one of them counts cost

    def settle(self, spent: quota.Spent, now_us: int) -> None:
        """Replace the reservation by what was used; a second call does nothing."""
        if self._open:
            self._open = False
            self._book.end(self, spent, now_us)

    def headers(self, now_us: int) -> quota.Headers:
        """Return OpenAI's x-ratelimit headers of the tightest quotas over a minute, if there are any."""
        return self._book.headers((meter for meter, _ in self.places), now_us)


_FREE = quota.Free()


class Book:
    """`quota.Quotas` of one owner.

    Args:
        pricing: what tokens cost; asked only where a limit on cost applies.
        tell: called with each notice; must not raise.
        warn_percent: share of a day's or month's limit at which to warn.
        steady_us: returns the owner's monotonic µs, which decide what a minute is: a claim's own time is
            another host's, and of a request that moves minutes old. None: the times of the calls, for those
            that come in order.
    """

    def __init__(
        self,
        pricing: quota.Pricing | None = None,
        tell: Callable[[Notice], None] = lambda notice: None,
        *,
        warn_percent: int = 80,
        steady_us: Callable[[], int] | None = None,
    ) -> None:
        self._monotonic_us = steady_us
        self._pricing = pricing or quota.NoPrices()
        self._tell = tell
        self._warn_percent = warn_percent
        self._rules = limits.Rules()
        self._meters: dict[limits.Key, meters.Meter] = {}
        self._plans: dict[tuple[str, ...], tuple[list[meters.Meter], bool]] = {}
        self._open: dict[str, Ticket] = {}
        self._memory = meters.Memory()
        self._last_us = 0
        self._steady_us = 0

    def reserve(self, claim: quota.Claim) -> quota.Hold:
        """Take the claim from every quota that it falls under, all or none.

        Raises:
            errors.QuotaExceeded: which quota, and when there is room again.
            errors.LargerThanQuota: it asks for more than a quota holds when nothing is used.
        """
        return self._reserve(claim, forced=False)

    def adopt(self, claim: quota.Claim) -> quota.Hold:
        """Take a claim of a request that another owner has let in, whatever the limits are."""
        return self._reserve(claim, forced=True)

    def _reserve(self, claim: quota.Claim, *, forced: bool) -> quota.Hold:
        before = self._open.get(claim.request_id)
        if before is not None:
            before.settle(quota.NOTHING, claim.now_us)
        found, priced = self._plan(claim)
        if not found:
            return _FREE
        utc, steady = claim.now_us, self._steady(claim.now_us)
        cost = 0
        if priced:
            most = quota.Spent(claim.prompt_tokens, 0, claim.output_tokens)
            cost = self._pricing.cost(claim.model, claim.tier, most, utc)
        asked = (claim.prompt_tokens + claim.output_tokens, cost, 1)
        for meter in found:
            if not meter.fits(asked[meter.unit], utc, steady) and not forced:
                error = self._refusal(found, asked, utc, steady)
                error.limits = self.headers(found, utc)
                raise error
        places = [(meter, meter.take(asked[meter.unit], steady)) for meter in found]
        ticket = Ticket(self, claim, asked, places, priced)
        self._open[claim.request_id] = ticket
        return ticket

    def end(self, ticket: Ticket, spent: quota.Spent, now_us: int) -> None:
        """Settle a ticket; it calls this itself, once."""
        claim, asked = ticket.claim, ticket.asked
        if self._open.get(claim.request_id) is ticket:
            del self._open[claim.request_id]
        steady = self._steady(now_us)
        tokens = spent.tokens
        cost = 0
        if tokens and ticket.priced:
            cost = self._pricing.cost(claim.model, claim.tier, spent, claim.now_us)
        used = (tokens, cost, 1 if tokens else 0)
        for meter, place in ticket.places:
            unit = meter.unit
            meter.settle(place, asked[unit], used[unit], steady)
            if (
                isinstance(meter, meters.CalendarMeter)
                and place.known >= meter.alarm
                and place is meter.current
            ):
                self._warn(meter, place, now_us)

    def set_limits(self, found: Iterable[limits.Limit]) -> None:
        """Put limits in force; counters of those that stay go on, open claims stay taken."""
        self._rules = limits.Rules(tuple(found))
        self._plans.clear()
        before, self._meters = self._meters, {}
        for key, meter in before.items():
            limit = self._rules.of(key)
            if limit is not None:
                meter.change(limit)
                self._meters[key] = meter

    def used(self, now_us: int) -> dict[limits.Key, int]:
        """Return what is used and reserved of every counter that was moved since the start."""
        return {key: used for key, (used, _) in self.standing(now_us).items()}

    def standing(self, now_us: int) -> dict[limits.Key, tuple[int, int]]:
        """Return the same with each counter's limit."""
        steady = self._steady(now_us)
        return {
            key: (meter.used(now_us, steady), meter.amount) for key, meter in self._meters.items()
        }

    @property
    def open(self) -> int:
        """How many claims are not settled."""
        return len(self._open)

    def collect(self) -> Mapping[tuple[limits.Key, int], int]:
        """Return what was settled since the last call, by counter and window's start, to be kept.

        Call `learn` with the sums when they are on disk. Until then the same mapping is returned again,
        so that a batch whose fate is not known can be told apart from the next one.
        """
        memory = self._memory
        if not memory.transit and memory.dirty:
            for cell in memory.dirty:
                place = cell.key, cell.start_us
                memory.transit[place] = memory.transit.get(place, 0) + cell.pending
                cell.pending = 0
            memory.dirty.clear()
        return memory.transit

    def learn(self, sums: Mapping[tuple[limits.Key, int], int], *, collected: bool = False) -> None:
        """Take in settled sums from the registry.

        Args:
            sums: whole sums of the windows that have changed, by counter and window's start.
            collected: whether they hold what `collect` returned last.
        """
        memory = self._memory
        if collected:
            for place, amount in memory.transit.items():
                memory.stored[place] = memory.stored.get(place, 0) + amount
            memory.transit = {}
        memory.stored.update(sums)
        for key, start in sums:
            meter = self._meters.get(key)
            cell = meter.cells.get(start) if isinstance(meter, meters.CalendarMeter) else None
            if cell is not None:
                cell.known = memory.known(key, start) + cell.pending

    def forget(self, before_us: int) -> None:
        """Drop sums of windows that began before ``before_us``."""
        kept = self._memory.stored
        self._memory.stored = {place: kept[place] for place in kept if place[1] >= before_us}

    def headers(self, found: Iterable[meters.Meter], now_us: int) -> quota.Headers:
        """Return OpenAI's x-ratelimit headers of the tightest of some counters."""
        rolling = [meter for meter in found if isinstance(meter, meters.RollingMeter)]
        if not rolling:
            return ()
        steady, tightest = self._steady(now_us), dict[int, tuple[int, meters.RollingMeter]]()
        for meter in rolling:
            if meter.hard:
                left = max(0, meter.amount - meter.used(now_us, steady))
                if meter.unit not in tightest or left < tightest[meter.unit][0]:
                    tightest[meter.unit] = left, meter
        told: list[tuple[str, str]] = []
        for unit, word in ((limits.Unit.REQUESTS, "requests"), (limits.Unit.TOKENS, "tokens")):
            if unit in tightest:
                left, meter = tightest[unit]
                told += (
                    (f"x-ratelimit-limit-{word}", str(meter.amount)),
                    (f"x-ratelimit-remaining-{word}", str(left)),
                    (f"x-ratelimit-reset-{word}", f"{math.ceil(meter.clears_s(steady))}s"),
                )
        return tuple(told)

    def _plan(self, claim: quota.Claim) -> tuple[list[meters.Meter], bool]:
        """Return the counters that a claim moves, and whether one counts cost."""
        who = claim.team, claim.user, claim.key_id, claim.model, claim.tier
        plan = self._plans.get(who)
        if plan is None:
            found = [self._meter(limit) for limit in self._rules.matching(*who)]
            plan = found, any(meter.unit == limits.Unit.COST for meter in found)
            if len(self._plans) >= PLANS:
                self._plans.clear()
            self._plans[who] = plan
        return plan

    def _meter(self, limit: limits.Limit) -> meters.Meter:
        found = self._meters.get(limit.key)
        if found is None:
            kind = limit.key.kind
            if kind.kept:
                found = meters.CalendarMeter(limit, self._memory, self._warn_percent)
            elif kind is limits.Kind.CONCURRENT:
                found = meters.ConcurrentMeter(limit)
            else:
                found = meters.RollingMeter(limit)
            self._meters[limit.key] = found
        return found

    def _steady(self, now_us: int) -> int:
        """Return a time that never goes back, and runs on when the clock was set back."""
        if self._monotonic_us is not None:
            return self._monotonic_us()
        gone = now_us - self._last_us
        if gone >= 0:
            self._steady_us += gone
            self._last_us = now_us
        elif gone < -STEP_US:
            self._last_us = now_us
        return self._steady_us

    def _warn(self, meter: meters.CalendarMeter, cell: meters.Cell, now_us: int) -> None:
        over = cell.known > meter.amount
        level = Level.OVER if over and not meter.hard else Level.WARNING
        if over:
            meter.told()
        meter.told()
        self._tell(Notice(level, meter.key, cell.known, meter.amount, now_us))

    def _refusal(
        self, found: list[meters.Meter], asked: tuple[int, int, int], utc: int, steady: int
    ) -> errors.ForebayError:
        """Return the error of a claim that does not fit: of the quota that takes longest to free."""
        worst, longest = found[0], -1.0
        for meter in found:
            amount = asked[meter.unit]
            if meter.fits(amount, utc, steady):
                continue
            show = meter.key.kind.show
            if amount > meter.amount > 0:
                return errors.LargerThanQuota(
                    f"{meter.key} is {show(meter.amount)} and the request may use {show(amount)}: "
                    "send less, or set a lower max_tokens"
                )
            wait = math.inf if meter.amount == 0 else meter.wait_s(amount, utc, steady)
            if wait > longest:
                worst, longest = meter, wait
        used = worst.used(utc, steady)
        if utc >= worst.quiet_until_us:
            ends = utc + NOTICE_US
            if isinstance(worst, meters.CalendarMeter):
                ends = worst.cell(utc).end_us
            worst.quiet_until_us = ends
            self._tell(Notice(Level.REFUSED, worst.key, used, worst.amount, utc))
        show = worst.key.kind.show
        left = None if longest == math.inf else longest
        then = "ask who set it" if left is None else f"try again after {math.ceil(left)} s"
        return errors.QuotaExceeded(
            f"{worst.key} {show(worst.amount)} is used up ({show(used)} used or reserved, "
            f"{show(asked[worst.unit])} more asked): {then}",
            retry_after_s=left,
        )

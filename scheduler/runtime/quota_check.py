"""Compares the counters of quotas with the ledger, and sets them right.

Counters and ledger move while they are read, so a difference means something only if it can't come from
that: what was settled well before the reading has to be in the ledger, and what requests that have ended
used must be settled soon after. What requests that may still run used is in the ledger attempt by attempt
and in the counters at their end: it may be in a counter or not. So both sides are a least and a most, and
they agree where these meet.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from scheduler.contracts import clock, errors, quota
from scheduler.core import quota_limits as limits
from scheduler.runtime.registry import quotas

log = logging.getLogger(__name__)
EVERY_S = 3600.0
LOOK_S = 60.0  # how often wishes for a check are looked for
SETTLE_S = 5.0  # within this a settled request is in the registry and its rows are on disk
# A request waits for its next attempt, and a client for its last bytes, no longer than this, or is corrected
# twice: once ahead of its end and once after it.
QUIET_S = 900.0
_HOUR_US = 3_600_000_000


def periodic(
    registry: quotas.Quotas,
    ledger: quota.LedgerTotals,
    pricing: quota.DatedPricing,
    time: clock.Clock,
    *,
    refresh_prices: Callable[[], None] = lambda: None,
) -> Callable[[int], Awaitable[None]]:
    """Return work for `loop.Periodic` each `LOOK_S`: it checks on the hour, and soon after a wish.

    ``refresh_prices`` is called in a thread before each check.
    """
    heard = -1

    async def look(period_us: int) -> None:
        nonlocal heard
        wishes = await asyncio.to_thread(registry.check_wishes)
        if period_us % round(EVERY_S * 1e6) and wishes == heard:
            return
        await asyncio.to_thread(refresh_prices)
        try:
            await check(registry, ledger, pricing, time)
        except errors.RecordingUnavailable as error:
            log.warning("quotas are not compared with the ledger: %s", error.message)
            heard = -1  # at the next look again
            return
        heard = wishes

    return look


async def check(
    registry: quotas.Quotas,
    ledger: quota.LedgerTotals,
    pricing: quota.DatedPricing,
    time: clock.Clock,
    *,
    settle_s: float = SETTLE_S,
    quiet_s: float = QUIET_S,
) -> Mapping[quotas.Place, int]:
    """Compare the counters of this day and month, correct them, and return the differences.

    Args:
        registry: the counters.
        ledger: what they are compared with.
        pricing: as the owners of the counters price.
        time: the clock.
        settle_s: how long a request that has ended takes to be in both.
        quiet_s: how long a request whose end nobody told may go on after its last attempt.

    Raises:
        errors.RecordingUnavailable: the ledger can't be read whole; nothing was corrected.
    """
    rules = limits.Rules(
        tuple(
            rule.limit
            for rule in await asyncio.to_thread(registry.rules)
            if rule.limit.key.kind.kept
        )
    )
    if not rules:
        return {}
    now_us = time.wall_us()
    spans = {period: limits.window(period, now_us) for period in rules.periods}
    starts = [start for start, _ in spans.values()]
    longest = min(starts), max(end for _, end in spans.values())
    before = await asyncio.to_thread(registry.sums, starts)
    await time.sleep(settle_s)
    over_us = time.wall_us() - round(quiet_s * 1e6)
    cuts = pricing.changes(*longest)
    rows = await asyncio.to_thread(ledger.consumed, *longest, cuts=cuts, over_us=over_us)
    await time.sleep(settle_s)
    after = await asyncio.to_thread(registry.sums, starts)
    found = totals(rules, rows, pricing, spans)
    drifts = {
        place: drift(before.get(place), found.get(place, Ledger()), after.get(place))
        for place in {*found, *before, *after}
        if rules.of(place[0]) is not None
    }
    checked = {place: counted.checked_us for place, counted in after.items()}
    await asyncio.to_thread(registry.correct, drifts, checked, time.wall_us())
    for (key, _), amount in drifts.items():
        if amount:
            log.warning("quota: %s: corrected by %s to the ledger", key, key.kind.show(amount))
    return drifts


@dataclasses.dataclass(slots=True)
class Ledger:
    """What the ledger says of one counter.

    Attributes:
        ended: what requests that have ended used.
        running: what requests that may still run used so far.
        slack: how far rounding may put the sum off.
    """

    ended: int = 0
    running: int = 0
    slack: int = 0


def totals(
    rules: limits.Rules,
    rows: Sequence[quota.Consumed],
    pricing: quota.Pricing,
    spans: Mapping[limits.Period, tuple[int, int]],
) -> dict[quotas.Place, Ledger]:
    """Return what the ledger has for each counter.

    Each request's cost is rounded to a micro-unit and the ledger's rows are sums over requests, so the two
    may differ by a micro-unit for each.
    """
    found: dict[quotas.Place, Ledger] = {}
    for row in rows:
        for limit in rules.matching(row.team, row.user, row.key_id, row.model, row.tier):
            key = limit.key
            start, end = spans[key.kind.period]
            if not start <= row.from_us < end:
                continue
            sums = found.setdefault((key, start), Ledger())
            amount = row.spent.tokens
            if key.kind.unit is limits.Unit.COST:
                amount = pricing.cost(row.model, row.tier, row.spent, row.from_us)
                sums.slack += row.attempts
            if row.running:
                sums.running += amount
            else:
                sums.ended += amount
    return found


def drift(before: quotas.Counted | None, ledger: Ledger, after: quotas.Counted | None) -> int:
    """Return what has to be added to a counter, 0 if it agrees with the ledger."""
    least = before.amount if before else 0
    most = after.amount if after else 0
    if ledger.ended > most + ledger.slack:
        return ledger.ended - most
    recorded = ledger.ended + ledger.running
    if recorded < least - ledger.slack:
        return recorded - least
    return 0

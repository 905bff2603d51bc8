"""Compares the counters of quotas with the ledger, and sets them right.

Counters and ledger move while they are read, so a difference means something only if it can't come from
that: what was settled well before the reading has to be in the ledger, and what the ledger has must be
settled soon after. A figure of the ledger between the two sums agrees.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from scheduler.contracts import clock, errors, quota
from scheduler.core import quota_limits as limits
from scheduler.runtime.registry import quotas

log = logging.getLogger(__name__)
EVERY_S = 3600.0
LOOK_S = 60.0  # how often wishes for a check are looked for
SETTLE_S = 5.0  # within this a settled request is in the registry and its rows are on disk
_HOUR_US = 3_600_000_000


def periodic(
    registry: quotas.Quotas,
    ledger: quota.LedgerTotals,
    pricing: quota.Pricing,
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
    pricing: quota.Pricing,
    time: clock.Clock,
    *,
    settle_s: float = SETTLE_S,
) -> Mapping[quotas.Place, int]:
    """Compare the counters of this day and month, correct them, and return the differences.

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
    rows = await asyncio.to_thread(ledger.consumed, *longest)
    await time.sleep(settle_s)
    after = await asyncio.to_thread(registry.sums, starts)
    found = totals(rules, rows, pricing, spans)
    drifts = {
        place: drift(before.get(place), found.get(place, (0, 0)), after.get(place))
        for place in {*found, *before, *after}
        if rules.of(place[0]) is not None
    }
    checked = {place: counted.checked_us for place, counted in after.items()}
    await asyncio.to_thread(registry.correct, drifts, checked, time.wall_us())
    for (key, _), amount in drifts.items():
        if amount:
            log.warning("quota: %s: corrected by %s to the ledger", key, key.kind.show(amount))
    return drifts


def totals(
    rules: limits.Rules,
    rows: Sequence[quota.Consumed],
    pricing: quota.Pricing,
    spans: Mapping[limits.Period, tuple[int, int]],
) -> dict[quotas.Place, tuple[int, int]]:
    """Return what each counter should have, and how far rounding may put it off.

    Each request's cost is rounded to a micro-unit and the ledger's rows hold the requests of an hour, so
    the two may differ by a micro-unit for each request.
    """
    found: dict[quotas.Place, tuple[int, int]] = {}
    for row in rows:
        for limit in rules.matching(row.team, row.user, row.key_id, row.model, row.tier):
            key = limit.key
            start, end = spans[key.kind.period]
            if not start <= row.hour_us < end:
                continue
            amount, slack = row.spent.tokens, 0
            if key.kind.unit is limits.Unit.COST:
                amount = pricing.cost(row.model, row.tier, row.spent, row.hour_us)
                slack = row.requests
            place = key, start
            had = found.get(place, (0, 0))
            found[place] = had[0] + amount, had[1] + slack
    return found


def drift(
    before: quotas.Counted | None, ledger: tuple[int, int], after: quotas.Counted | None
) -> int:
    """Return what has to be added to a counter, 0 if it agrees with the ledger."""
    least = before.amount if before else 0
    most = after.amount if after else 0
    amount, slack = ledger
    if amount > most + slack:
        return amount - most
    if amount < least - slack:
        return amount - least
    return 0

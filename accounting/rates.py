"""What a token and a GPU-hour cost: by model and tier, from a moment on, never backwards. Pure.

A rate is one price of one kind of use, for one model or all (``*``) and one tier or all, from a moment
on. Nothing is ever changed: a new price is a new rate from a later moment. The rate of an attempt is the
one that held when its request arrived; for a price of GPU time, when the time was held.

Which of several holds: the closest scope first (model and tier, model, tier, all), for each kind by
itself; within a scope the latest beginning; of two that begin together the one that was added later.
Without any the price is 0.
"""

import bisect
import dataclasses
import enum
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from accounting import money, postings
from scheduler.contracts import quota

POSTING = "rate"
ANY = "*"
FOREVER_US = 2**63 - 1


class Use(enum.StrEnum):
    """What is priced."""

    UNCACHED = "uncached_prompt"
    CACHED = "cached_prompt"
    OUTPUT = "output"
    GPU = "gpu"

    @property
    def per(self) -> int:
        """How much a price is for: 1,000 tokens, or the µs of a GPU-hour."""
        return 3_600_000_000 if self is Use.GPU else 1_000

    @property
    def unit(self) -> str:
        """The unit of an amount."""
        return "gpu_us" if self is Use.GPU else "tokens"


TOKENS = (Use.UNCACHED, Use.CACHED, Use.OUTPUT)


@dataclasses.dataclass(frozen=True, slots=True)
class Rate:
    """One price.

    Attributes:
        model, tier: what it is for; `ANY` for all.
        micro: micro-units for `use.per`.
        from_us: from when on, UTC µs, for what arrives then or later.
        posting: number of the posting that added it.
        added_us, author, reason: when, by whom and why it was added.
    """

    model: str
    tier: str
    use: Use
    micro: int
    from_us: int
    posting: int = 0
    added_us: int = 0
    author: str = ""
    reason: str = ""


class Rates:
    """All rates of a site, for look-ups."""

    def __init__(self, rates: Iterable[Rate] = ()) -> None:
        self.all: tuple[Rate, ...] = tuple(
            sorted(rates, key=lambda each: (each.from_us, each.posting))
        )
        self._by_scope: dict[tuple[str, str, Use], list[Rate]] = {}
        for rate in self.all:
            self._by_scope.setdefault((rate.model, rate.tier, rate.use), []).append(rate)

    def find(self, model: str, tier: str, use: Use, at_us: int) -> Rate | None:
        """Return the rate that holds for what arrived at ``at_us``."""
        for scope in ((model, tier), (model, ANY), (ANY, tier), (ANY, ANY)):
            found = self._by_scope.get((*scope, use), [])
            place = bisect.bisect_right(found, at_us, key=lambda each: each.from_us)
            if place:
                return found[place - 1]
        return None

    def price(self, model: str, tier: str, use: Use, at_us: int) -> int:
        """Return micro-units for `use.per`; 0 where no rate is set."""
        rate = self.find(model, tier, use, at_us)
        return 0 if rate is None else rate.micro

    def changes(self, start_us: int, end_us: int) -> list[int]:
        """Return the moments inside ``(start_us, end_us)`` at which any rate begins, ascending."""
        return sorted({rate.from_us for rate in self.all if start_us < rate.from_us < end_us})

    def spans(self, pairs: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
        """Return for each (model, tier) its prices from the beginning to the end of time, without gaps.

        A row has model, tier, start_us, end_us (not including) and a price for each use; times that no
        rate covers cost 0. It is what SQL joins attempts with.
        """
        rows = []
        for model, tier in sorted(set(pairs)):
            borders = [0, *self.changes(0, FOREVER_US), FOREVER_US]
            for start, end in itertools.pairwise(borders):
                prices = {use.value: self.price(model, tier, use, start) for use in Use}
                rows.append(
                    {"model": model, "tier": tier, "start_us": start, "end_us": end, **prices}
                )
        return rows


def cost(amount: int, use: Use, micro: int) -> int:
    """Return what an amount costs at a price, rounded once: micro-units."""
    return money.divide(amount * micro, use.per)


class Pricing:
    """Implements `scheduler.contracts.quota.DatedPricing`; `current` is replaced as rates are added."""

    def __init__(self, current: Rates | None = None) -> None:
        self.current = current or Rates()

    def cost(self, model: str, tier: str, spent: quota.Spent, at_us: int) -> int:
        """Return micro-units for ``spent``, rounded once over its three kinds; 0 where no rate is set.

        A bill rounds once a line and not once a request: the sum of many of these may differ from it
        by half a micro-unit for each.
        """
        amounts = spent.uncached_prompt_tokens, spent.cached_prompt_tokens, spent.output_tokens
        total = sum(
            amount * self.current.price(model, tier, use, at_us)
            for use, amount in zip(TOKENS, amounts, strict=True)
        )
        return money.divide(total, Use.OUTPUT.per)

    def changes(self, first_us: int, last_us: int) -> list[int]:
        """Return the moments inside ``(first_us, last_us)`` at which any price changes, ascending."""
        return self.current.changes(first_us, last_us)


def read(log: Sequence[postings.Posting]) -> Rates:
    """Return the rates of a log."""
    return Rates(
        Rate(
            model=item["model"],
            tier=item["tier"],
            use=Use(item["use"]),
            micro=item["micro"],
            from_us=item["from_us"],
            posting=posting.number,
            added_us=posting.at_us,
            author=posting.author,
            reason=posting.reason,
        )
        for posting in log
        if posting.kind == POSTING
        for item in posting.body["rates"]
    )


def body(model: str, tier: str, prices: Mapping[Use, int], from_us: int) -> dict[str, Any]:
    """Return the body of a posting that adds one rate for each use in ``prices``."""
    return {
        "rates": [
            {"model": model, "tier": tier, "use": use.value, "micro": micro, "from_us": from_us}
            for use, micro in sorted(prices.items())
        ]
    }


def overlapped(known: Rates, wanted: Mapping[str, Any], now_us: int) -> Rate | None:
    """Return a rate that ``wanted`` (an item of `body`) would rewrite: it holds for a time that has passed.

    A first price may begin in the past, for what had none: that tells what was not told. Where a rate
    already holds, a new one may only begin now or later.
    """
    if wanted["from_us"] >= now_us:
        return None
    for rate in known.all:
        same = rate.use == wanted["use"] and all(
            ANY in {getattr(rate, name), wanted[name]} or getattr(rate, name) == wanted[name]
            for name in ("model", "tier")
        )
        if same and rate.from_us < now_us:
            return rate
    return None

"""What quotas cost: a claim and its settlement, a refusal, and an exchange with the registry.

Medians of several rounds with the least and the most; the last line is JSON. Times are this process's
CPU time, but for the exchange, which waits for the disk.
"""

import dataclasses
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from scheduler.contracts import errors, quota
from scheduler.core import quota as books
from scheduler.core import quota_limits as limits
from scheduler.runtime.registry import database, quotas, store

CLAIMS = 50_000
ROUNDS = 7
CHANGED = 1_000  # counters with news in one exchange: teams times kinds of a busy second
START_US = 1_790_000_000_000_000
SPENT = quota.Spent(60, 20, 30)
KINDS = (limits.Kind.TOKENS_PER_MINUTE, limits.Kind.TOKENS_PER_DAY, limits.Kind.CONCURRENT)
MORE = (*KINDS, limits.Kind.TOKENS_PER_MONTH)


@dataclasses.dataclass(frozen=True)
class Spread:
    """The median of some rounds and how far they lie apart."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, rounds: Sequence[float]) -> "Spread":
        """Return the spread of some figures."""
        return cls(
            round(statistics.median(rounds), 2), round(min(rounds), 2), round(max(rounds), 2)
        )


def owned(kinds: Sequence[limits.Kind], scopes: int, amount: int) -> list[limits.Limit]:
    """Return limits of some kinds for the first of team, key and user."""
    owners = ((limits.Scope.TEAM, ""), (limits.Scope.KEY, "k1"), (limits.Scope.USER, "ada"))
    return [
        limits.Limit(limits.Key(scope, "physics", name, "", "", kind), amount)
        for scope, name in owners[:scopes]
        for kind in kinds
    ]


def claims() -> list[quota.Claim]:
    """Return claims a hundred µs apart, as ten thousand requests a second make them."""
    return [
        quota.Claim(
            f"q{n}", "physics", "ada", "k1", "chat", "interactive", 100, 100, START_US + 100 * n
        )
        for n in range(CLAIMS)
    ]


def rounds_us(body: Callable[[], None]) -> Spread:
    """Return the CPU µs of each claim in a round of all."""
    found = []
    for _ in range(ROUNDS):
        began = time.process_time()
        body()
        found.append((time.process_time() - began) / CLAIMS * 1e6)
    return Spread.of(found)


def reserve_and_settle_us(found: Sequence[limits.Limit]) -> Spread:
    """Return the cost of a claim that is granted, with its settlement."""
    asked = claims()

    def body() -> None:
        book = books.Book()
        book.set_limits(found)
        for claim in asked:
            book.reserve(claim).settle(SPENT, claim.now_us + 50)

    return rounds_us(body)


def refuse_us() -> Spread:
    """Return the cost of a claim that is refused, its error's text included."""
    asked = claims()

    def body() -> None:
        book = books.Book()
        book.set_limits(owned(KINDS[:1], 1, 200))
        refused = 0
        for claim in asked:
            try:
                book.reserve(claim)
            except errors.QuotaExceeded:
                refused += 1
        if refused < CLAIMS - 2:
            raise AssertionError("claims were granted that should have been refused")

    return rounds_us(body)


def exchange_ms(registry: quotas.Quotas) -> Spread:
    """Return the time of a transaction with `CHANGED` differences."""
    keys = [
        limits.Key(limits.Scope.TEAM, f"team{n}", "", "", "", limits.Kind.TOKENS_PER_DAY)
        for n in range(CHANGED)
    ]
    found = []
    for batch in range(1, ROUNDS + 1):
        report = quotas.Report("bench", batch, {(key, 0): 5 for key in keys})
        began = time.perf_counter()
        registry.exchange(report, (0, 0), START_US)
        found.append((time.perf_counter() - began) * 1e3)
    return Spread.of(found)


def main() -> int:
    """Measure, and print a table and the JSON line."""
    costs = {
        "none": reserve_and_settle_us([]),
        "team_2": reserve_and_settle_us(owned(KINDS[:2], 1, 10**12)),
        "team_and_key_6": reserve_and_settle_us(owned(KINDS, 2, 10**12)),
        "team_key_user_12": reserve_and_settle_us(owned(MORE, 3, 10**12)),
    }
    refused = refuse_us()
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder:
        registry = store.Registry.open(database.sqlite_url(Path(folder)))
        exchange = exchange_ms(registry.quotas)
        registry.close()
    print(f"{platform.machine()}, Python {platform.python_version()}, {ROUNDS} rounds of {CLAIMS}")
    for name, spread in costs.items():
        print(f"reserve and settle, limits {name:18} {spread.median:6.2f} µs")
    print(f"refuse                                      {refused.median:6.2f} µs")
    print(f"exchange of {CHANGED} counters (SQLite)         {exchange.median:6.2f} ms")
    figures = {
        "reserve_settle_us": {name: dataclasses.asdict(spread) for name, spread in costs.items()},
        "refuse_us": dataclasses.asdict(refused),
        "exchange_ms": {"counters": CHANGED, **dataclasses.asdict(exchange)},
    }
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())

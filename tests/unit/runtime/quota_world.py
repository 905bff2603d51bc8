"""Limits, claims and a ledger's words as the tests of quotas write them."""

import datetime
from collections.abc import Mapping

from scheduler.contracts import clock, quota
from scheduler.core import quota_limits as limits
from scheduler.runtime import quota_check
from scheduler.runtime.registry import quotas, store

K = limits.Kind
TEAM = limits.Key(limits.Scope.TEAM, "physics", "", "", "", K.TOKENS_PER_DAY)
MONTH = TEAM._replace(kind=K.TOKENS_PER_MONTH)
NOON = round(datetime.datetime(2026, 11, 30, 12, tzinfo=datetime.UTC).timestamp() * 1_000_000)
DAY = limits.window(limits.Period.DAY, NOON)[0]


def set_limits(
    registry: store.Registry, wanted: Mapping[limits.Key, int | None], *, hard: bool = True
) -> None:
    registry.quotas.change(wanted, hard=hard, author="root", reason="grant 42", now_us=NOON)


def claim(number: int, now_us: int = NOON, team: str = "physics", key: str = "k1") -> quota.Claim:
    return quota.Claim(f"q{number}", team, "ada", key, "chat", "interactive", 6, 4, now_us)


class Watch(clock.FakeClock):
    """A clock whose sleeps pass at once, and let something happen."""

    def __init__(self) -> None:
        super().__init__(wall_us=NOON)
        self.then = list[object]()

    async def sleep(self, seconds: float) -> None:
        if self.then:
            act = self.then.pop(0)
            assert callable(act)
            await act()


def consumed(tokens: int, *, team: str = "physics", from_us: int = NOON) -> quota.Consumed:
    spent = quota.Spent(tokens)
    return quota.Consumed(team, "ada", "k1", "chat", "interactive", from_us, 1, spent)


def settled(registry: store.Registry, batch: int, amount: int) -> None:
    changes = {(TEAM, DAY): amount, (MONTH, limits.window(limits.Period.MONTH, NOON)[0]): amount}
    registry.quotas.exchange(quotas.Report("one", batch, changes), (0, 0), NOON)


async def checked(
    registry: store.Registry, ledger: quota.LedgerTotals, time: clock.Clock | None = None
) -> list[int]:
    found = await quota_check.check(registry.quotas, ledger, quota.NoPrices(), time or Watch())
    return [found[place] for place in sorted(found)]

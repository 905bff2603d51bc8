"""The check of the quotas' counters against the ledger."""

import dataclasses
import logging
from collections.abc import Sequence

import pytest

from scheduler.contracts import errors, quota
from scheduler.runtime import quota_check
from scheduler.runtime.registry import quotas, store
from tests.unit.runtime import quota_world


@pytest.mark.parametrize(
    ("counter", "ledger", "drifts"),
    [(100, 100, [0, 0]), (140, 100, [-40, -40]), (60, 100, [40, 40]), (0, 100, [100, 100])],
)
async def test_counters_are_set_to_what_the_ledger_says(
    registry: store.Registry, counter: int, ledger: int, drifts: list[int]
) -> None:
    quota_world.set_limits(registry, {quota_world.TEAM: 1000, quota_world.MONTH: 1000})
    if counter:
        quota_world.settled(registry, 1, counter)
    rows = [
        quota_world.consumed(ledger - 1),
        quota_world.consumed(1),
        quota_world.consumed(50, team="chem"),
    ]
    assert await quota_world.checked(registry, quota.FixedTotals(rows)) == drifts
    found = registry.quotas.sums([quota_world.DAY])[quota_world.TEAM, quota_world.DAY]
    assert found == quotas.Counted(100, drifts[0], quota_world.NOON)
    assert await quota_world.checked(registry, quota.FixedTotals(rows)) == [0, 0]


async def test_use_of_earlier_days_counts_for_the_month_only(registry: store.Registry) -> None:
    quota_world.set_limits(registry, {quota_world.TEAM: 1000, quota_world.MONTH: 1000})
    quota_world.settled(registry, 1, 10)
    rows = [
        quota_world.consumed(10),
        quota_world.consumed(70, from_us=quota_world.DAY - 3_600_000_000),
    ]
    assert sorted(await quota_world.checked(registry, quota.FixedTotals(rows))) == [0, 70]


async def test_use_while_the_ledger_is_read_is_no_drift(registry: store.Registry) -> None:
    quota_world.set_limits(registry, {quota_world.TEAM: 1000})
    quota_world.settled(registry, 1, 100)
    time = quota_world.Watch()

    async def before_the_reading() -> None:
        quota_world.settled(registry, 2, 20)

    async def after_it() -> None:
        quota_world.settled(registry, 3, 30)

    time.then = [before_the_reading, after_it]
    assert await quota_world.checked(
        registry, quota.FixedTotals([quota_world.consumed(120)]), time
    ) == [0]
    assert registry.quotas.sums([quota_world.DAY])[quota_world.TEAM, quota_world.DAY].amount == 150


@pytest.mark.parametrize(
    ("counter", "drift"),
    [(90, 10), (100, 0), (120, 0), (140, 0), (150, -10)],
)
async def test_what_running_requests_used_so_far_may_be_settled_or_not(
    registry: store.Registry, counter: int, drift: int
) -> None:
    """An attempt that was lost is in the ledger; its request goes on, and settles all of it at its end."""
    quota_world.set_limits(registry, {quota_world.TEAM: 1000})
    quota_world.settled(registry, 1, counter)
    running = dataclasses.replace(quota_world.consumed(40), running=True)
    assert await quota_world.checked(
        registry, quota.FixedTotals([quota_world.consumed(100), running])
    ) == [drift]


async def test_the_ledger_is_asked_for_pieces_between_prices(registry: store.Registry) -> None:
    class Dated(quota.NoPrices):
        def cost(self, model: str, tier: str, spent: quota.Spent, at_us: int) -> int:
            return spent.tokens * (1 if at_us < quota_world.NOON + 5 else 3)

        def changes(self, first_us: int, last_us: int) -> list[int]:
            assert first_us <= quota_world.NOON < last_us
            return [quota_world.NOON + 5]

    class Asked(quota.FixedTotals):
        def consumed(
            self, first_us: int, last_us: int, *, cuts: Sequence[int] = (), over_us: int = 0
        ) -> Sequence[quota.Consumed]:
            assert list(cuts) == [quota_world.NOON + 5]
            assert over_us == quota_world.NOON - round(quota_check.QUIET_S * 1e6)
            return super().consumed(first_us, last_us)

    money = quota_world.TEAM._replace(kind=quota_world.K.COST_PER_DAY)
    quota_world.set_limits(registry, {money: 1000})
    ledger = Asked(
        [quota_world.consumed(20), quota_world.consumed(20, from_us=quota_world.NOON + 5)]
    )
    found = await quota_check.check(registry.quotas, ledger, Dated(), quota_world.Watch())
    assert found == {(money, quota_world.DAY): 80}


async def test_two_checks_at_once_correct_once(registry: store.Registry) -> None:
    """S8 for this job: an old leader and a new one."""
    quota_world.set_limits(registry, {quota_world.TEAM: 1000})
    quota_world.settled(registry, 1, 100)
    ledger, time = quota.FixedTotals([quota_world.consumed(130)]), quota_world.Watch()

    async def the_other() -> None:
        assert await quota_world.checked(registry, ledger) == [30]

    async def nothing() -> None:
        return

    time.then = [nothing, the_other]
    await quota_world.checked(registry, ledger, time)
    assert registry.quotas.sums([quota_world.DAY])[quota_world.TEAM, quota_world.DAY].amount == 130


async def test_rounding_of_each_request_is_no_drift(registry: store.Registry) -> None:
    class Third(quota.NoPrices):
        def cost(self, model: str, tier: str, spent: quota.Spent, at_us: int) -> int:
            return spent.tokens // 3

    money = quota_world.TEAM._replace(kind=quota_world.K.COST_PER_DAY)
    quota_world.set_limits(registry, {money: 1000})
    registry.quotas.exchange(
        quotas.Report("o", 1, {(money, quota_world.DAY): 6}), (0, 0), quota_world.NOON
    )
    ledger = quota.FixedTotals([dataclasses.replace(quota_world.consumed(20), attempts=2)])
    found = await quota_check.check(registry.quotas, ledger, Third(), quota_world.Watch())
    assert found == {(money, quota_world.DAY): 0}


async def test_checks_run_on_the_hour_and_after_a_wish_and_not_on_a_damaged_ledger(
    registry: store.Registry, caplog: pytest.LogCaptureFixture
) -> None:
    class Damaged(quota.FixedTotals):
        asked = 0

        def consumed(
            self, first_us: int, last_us: int, *, cuts: Sequence[int] = (), over_us: int = 0
        ) -> Sequence[quota.Consumed]:
            self.asked += 1
            raise errors.RecordingUnavailable("p.parquet: damaged")

    quota_world.set_limits(registry, {quota_world.TEAM: 1000})
    quota_world.settled(registry, 1, 100)
    good, bad = quota.FixedTotals([quota_world.consumed(10)]), Damaged()
    minute = 60_000_000
    look = quota_check.periodic(registry.quotas, bad, quota.NoPrices(), quota_world.Watch())
    await look(quota_world.NOON + minute)
    await look(quota_world.NOON + 2 * minute)
    assert bad.asked == 2
    assert registry.quotas.sums([quota_world.DAY])[quota_world.TEAM, quota_world.DAY].amount == 100
    assert "damaged" in caplog.text

    look = quota_check.periodic(registry.quotas, good, quota.NoPrices(), quota_world.Watch())
    for at, batch, wish in ((1, 2, False), (2, 3, False), (3, 4, True), (60, 5, False)):
        if wish:
            registry.quotas.wish_check()
        await look(quota_world.NOON + at * minute)
        quota_world.settled(registry, batch, 7)
    assert registry.quotas.sums([quota_world.DAY])[quota_world.TEAM, quota_world.DAY].amount == 17
    with caplog.at_level(logging.WARNING):
        await look(quota_world.NOON + 120 * minute)
    assert "corrected by -7 to the ledger" in caplog.text

"""Quotas in the registry, the keeper of the owner's book and the check against the ledger."""

import asyncio
import dataclasses
import datetime
import logging
import threading
from collections.abc import Mapping, Sequence

import pytest
from sqlalchemy import exc

from scheduler.contracts import clock, errors, quota
from scheduler.core import quota_limits as limits
from scheduler.runtime import quota_check, quota_keeper
from scheduler.runtime.registry import quotas, store

K = limits.Kind
TEAM = limits.Key(limits.Scope.TEAM, "physics", "", "", "", K.TOKENS_PER_DAY)
MONTH = TEAM._replace(kind=K.TOKENS_PER_MONTH)
RUNNING = TEAM._replace(kind=K.CONCURRENT)
NOON = round(datetime.datetime(2026, 11, 30, 12, tzinfo=datetime.UTC).timestamp() * 1_000_000)
DAY = limits.window(limits.Period.DAY, NOON)[0]
SPENT = quota.Spent(6, 0, 4)


def set_limits(
    registry: store.Registry, wanted: Mapping[limits.Key, int | None], *, hard: bool = True
) -> None:
    registry.quotas.change(wanted, hard=hard, author="root", reason="grant 42", now_us=NOON)


def claim(number: int, now_us: int = NOON, team: str = "physics", key: str = "k1") -> quota.Claim:
    return quota.Claim(f"q{number}", team, "ada", key, "chat", "interactive", 6, 4, now_us)


def report(batch: int, amount: int, owner: str = "one") -> quotas.Report:
    return quotas.Report(owner, batch, {(TEAM, DAY): amount})


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


def test_limits_are_kept_with_who_set_them_and_why(registry: store.Registry) -> None:
    set_limits(registry, {TEAM: 1000, MONTH: 20_000})
    set_limits(registry, {TEAM: 500}, hard=False)
    set_limits(registry, {MONTH: None})
    assert registry.quotas.rules() == (
        quotas.Rule(limits.Limit(TEAM, 500, hard=False), "root", "grant 42", NOON),
    )
    told = [(change.key.kind, change.amount) for change in registry.quotas.history()]
    assert told == [
        (K.TOKENS_PER_MONTH, None),
        (K.TOKENS_PER_DAY, 500),
        (K.TOKENS_PER_MONTH, 20_000),
        (K.TOKENS_PER_DAY, 1000),
    ]
    assert registry.journal.events(1)[0].body["text"].endswith("tokens_per_month removed by root")


def test_of_several_changes_all_are_made_or_none(registry: store.Registry) -> None:
    with pytest.raises(errors.NotFound, match="no such limit"):
        set_limits(registry, {TEAM: 5, MONTH: None})
    assert registry.quotas.rules() == ()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"team": "007"}, {"team": "7"}),
        ({"team": "1e3"}, {"team": "1000"}),
        ({"team": "NULL"}, {"team": "null"}),
        ({"team": "a:b", "name": "c"}, {"team": "a", "name": "b:c"}),
    ],
)
def test_names_are_strings_and_never_joined(
    registry: store.Registry, one: dict[str, str], other: dict[str, str]
) -> None:
    """A7, in both databases."""
    keys = [
        TEAM._replace(scope=limits.Scope.KEY if "name" in names else limits.Scope.TEAM, **names)  # type: ignore[arg-type]
        for names in (one, other)
    ]
    for amount, key in enumerate(keys, 1):
        set_limits(registry, {key: amount})
        registry.quotas.exchange(quotas.Report("o", amount, {(key, DAY): amount}), (0, 0), NOON)
    assert {rule.limit.key: rule.limit.amount for rule in registry.quotas.rules()} == {
        keys[0]: 1,
        keys[1]: 2,
    }
    sums = {place[0]: counted.amount for place, counted in registry.quotas.sums([DAY]).items()}
    assert sums == {keys[0]: 1, keys[1]: 2}


def test_a_batch_sent_again_is_added_once_and_owners_add_up(registry: store.Registry) -> None:
    first = registry.quotas.exchange(report(1, 10), (-1, 0), NOON)
    again = registry.quotas.exchange(report(1, 10), (-1, 0), NOON)
    assert first.sums == again.sums == {(TEAM, DAY): 10}
    assert registry.quotas.exchange(report(2, 5), again.seen, NOON).sums == {(TEAM, DAY): 15}
    news = registry.quotas.exchange(report(1, 7, "two"), (-1, 0), NOON)
    assert news.sums == {(TEAM, DAY): 22}
    nothing = registry.quotas.exchange(quotas.Report("two"), news.seen, NOON)
    assert (nothing.rules, nothing.sums) == (None, {})


def test_what_runs_at_all_owners_heard_of_late_adds_up(registry: store.Registry) -> None:
    for owner, at_us, amount in (
        ("one", NOON, 2),
        ("two", NOON, 3),
        ("dead", NOON - 60_000_000, 9),
    ):
        told = quotas.Report(owner, running={RUNNING: amount})
        registry.quotas.exchange(told, (0, 0), at_us)
    assert registry.quotas.running(NOON + 1) == {RUNNING: 5}


async def test_a_change_is_in_force_after_one_exchange_and_sums_survive_the_owner(
    registry: store.Registry,
) -> None:
    time = clock.FakeClock(wall_us=NOON)
    keeper = quota_keeper.Keeper(registry.quotas, time)
    await keeper.exchange()
    set_limits(registry, {TEAM: 25})
    await keeper.exchange()
    for number in range(2):
        keeper.book.reserve(claim(number)).settle(SPENT, NOON)
    with pytest.raises(errors.QuotaExceeded):
        keeper.book.reserve(claim(3))
    await keeper.exchange()
    heir = quota_keeper.Keeper(registry.quotas, time)  # the first one was killed here
    await heir.exchange()
    assert heir.book.used(NOON) == {}
    with pytest.raises(errors.QuotaExceeded, match="20 used"):
        heir.book.reserve(claim(4))
    await keeper.close()


async def test_notices_and_what_runs_now_are_told(
    registry: store.Registry, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = quota_keeper.Keeper(registry.quotas, clock.FakeClock(wall_us=NOON))
    set_limits(registry, {TEAM: 10, RUNNING: 5})
    await keeper.exchange()
    keeper.book.reserve(claim(1)).settle(SPENT, NOON)
    set_limits(registry, {TEAM: 100})
    await keeper.exchange()
    keeper.book.reserve(claim(2))
    for _ in range(quota_keeper.RUNNING_TICKS):
        await keeper.exchange()
    assert registry.quotas.running(NOON) == {RUNNING: 1}
    texts = [entry.body["text"] for entry in registry.journal.events()]
    assert "team physics: tokens_per_day 10: nearly used up (10 used)" in texts
    assert "nearly used up" in caplog.text


class Hanging:
    """A registry's quotas whose database takes calls and answers none."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.thaw = threading.Event()
        self.answered = False

    def exchange(self, told: quotas.Report, seen: tuple[int, int], now_us: int) -> quotas.News:
        self.asked.set()
        self.thaw.wait(20)
        self.answered = True
        raise exc.OperationalError("", {}, Exception("gone"))


def test_a_database_that_hangs_keeps_no_process_from_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(quota_keeper, "CLOSE_S", 0.01)
    hanging = Hanging()
    keeper = quota_keeper.Keeper(hanging, clock.FakeClock(wall_us=NOON))  # type: ignore[arg-type]
    asyncio.run(keeper.close())  # waits for the threads of `asyncio.to_thread`
    assert hanging.asked.is_set()
    assert not hanging.answered
    assert all(one.daemon for one in threading.enumerate() if one.name == "quotas")
    hanging.thaw.set()
    assert "is not in the registry: no answer for 0.01 s" in caplog.text


class Flaky:
    """A registry's quotas that fail before or after the write, as often as told."""

    def __init__(self, real: quotas.Quotas) -> None:
        self.real = real
        self.fail = ""

    def exchange(self, told: quotas.Report, seen: tuple[int, int], now_us: int) -> quotas.News:
        if self.fail == "before":
            raise exc.OperationalError("", {}, Exception("gone"))
        news = self.real.exchange(told, seen, now_us)
        if self.fail == "after":
            raise exc.OperationalError("", {}, Exception("gone"))
        return news

    def wish_check(self) -> None:
        self.real.wish_check()


@pytest.mark.parametrize("fail", ["before", "after"])
async def test_without_the_registry_limits_stay_and_use_is_told_once_later(
    registry: store.Registry, fail: str, caplog: pytest.LogCaptureFixture
) -> None:
    flaky, time = Flaky(registry.quotas), clock.FakeClock(wall_us=NOON)
    keeper = quota_keeper.Keeper(flaky, time)  # type: ignore[arg-type]
    set_limits(registry, {TEAM: 30})
    await keeper.start()
    flaky.fail = fail
    for number in range(3):
        keeper.book.reserve(claim(number)).settle(SPENT, NOON)
        with pytest.raises(exc.OperationalError):
            await keeper.exchange()
    with pytest.raises(errors.QuotaExceeded, match="30 used"):
        keeper.book.reserve(claim(4))
    flaky.fail = ""
    await keeper.close()
    assert registry.quotas.sums([DAY])[TEAM, DAY].amount == 30
    assert "registry" not in caplog.text  # whoever calls `exchange` itself is told by the exception


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


@pytest.mark.parametrize(
    ("counter", "ledger", "drifts"),
    [(100, 100, [0, 0]), (140, 100, [-40, -40]), (60, 100, [40, 40]), (0, 100, [100, 100])],
)
async def test_counters_are_set_to_what_the_ledger_says(
    registry: store.Registry, counter: int, ledger: int, drifts: list[int]
) -> None:
    set_limits(registry, {TEAM: 1000, MONTH: 1000})
    if counter:
        settled(registry, 1, counter)
    rows = [consumed(ledger - 1), consumed(1), consumed(50, team="chem")]
    assert await checked(registry, quota.FixedTotals(rows)) == drifts
    found = registry.quotas.sums([DAY])[TEAM, DAY]
    assert found == quotas.Counted(100, drifts[0], NOON)
    assert await checked(registry, quota.FixedTotals(rows)) == [0, 0]


async def test_use_of_earlier_days_counts_for_the_month_only(registry: store.Registry) -> None:
    set_limits(registry, {TEAM: 1000, MONTH: 1000})
    settled(registry, 1, 10)
    rows = [consumed(10), consumed(70, from_us=DAY - 3_600_000_000)]
    assert sorted(await checked(registry, quota.FixedTotals(rows))) == [0, 70]


async def test_use_while_the_ledger_is_read_is_no_drift(registry: store.Registry) -> None:
    set_limits(registry, {TEAM: 1000})
    settled(registry, 1, 100)
    time = Watch()

    async def before_the_reading() -> None:
        settled(registry, 2, 20)

    async def after_it() -> None:
        settled(registry, 3, 30)

    time.then = [before_the_reading, after_it]
    assert await checked(registry, quota.FixedTotals([consumed(120)]), time) == [0]
    assert registry.quotas.sums([DAY])[TEAM, DAY].amount == 150


@pytest.mark.parametrize(
    ("counter", "drift"),
    [(90, 10), (100, 0), (120, 0), (140, 0), (150, -10)],
)
async def test_what_running_requests_used_so_far_may_be_settled_or_not(
    registry: store.Registry, counter: int, drift: int
) -> None:
    """An attempt that was lost is in the ledger; its request goes on, and settles all of it at its end."""
    set_limits(registry, {TEAM: 1000})
    settled(registry, 1, counter)
    running = dataclasses.replace(consumed(40), running=True)
    assert await checked(registry, quota.FixedTotals([consumed(100), running])) == [drift]


async def test_the_ledger_is_asked_for_pieces_between_prices(registry: store.Registry) -> None:
    class Dated(quota.NoPrices):
        def cost(self, model: str, tier: str, spent: quota.Spent, at_us: int) -> int:
            return spent.tokens * (1 if at_us < NOON + 5 else 3)

        def changes(self, first_us: int, last_us: int) -> list[int]:
            assert first_us <= NOON < last_us
            return [NOON + 5]

    class Asked(quota.FixedTotals):
        def consumed(
            self, first_us: int, last_us: int, *, cuts: Sequence[int] = (), over_us: int = 0
        ) -> Sequence[quota.Consumed]:
            assert list(cuts) == [NOON + 5]
            assert over_us == NOON - round(quota_check.QUIET_S * 1e6)
            return super().consumed(first_us, last_us)

    money = TEAM._replace(kind=K.COST_PER_DAY)
    set_limits(registry, {money: 1000})
    ledger = Asked([consumed(20), consumed(20, from_us=NOON + 5)])
    found = await quota_check.check(registry.quotas, ledger, Dated(), Watch())
    assert found == {(money, DAY): 80}


async def test_two_checks_at_once_correct_once(registry: store.Registry) -> None:
    """S8 for this job: an old leader and a new one."""
    set_limits(registry, {TEAM: 1000})
    settled(registry, 1, 100)
    ledger, time = quota.FixedTotals([consumed(130)]), Watch()

    async def the_other() -> None:
        assert await checked(registry, ledger) == [30]

    async def nothing() -> None:
        return

    time.then = [nothing, the_other]
    await checked(registry, ledger, time)
    assert registry.quotas.sums([DAY])[TEAM, DAY].amount == 130


async def test_rounding_of_each_request_is_no_drift(registry: store.Registry) -> None:
    class Third(quota.NoPrices):
        def cost(self, model: str, tier: str, spent: quota.Spent, at_us: int) -> int:
            return spent.tokens // 3

    money = TEAM._replace(kind=K.COST_PER_DAY)
    set_limits(registry, {money: 1000})
    registry.quotas.exchange(quotas.Report("o", 1, {(money, DAY): 6}), (0, 0), NOON)
    ledger = quota.FixedTotals([dataclasses.replace(consumed(20), attempts=2)])
    found = await quota_check.check(registry.quotas, ledger, Third(), Watch())
    assert found == {(money, DAY): 0}


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

    set_limits(registry, {TEAM: 1000})
    settled(registry, 1, 100)
    good, bad = quota.FixedTotals([consumed(10)]), Damaged()
    minute = 60_000_000
    look = quota_check.periodic(registry.quotas, bad, quota.NoPrices(), Watch())
    await look(NOON + minute)
    await look(NOON + 2 * minute)
    assert bad.asked == 2
    assert registry.quotas.sums([DAY])[TEAM, DAY].amount == 100
    assert "damaged" in caplog.text

    look = quota_check.periodic(registry.quotas, good, quota.NoPrices(), Watch())
    for at, batch, wish in ((1, 2, False), (2, 3, False), (3, 4, True), (60, 5, False)):
        if wish:
            registry.quotas.wish_check()
        await look(NOON + at * minute)
        settled(registry, batch, 7)
    assert registry.quotas.sums([DAY])[TEAM, DAY].amount == 17
    with caplog.at_level(logging.WARNING):
        await look(NOON + 120 * minute)
    assert "corrected by -7 to the ledger" in caplog.text


async def test_metrics_tell_shares_notices_and_drift(registry: store.Registry) -> None:
    time = clock.FakeClock(wall_us=NOON)
    keeper = quota_keeper.Keeper(registry.quotas, time)
    numbers = keeper.numbers.registry
    set_limits(registry, {TEAM: 20})
    await keeper.exchange()
    keeper.book.reserve(claim(1))
    settled(registry, 1, 8)
    await checked(registry, quota.FixedTotals([consumed(9)]))
    await keeper.exchange()
    labels = {"team": "physics", "model": "", "tier": "", "kind": "tokens_per_day"}
    assert numbers.get_sample_value("forebay_quota_used_ratio", labels) == (10 + 9) / 20
    assert numbers.get_sample_value("forebay_quota_drift", labels) == 1
    assert numbers.get_sample_value("forebay_quota_notices_total", {"level": "refused"}) == 0
    with pytest.raises(errors.QuotaExceeded):
        keeper.book.reserve(claim(3))
    assert numbers.get_sample_value("forebay_quota_notices_total", {"level": "refused"}) == 1
    set_limits(registry, {TEAM: None})
    await keeper.exchange()
    assert numbers.get_sample_value("forebay_quota_used_ratio", labels) == 0

"""Quotas in the registry, and the keeper of the owner's book."""

import asyncio
import threading

import pytest
from sqlalchemy import exc

from scheduler.contracts import clock, errors, quota
from scheduler.core import quota_limits as limits
from scheduler.runtime import quota_keeper
from scheduler.runtime.registry import quotas, store
from tests.unit.runtime import quota_world

RUNNING = quota_world.TEAM._replace(kind=quota_world.K.CONCURRENT)
SPENT = quota.Spent(6, 0, 4)


def report(batch: int, amount: int, owner: str = "one") -> quotas.Report:
    return quotas.Report(owner, batch, {(quota_world.TEAM, quota_world.DAY): amount})


def test_limits_are_kept_with_who_set_them_and_why(registry: store.Registry) -> None:
    quota_world.set_limits(registry, {quota_world.TEAM: 1000, quota_world.MONTH: 20_000})
    quota_world.set_limits(registry, {quota_world.TEAM: 500}, hard=False)
    quota_world.set_limits(registry, {quota_world.MONTH: None})
    assert registry.quotas.rules() == (
        quotas.Rule(
            limits.Limit(quota_world.TEAM, 500, hard=False), "root", "grant 42", quota_world.NOON
        ),
    )
    told = [(change.key.kind, change.amount) for change in registry.quotas.history()]
    assert told == [
        (quota_world.K.TOKENS_PER_MONTH, None),
        (quota_world.K.TOKENS_PER_DAY, 500),
        (quota_world.K.TOKENS_PER_MONTH, 20_000),
        (quota_world.K.TOKENS_PER_DAY, 1000),
    ]
    assert registry.journal.events(1)[0].body["text"].endswith("tokens_per_month removed by root")


def test_of_several_changes_all_are_made_or_none(registry: store.Registry) -> None:
    with pytest.raises(errors.NotFound, match="no such limit"):
        quota_world.set_limits(registry, {quota_world.TEAM: 5, quota_world.MONTH: None})
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
    scopes = (limits.Scope.KEY if "name" in names else limits.Scope.TEAM for names in (one, other))
    keys = [
        quota_world.TEAM._replace(scope=scope, **names)  # type: ignore[arg-type]
        for scope, names in zip(scopes, (one, other), strict=True)
    ]
    for amount, key in enumerate(keys, 1):
        quota_world.set_limits(registry, {key: amount})
        registry.quotas.exchange(
            quotas.Report("o", amount, {(key, quota_world.DAY): amount}), (0, 0), quota_world.NOON
        )
    assert {rule.limit.key: rule.limit.amount for rule in registry.quotas.rules()} == {
        keys[0]: 1,
        keys[1]: 2,
    }
    sums = {
        place[0]: counted.amount
        for place, counted in registry.quotas.sums([quota_world.DAY]).items()
    }
    assert sums == {keys[0]: 1, keys[1]: 2}


def test_a_batch_sent_again_is_added_once_and_owners_add_up(registry: store.Registry) -> None:
    first = registry.quotas.exchange(report(1, 10), (-1, 0), quota_world.NOON)
    again = registry.quotas.exchange(report(1, 10), (-1, 0), quota_world.NOON)
    assert first.sums == again.sums == {(quota_world.TEAM, quota_world.DAY): 10}
    assert registry.quotas.exchange(report(2, 5), again.seen, quota_world.NOON).sums == {
        (quota_world.TEAM, quota_world.DAY): 15
    }
    news = registry.quotas.exchange(report(1, 7, "two"), (-1, 0), quota_world.NOON)
    assert news.sums == {(quota_world.TEAM, quota_world.DAY): 22}
    nothing = registry.quotas.exchange(quotas.Report("two"), news.seen, quota_world.NOON)
    assert (nothing.rules, nothing.sums) == (None, {})


def test_what_runs_at_all_owners_heard_of_late_adds_up(registry: store.Registry) -> None:
    for owner, at_us, amount in (
        ("one", quota_world.NOON, 2),
        ("two", quota_world.NOON, 3),
        ("dead", quota_world.NOON - 60_000_000, 9),
    ):
        told = quotas.Report(owner, running={RUNNING: amount})
        registry.quotas.exchange(told, (0, 0), at_us)
    assert registry.quotas.running(quota_world.NOON + 1) == {RUNNING: 5}


async def test_a_change_is_in_force_after_one_exchange_and_sums_survive_the_owner(
    registry: store.Registry,
) -> None:
    time = clock.FakeClock(wall_us=quota_world.NOON)
    keeper = quota_keeper.Keeper(registry.quotas, time)
    await keeper.exchange()
    quota_world.set_limits(registry, {quota_world.TEAM: 25})
    await keeper.exchange()
    for number in range(2):
        keeper.book.reserve(quota_world.claim(number)).settle(SPENT, quota_world.NOON)
    with pytest.raises(errors.QuotaExceeded):
        keeper.book.reserve(quota_world.claim(3))
    await keeper.exchange()
    heir = quota_keeper.Keeper(registry.quotas, time)  # the first one was killed here
    await heir.exchange()
    assert heir.book.used(quota_world.NOON) == {}
    with pytest.raises(errors.QuotaExceeded, match="20 used"):
        heir.book.reserve(quota_world.claim(4))
    await keeper.close()


async def test_notices_and_what_runs_now_are_told(
    registry: store.Registry, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = quota_keeper.Keeper(registry.quotas, clock.FakeClock(wall_us=quota_world.NOON))
    quota_world.set_limits(registry, {quota_world.TEAM: 10, RUNNING: 5})
    await keeper.exchange()
    keeper.book.reserve(quota_world.claim(1)).settle(SPENT, quota_world.NOON)
    quota_world.set_limits(registry, {quota_world.TEAM: 100})
    await keeper.exchange()
    keeper.book.reserve(quota_world.claim(2))
    for _ in range(quota_keeper.RUNNING_TICKS):
        await keeper.exchange()
    assert registry.quotas.running(quota_world.NOON) == {RUNNING: 1}
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
    keeper = quota_keeper.Keeper(hanging, clock.FakeClock(wall_us=quota_world.NOON))  # type: ignore[arg-type]
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
    flaky, time = Flaky(registry.quotas), clock.FakeClock(wall_us=quota_world.NOON)
    keeper = quota_keeper.Keeper(flaky, time)  # type: ignore[arg-type]
    quota_world.set_limits(registry, {quota_world.TEAM: 30})
    await keeper.start()
    flaky.fail = fail
    for number in range(3):
        keeper.book.reserve(quota_world.claim(number)).settle(SPENT, quota_world.NOON)
        with pytest.raises(exc.OperationalError):
            await keeper.exchange()
    with pytest.raises(errors.QuotaExceeded, match="30 used"):
        keeper.book.reserve(quota_world.claim(4))
    flaky.fail = ""
    await keeper.close()
    assert registry.quotas.sums([quota_world.DAY])[quota_world.TEAM, quota_world.DAY].amount == 30
    assert "registry" not in caplog.text  # whoever calls `exchange` itself is told by the exception


async def test_metrics_tell_shares_notices_and_drift(registry: store.Registry) -> None:
    time = clock.FakeClock(wall_us=quota_world.NOON)
    keeper = quota_keeper.Keeper(registry.quotas, time)
    numbers = keeper.numbers.registry
    quota_world.set_limits(registry, {quota_world.TEAM: 20})
    await keeper.exchange()
    keeper.book.reserve(quota_world.claim(1))
    quota_world.settled(registry, 1, 8)
    await quota_world.checked(registry, quota.FixedTotals([quota_world.consumed(9)]))
    await keeper.exchange()
    labels = {"team": "physics", "model": "", "tier": "", "kind": "tokens_per_day"}
    assert numbers.get_sample_value("forebay_quota_used_ratio", labels) == (10 + 9) / 20
    assert numbers.get_sample_value("forebay_quota_drift", labels) == 1
    assert numbers.get_sample_value("forebay_quota_notices_total", {"level": "refused"}) == 0
    with pytest.raises(errors.QuotaExceeded):
        keeper.book.reserve(quota_world.claim(3))
    assert numbers.get_sample_value("forebay_quota_notices_total", {"level": "refused"}) == 1
    quota_world.set_limits(registry, {quota_world.TEAM: None})
    await keeper.exchange()
    assert numbers.get_sample_value("forebay_quota_used_ratio", labels) == 0

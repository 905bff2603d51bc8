"""Quotas: never sold twice, all of it comes back, whatever the order, the hour and the clock do."""

import dataclasses
import random

from hypothesis import given
from hypothesis import strategies as st

from scheduler.contracts import errors, quota
from scheduler.core import quota as books
from scheduler.core import quota_limits as limits

HOUR_US = 3_600_000_000
NOON_US = 1_790_000_000_000_000 // (24 * HOUR_US) * 24 * HOUR_US + 12 * HOUR_US
TEAM = limits.Key(limits.Scope.TEAM, "physics", "", "", "", limits.Kind.TOKENS_PER_DAY)


def limit(kind: limits.Kind, amount: int, **more: object) -> limits.Limit:
    return limits.Limit(TEAM._replace(kind=kind, **more), amount)  # type: ignore[arg-type]


def claim(number: int, now_us: int, prompt: int = 10, output: int = 0) -> quota.Claim:
    return quota.Claim(
        f"q{number}", "physics", "ada", "k1", "chat", "interactive", prompt, output, now_us
    )


def taken(book: books.Book, asked: quota.Claim) -> quota.Hold | None:
    try:
        return book.reserve(asked)
    except (errors.QuotaExceeded, errors.LargerThanQuota):
        return None


@dataclasses.dataclass(frozen=True)
class Ask:
    tokens: int
    share: float  # of what it asked for it really uses
    gap_us: int


ASKS = st.lists(
    st.builds(Ask, st.integers(1, 60), st.floats(0, 1), st.integers(0, 5_000_000)), max_size=60
)
ALL = (
    limit(limits.Kind.TOKENS_PER_MINUTE, 200),
    limit(limits.Kind.TOKENS_PER_DAY, 300),
    limit(limits.Kind.TOKENS_PER_MONTH, 500),
    limit(limits.Kind.CONCURRENT, 7),
    limit(limits.Kind.TOKENS_PER_DAY, 150, scope=limits.Scope.USER, name="ada"),
)


@given(asks=ASKS, seed=st.integers(0, 2**32))
def test_a_day_is_never_oversold_and_what_is_held_comes_back(asks: list[Ask], seed: int) -> None:
    book, now = books.Book(), NOON_US
    book.set_limits(ALL)
    rng, held, spent = random.Random(seed), list[tuple[Ask, quota.Hold]](), 0
    for number, ask in enumerate(asks):
        now += ask.gap_us
        hold = taken(book, claim(number, now, ask.tokens))
        if hold is not None:
            held.append((ask, hold))
        assert all(used <= cap.amount for cap in ALL for used in [book.used(now).get(cap.key, 0)])
        assert len(held) <= 7
        while held and rng.random() < 0.4:  # in any order, and twice
            one, ended = held.pop(rng.randrange(len(held)))
            used = int(one.tokens * one.share)
            spent += used
            ended.settle(quota.Spent(used), now)
            ended.settle(quota.Spent(used), now)
    for one, hold in held:
        spent += int(one.tokens * one.share)
        hold.settle(quota.Spent(output_tokens=int(one.tokens * one.share)), now)
    assert book.open == 0
    used_now = book.used(now)
    for cap in ALL:
        if cap.key.kind.kept and cap.key in used_now:
            assert used_now[cap.key] == spent
    assert used_now.get(ALL[3].key, 0) == 0
    assert sum(amount for (key, _), amount in book.collect().items() if key == TEAM) == spent


@given(st.lists(st.integers(0, 20), min_size=1, max_size=30), st.integers(0, 2**32))
def test_the_order_of_settling_does_not_matter(uses: list[int], seed: int) -> None:
    totals = []
    for order in (range(len(uses)), random.Random(seed).sample(range(len(uses)), len(uses))):
        book = books.Book()
        book.set_limits(
            (
                limit(limits.Kind.TOKENS_PER_DAY, 10_000),
                limit(limits.Kind.TOKENS_PER_MINUTE, 10_000),
                limit(limits.Kind.CONCURRENT, 100),
            )
        )
        holds = [book.reserve(claim(number, NOON_US)) for number in range(len(uses))]
        for index in order:
            holds[index].settle(quota.Spent(uses[index]), NOON_US + 1)
        totals.append(book.used(NOON_US + 1))
        assert totals[-1][limit(limits.Kind.TOKENS_PER_MINUTE, 0).key] == sum(uses)
    assert totals[0] == totals[1]


@given(
    starts=st.lists(st.integers(0, 180_000_000), min_size=1, max_size=80),
    sizes=st.lists(st.integers(1, 50), min_size=80, max_size=80),
)
def test_no_sixty_seconds_hold_more_than_the_limit_of_a_minute(
    starts: list[int], sizes: list[int]
) -> None:
    book = books.Book()
    book.set_limits((limit(limits.Kind.TOKENS_PER_MINUTE, 100),))
    granted: list[tuple[int, int]] = []
    for number, at in enumerate(sorted(starts)):
        if taken(book, claim(number, NOON_US + at, sizes[number])) is not None:
            granted.append((at, sizes[number]))
    for at, _ in granted:
        assert sum(size for when, size in granted if at <= when <= at + 60_000_000) <= 100


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=30),
    gaps=st.lists(st.integers(0, 5_000_000), min_size=30, max_size=30),
    asked=st.integers(1, 100),
)
def test_retry_after_is_when_a_minute_has_room(
    sizes: list[int], gaps: list[int], asked: int
) -> None:
    book, now = books.Book(), NOON_US
    book.set_limits((limit(limits.Kind.TOKENS_PER_MINUTE, 100),))
    for number, size in enumerate(sizes):
        now += gaps[number]
        taken(book, claim(number, now, size))
    try:
        book.reserve(claim(999, now, asked))
    except errors.QuotaExceeded as error:
        wait_us = round((error.retry_after_s or 0) * 1e6)
        assert 0 < wait_us <= 61_000_000
        assert taken(book, claim(999, now + wait_us - 2, asked)) is None
        assert taken(book, claim(999, now + wait_us, asked)) is not None


STEPS = st.lists(
    st.tuples(st.integers(-HOUR_US, HOUR_US), st.integers(1, 40), st.booleans()), max_size=60
)


@given(STEPS)
def test_a_clock_that_jumps_an_hour_either_way_loses_nothing(
    steps: list[tuple[int, int, bool]],
) -> None:
    """Around midnight and the month's end: each use is in the window in which it was reserved."""
    book, now = books.Book(), limits.window(limits.Period.MONTH, NOON_US)[1]
    book.set_limits((limit(limits.Kind.TOKENS_PER_DAY, 10**6), ALL[0], ALL[3]))
    expected: dict[tuple[limits.Key, int], int] = {}
    held: list[tuple[int, int, quota.Hold]] = []
    for number, (step, tokens, end) in enumerate(steps):
        now += step
        hold = taken(book, claim(number, now, tokens))
        if hold is not None:
            held.append((now, tokens, hold))
        if end and held:
            at, used, ended = held.pop()
            place = TEAM, limits.window(limits.Period.DAY, at)[0]
            expected[place] = expected.get(place, 0) + used
            ended.settle(quota.Spent(used), now)
    for _, _, hold in held:
        hold.settle(quota.NOTHING, now)
    assert book.collect() == expected
    # An hour's step back must not shut a minute's quota for an hour.
    now += 61_000_000 + books.STEP_US
    assert taken(book, claim(1000, now, 200)) is not None


@given(st.lists(st.integers(0, 30), max_size=20), st.lists(st.integers(0, 2), max_size=40))
def test_sums_told_to_the_registry_and_back_count_once(uses: list[int], fates: list[int]) -> None:
    """A write may fail, or succeed without our hearing of it; other owners write in between."""
    book, kept, others = books.Book(), dict[tuple[limits.Key, int], int](), 0
    book.set_limits((limit(limits.Kind.TOKENS_PER_DAY, 10**6),))
    place = TEAM, limits.window(limits.Period.DAY, NOON_US)[0]
    applied = False
    for number, used in enumerate(uses):
        book.reserve(claim(number, NOON_US)).settle(quota.Spent(used), NOON_US)
        fate = fates[number] if number < len(fates) else 0
        batch = book.collect()
        if fate > 0 and batch and not applied:  # a batch is applied once, however often sent
            for where, amount in batch.items():
                kept[where] = kept.get(where, 0) + amount
            applied = True
        if fate == 2:
            kept[place] = kept.get(place, 0) + 5
            others += 5
            book.learn(dict(kept), collected=True)
            applied = False
        assert book.used(NOON_US)[TEAM] == sum(uses[: number + 1]) + others

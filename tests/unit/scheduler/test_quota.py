"""The book of quotas: scopes, refusals and when to come back, warnings, windows, names."""

import datetime

import pytest

from scheduler.contracts import errors, quota
from scheduler.core import quota as books
from scheduler.core import quota_limits as limits

K = limits.Kind


def us(text: str) -> int:
    return round(datetime.datetime.fromisoformat(text).timestamp() * 1_000_000)


NOON = us("2026-11-30T12:00:00+00:00")


def key(kind: limits.Kind, team: str = "physics", **more: str) -> limits.Key:
    fields = {"scope": "team", "name": "", "model": "", "tier": "", **more}
    scope = limits.Scope(fields.pop("scope"))
    return limits.Key(scope, team, fields["name"], fields["model"], fields["tier"], kind)


def claim(
    number: int = 0,
    *,
    tokens: int = 10,
    output: int = 0,
    now: int = NOON,
    team: str = "physics",
    user: str = "ada",
    key_id: str = "k1",
    model: str = "chat",
    tier: str = "interactive",
) -> quota.Claim:
    return quota.Claim(f"q{number}", team, user, key_id, model, tier, tokens, output, now)


def book(*found: limits.Limit, pricing: quota.Pricing | None = None) -> books.Book:
    made = books.Book(pricing)
    made.set_limits(found)
    return made


class Prices:
    """A micro-unit for a cached token, 10 for an uncached one, 100 for one of output."""

    def cost(self, model: str, tier: str, spent: quota.Spent, at_us: int) -> int:
        return (
            spent.cached_prompt_tokens
            + 10 * spent.uncached_prompt_tokens
            + 100 * spent.output_tokens
        )


def test_two_hundred_at_once_get_what_the_limit_allows_and_no_more() -> None:
    limited = book(limits.Limit(key(K.TOKENS_PER_DAY), 1000))
    holds, refused = [], []
    for number in range(200):
        try:
            holds.append(limited.reserve(claim(number, tokens=20, output=30)))
        except errors.QuotaExceeded as error:
            refused.append(error)
    assert (len(holds), len(refused)) == (20, 180)
    for hold in holds:
        hold.settle(quota.Spent(20, 0, 30), NOON)
    assert limited.used(NOON) == {key(K.TOKENS_PER_DAY): 1000}


def test_all_quotas_are_taken_or_none() -> None:
    limited = book(
        limits.Limit(key(K.TOKENS_PER_DAY), 1000),
        limits.Limit(key(K.TOKENS_PER_MONTH, scope="user", name="ada"), 15),
        limits.Limit(key(K.CONCURRENT, scope="key", name="k1"), 5),
    )
    limited.reserve(claim(1))
    with pytest.raises(errors.QuotaExceeded, match="team physics user ada: tokens_per_month 15"):
        limited.reserve(claim(2))
    assert sorted(limited.used(NOON).values()) == [1, 10, 10]
    limited.reserve(claim(3, user="bob"))  # of the same key and team, not the same user
    assert limited.used(NOON)[key(K.TOKENS_PER_DAY)] == 20


def test_a_refusal_names_the_quota_that_takes_longest_and_says_when() -> None:
    limited = book(
        limits.Limit(key(K.TOKENS_PER_MINUTE), 10), limits.Limit(key(K.TOKENS_PER_DAY), 10)
    )
    limited.reserve(claim(1))
    with pytest.raises(errors.QuotaExceeded) as caught:
        limited.reserve(claim(2))
    assert caught.value.retry_after_s == 12 * 3600
    assert caught.value.message == (
        "team physics: tokens_per_day 10 is used up (10 used or reserved, 10 more asked): "
        "try again after 43200 s"
    )
    assert (caught.value.status, caught.value.kind) == (429, "insufficient_quota")


def test_what_can_never_fit_is_a_bad_request_and_nothing_is_taken() -> None:
    limited = book(limits.Limit(key(K.TOKENS_PER_MINUTE), 100))
    with pytest.raises(errors.LargerThanQuota, match="lower max_tokens") as caught:
        limited.reserve(claim(tokens=50, output=51))
    assert (caught.value.status, caught.value.retryable) == (400, False)
    limited.reserve(claim(tokens=50, output=50))


def test_a_limit_of_zero_shuts_a_team_out_without_a_time_to_come_back() -> None:
    limited = book(limits.Limit(key(K.TOKENS_PER_DAY), 0))
    with pytest.raises(errors.QuotaExceeded, match="ask who set it") as caught:
        limited.reserve(claim())
    assert caught.value.retry_after_s is None


def test_the_wait_for_a_place_is_learned_from_how_long_requests_take() -> None:
    limited = book(limits.Limit(key(K.CONCURRENT), 2))
    first = limited.reserve(claim(1))
    limited.reserve(claim(2))
    with pytest.raises(errors.QuotaExceeded) as caught:
        limited.reserve(claim(3))
    assert caught.value.retry_after_s == 1.0
    first.settle(quota.Spent(10), NOON + 8_000_000)
    limited.reserve(claim(4, now=NOON + 8_000_000))
    with pytest.raises(errors.QuotaExceeded) as caught:
        limited.reserve(claim(5, now=NOON + 8_000_000))
    assert caught.value.retry_after_s == 4.0  # two run, eight seconds each


def test_a_request_that_never_ran_counts_nowhere() -> None:
    kinds = (K.TOKENS_PER_MINUTE, K.REQUESTS_PER_MINUTE, K.CONCURRENT, K.TOKENS_PER_DAY)
    limited = book(*(limits.Limit(key(kind), 100) for kind in kinds))
    limited.reserve(claim()).settle(quota.NOTHING, NOON + 1)
    assert set(limited.used(NOON + 1).values()) == {0}
    assert not limited.collect()


def test_what_was_used_beyond_the_claim_counts_too() -> None:
    limited = book(limits.Limit(key(K.TOKENS_PER_MINUTE), 100))
    hold = limited.reserve(claim(tokens=10))
    hold.settle(quota.Spent(10, 0, 70), NOON + 300_000_000)  # its minute is long over
    assert limited.used(NOON + 300_000_000) == {key(K.TOKENS_PER_MINUTE): 70}


def test_a_claim_made_again_replaces_the_first() -> None:
    limited = book(limits.Limit(key(K.TOKENS_PER_DAY), 100))
    first = limited.reserve(claim(1, tokens=80))
    second = limited.reserve(claim(1, tokens=90))
    first.settle(quota.Spent(80), NOON)
    assert limited.used(NOON) == {key(K.TOKENS_PER_DAY): 90}
    second.settle(quota.Spent(5), NOON)
    assert limited.used(NOON) == {key(K.TOKENS_PER_DAY): 5}
    assert limited.open == 0


def test_a_request_that_runs_already_is_adopted_whatever_the_limit() -> None:
    limited = book(limits.Limit(key(K.TOKENS_PER_DAY), 15))
    for number in range(3):
        limited.adopt(claim(number))
    assert limited.used(NOON) == {key(K.TOKENS_PER_DAY): 30}
    with pytest.raises(errors.QuotaExceeded):
        limited.reserve(claim(4))


def test_a_soft_limit_lets_through_and_tells_twice() -> None:
    told: list[books.Notice] = []
    limited = books.Book(tell=told.append)
    limited.set_limits([limits.Limit(key(K.TOKENS_PER_DAY), 100, hard=False)])
    for number in range(20):
        limited.reserve(claim(number)).settle(quota.Spent(10), NOON)
    assert [(notice.level, notice.used) for notice in told] == [
        (books.Level.WARNING, 80),
        (books.Level.OVER, 110),
    ]
    assert str(told[1]) == "team physics: tokens_per_day 100: soft limit passed (110 used)"


def test_a_hard_limit_tells_at_eighty_percent_and_at_the_first_refusal_of_each_window() -> None:
    told: list[books.Notice] = []
    limited = books.Book(tell=told.append)
    limited.set_limits([limits.Limit(key(K.TOKENS_PER_DAY), 100)])
    for number in range(30):
        at = NOON if number < 15 else NOON + 86_400_000_000
        try:
            limited.reserve(claim(number, now=at)).settle(quota.Spent(10), at)
        except errors.QuotaExceeded:
            continue
    assert [notice.level.value for notice in told] == ["warning", "refused"] * 2


def test_a_settlement_of_yesterday_does_not_warn_for_today() -> None:
    told: list[books.Notice] = []
    limited = books.Book(tell=told.append)
    limited.set_limits([limits.Limit(key(K.TOKENS_PER_DAY), 100)])
    midnight = us("2026-12-01T00:00:00+00:00")
    late = limited.reserve(claim(1, tokens=90, now=midnight - 1))
    limited.reserve(claim(2, now=midnight)).settle(quota.Spent(1), midnight)
    late.settle(quota.Spent(90), midnight + 5)
    assert told == []
    assert limited.used(midnight) == {key(K.TOKENS_PER_DAY): 1}


@pytest.mark.parametrize(
    ("kind", "full", "after"),
    [
        (K.TOKENS_PER_DAY, "2026-11-30T23:59:59.999999+00:00", "2026-12-01T00:00:00+00:00"),
        (K.TOKENS_PER_MONTH, "2026-11-30T23:59:59.999999+00:00", "2026-12-01T00:00:00+00:00"),
        (K.TOKENS_PER_MONTH, "2026-12-31T23:59:59.999999+00:00", "2027-01-01T00:00:00+00:00"),
        (K.TOKENS_PER_MONTH, "2028-02-29T23:59:59.999999+00:00", "2028-03-01T00:00:00+00:00"),
    ],
)
def test_windows_roll_over_on_the_microsecond(kind: limits.Kind, full: str, after: str) -> None:
    limited = book(limits.Limit(key(kind), 10))
    limited.reserve(claim(1, now=us(full)))
    with pytest.raises(errors.QuotaExceeded) as caught:
        limited.reserve(claim(2, now=us(full)))
    assert caught.value.retry_after_s == 1e-6
    limited.reserve(claim(3, now=us(after)))
    start, end = limits.window(kind.period, us(full))
    assert end == us(after)
    assert limits.window(kind.period, start) == (start, end)


def test_budgets_count_money_at_the_price_of_what_was_used() -> None:
    limited = book(limits.Limit(key(K.COST_PER_MONTH), 2_000_000), pricing=Prices())
    hold = limited.reserve(claim(1, tokens=1000, output=10_000))
    assert limited.used(NOON) == {key(K.COST_PER_MONTH): 1_010_000}
    with pytest.raises(errors.QuotaExceeded, match=r"cost_per_month 2.00 is used up \(1.01 used"):
        limited.reserve(claim(2, tokens=1000, output=10_000))
    hold.settle(quota.Spent(400, 600, 100), NOON)
    assert limited.used(NOON) == {key(K.COST_PER_MONTH): 4000 + 600 + 10_000}


def test_limits_for_a_model_or_tier_count_only_that() -> None:
    limited = book(
        limits.Limit(key(K.TOKENS_PER_DAY, model="big"), 10),
        limits.Limit(key(K.TOKENS_PER_DAY, tier="batch"), 10),
        limits.Limit(key(K.TOKENS_PER_DAY), 40),
    )
    limited.reserve(claim(1, model="big"))
    limited.reserve(claim(2, tier="batch"))
    for refused in (claim(3, model="big"), claim(4, tier="batch")):
        with pytest.raises(errors.QuotaExceeded):
            limited.reserve(refused)
    limited.reserve(claim(5))
    assert limited.used(NOON)[key(K.TOKENS_PER_DAY)] == 30


def test_everybody_without_a_limit_of_their_own_has_the_common_one_each() -> None:
    limited = book(
        limits.Limit(key(K.TOKENS_PER_DAY, scope="user", name="*"), 10),
        limits.Limit(key(K.TOKENS_PER_DAY, scope="user", name="ada"), 30),
        limits.Limit(key(K.CONCURRENT, team="*"), 2),
    )
    for number, user in enumerate(("ada", "bob")):
        limited.reserve(claim(number, user=user))
    limited.reserve(claim(9, team="chem"))
    with pytest.raises(errors.QuotaExceeded, match="team physics: concurrent 2"):
        limited.reserve(claim(10))
    assert limited.used(NOON)[key(K.TOKENS_PER_DAY, scope="user", name="bob")] == 10


@pytest.mark.parametrize("teams", [("007", "7"), ("1e3", "1000.0"), ("NULL", "null"), ("a", "a:b")])
def test_teams_that_look_alike_are_counted_apart(teams: tuple[str, str]) -> None:
    """A7: names are strings and nothing else."""
    limited = book(*(limits.Limit(key(K.TOKENS_PER_DAY, team=team), 10) for team in teams))
    for number, team in enumerate(teams):
        limited.reserve(claim(number, team=team))
    assert limited.used(NOON) == {key(K.TOKENS_PER_DAY, team=team): 10 for team in teams}


def test_joined_names_do_not_collide() -> None:
    """A7: team a:b with key c beside team a with key b:c."""
    pairs = (("a:b", "c"), ("a", "b:c"))
    limited = book(
        *(
            limits.Limit(key(K.TOKENS_PER_DAY, team=team, scope="key", name=name), 10)
            for team, name in pairs
        )
    )
    for number, (team, name) in enumerate(pairs):
        limited.reserve(claim(number, team=team, key_id=name))
    assert list(limited.used(NOON).values()) == [10, 10]
    user = book(limits.Limit(key(K.TOKENS_PER_DAY, scope="user", name="k1"), 10))
    user.reserve(claim(1, key_id="k1"))
    assert user.used(NOON) == {}  # a user's limit does not meet a key of that name


def test_a_changed_limit_keeps_its_counter_and_open_claims() -> None:
    limited = book(limits.Limit(key(K.TOKENS_PER_DAY), 20))
    hold = limited.reserve(claim(1))
    limited.set_limits([limits.Limit(key(K.TOKENS_PER_DAY), 15)])
    with pytest.raises(errors.QuotaExceeded):
        limited.reserve(claim(2))
    limited.set_limits([])
    limited.reserve(claim(3))
    hold.settle(quota.Spent(7), NOON)
    assert list(limited.collect().values()) == [7]  # kept although nothing limits it now
    assert limited.used(NOON) == {}


def test_sums_of_before_and_of_other_owners_count() -> None:
    limited = book(limits.Limit(key(K.TOKENS_PER_DAY), 100))
    place = key(K.TOKENS_PER_DAY), limits.window(limits.Period.DAY, NOON)[0]
    limited.learn({place: 60})
    limited.reserve(claim(1, tokens=30)).settle(quota.Spent(30), NOON)
    assert limited.used(NOON)[place[0]] == 90
    assert limited.collect() == {place: 30}
    limited.learn({place: 95}, collected=True)  # ours and another owner's 5
    assert limited.used(NOON)[place[0]] == 95
    with pytest.raises(errors.QuotaExceeded):
        limited.reserve(claim(2))
    limited.learn({place: 80})  # the ledger said less
    limited.reserve(claim(3))


def test_headers_tell_what_is_left_of_the_minute() -> None:
    limited = book(
        limits.Limit(key(K.TOKENS_PER_MINUTE), 1000),
        limits.Limit(key(K.TOKENS_PER_MINUTE, scope="key", name="k1"), 100),
        limits.Limit(key(K.REQUESTS_PER_MINUTE), 60),
    )
    hold = limited.reserve(claim(1, tokens=30))
    assert hold.headers(NOON) == (
        ("x-ratelimit-limit-requests", "60"),
        ("x-ratelimit-remaining-requests", "59"),
        ("x-ratelimit-reset-requests", "61s"),
        ("x-ratelimit-limit-tokens", "100"),
        ("x-ratelimit-remaining-tokens", "70"),
        ("x-ratelimit-reset-tokens", "61s"),
    )
    assert quota.Unlimited().reserve(claim(2)).headers(NOON) == ()
    assert limited.reserve(claim(3, team="chem")).headers(NOON) == ()


@pytest.mark.parametrize("age_s", [120, -120])
def test_a_claim_of_another_time_does_not_move_the_minute(age_s: int) -> None:
    """A stream that began two minutes ago moves here, or another host's clock is wrong."""
    steady = 5_000_000
    limited = books.Book(steady_us=lambda: steady)
    limited.set_limits([limits.Limit(key(K.TOKENS_PER_MINUTE), 1000)])
    limited.reserve(claim(1, tokens=1000)).settle(quota.Spent(1000), NOON)
    limited.adopt(claim(2, tokens=0, now=NOON - age_s * 1_000_000))
    for number in range(3, 6):
        with pytest.raises(errors.QuotaExceeded):
            limited.reserve(claim(number, tokens=1000, now=NOON + 2_000_000))
    steady += 61_000_000
    limited.reserve(claim(9, tokens=1000, now=NOON + 3_000_000))

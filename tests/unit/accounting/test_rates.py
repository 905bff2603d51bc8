"""Money, rates and the log that holds them: exact, never backwards, one writer at a place."""

import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting import money, postings, rates
from scheduler.contracts import quota

Use = rates.Use


def rate(
    model: str = "*", tier: str = "*", use: Use = Use.OUTPUT, micro: int = 5, from_us: int = 0,
    posting: int = 1,
) -> rates.Rate:  # fmt: skip
    return rates.Rate(model, tier, use, micro, from_us, posting)


@pytest.mark.parametrize(
    ("text", "micro"), [("12", 12_000_000), ("-3.50", -3_500_000), ("0.000025", 25), ("+1.1", 1_100_000)]
)  # fmt: skip
def test_money_is_read(text: str, micro: int) -> None:
    assert money.read(text) == micro


@pytest.mark.parametrize("text", ["", "1e3", "1,50", "0.0000001", "NaN", "9" * 11, "١", "1."])
def test_money_that_is_none_is_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="invalid amount") as raised:
        money.read(text)
    assert "\n" not in str(raised.value)


@given(st.integers(-money.MOST, money.MOST))
def test_money_prints_exactly(micro: int) -> None:
    assert money.read(money.show(micro)) == micro


@given(st.integers(-(10**15), 10**15), st.sampled_from([1_000, 3_600_000_000]))
def test_rounding_is_to_the_nearest_and_the_same_for_credits(value: int, by: int) -> None:
    assert abs(2 * (money.divide(value, by) * by - value)) <= by
    assert money.divide(-value, by) == -money.divide(value, by)


def test_the_closest_scope_holds_for_each_use_by_itself() -> None:
    known = rates.Rates(
        [
            rate(micro=1),
            rate(use=Use.GPU, micro=9),
            rate(tier="batch", micro=2),
            rate(model="chat", micro=3),
            rate(model="chat", tier="batch", micro=4, from_us=100),
        ]
    )
    assert known.price("big", "standard", Use.OUTPUT, 50) == 1
    assert known.price("big", "batch", Use.OUTPUT, 50) == 2
    assert known.price("chat", "batch", Use.OUTPUT, 99) == 3
    assert known.price("chat", "batch", Use.OUTPUT, 100) == 4
    assert known.price("chat", "batch", Use.GPU, 100) == 9
    assert known.price("chat", "batch", Use.CACHED, 100) == 0
    assert known.changes(0, 200) == [100]


def test_of_two_that_begin_together_the_later_posting_holds() -> None:
    known = rates.Rates([rate(micro=7, posting=2), rate(micro=6, posting=1)])
    assert known.price("chat", "batch", Use.OUTPUT, 0) == 7


def test_a_new_rate_changes_nothing_that_was_priced() -> None:
    before = rates.Rates([rate(micro=5)])
    after = rates.Rates([*before.all, rate(micro=50, from_us=1_000, posting=2)])
    for at in (0, 1, 999):
        assert after.price("m", "t", Use.OUTPUT, at) == before.price("m", "t", Use.OUTPUT, at)
    (item,) = rates.body("*", "batch", {Use.OUTPUT: 1}, 900)["rates"]
    assert rates.overlapped(before, item, now_us=1_000) == before.all[0]
    assert rates.overlapped(before, item, now_us=900) is None
    assert rates.overlapped(rates.Rates(), item, now_us=1_000) is None
    (other,) = rates.body("*", "batch", {Use.CACHED: 1}, 900)["rates"]
    assert rates.overlapped(before, other, now_us=1_000) is None


def test_pricing_is_the_ports_and_rounds_once() -> None:
    pricing: quota.Pricing = rates.Pricing(
        rates.Rates([rate(use=use, micro=500) for use in rates.TOKENS])
    )
    assert pricing.cost("m", "t", quota.Spent(1, 0, 0), 0) == 1  # half a micro-unit, rounded up
    assert pricing.cost("m", "t", quota.Spent(1, 1, 1), 0) == 2  # 1.5 once, not three halves up
    assert rates.Pricing().cost("m", "t", quota.Spent(10**9, 0, 0), 0) == 0


def test_spans_cover_all_time_for_sql() -> None:
    known = rates.Rates([rate(micro=5, from_us=10), rate(model="chat", micro=6, from_us=20)])
    rows = known.spans([("chat", "batch"), ("chat", "batch")])
    assert [(row["start_us"], row["output"]) for row in rows] == [(0, 0), (10, 5), (20, 6)]
    assert [row["end_us"] for row in rows] == [10, 20, rates.FOREVER_US]


def draft(number: int) -> postings.Draft:
    return postings.Draft("rate", number, "ops", "why", {"n": number})


def test_many_writers_one_order(tmp_path: Path) -> None:
    """Every writer has its own view of the folder, as hosts of a site have."""
    made: list[int] = []

    def write(first: int) -> None:
        log = postings.Postings(tmp_path)
        for number in range(first, first + 5):
            made.append(log.append(lambda seen, n=number: draft(n)).number)  # type: ignore[misc]

    threads = [threading.Thread(target=write, args=(100 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == list(range(1, 21))
    assert [each.number for each in postings.Postings(tmp_path).read()] == list(range(1, 21))
    assert [path.name for path in (tmp_path / "postings").iterdir() if path.name[0] == "."] == []


def test_a_decision_is_made_over_the_log_as_it_is(tmp_path: Path) -> None:
    one, two = postings.Postings(tmp_path), postings.Postings(tmp_path)
    one.read()
    two.append(lambda log: draft(1))
    seen: list[int] = []

    def decide(log: postings.Log) -> postings.Draft:
        seen.append(len(log))
        if len(seen) == 1:
            two.append(lambda _: draft(2))  # faster, in between
        return draft(3)

    assert one.append(decide).number == 3
    assert seen == [1, 2]


def test_what_a_decision_raises_leaves_nothing(tmp_path: Path) -> None:
    def refuse(log: postings.Log) -> postings.Draft:
        raise ValueError("no")

    log = postings.Postings(tmp_path)
    with pytest.raises(ValueError, match="no"):
        log.append(refuse)
    assert list(log.folder.iterdir()) == []


@pytest.mark.parametrize("how", ["changed", "gone", "rubbish"])
def test_a_log_that_was_tampered_with_is_named(tmp_path: Path, how: str) -> None:
    log = postings.Postings(tmp_path)
    for number in range(3):
        log.append(lambda _, n=number: draft(n))  # type: ignore[misc]
    second = log.folder / "00000002.json"
    if how == "gone":
        second.unlink()
    elif how == "rubbish":
        second.write_text("{")
    else:
        second.write_text(json.dumps({**json.loads(second.read_text()), "author": "eve"}))
    with pytest.raises(postings.PostingsDamaged, match=r"postings/0000000\d.json .*backup"):
        postings.Postings(tmp_path).read()

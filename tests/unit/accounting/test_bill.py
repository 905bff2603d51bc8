"""Bills: sums that add up, prices that change, what is not billed and what is told of it."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting import (
    bill,
    billing,
    books,
    manifest,
    postings,
    rates,
    rolling,
    rollup,
    settings,
    ship,
    spool,
)
from scheduler.contracts import clock, errors
from tests.unit.accounting import bills, samples, world

office = bills.office  # the fixture


def used(month: str, amount: int, *, team: str = "red") -> bill.Used:
    return bill.Used(month, team, "ann", "chat", "batch", rates.Use.OUTPUT, 500, amount)


amounts = st.lists(st.tuples(st.sampled_from(["red", "blue"]), st.integers(0, 10**9)), max_size=9)


@given(amounts)
def test_a_line_is_rounded_once_whatever_it_is_made_of(parts: list[tuple[str, int]]) -> None:
    lines = bill.lines("2026-11", [used("2026-11", amount, team=team) for team, amount in parts])
    for team in ("red", "blue"):
        whole = sum(amount for name, amount in parts if name == team)
        mine = [line for line in lines if line.team == team]
        assert sum(line.amount for line in mine) == whole
        assert bill.total(mine) == rates.cost(whole, rates.Use.OUTPUT, 500)


@given(amounts, amounts)
def test_all_bills_together_say_what_one_would_have_said(
    first: list[tuple[str, int]], more: list[tuple[str, int]]
) -> None:
    early = [used("2026-11", amount, team=team) for team, amount in first]
    everything = early + [used("2026-11", amount, team=team) for team, amount in more]
    november = bill.lines("2026-11", early)
    late = bill.late("2026-12", ["2026-11"], everything, november)
    assert all(line.late and line.month == "2026-12" for line in late)
    assert bill.total([*november, *late]) == bill.total(bill.lines("2026-11", everything))
    assert bill.late("2027-01", ["2026-11"], everything, [*november, *late]) == []


def test_a_row_that_turns_out_to_be_the_platforms_is_given_back() -> None:
    november = bill.lines("2026-11", [used("2026-11", 4_000)])
    (credit,) = bill.late("2026-12", ["2026-11"], [], november)
    assert (credit.amount, credit.cost) == (-4_000, -2_000)
    assert bill.late("2026-12", ["2026-10"], [], november) == []


def post(number: int, kind: str, **body: Any) -> postings.Posting:
    return postings.Posting(number, kind, 0, "ops", "why", body, "")


def closing(number: int, month: str) -> postings.Posting:
    return post(
        number, bill.CLOSE, month=month, start_us=0, end_us=1, file="", sha256="", lines=0, total=0
    )


def test_an_adjustment_of_a_closed_month_is_late_on_the_open_bill() -> None:
    log = [
        post(1, bill.ADJUSTMENT, team="red", micro=-5, month="2026-11"),
        closing(2, "2026-11"),
        post(3, bill.ADJUSTMENT, team="red", micro=-7, month="2026-11"),
        closing(4, "2026-12"),
        post(5, bill.ADJUSTMENT, team="red", micro=-9, month="2026-11"),
    ]
    found = [(line.month, line.used_month, line.late) for line in bill.adjustments(log)]
    assert found == [
        ("2026-11", "2026-11", False),
        ("2026-12", "2026-11", True),
        ("2027-01", "2026-11", True),
    ]


def test_a_bill_is_what_teams_pay_and_nothing_of_the_platforms(office: billing.Billing) -> None:
    """A3's half: asking again changes nothing; preempted and lost attempts cost nothing."""
    made = office.month("2026-11")
    found = {(line.team, line.user, line.what): line.amount for line in made.lines}
    assert found["red", "ann", "output"] == 10
    assert found["blue", "bob", "output"] == 14
    assert found["blue", "bob", "uncached_prompt"] == 10
    assert found["blue", "bob", "cached_prompt"] == 2
    assert bill.total(made.lines) == 24 * 1_000 + 18 * 100
    assert made.problems == ()
    assert office.month("2026-11") == made
    assert office.month("2026-10").lines == ()


def test_a_rate_from_the_middle_of_a_month_makes_two_lines(
    office: billing.Billing, tmp_path: Path
) -> None:
    change = world.NOON + 2 * world.SECOND
    office.add_rates(
        rates.body("chat", "batch", {rates.Use.OUTPUT: 3_000_000}, change),
        author="ops", reason="dearer", now_us=bills.NOV + 1,
    )  # fmt: skip
    bills.write(tmp_path, "more", samples.row(
        "close", "b9", team="blue", user="bob", tier="batch", started_us=world.NOON, output_tokens=5
    ))  # fmt: skip
    lines = [x for x in office.month("2026-11").lines if (x.team, x.what) == ("blue", "output")]
    assert [(x.price, x.amount, x.cost) for x in lines] == [
        (1_000_000, 5, 5_000),
        (3_000_000, 14, 42_000),
    ]


def test_a_rate_may_not_begin_in_what_was_priced_or_billed(office: billing.Billing) -> None:
    wanted = rates.body("chat", "*", {rates.Use.OUTPUT: 1}, world.NOON)
    with pytest.raises(errors.BadRequest, match="held in that time"):
        office.add_rates(wanted, author="ops", reason="x", now_us=world.NOON + 1)
    bills.close(office, "2026-11", bills.DEC)
    with pytest.raises(errors.BadRequest, match="2026-11 is closed"):
        office.add_rates(
            rates.body("chat", "*", {rates.Use.CACHED: 1}, world.NOON),
            author="ops", reason="x", now_us=bills.DEC,
        )  # fmt: skip
    assert len(office.price_list().all) == 2


def test_a_clock_that_went_back_an_hour_reprices_nothing(office: billing.Billing) -> None:
    """What was used and posted after the clock's new time keeps its price."""
    hour = 3_600 * world.SECOND
    last = world.NOON + 10 * world.SECOND  # the end of the lease's GPU time
    back = world.NOON - hour
    assert office.priced_until(back) == last
    wanted = rates.body("chat", "*", {rates.Use.OUTPUT: 9_000_000}, world.NOON)
    with pytest.raises(errors.BadRequest, match="begin at 2026-11-27T12:00:11"):
        office.add_rates(wanted, author="ops", reason="x", now_us=back)
    before = office.month("2026-11").lines
    since = office.priced_until(back)
    wanted = rates.body("chat", "*", {rates.Use.OUTPUT: 9_000_000}, since)
    office.add_rates(wanted, author="ops", reason="x", now_us=back)
    assert office.month("2026-11").lines == before
    # A posting of the time before the clock went back counts as well.
    office.adjust(
        "red", 1, "2026-11", author="o", reason="r", now_us=world.NOON + 20 * world.SECOND
    )
    assert office.priced_until(back + 5) == world.NOON + 20 * world.SECOND
    with pytest.raises(errors.BadRequest, match="held in that time"):
        office.add_rates(wanted, author="ops", reason="x", now_us=back + 5)
    assert office.priced_until(bills.DEC) == bills.DEC


def test_a_bill_is_the_same_whatever_the_clock_of_its_rows_did(tmp_path: Path) -> None:
    """A writer whose clock goes back an hour between two requests: each is billed once, at its own rate."""
    hour = 3_600 * world.SECOND
    office = billing.Billing(tmp_path, settings.Accounting())
    for price, since in ((1_000_000, bills.NOV), (2_000_000, world.NOON)):
        office.add_rates(
            rates.body("*", "*", {rates.Use.OUTPUT: price}, since),
            author="o",
            reason="r",
            now_us=bills.NOV,
        )
    time = clock.FakeClock(wall_us=world.NOON + hour)
    sink = spool.Spool(tmp_path / "spool" / "g", "g", clock=time)
    for number, at in enumerate((world.NOON + hour // 2, world.NOON - hour // 2)):
        time.step_wall(at - time.wall_us())
        sink.append(samples.row("open", f"q{number}", started_us=at))
        sink.append(samples.row("close", f"q{number}", started_us=at, output_tokens=1_000))
    sink.close()
    live = office.month("2026-11").lines
    assert [(line.price, line.amount) for line in live] == [(1_000_000, 1_000), (2_000_000, 1_000)]
    for at in (world.NOON - hour // 2, world.NOON + hour):
        time.step_wall(at - time.wall_us())
        ship.ship(tmp_path, time)
        rolling.roll(books.Books(tmp_path), time)
    assert office.month("2026-11").lines == live


def test_a_team_is_known_by_what_it_used_or_owes(office: billing.Billing) -> None:
    assert office.knows("red")
    assert not office.knows("rde")
    office.adjust("new", 7, "2026-11", author="ops", reason="x", now_us=world.NOON)
    assert office.knows("new")
    bills.close(office, "2026-11", bills.DEC)
    assert office.knows("red")
    assert not office.knows("rde")


def test_what_costs_more_than_a_bill_can_hold_is_said(
    office: billing.Billing, tmp_path: Path
) -> None:
    bills.write(tmp_path, "big", samples.row("close", "big", output_tokens=10**13))
    office.add_rates(
        rates.body("chat", "interactive", {rates.Use.OUTPUT: 10**12}, bills.NOV + 1),
        author="ops", reason="typo", now_us=bills.NOV,
    )  # fmt: skip
    assert office.month("2026-11").lines
    with pytest.raises(errors.BadRequest, match="more than a bill can hold: check its price"):
        bills.close(office, "2026-11", bills.DEC)


def test_two_who_write_the_same_file_at_once_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "f"
    with manifest.writing(path) as one:
        one.write(b"one")
        with manifest.writing(path) as two:
            two.write(b"longer")
        assert path.read_bytes() == b"longer"
    assert path.read_bytes() == b"one"
    with pytest.raises(ValueError, match="no"), manifest.writing(path):
        raise ValueError("no")
    assert [each.name for each in tmp_path.iterdir()] == ["f"]


def test_adjustments_are_lines_with_author_and_reason(office: billing.Billing) -> None:
    line = office.adjust(
        "red", -2_500_000, "2026-11", author="ops", reason="outage", now_us=bills.DEC - 1
    )
    assert (line.cost, line.author, line.reason, line.late) == (-2_500_000, "ops", "outage", False)
    assert line in office.month("2026-11").lines
    bills.close(office, "2026-11", bills.DEC)
    late = office.adjust("red", 7, "2026-11", author="ops", reason="found", now_us=bills.DEC)
    assert (late.month, late.late) == ("2026-12", True)
    assert late in office.month("2026-12").lines
    with pytest.raises(errors.BadRequest, match="2027-02 has not begun"):
        office.adjust("red", 7, "2027-02", author="ops", reason="x", now_us=bills.DEC)


def test_a_bill_that_was_changed_is_named(office: billing.Billing, tmp_path: Path) -> None:
    closed = bills.close(office, "2026-11", bills.DEC)
    path = tmp_path / "postings" / closed.file
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(postings.PostingsDamaged, match="was changed since 2026-11 was closed"):
        office.month("2026-11")


def test_gpu_time_is_priced_for_the_time_it_was_held(office: billing.Billing) -> None:
    office.add_rates(
        rates.body("*", "*", {rates.Use.GPU: 3_600_000_000}, bills.NOV),
        author="ops",
        reason="x",
        now_us=bills.DEC,
    )
    lines = [line for line in office.month("2026-11").lines if line.what == "gpu"]
    by = {line.team: line for line in lines}
    assert by["blue"].cost == by["blue"].amount == 4 * world.SECOND  # a unit for each GPU-second
    assert by["red"].amount == 4 * (world.SECOND - 10)
    assert {field.name for field in dataclasses.fields(bill.Line)} >= {"author", "reason", "late"}


def test_whole_days_come_from_the_rollups_and_the_rest_from_rows(
    office: billing.Billing, tmp_path: Path
) -> None:
    """Rows of a day that the rollups have are not counted a second time; closing rests on the rows."""
    before = office.month("2026-11").lines
    day = world.NOON // rollup.DAY_US * rollup.DAY_US
    row = {
        "cluster": "c1",
        "team": "red",
        "user": "ann",
        "model": "chat",
        "version": "1",
        "adapter": "",
    }
    row |= {"tier": "interactive", "endpoint": "/v1/chat/completions", "payer": "team"}
    values: dict[str, Any] = {**row, **dict.fromkeys(rollup.SUMS, 0), "output_tokens": 500}
    with rollup.opened(rollup.path_of(tmp_path), write=True) as session:
        rollup.create(session)
        names = ", ".join(f'"{name}"' for name in ("period_us", *values))
        marks = ", ".join("?" for _ in range(len(values) + 1))
        for start in (day - rollup.DAY_US, day):  # the newest day is not over: its rows count
            session.execute(
                f"INSERT INTO usage_days ({names}) VALUES ({marks})", [start, *values.values()]
            )
    rolled = office.month("2026-11").lines
    red = {line.what: line.amount for line in rolled if line.team == "red"}
    assert red["output"] == 500 + 10
    assert [line for line in rolled if line.team == "blue"] == [
        line for line in before if line.team == "blue"
    ]
    bills.close(office, "2026-11", bills.DEC)
    assert office.month("2026-11").lines == before


@pytest.mark.parametrize(
    ("given", "words"),
    [({"time_zone": "Mars/Olympus"}, "no such zone"), ({"currency": ""}, "printable")],
)
def test_settings_that_mean_nothing_are_refused_where_they_are_read(
    given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        settings.Accounting(**given)

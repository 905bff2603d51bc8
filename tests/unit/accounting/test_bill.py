"""Bills: sums that add up, closed months that do not change, late rows once."""

import dataclasses
import datetime
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
from tests.unit.accounting import samples, world

Use = rates.Use
SECOND = world.SECOND


def us(text: str) -> int:
    return round(datetime.datetime.fromisoformat(text + "+00:00").timestamp()) * 1_000_000


NOV, DEC, JAN = us("2026-11-01T00:00:00"), us("2026-12-01T00:00:00"), us("2027-01-01T00:00:00")
LATER = us("2027-01-02T00:00:00")


def used(month: str, amount: int, *, team: str = "red") -> bill.Used:
    return bill.Used(month, team, "ann", "chat", "batch", Use.OUTPUT, 500, amount)


amounts = st.lists(st.tuples(st.sampled_from(["red", "blue"]), st.integers(0, 10**9)), max_size=9)


@given(amounts)
def test_a_line_is_rounded_once_whatever_it_is_made_of(parts: list[tuple[str, int]]) -> None:
    lines = bill.lines("2026-11", [used("2026-11", amount, team=team) for team, amount in parts])
    for team in ("red", "blue"):
        whole = sum(amount for name, amount in parts if name == team)
        mine = [line for line in lines if line.team == team]
        assert sum(line.amount for line in mine) == whole
        assert bill.total(mine) == rates.cost(whole, Use.OUTPUT, 500)


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


def write(state: Path, name: str, *rows: Any) -> None:
    sink = spool.Spool(state / "spool" / name, name, clock=clock.FakeClock())
    for row in rows:
        sink.append(row)
    sink.close()


@pytest.fixture
def office(tmp_path: Path) -> billing.Billing:
    """The world of November, with a price for output, and another one from noon of the 27th on."""
    world.write(tmp_path)
    made = billing.Billing(tmp_path, settings.Accounting())
    made.add_rates(
        rates.body("*", "*", {Use.OUTPUT: 1_000_000, Use.UNCACHED: 100_000}, NOV),
        author="ops", reason="first", now_us=NOV,
    )  # fmt: skip
    return made


OPEN_US = round(settings.Accounting().open_at_most_s * 1e6)


def close(office: billing.Billing, month: str, end_us: int) -> bill.Closed:
    """Close a month once its last attempts are over and everything is shipped."""
    now_us = end_us + OPEN_US
    ship.ship(office._books.state_dir, clock.FakeClock(wall_us=now_us))
    return office.close(month, author="ops", reason="", now_us=now_us)


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
    change = world.NOON + 2 * SECOND
    office.add_rates(
        rates.body("chat", "batch", {Use.OUTPUT: 3_000_000}, change),
        author="ops", reason="dearer", now_us=NOV + 1,
    )  # fmt: skip
    write(tmp_path, "more", samples.row(
        "close", "b9", team="blue", user="bob", tier="batch", started_us=world.NOON, output_tokens=5
    ))  # fmt: skip
    lines = [x for x in office.month("2026-11").lines if (x.team, x.what) == ("blue", "output")]
    assert [(x.price, x.amount, x.cost) for x in lines] == [
        (1_000_000, 5, 5_000),
        (3_000_000, 14, 42_000),
    ]


def test_a_rate_may_not_begin_in_what_was_priced_or_billed(office: billing.Billing) -> None:
    wanted = rates.body("chat", "*", {Use.OUTPUT: 1}, world.NOON)
    with pytest.raises(errors.BadRequest, match="held in that time"):
        office.add_rates(wanted, author="ops", reason="x", now_us=world.NOON + 1)
    close(office, "2026-11", DEC)
    with pytest.raises(errors.BadRequest, match="2026-11 is closed"):
        office.add_rates(
            rates.body("chat", "*", {Use.CACHED: 1}, world.NOON),
            author="ops", reason="x", now_us=DEC,
        )  # fmt: skip
    assert len(office.price_list().all) == 2


def test_a_clock_that_went_back_an_hour_reprices_nothing(office: billing.Billing) -> None:
    """What was used and posted after the clock's new time keeps its price."""
    hour = 3_600 * SECOND
    last = world.NOON + 10 * SECOND  # the end of the lease's GPU time
    back = world.NOON - hour
    assert office.priced_until(back) == last
    wanted = rates.body("chat", "*", {Use.OUTPUT: 9_000_000}, world.NOON)
    with pytest.raises(errors.BadRequest, match="begin at 2026-11-27T12:00:11"):
        office.add_rates(wanted, author="ops", reason="x", now_us=back)
    before = office.month("2026-11").lines
    since = office.priced_until(back)
    wanted = rates.body("chat", "*", {Use.OUTPUT: 9_000_000}, since)
    office.add_rates(wanted, author="ops", reason="x", now_us=back)
    assert office.month("2026-11").lines == before
    # A posting of the time before the clock went back counts as well.
    office.adjust("red", 1, "2026-11", author="o", reason="r", now_us=world.NOON + 20 * SECOND)
    assert office.priced_until(back + 5) == world.NOON + 20 * SECOND
    with pytest.raises(errors.BadRequest, match="held in that time"):
        office.add_rates(wanted, author="ops", reason="x", now_us=back + 5)
    assert office.priced_until(DEC) == DEC


def test_a_bill_is_the_same_whatever_the_clock_of_its_rows_did(tmp_path: Path) -> None:
    """A writer whose clock goes back an hour between two requests: each is billed once, at its own rate."""
    hour = 3_600 * SECOND
    office = billing.Billing(tmp_path, settings.Accounting())
    for price, since in ((1_000_000, NOV), (2_000_000, world.NOON)):
        office.add_rates(
            rates.body("*", "*", {Use.OUTPUT: price}, since), author="o", reason="r", now_us=NOV
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
    close(office, "2026-11", DEC)
    assert office.knows("red")
    assert not office.knows("rde")


def test_what_costs_more_than_a_bill_can_hold_is_said(
    office: billing.Billing, tmp_path: Path
) -> None:
    write(tmp_path, "big", samples.row("close", "big", output_tokens=10**13))
    office.add_rates(
        rates.body("chat", "interactive", {Use.OUTPUT: 10**12}, NOV + 1),
        author="ops", reason="typo", now_us=NOV,
    )  # fmt: skip
    assert office.month("2026-11").lines
    with pytest.raises(errors.BadRequest, match="more than a bill can hold: check its price"):
        close(office, "2026-11", DEC)


def test_rows_for_a_month_that_is_no_longer_looked_at_are_told(tmp_path: Path) -> None:
    """Three closed months, one is looked at: what came late for the first is on no bill, and said."""
    office = billing.Billing(tmp_path, settings.Accounting(late_months=1))
    office.add_rates(
        rates.body("*", "*", {Use.OUTPUT: 1}, 1), author="o", reason="r", now_us=1
    )  # fmt: skip
    days = [us(f"2026-{month:02}-10T12:00:00") for month in (8, 9, 10, 11)]
    for number, at in enumerate(days):
        write(
            tmp_path,
            f"w{number}",
            samples.row("close", f"q{number}", started_us=at, output_tokens=10),
        )
    for month, end in (("2026-08", "2026-09"), ("2026-09", "2026-10"), ("2026-10", "2026-11")):
        close(office, month, us(f"{end}-01T00:00:00"))
    time = clock.FakeClock(wall_us=DEC)
    rolling.roll(books.Books(tmp_path), time)
    assert office.month("2026-11").doubtful == ()
    write(tmp_path, "late", samples.row("close", "qq", started_us=days[0] + 1, output_tokens=7))
    ship.ship(tmp_path, time)
    rolling.roll(books.Books(tmp_path), time)
    (told,) = office.month("2026-11").doubtful
    assert "2026-08: 7 tokens more than all bills say" in told
    wider = billing.Billing(tmp_path, settings.Accounting(late_months=3)).month("2026-11")
    assert wider.doubtful == ()
    assert [line.amount for line in wider.lines if line.late] == [7]


def test_a_closed_month_does_not_change_and_late_rows_are_billed_once(
    office: billing.Billing, tmp_path: Path
) -> None:
    before = office.month("2026-11")
    closed = close(office, "2026-11", DEC)
    assert (closed.total, closed.lines) == (bill.total(before.lines), len(before.lines))
    write(tmp_path, "found", samples.row("close", "late", output_tokens=1_000))
    kept = office.month("2026-11")
    assert kept.closed is not None
    assert kept.lines == before.lines
    december = office.month("2026-12").lines
    assert [(x.used_month, x.amount, x.cost, x.late) for x in december] == [
        ("2026-11", 1_000, 1_000_000, True)
    ]
    assert office.month("2027-01").lines == ()
    close(office, "2026-12", JAN)
    assert office.month("2026-12").lines == december
    assert office.month("2027-01").lines == ()
    again = billing.Billing(tmp_path, settings.Accounting())  # another gateway says the same
    assert again.month("2026-12").lines == december


def test_a_closing_answers_with_its_own_month_whoever_closes_the_next(
    office: billing.Billing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = office._postings.append

    def overtaken(decide: Any) -> postings.Posting:
        made = append(decide)
        close(billing.Billing(tmp_path, settings.Accounting()), "2026-12", LATER)
        return made

    monkeypatch.setattr(office._postings, "append", overtaken)
    assert close(office, "2026-11", LATER).month == "2026-11"


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


def test_a_month_is_not_closed_while_rows_of_it_are_in_a_spool(
    office: billing.Billing, tmp_path: Path
) -> None:
    write(tmp_path, "more", samples.row("close", "m", output_tokens=1))
    with pytest.raises(errors.BadRequest, match=r"2 spool segments .* not shipped.*try again"):
        office.close("2026-11", author="ops", reason="", now_us=DEC + OPEN_US)
    close(office, "2026-11", DEC)


def test_months_are_closed_once_in_order_and_not_before_their_end(office: billing.Billing) -> None:
    with pytest.raises(errors.BadRequest, match=r"close it after 2026-12-01T06:00:00 \(UTC\)"):
        close(office, "2026-11", DEC - 1)
    with pytest.raises(errors.BadRequest, match="2026-11 has usage, GPU time or"):
        close(office, "2026-12", JAN)
    close(office, "2026-11", DEC)
    with pytest.raises(errors.BadRequest, match="closed already"):
        close(office, "2026-11", DEC)
    with pytest.raises(errors.BadRequest, match="2026-12 is next"):
        close(office, "2027-01", us("2027-03-01T00:00:00"))


def test_a_row_of_the_far_future_is_named(office: billing.Billing, tmp_path: Path) -> None:
    far = 2**63 - 3_000_000
    write(tmp_path, "far", samples.row("close", "far", started_us=far, output_tokens=9))
    made = office.month("2026-11")
    assert sum(line.amount for line in made.lines if line.what == "output") == 24
    assert made.doubtful == (
        "1 attempts are dated after 2100: a clock was wrong; they are on no bill: see "
        "`facct -S 2100-01-01 -E 9999-12-31`, and use `fctl adjust`",
    )


def test_a_row_of_1970_blocks_no_closing_and_is_named(
    office: billing.Billing, tmp_path: Path
) -> None:
    write(tmp_path, "bad", samples.row("close", "bad", started_us=SECOND, output_tokens=1_000))
    (told,) = office.month("2026-11").doubtful
    assert told.startswith("1 attempts and 0 GPU intervals are dated before 2000")
    close(office, "2026-11", DEC)
    december = office.month("2026-12")
    assert (december.lines, december.doubtful) == ((), (told,))


def test_gpu_time_and_adjustments_alone_are_a_month_to_close_first(
    office: billing.Billing, tmp_path: Path
) -> None:
    office.adjust("red", 7, "2026-09", author="ops", reason="x", now_us=DEC)
    with pytest.raises(errors.BadRequest, match="2026-09 has usage, GPU time or adjustments"):
        close(office, "2026-11", DEC)
    write(tmp_path, "gpu", samples.gpu(lease_id="l-8", start_us=us("2026-08-05T00:00:00")))
    with pytest.raises(errors.BadRequest, match="2026-08 has usage, GPU time or adjustments"):
        close(office, "2026-09", DEC)


def test_what_comes_before_the_first_closed_month_is_late_on_the_next_bill(
    office: billing.Billing, tmp_path: Path
) -> None:
    prices = rates.body(
        "*", "*", {Use.GPU: 3_600_000_000, Use.CACHED: 1}, us("2026-01-01T00:00:00")
    )
    office.add_rates(prices, author="ops", reason="x", now_us=us("2026-01-01T00:00:00"))
    close(office, "2026-11", DEC)
    begin = us("2026-03-05T00:00:00")
    write(
        tmp_path,
        "old",
        samples.gpu(lease_id="l-8", start_us=begin),
        samples.replica("serving", begin, begin + 60 * SECOND, lease_id="l-8", dedicated="red"),
        samples.row(
            "close", "old", started_us=us("2026-04-01T00:00:00"), cached_prompt_tokens=1_000
        ),
    )
    late = office.month("2026-12").lines
    assert [(x.used_month, x.what, x.amount, x.late) for x in late] == [
        ("2026-03", "gpu", 240 * SECOND, True),
        ("2026-04", "cached_prompt", 1_000, True),
    ]
    close(office, "2026-12", JAN)
    assert office.month("2026-12").lines == late
    assert office.month("2027-01").lines == ()


def test_an_adjustment_that_no_bill_has_is_late_on_the_next(
    office: billing.Billing, monkeypatch: pytest.MonkeyPatch
) -> None:
    office.adjust("red", 7, "2026-09", author="ops", reason="x", now_us=DEC)
    with monkeypatch.context() as patched:  # as an earlier release closed it
        patched.setattr(billing.Billing, "_first_month", lambda *_: "")
        close(office, "2026-11", DEC)
    (line,) = office.month("2026-12").lines
    assert (line.used_month, line.cost, line.late) == ("2026-09", 7, True)
    close(office, "2026-12", JAN)
    assert office.month("2027-01").lines == ()


def test_adjustments_are_lines_with_author_and_reason(office: billing.Billing) -> None:
    line = office.adjust(
        "red", -2_500_000, "2026-11", author="ops", reason="outage", now_us=DEC - 1
    )
    assert (line.cost, line.author, line.reason, line.late) == (-2_500_000, "ops", "outage", False)
    assert line in office.month("2026-11").lines
    close(office, "2026-11", DEC)
    late = office.adjust("red", 7, "2026-11", author="ops", reason="found", now_us=DEC)
    assert (late.month, late.late) == ("2026-12", True)
    assert late in office.month("2026-12").lines
    with pytest.raises(errors.BadRequest, match="2027-02 has not begun"):
        office.adjust("red", 7, "2027-02", author="ops", reason="x", now_us=DEC)


def test_a_bill_that_was_changed_is_named(office: billing.Billing, tmp_path: Path) -> None:
    closed = close(office, "2026-11", DEC)
    path = tmp_path / "postings" / closed.file
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(postings.PostingsDamaged, match="was changed since 2026-11 was closed"):
        office.month("2026-11")


def test_a_months_borders_are_the_sites_and_stay_when_the_zone_is_changed(tmp_path: Path) -> None:
    """2026-12-01 00:30 in Berlin is November in UTC; the night is billed once, whatever is set later."""
    write(
        tmp_path,
        "g",
        samples.row("close", "n", started_us=us("2026-11-30T23:30:00"), output_tokens=3),
    )
    berlin = billing.Billing(tmp_path, settings.Accounting(time_zone="Europe/Berlin"))
    assert berlin.month("2026-11").lines == ()
    close(berlin, "2026-11", DEC)
    utc = billing.Billing(tmp_path, settings.Accounting())
    assert [line.amount for line in utc.month("2026-12").lines] == [3]
    assert not any(line.late for line in utc.month("2026-12").lines)


def test_gpu_time_is_priced_for_the_time_it_was_held(office: billing.Billing) -> None:
    office.add_rates(
        rates.body("*", "*", {Use.GPU: 3_600_000_000}, NOV), author="ops", reason="x", now_us=DEC
    )
    lines = [line for line in office.month("2026-11").lines if line.what == "gpu"]
    by = {line.team: line for line in lines}
    assert by["blue"].cost == by["blue"].amount == 4 * SECOND  # a unit for each GPU-second
    assert by["red"].amount == 4 * (SECOND - 10)
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
    close(office, "2026-11", DEC)
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

"""freport says the same from rollups as from the rows, wherever its periods are cut."""

import random
from pathlib import Path
from typing import Any

import pytest

from accounting import (
    books,
    quantities,
    rates,
    reports,
    rolling,
    rollup,
    ship,
    summaries,
    windows,
)
from scheduler.contracts import clock, usage
from tests.unit.accounting import samples
from tests.unit.accounting.test_routes import ask
from tests.unit.accounting.test_ship import write

HOUR, DAY = rollup.HOUR_US, rollup.DAY_US
MIDNIGHT = samples.NOON - DAY // 2
LATER = clock.FakeClock(MIDNIGHT + 4 * DAY + HOUR)
REPORTS = [
    ("user", "day", "Europe/Berlin", -HOUR, 4 * DAY - HOUR),
    ("tier", "hour", "UTC", 20 * HOUR, 30 * HOUR),
    ("team", "day", "Asia/Kolkata", HOUR // 2 - 6 * HOUR, 3 * DAY),
    ("endpoint", "month", "UTC", DAY + 7, 3 * DAY - 5),
]


def made(seed: int) -> list[usage.Row]:
    """Return requests of four days: resumed ones, refused ones, batch lines that were sent again."""
    chance = random.Random(seed)
    rows: list[usage.Row] = []
    for n in range(200):
        about: dict[str, Any] = {
            "team": chance.choice(["red", "blue"]),
            "user": chance.choice(["ann", "bob"]),
            "tier": chance.choice(["batch", "interactive"]),
            "started_us": MIDNIGHT + chance.randrange(4 * DAY),
            "outcome": chance.choice(["ok", "refused", "preempted"]),
            "payer": chance.choice(list(usage.Payer)),
            "output_tokens": chance.randrange(1000),
            "waste_tokens": chance.choice([0, 7]),
        }
        if n % 2:
            about |= {"batch_job_id": 1 + n % 3, "custom_id": f"line-{chance.randrange(9)}"}
        for attempt in range(1, chance.choice([2, 2, 3])):
            rows.append(samples.row("close", f"q{n}", attempt, **about))
    return rows


def reported(state: Path) -> list[Any]:
    """Return the rows of `REPORTS`."""
    found = []
    for by, unit, tz, first, last in REPORTS:
        window = windows.Window(MIDNIGHT + first, MIDNIGHT + last)
        cuts = windows.periods(window, unit, windows.zone(tz))
        with books.Books(state).reading(window.start_us, window.end_us) as reading:

            def work(
                rolled_us: int, reading: books.Reading = reading, by: str = by, cuts: Any = cuts
            ) -> list[dict[str, Any]]:
                told = summaries.told(by, reports.Scope(), reports.Filter())
                taken = quantities.take(reading, cuts, rates.Rates(), None, rolled_us, told)
                return summaries.summary(
                    reading, reports.Scope(), reports.Filter(),
                    by=by, cuts=cuts, taken=taken, rolled_us=rolled_us,
                )  # fmt: skip

            found.append(quantities.with_rollups(reading, cuts[0], work))
            assert reading.problems == ()
    return found


def rolled(state: Path) -> None:
    ship.ship(state, LATER)
    assert rolling.roll(books.Books(state), LATER).problems == ()


def test_rollups_change_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, made(1))
    before = reported(tmp_path)
    rolled(tmp_path)
    assert quantities.rolled_until(tmp_path) == MIDNIGHT + 3 * DAY
    assert reported(tmp_path) == before

    def held(*_: Any, **__: Any) -> Any:
        raise rollup.Busy("held")

    monkeypatch.setattr(rollup, "sums", held)
    assert reported(tmp_path) == before


def test_a_late_row_is_in_the_next_report_although_no_pass_has_seen_it(tmp_path: Path) -> None:
    write(tmp_path, made(5))
    rolled(tmp_path)
    before = reported(tmp_path)
    write(tmp_path, [samples.row("close", "late", started_us=MIDNIGHT + DAY + HOUR)])
    live = reported(tmp_path)
    assert live != before
    ship.ship(tmp_path, LATER)
    assert reported(tmp_path) == live
    rolled(tmp_path)
    assert reported(tmp_path) == live


PRICED = rates.Rates(
    [
        rates.Rate("*", "batch", rates.Use.OUTPUT, 7_001, 0),
        rates.Rate("*", "interactive", rates.Use.OUTPUT, 11_003, MIDNIGHT + DAY + HOUR // 3),
    ]
)
ASKED = [
    (reports.Scope(), reports.Filter(), rates.Rates(), ["team"]),
    (reports.Scope(), reports.Filter(), PRICED, ["team", "model", "tier"]),
    (reports.Scope("red", "ann"), reports.Filter(), rates.Rates(), ["team", "user"]),
    (reports.Scope("red"), reports.Filter(users=("bob",)), rates.Rates(), ["team", "user"]),
    (
        reports.Scope(), reports.Filter(models=("m1", "none"), tiers=("batch",)), PRICED,
        ["team", "model", "tier"],
    ),
    (reports.Scope(), reports.Filter(clusters=("none",)), rates.Rates(), ["cluster", "team"]),
]  # fmt: skip


def test_a_report_asks_for_no_more_owners_than_it_looks_at_and_says_the_same(
    tmp_path: Path,
) -> None:
    """Whoever asks and whatever is left out: owners that are told apart for nothing change no row."""
    write(tmp_path, made(9))
    rolled(tmp_path)
    cuts = [MIDNIGHT + n * DAY for n in range(5)]
    with books.Books(tmp_path).reading(cuts[0], cuts[-1]) as reading:
        for scope, asked, known, names in ASKED:
            told = summaries.told("team", scope, asked)
            for rolled_us in (0, quantities.rolled_until(tmp_path)):
                few, many = (
                    quantities.take(reading, cuts, known, None, rolled_us, each)
                    for each in (told, reports.OWNER)
                )
                rows = [
                    summaries.summary(
                        reading, scope, asked, by="team", cuts=cuts, taken=each, rolled_us=rolled_us
                    )
                    for each in (few, many)
                ]
                assert rows[0] == rows[1]
                used = {
                    name
                    for each in few.amounts
                    for name, value in zip(reports.OWNER, each.owner, strict=True)
                    if value
                }
                assert used == set(names)
                assert len(few.amounts) < len(many.amounts)


async def test_whole_days_are_not_read_from_the_rows(tmp_path: Path) -> None:
    write(tmp_path, made(6))
    rolled(tmp_path)
    with rollup.opened(rollup.path_of(tmp_path), write=True) as session:
        session.execute("UPDATE usage_days SET output_tokens = 5, refused = 3")
        text = (
            "SELECT count(*) FILTER (payer = 'team'), count(*) FROM usage_days WHERE period_us = $1"
        )
        ((paid, every),) = session.execute(text, [MIDNIGHT]).fetchall()
    span: dict[str, Any] = {"start_us": MIDNIGHT, "end_us": MIDNIGHT + DAY, "by": "cluster"}
    (row,) = (await ask(tmp_path, "rollup", **span))["rows"]
    assert (row["output_tokens"], row["refused"]) == (5 * paid, 3 * every)

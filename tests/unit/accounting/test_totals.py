"""The ledger's totals for quotas: by who pays, what for and the hour of arrival."""

from pathlib import Path

import pytest

from accounting import rates, ship, spool, totals
from scheduler.contracts import clock, errors, quota
from tests.unit.accounting import samples, world

HOUR_US = 3_600_000_000
HOUR = samples.NOON // HOUR_US * HOUR_US


def test_what_teams_pay_is_summed_and_what_the_platform_pays_is_not(tmp_path: Path) -> None:
    world.write(tmp_path)
    found = totals.Totals(tmp_path).consumed(HOUR, HOUR + HOUR_US)
    assert {(row.team, row.user, row.tier): (row.attempts, row.spent) for row in found} == {
        ("red", "ann", "interactive"): (1, quota.Spent(8, 0, 10)),
        ("blue", "bob", "batch"): (2, quota.Spent(10, 2, 14)),
    }
    assert {row.from_us for row in found} == {HOUR}
    assert totals.Totals(tmp_path).consumed(HOUR + HOUR_US, HOUR + 2 * HOUR_US) == []


@pytest.mark.parametrize("shipped", [False, True])
def test_names_that_look_like_numbers_or_joined_stay_apart(tmp_path: Path, shipped: bool) -> None:
    """A7: in spools and in Parquet."""
    names = [("007", "k"), ("7", "k"), ("1e3", "k"), ("NULL", "k"), ("a:b", "c"), ("a", "b:c")]
    sink = spool.Spool(tmp_path / "spool" / "gateway", "gateway", clock=clock.FakeClock())
    for number, (team, key) in enumerate(names):
        sink.append(
            samples.row("close", f"q{number}", team=team, key_id=key, output_tokens=number + 1)
        )
    sink.close()
    if shipped:
        ship.ship(tmp_path, clock.FakeClock())
    found = totals.Totals(tmp_path).consumed(HOUR, HOUR + HOUR_US)
    assert {(row.team, row.key_id): row.spent.output_tokens for row in found} == {
        name: number + 1 for number, name in enumerate(names)
    }


def test_a_damaged_ledger_gives_no_totals(tmp_path: Path) -> None:
    world.write(tmp_path)
    ship.ship(tmp_path, clock.FakeClock())
    for path in (tmp_path / "parquet").rglob("*.parquet"):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(errors.RecordingUnavailable, match="not counted"):
        totals.Totals(tmp_path).consumed(HOUR, HOUR + HOUR_US)


def test_an_hour_is_cut_where_a_rate_begins_and_each_part_has_its_own_price(tmp_path: Path) -> None:
    cut, second = HOUR + 600_000_000, 1_000_000
    sink = spool.Spool(tmp_path / "spool" / "gateway", "gateway", clock=clock.FakeClock())
    for number, at in enumerate((HOUR, cut - 1, cut, cut + second, HOUR + HOUR_US)):
        sink.append(samples.row("close", f"q{number}", started_us=at, output_tokens=10**number))
    sink.close()
    known = rates.Rates(
        rates.Rate("*", "*", rates.Use.OUTPUT, price, at)
        for price, at in ((1_000, 0), (3_000, cut), (9_000, HOUR + 2 * HOUR_US))
    )
    pricing = rates.Pricing(known)
    end = HOUR + 2 * HOUR_US
    found = totals.Totals(tmp_path).consumed(HOUR, end, cuts=pricing.changes(HOUR, end))
    assert [(row.from_us, row.attempts, row.spent.output_tokens) for row in found] == [
        (HOUR, 2, 11), (cut, 2, 1100), (HOUR + HOUR_US, 1, 10_000),
    ]  # fmt: skip
    costs = [pricing.cost(row.model, row.tier, row.spent, row.from_us) for row in found]
    assert costs == [11, 3_300, 30_000]


@pytest.mark.parametrize(
    ("kind", "outcome", "ended_s", "runs"),
    [
        ("close", "ok", 0, False),
        ("close", "client_gone", 0, False),
        ("close", "replica_lost", 0, True),  # goes on elsewhere
        ("close", "replica_lost", -2, False),  # it would have by now
        ("replica", "ok", 0, True),  # the client may read slowly
        ("replica", "ok", -2, False),
        ("open", "open", -2, True),
    ],
)
def test_what_a_request_used_that_may_still_run_is_told_apart(
    tmp_path: Path, kind: str, outcome: str, ended_s: int, runs: bool
) -> None:
    noon = samples.NOON
    sink = spool.Spool(tmp_path / "spool" / "gateway", "gateway", clock=clock.FakeClock())
    sink.append(samples.row("close", "q1", 1, output_tokens=5, ended_us=noon, outcome="error"))
    end = {} if kind == "open" else {"outcome": outcome, "ended_us": noon + ended_s * 1_000_000}
    sink.append(samples.row(kind, "q1", 2, **end))
    sink.append(samples.row("close", "q2", output_tokens=3))
    sink.close()
    over = noon - 1_000_000 if ended_s == 0 else noon + 1
    found = totals.Totals(tmp_path).consumed(HOUR, HOUR + HOUR_US, over_us=over)
    by_state = {row.running: row.spent.output_tokens for row in found}
    assert by_state == ({True: 5, False: 3} if runs else {False: 8})

"""The ledger's totals for quotas: by who pays, what for and the hour of arrival."""

from pathlib import Path

import pytest

from accounting import ship, spool, totals
from scheduler.contracts import clock, errors, quota
from tests.unit.accounting import samples, world

HOUR_US = 3_600_000_000
HOUR = samples.NOON // HOUR_US * HOUR_US


def test_what_teams_pay_is_summed_and_what_the_platform_pays_is_not(tmp_path: Path) -> None:
    world.write(tmp_path)
    found = totals.Totals(tmp_path).consumed(HOUR, HOUR + HOUR_US)
    assert {(row.team, row.user, row.tier): (row.requests, row.spent) for row in found} == {
        ("red", "ann", "interactive"): (1, quota.Spent(8, 0, 10)),
        ("blue", "bob", "batch"): (2, quota.Spent(10, 2, 14)),
    }
    assert {row.hour_us for row in found} == {HOUR}
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

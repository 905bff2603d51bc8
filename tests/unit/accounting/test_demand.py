"""The demand that forecasts read: quarters of an hour, kept longer than minutes, batch left out."""

from pathlib import Path

import pytest

from accounting import books, demand, rolling, rollup
from scheduler.contracts import clock, usage
from tests.unit.accounting import samples
from tests.unit.accounting.test_rolling import LATER, NOW, closed, record, roll

QUARTER = demand.QUARTER_US
CLUSTER = samples.row("open", "q").identity.cluster


def quarters(state: Path) -> dict[str, dict[int, float]]:
    found = demand.Ledger(state, CLUSTER).quarters(0, samples.NOON + 10 * samples.DAY_US)
    return {
        model: {(at - samples.NOON) // QUARTER: arrived.requests for at, arrived in kept.items()}
        for model, kept in found.items()
    }


def test_requests_are_counted_by_the_quarter_and_late_ones_are_added(tmp_path: Path) -> None:
    rows: list[usage.Row] = [closed(n, samples.NOON + n * 60_000_000) for n in range(20)]
    rows += [closed(100, tier="batch", batch_job_id=1, custom_id="x")]
    record(tmp_path, rows)
    assert demand.Ledger(tmp_path, CLUSTER).quarters(0, samples.NOON) == {}
    roll(tmp_path)
    model = closed(0).identity.model
    assert quarters(tmp_path) == {model: {0: 15.0, 1: 5.0}}
    record(tmp_path, [closed(200, samples.NOON + 60_000_000)])
    roll(tmp_path)
    assert quarters(tmp_path) == {model: {0: 16.0, 1: 5.0}}
    (arrived,) = {
        each.held_s for each in demand.Ledger(tmp_path, CLUSTER).quarters(0, 2**62)[model].values()
    }
    assert arrived == pytest.approx(0.011)
    assert demand.Ledger(tmp_path, "elsewhere").quarters(0, 2**62) == {}


def test_quarters_outlive_minutes_and_one_that_was_never_kept_is_a_fourth_of_its_hour(
    tmp_path: Path,
) -> None:
    record(tmp_path, [closed(n, samples.NOON + n * 60_000_000) for n in range(8)])
    roll(tmp_path)
    model = closed(0).identity.model
    roll(tmp_path, LATER)
    assert quarters(tmp_path) == {model: {0: 8.0}}
    rolling.rebuild(books.Books(tmp_path), LATER)
    assert quarters(tmp_path) == {model: {0: 2.0, 1: 2.0, 2: 2.0, 3: 2.0}}


def test_what_no_forecast_looks_at_is_dropped(tmp_path: Path) -> None:
    record(tmp_path, [closed(1)])
    roll(tmp_path)
    much_later = clock.FakeClock(samples.NOON + 60 * samples.DAY_US)
    record(tmp_path, [closed(2, much_later.wall_us() - 60_000_000)], much_later)
    roll(tmp_path, much_later)
    with rollup.opened(rollup.path_of(tmp_path)) as session:
        ((n,),) = session.execute("SELECT count(*) FROM demand_quarters").fetchall()
    assert n == 1


def test_a_damaged_file_and_one_of_an_earlier_release_are_no_surprise(tmp_path: Path) -> None:
    record(tmp_path, [closed(1)])
    roll(tmp_path)
    with rollup.opened(rollup.path_of(tmp_path), write=True) as session:
        session.execute("DROP TABLE demand_quarters")
    assert demand.Ledger(tmp_path, CLUSTER).quarters(0, 2**62) == {}
    rollup.path_of(tmp_path).write_bytes(b"not a database" * 1000)
    with pytest.raises(OSError, match=r"accounting\.duckdb"):
        demand.Ledger(tmp_path, CLUSTER).quarters(0, 2**62)
    assert roll(tmp_path, NOW).problems

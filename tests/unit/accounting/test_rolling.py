"""Rollups: each row once, late rows as a revision, whatever is killed, repeated or lost."""

from pathlib import Path
from typing import Any

import pytest

from accounting import books, compact, manifest, rolling, rollup, ship
from scheduler.contracts import clock, usage
from tests.unit.accounting import samples
from tests.unit.accounting.test_ship import write

NOW = clock.FakeClock(samples.NOON + 3_600_000_000)
LATER = clock.FakeClock(samples.NOON + 5 * samples.DAY_US)
HOUR, DAY = rollup.HOUR_US, rollup.DAY_US
MIDNIGHT = samples.NOON - 12 * HOUR


def closed(n: int, arrived_us: int = samples.NOON, **more: Any) -> usage.UsageRow:
    return samples.row(
        "close",
        f"q{n}",
        arrived_us=arrived_us,
        started_us=arrived_us + 10,
        first_token_us=arrived_us + 1000,
        ended_us=arrived_us + 11_000,
        **{"uncached_prompt_tokens": 7, "output_tokens": 11, **more},
    )


def record(state: Path, rows: list[usage.Row], now: clock.Clock = NOW) -> None:
    write(state, rows)
    ship.ship(state, now)


def roll(state: Path, now: clock.Clock = NOW, **more: Any) -> rolling.Rolled:
    return rolling.roll(books.Books(state), now, **more)


def ask(state: Path, statement: str) -> list[tuple[Any, ...]]:
    with rollup.opened(rollup.path_of(state)) as session:
        rows: list[tuple[Any, ...]] = session.execute(statement).fetchall()
    return rows


def total(state: Path, level: str, what: str = "attempts") -> int:
    ((found,),) = ask(state, f"SELECT coalesce(sum({what}), 0)::BIGINT FROM usage_{level}")
    return int(found)


def same_as_rows(state: Path) -> None:
    """Every level says what the rows say."""
    names = ", ".join(f"sum({name})::BIGINT" for name in rollup.SUMS)
    keys = rollup.quoted(rollup.KEYS)
    with books.Books(state).reading() as reading:
        for level, length in (("hours", HOUR), ("days", DAY)):
            text = f"SELECT period_us // {length} AS p, {keys}, {names} FROM {{}} GROUP BY ALL ORDER BY ALL"
            rows = f"({rollup.usage_of('usage', HOUR)})"
            wanted = reading.session.execute(text.format(rows)).fetchall()
            assert ask(state, text.format(f"usage_{level}")) == wanted


def test_minutes_hours_and_days_add_up(tmp_path: Path) -> None:
    rows = [closed(n, samples.NOON + n * 20_000_000) for n in range(9)]
    record(tmp_path, [*rows, samples.row("open", "q0"), samples.row("open", "lonely")])
    done = roll(tmp_path)
    assert (done.days, done.minutes, done.problems) == (1, 3, ())
    for level in rollup.LEVELS:
        assert total(tmp_path, level) == 10
        assert total(tmp_path, level, "output_tokens") == 99
        assert total(tmp_path, level, "open") == 1
        assert total(tmp_path, level, "ttft_us") == 9000
        assert total(tmp_path, level, "decode_tokens") == 90
    same_as_rows(tmp_path)
    assert roll(tmp_path).days == 0
    counts = ask(tmp_path, "SELECT what, bucket, sum(n) FROM latency_days GROUP BY ALL ORDER BY 1")
    ((_, tpot, n), (_, ttft, m)) = [(what, bucket, count) for what, bucket, count in counts][::-1]
    assert (n, m) == (9, 9)
    assert rollup.quantile_us({tpot: 9}, 0.5) == pytest.approx(1000, rel=0.05)
    assert rollup.quantile_us({ttft: 9}, 0.95) == pytest.approx(1000, rel=0.05)


def test_a_late_row_is_a_revision_and_replaces_what_it_corrects(tmp_path: Path) -> None:
    record(tmp_path, [samples.row("open", "q1"), closed(2)])
    roll(tmp_path)
    assert total(tmp_path, "days", "open") == 1
    record(tmp_path, [closed(1, output_tokens=5)])
    roll(tmp_path, clock.FakeClock(samples.NOON + 2 * HOUR))
    for level in rollup.LEVELS:
        assert (total(tmp_path, level), total(tmp_path, level, "open")) == (2, 0)
    same_as_rows(tmp_path)
    assert ask(tmp_path, "SELECT level, revision, late_revisions FROM periods ORDER BY 1") == [
        ("days", 1, 0),  # the day had not ended
        ("hours", 1, 1),
        ("minutes", 1, 1),
    ]


def test_a_row_that_is_days_late_has_its_hour_summed_from_the_rows(tmp_path: Path) -> None:
    record(tmp_path, [closed(n, samples.NOON + n * 60_000_000) for n in range(5)])
    roll(tmp_path)
    record(tmp_path, [closed(9, samples.NOON + 30_000_000)], LATER)
    roll(tmp_path, LATER)
    assert [total(tmp_path, level) for level in rollup.LEVELS] == [0, 6, 6]
    same_as_rows(tmp_path)
    record(tmp_path, [closed(10, LATER.wall_us())], LATER)
    roll(tmp_path, LATER)
    assert [total(tmp_path, level) for level in rollup.LEVELS] == [1, 7, 7]


def test_a_pass_opens_the_files_of_the_minutes_that_it_sums_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A day has a file a minute until it is compacted: a pass that opened all would cost more each hour."""
    opened: list[int] = []
    plain = books.Books.over

    def over(records: books.Books, files: Any) -> Any:
        opened.append(len(files))
        return plain(records, files)

    monkeypatch.setattr(books.Books, "over", over)
    for minute in range(4):
        record(tmp_path, [closed(minute, samples.NOON + minute * 60_000_000)])
        roll(tmp_path)
    assert opened == [1] * 8  # what is new, and what is summed
    record(tmp_path, [closed(0, output_tokens=12), closed(99, samples.NOON + 2 * 60_000_000)])
    roll(tmp_path)
    assert opened[8:] == [1, 3]  # the late file, and those of the two minutes that it touches
    assert total(tmp_path, "minutes", "output_tokens") == 5 * 11 + 1
    same_as_rows(tmp_path)


def test_compaction_changes_no_sum_and_is_not_rolled_up_again(tmp_path: Path) -> None:
    record(tmp_path, [samples.row("open", "q1"), closed(1)])
    record(tmp_path, [closed(1), closed(2)])
    roll(tmp_path, LATER)
    assert compact.compact(tmp_path, LATER).files_after == 1
    assert roll(tmp_path, LATER).days == 0
    assert total(tmp_path, "days") == 2


def test_rows_that_a_compaction_swallowed_before_the_pass_are_counted(tmp_path: Path) -> None:
    record(tmp_path, [closed(1)])
    roll(tmp_path, LATER)
    record(tmp_path, [closed(2)])
    compact.compact(tmp_path, LATER)
    assert roll(tmp_path, LATER).days == 1
    assert total(tmp_path, "days") == 2


def test_an_attempt_whose_gateway_died_becomes_an_error_once_and_a_late_row_wins(
    tmp_path: Path,
) -> None:
    record(tmp_path, [samples.row("open", "q1"), closed(2)])
    roll(tmp_path, LATER)
    assert (total(tmp_path, "days", "open"), total(tmp_path, "days", "error")) == (1, 0)
    soon = clock.FakeClock(MIDNIGHT + DAY + HOUR)
    assert compact.compact(tmp_path, soon).files_after == 0  # it may still be running
    assert compact.compact(tmp_path, LATER).given_up == 1
    assert compact.compact(tmp_path, LATER).given_up == 0
    roll(tmp_path, LATER)
    assert (total(tmp_path, "days", "open"), total(tmp_path, "days", "error")) == (0, 1)
    assert total(tmp_path, "days") == 2
    with books.Books(tmp_path).reading() as reading:
        (row,) = reading.query("SELECT * FROM usage WHERE request_id = 'q1'")
    assert (row["outcome"], row["payer"]) == ("error", "platform")
    assert (row["reason"], row["output_tokens"]) == ("gateway died before the answer", 0)
    record(tmp_path, [samples.row("replica", "q1", output_tokens=4)], LATER)
    for _ in range(2):
        with books.Books(tmp_path).reading() as reading:
            (row,) = reading.query("SELECT * FROM usage WHERE request_id = 'q1'")
        assert (row["kind"], row["outcome"], row["output_tokens"]) == ("replica", "ok", 4)
        assert roll(tmp_path, LATER).days <= 1
        assert (total(tmp_path, "days", "ok"), total(tmp_path, "days", "error")) == (2, 0)
        compact.compact(tmp_path, LATER)


def test_a_damaged_file_keeps_the_sums_that_were_made_of_it(tmp_path: Path) -> None:
    record(tmp_path, [closed(1)])
    roll(tmp_path)
    current = manifest.load(tmp_path / "parquet")
    assert current is not None
    path = tmp_path / "parquet" / current.files[0].path
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    record(tmp_path, [closed(2)])
    done = roll(tmp_path)
    assert any(path.name in line for line in done.problems)
    assert done.days == 0
    assert total(tmp_path, "days") == 1


def test_lost_or_damaged_it_is_made_again(tmp_path: Path) -> None:
    record(tmp_path, [closed(n, samples.NOON + n * HOUR) for n in range(-13, 3)])
    roll(tmp_path)
    path = rollup.path_of(tmp_path)
    path.write_bytes(b"rubbish" * 1000)
    (problem,) = roll(tmp_path).problems
    assert str(path) in problem
    same_as_rows(tmp_path)
    path.unlink()
    roll(tmp_path)
    same_as_rows(tmp_path)
    assert rolling.rebuild(books.Books(tmp_path), NOW).days == 2
    same_as_rows(tmp_path)
    assert roll(tmp_path).days == 0
    assert sorted(each.name for each in tmp_path.glob("*accounting*")) == [
        "accounting.duckdb",
        "accounting.duckdb.damaged",
    ]


def test_an_older_manifest_from_a_backup_makes_them_anew(tmp_path: Path) -> None:
    record(tmp_path, [closed(1)])
    old = (tmp_path / "parquet" / manifest.NAME).read_text()
    record(tmp_path, [closed(2)])
    roll(tmp_path)
    (tmp_path / "parquet" / manifest.NAME).write_text(old)
    (problem,) = roll(tmp_path).problems
    assert "newer than the manifest" in problem
    assert total(tmp_path, "days") == 1


def test_who_reads_waits_for_who_writes_and_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), rollup.opened(rollup.path_of(tmp_path)):
        pass
    record(tmp_path, [closed(1)])
    roll(tmp_path)
    path = rollup.path_of(tmp_path)
    with (
        rollup.opened(path, write=True),
        pytest.raises(rollup.Busy, match="another process holds"),
        rollup.opened(path, wait_s=0),
    ):
        pass


def test_a_reader_that_stays_holds_a_pass_up_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path, [closed(1)])
    roll(tmp_path)
    record(tmp_path, [closed(2)])
    monkeypatch.setattr(rollup, "WAIT_S", 0.0)
    with rollup.opened(rollup.path_of(tmp_path)):
        (problem,) = roll(tmp_path).problems
    assert "another process holds it open" in problem
    assert roll(tmp_path).problems == ()
    assert total(tmp_path, "days") == 2


def test_a_window_takes_days_inside_and_hours_at_its_borders(tmp_path: Path) -> None:
    record(tmp_path, [closed(n, MIDNIGHT + n * HOUR) for n in range(96)])
    roll(tmp_path, LATER)
    for first, last in ((5, 90), (0, 96), (24, 48), (30, 40), (23, 25), (0, 1)):
        span = MIDNIGHT + first * HOUR, MIDNIGHT + last * HOUR
        with rollup.sums(tmp_path, [span]) as session:
            found = session.execute("SELECT sum(attempts) FROM usage_sums").fetchone()
        assert found == (last - first,)
    spans = [(MIDNIGHT + n * HOUR, MIDNIGHT + (n + 30) * HOUR) for n in (1, 31, 61)]
    with rollup.sums(tmp_path, spans) as session:
        text = "SELECT piece, sum(attempts) FROM usage_sums GROUP BY piece ORDER BY piece"
        assert session.execute(text).fetchall() == [(0, 30), (1, 30), (2, 30)]
    with pytest.raises(ValueError, match="whole UTC hours"), rollup.sums(tmp_path, [(1, HOUR)]):
        pass


def test_teams_that_look_like_numbers_or_nothing_stay_apart_a7(tmp_path: Path) -> None:
    """A7: nothing guesses a type from a name, in a partition or a key."""
    names = ["007", "7", "1e3", "NULL", "", "a:b", "a", "true", "2026-11-27"]
    rows = [
        closed(n, team=name, key_id="b:c" if name == "a" else "c") for n, name in enumerate(names)
    ]
    record(tmp_path, list(rows))
    compact.compact(tmp_path, LATER)
    roll(tmp_path)
    found = ask(tmp_path, "SELECT team, attempts FROM usage_days ORDER BY 1")
    assert found == [(name, 1) for name in sorted(names)]

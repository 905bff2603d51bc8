"""The rows that `make bench-accounting` makes: as many as asked, in order, and the same merged as written."""

import datetime
from pathlib import Path
from typing import Any

import duckdb
import pytest

from accounting import books, manifest, merge, pieces, schema
from tests.bench import accounting, accounting_peers, accounting_questions, accounting_report
from tests.bench import accounting_data as data

BILL: dict[str, Any] = {
    "cold_s": 1.5, "warm_s": 1.0, "warm_spread_s": [1, 2], "rss_mb": 77, "cache_dropped": True, "sum": [1],
}  # fmt: skip
DAY = data.Day(3, 1000, 400)


def test_days_add_up() -> None:
    for rows in (0, 1, 29, 1_000_003):
        made = data.days(rows)
        assert sum(day.rows for day in made) == rows
        assert [day.first for day in made] == [sum(d.rows for d in made[:n]) for n in range(30)]
    assert (made[0].name, made[29].name) == ("2026-11-01", "2026-11-30")
    assert data.month_us()[1] - data.month_us()[0] == 30 * data.DAY_US


def test_a_day_is_what_a_compaction_leaves(tmp_path: Path) -> None:
    entry = data.compacted(tmp_path / "parquet", DAY)
    manifest.save(tmp_path / "parquet", manifest.Manifest(1, (entry,)))
    with books.Books(tmp_path).reading() as reading:
        rows = reading.query("SELECT * FROM usage")
    assert reading.problems == ()
    assert len({(row["request_id"], row["attempt"]) for row in rows}) == len(rows) == DAY.rows
    assert rows == sorted(rows, key=lambda row: [row[name] for name in pieces.ORDER])
    assert {row["arrived_us"] // data.DAY_US * data.DAY_US for row in rows} == {DAY.start_us}
    assert all(row["output_tokens"] >= 0 and row["uncached_prompt_tokens"] >= 0 for row in rows)
    assert len({row["team"] for row in rows}) > 40


def test_as_written_and_merged_it_is_the_same() -> None:
    with duckdb.connect() as session:
        session.execute(f"CREATE TABLE ends AS {data.attempts(DAY, 0, DAY.rows)}")
        session.execute(f"CREATE TABLE raw AS {data.as_written('SELECT * FROM ends')}")
        names = ", ".join(f'"{name}"' for name in schema.columns(schema.USAGE))
        again = session.execute(f"SELECT {names} FROM ({merge.statement('raw')}) ORDER BY ALL")
        merged = again.fetchall()
        assert merged == session.execute(f"SELECT {names} FROM ends ORDER BY ALL").fetchall()


def test_figures_go_between_their_marks(tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    path.write_text("before\n<!-- figures -->\nold\n<!-- end of figures -->\nafter\n")
    accounting_report.write(path, "new\n")
    assert path.read_text() == "before\n<!-- figures -->\nnew\n<!-- end of figures -->\nafter\n"


def test_a_part_that_breaks_takes_no_other_along(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("the disk is full\nand more")

    done = accounting.Measured()
    assert not done.part("rebuild", broken)
    assert done.part("rollup", lambda: BILL)
    assert "rebuild broke" in capsys.readouterr().err
    found = accounting.figures(done, 5, datetime.datetime.now(datetime.UTC))
    assert found["bill_s"] == {"rollup": 1.5, "segments": None}
    assert (found["rss_mb"], found["broken"]) == (77, {"rebuild": "RuntimeError: the disk is full"})
    text = accounting_report.text(found)
    assert "- rebuild broke: RuntimeError: the disk is full\n" in text
    assert "| month's bill from rollups, cold | 1.5 s | < 1 s |" in text
    assert "| billing columns | not measured | ≤ 30 |" in text
    assert "PostgreSQL 15" not in text


@pytest.mark.duckdb
def test_everybody_is_asked_the_same_two_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By those that need no server; that all say the same is what the comparison is worth."""
    monkeypatch.setattr(data, "DAYS", accounting_questions.DAY.number + 1)
    monkeypatch.setattr(accounting_peers, "ROUNDS", dict.fromkeys(accounting_peers.ROUNDS, 1))
    ways = {"segments", "segments_sql", "sqlite", "duckdb_plain"}
    told = accounting_peers.compare(tmp_path, 3_600, sorted(ways))
    assert set(told["bill_5m_s"]) == set(told["day_5m_s"]) == ways
    assert accounting_questions.team_day(books.Books(tmp_path / "ours"))


def test_an_answer_that_differs_is_no_comparison() -> None:
    ways = {"segments": lambda _: [("red", 1)], "sqlite": lambda _: [("red", 2)]}
    with pytest.raises(RuntimeError, match="answers on the day differ: sqlite"):
        accounting_peers._in_turn(ways, "day")


def test_a_bill_that_is_another_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "stage", lambda *_: {**BILL, "sum": [2]})
    done = accounting.Measured()
    done.part("rollup", lambda: {**BILL, "sum": [1]})
    assert not done.part("segments", lambda: accounting.bill(done, Path(), "segments"))
    assert done.part("day", lambda: accounting.bill(done, Path(), "day"))

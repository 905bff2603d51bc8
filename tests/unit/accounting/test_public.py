"""The tables that docs/sql.md describes: its columns, its examples, and that they add up."""

import argparse
import datetime
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from accounting import billing, public, rates, settings, spool, sql_command, windows
from scheduler.contracts import clock
from scheduler.contracts.command_line import CommandError
from tests.unit.accounting import samples, world

DOC = Path(__file__).parents[3] / "docs" / "sql.md"
NOW = datetime.datetime(2026, 11, 27, 12, 30, tzinfo=datetime.UTC)
Run = Callable[..., str]


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("state")
    world.write(made)
    sink = spool.Spool(made / "spool" / "more", "more", clock=clock.FakeClock())
    start = world.NOON + 3 * world.SECOND
    sink.append(samples.row("close", "t1", started_us=start, first_token_us=start + 250_000))
    sink.close()
    office = billing.Billing(made, settings.Accounting())
    prices = {rates.Use.OUTPUT: 1_500_000, rates.Use.GPU: 3_600_000_000}
    office.add_rates(rates.body("*", "*", prices, 1), author="ops", reason="x", now_us=world.NOON)
    office.adjust("red", -5, "2026-11", author="ops", reason="y", now_us=world.NOON)
    return made


def run(state: Path, *words: str) -> str:
    parser = argparse.ArgumentParser()
    sql_command.declare(parser)
    out, err = io.StringIO(), io.StringIO()
    code = sql_command.run(
        parser.parse_args(words), state_dir=state, table=settings.Accounting(),
        streams=(out, err), now=NOW, tz=datetime.UTC,
    )  # fmt: skip
    assert (code, err.getvalue()) == (0, "")
    return out.getvalue()


def test_a_folder_without_books_is_said(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    sql_command.declare(parser)
    out, err = io.StringIO(), io.StringIO()
    code = sql_command.run(
        parser.parse_args(["SELECT count(*) FROM usage"]),
        state_dir=tmp_path, table=settings.Accounting(), streams=(out, err), now=NOW, tz=datetime.UTC,
    )  # fmt: skip
    assert code == 0
    assert err.getvalue() == f"{tmp_path}: nothing is recorded there yet (--config FILE?)\n"


def test_every_column_is_documented_and_every_documented_one_is_there(state: Path) -> None:
    text = DOC.read_text()
    with public.opened(
        state, settings.Accounting(), public.this_month(NOW, datetime.UTC)
    ) as tables:
        for name in public.TABLES:
            section = text.partition(f"\n## {name}:")[2].partition("\n## ")[0]
            cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
            told = {word for cell in cells for word in re.findall(r"`(\w+)`", cell)}
            found = tables.session.execute(f"SELECT * FROM {name} LIMIT 0").description
            assert told == {column[0] for column in found}, name


@pytest.mark.parametrize("example", re.findall(r"```sql\n(.*?)```", DOC.read_text(), re.DOTALL))
def test_examples_run_and_find_something(state: Path, example: str) -> None:
    assert json.loads(run(state, example, "--json"))


def test_bill_and_minutes_add_up(state: Path) -> None:
    (row,) = json.loads(run(state, "SELECT sum(cost)::BIGINT AS cost FROM bill", "--json"))
    office = billing.Billing(state, settings.Accounting())
    assert row["cost"] == sum(line.cost for line in office.month("2026-11").lines) != 0
    text = run(state, "SELECT sum(gpu_us)::BIGINT AS us FROM gpu_minutes", "--csv")
    assert text == f"us\n{40 * world.SECOND}\n"


def test_the_window_is_the_callers(state: Path) -> None:
    count = "SELECT count(*) AS n FROM usage"
    assert run(state, count, "--csv") == "n\n7\n"
    assert run(state, count, "--csv", "-S", "2026-11-27T12:00:01") == "n\n4\n"
    assert run(state, count, "--csv", "-E", "2026-11-20") == "n\n0\n"


def test_an_export_holds_the_same(state: Path, tmp_path: Path) -> None:
    run(state, "--export", str(tmp_path / "out"))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "bill.parquet", "gpu_minutes.parquet", "rates.parquet", "usage.parquet",
    ]  # fmt: skip
    assert pq.read_table(tmp_path / "out" / "usage.parquet").num_rows == 7


def test_a_month_without_anything_has_empty_tables(state: Path) -> None:
    window = windows.of_month("2026-01", datetime.UTC)
    with public.opened(state, settings.Accounting(), window) as tables:
        for name in ("usage", "gpu_minutes", "bill"):
            assert tables.session.execute(f"SELECT count(*) FROM {name}").fetchone() == (0,)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give a query, or --export"),
        (("SELEC 1",), "syntax error"),
        ((";",), "one query that only reads"),
        (("-- nothing",), "one query that only reads"),
        (("SELECT 1 AS a, 2 AS a", "--json"), "tell them apart with AS"),
        (("SELECT 1", "-S", "9pm"), "invalid time"),
        (("SELECT 1", "-S", "now", "-E", "today"), "give -S and -E in order"),
        (("SELECT 1", "--json", "--csv"), "exclude each other"),
        (("--export", "/proc/nowhere"), "choose another folder"),
    ],
)
def test_what_is_refused_is_one_line(state: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(CommandError, match=message) as raised:
        run(state, *words)
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(
    "text",
    [
        "COPY (SELECT 1 AS a) TO '{state}/parquet/w.parquet' (FORMAT parquet)",
        "EXPLAIN ANALYZE COPY (SELECT 1 AS a) TO '{state}/parquet/w.parquet' (FORMAT parquet)",
        "SELECT 1; COPY (SELECT 1) TO '{state}/w.csv'",
        "SET enable_external_access = true",
        "ATTACH '{state}/parquet/w.db'",
        "SELECT * FROM read_text('{state}/postings/00000001.json')",
        "SELECT * FROM read_text('/etc/passwd')",
    ],
)
def test_a_query_reads_the_tables_and_touches_nothing_else(state: Path, text: str) -> None:
    before = sorted(state.rglob("*"))
    with pytest.raises(CommandError, match=r"only reads is run|disabled by configuration"):
        run(state, text.format(state=state))
    assert sorted(state.rglob("*")) == before


def test_csv_of_a_query_holds_no_formula(state: Path) -> None:
    text = run(state, "SELECT '=1+1' AS \"@a\", -5 AS b, NULL AS c", "--csv")
    assert text == "'@a,b,c\n'=1+1,-5,\n"


def test_a_cell_cannot_steer_the_terminal(state: Path) -> None:
    assert "\x1b" not in run(state, "SELECT chr(27) || '[2J' AS a")

"""freport as a user sees it: the text, the refusals, the exit codes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from accounting import (
    freport_rows,
)
from scheduler.contracts import ports
from scheduler.contracts.command_line import CommandError
from tests.unit.accounting import commanding, world

run = commanding.run  # the fixture


def test_freport_team_adds_up(run: commanding.Run) -> None:
    assert run("freport team -S today") == (
        "-" * 80 + "\n"
        "Team usage by day, GPU time in Seconds\n"
        "Window: 2026-11-27T00:00:00 - 2026-11-27T12:30:00 (UTC)\n" + "-" * 80 + "\n"
        "Start               Team                GPU   Requests   Attempts "
        "  Uncached     Cached     Output   Platform\n"
        "------------------- ------------ ---------- ---------- ---------- "
        "---------- ---------- ---------- ----------\n"
        "2026-11-27T00:00:00 blue                  4          2          3 "
        "        10          2         14          9\n"
        "2026-11-27T00:00:00 red                   4          2          3 "
        "         8          0         10          4\n"
        "2026-11-27T00:00:00 (idle)               28\n"
        "2026-11-27T00:00:00 (waste)               4\n"
    )


def test_percent_of_gpus_that_were_never_idle_is_shown_to_admins(tmp_path: Path) -> None:
    rows = [
        {"start_us": 0, "what": "used", "gpu_us": 5},
        {"start_us": 0, "what": "used", "gpu_us": 15},
    ]
    assert [r["allocated_us"] for r in freport_rows.with_percent(rows, "Percent", whole=True)] == [
        20,
        20,
    ]
    with pytest.raises(CommandError, match="which is shown to admins"):
        freport_rows.with_percent(rows, "Percent", whole=False)


def test_freport_units_and_measures(run: commanding.Run) -> None:
    assert run("freport user by hour -S today -t perc -T gpu -P -n") == (
        "2026-11-27T12:00:00|blue|bob|10.00\n"
        "2026-11-27T12:00:00|red|ann|10.00\n"
        "2026-11-27T12:00:00|red|rob|0.00\n"
        "2026-11-27T12:00:00|(idle)||70.00\n"
        "2026-11-27T12:00:00|(waste)||10.00\n"
    )
    assert run("freport cluster --month 2026-11 -t minutes -T gpu -P -n", who=world.BOB) == (
        "2026-11-27T00:00:00|c1|0.07\n"
    )
    assert run("freport model hour -S today -T tokens -P -n").splitlines()[0] == (
        "2026-11-27T12:00:00|chat|4|6|18|2|24|13"
    )
    assert "shown to admins" in run("freport team -S today -t percent", who=world.BOB, code=1)
    assert run("freport team -P -n") == ""  # yesterday


def test_what_requests_jobs_and_attempts_cost(run: commanding.Run) -> None:
    """Platform attempts cost nothing; a job costs what its lines do; GPU time is shared among who ran."""
    assert run("facct -P -n -o jobid,cost,gpuseconds") == (
        "q1|0.019|4\n"  # 8 prompt tokens at 0.50 and 10 output tokens at 1.50 a thousand
        "r1|0.00|0\n"
        "12|0.026|4\n"
        "12.x|0.013|2\n"
        "12.y|0.013|2\n"
    )
    assert run("facct -P -n -D -j q1 -o attempt,cost,gpuseconds") == "1|0.00|0\n2|0.019|4\n"
    assert run("facct -P -n -X -j q1 -o cost,output --units K") == "0.019|0.01K\n"


def test_times_are_truncated_to_the_window(run: commanding.Run) -> None:
    line = "facct -P -n -X -j q1 -S 2026-11-27T11:00 -E 2026-11-27T12:00:01 -o end,elapsed"
    assert run(line) == "2026-11-27T12:00:01|00:00:01\n"
    leases = (
        "facct --leases -P -n -S 2026-11-27T12:00:02 -E 2026-11-27T12:00:04 -o start,end,gpuseconds"
    )
    assert run(f"{leases} -T") == "2026-11-27T12:00:02|2026-11-27T12:00:04|8\n"


def test_clusters(run: commanding.Run) -> None:
    assert run("facct -P -n -X -M c1 -o jobid") == "q1\nr1\n12\n"
    assert run("facct -P -n -X -M c2 -o jobid") == ""
    assert run("freport team -S today -M c2 -P -n") == ""


def test_freport_cost_and_efficiency(run: commanding.Run) -> None:
    assert run("freport endpoint -S today -T cost,efficiency -P").splitlines()[:2] == [
        "Start|Endpoint|Cost|TokensPerGPUHour|CostPer1kTokens",
        "2026-11-27T00:00:00|/v1/chat/completions|8.04496|19800|182.840000",
    ]
    rows = json.loads(run("freport team -S today --json"))
    assert rows["currency"] == "EUR"
    cost = {row["team"]: row["cost_micro"] for row in rows["rows"] if row["what"] == "used"}
    assert cost == {"blue": 4_026_000, "red": 4_018_960}
    assert run("freport team -S today -P -n -o team,cost", who=world.ANN) == "red|4.01896\n"


def test_freport_bill_is_exact_and_everyone_sees_their_own(run: commanding.Run) -> None:
    assert run(
        "freport bill -o team,user,model,tier,what,amount,unit,price,cost -P", who=world.ANN
    ) == (
        "Team|User|Model|Tier|What|Amount|Unit|Price|Cost\n"
        "red|ann|chat|interactive|gpu|0.0011|GPU-hours|3600.00|3.99996\n"
        "red|ann|chat|interactive|output|10|tokens|1.50|0.015\n"
        "red|ann|chat|interactive|uncached_prompt|8|tokens|0.50|0.004\n"
    )
    text = run("freport bill --month 2026-11")
    assert text.startswith(
        "-" * 80
        + "\nBill of 2026-11 (open, as of now), in EUR; prices are for 1000 tokens or a GPU-hour\n"
    )
    assert text.endswith(
        "Total of blue: 4.026 EUR\nTotal of red: 4.01896 EUR\nTotal: 8.04496 EUR\n"
    )
    points = {line[:117].rfind(".") for line in text.splitlines()[6:-3]}
    assert len(points) == 1  # of the costs, below each other
    document = json.loads(run("freport bill --month 2026-11 --json", who=world.BOB))
    assert {row["team"] for row in document["rows"]} == {"blue"}
    assert document["total"] == sum(row["cost"] for row in document["rows"]) == 4_026_000
    assert json.loads(run("freport bill --month 2026-10 --json"))["rows"] == []


def test_bars_are_for_terminals(run: commanding.Run) -> None:
    plain = run("freport team -S today --chart -T cost", terminal=True, NO_COLOR="1")
    assert "\x1b" not in plain
    assert "█" in plain
    assert [line.split()[0] for line in plain.splitlines() if "4.0" in line] == ["blue", "red"]


def test_a_chart_as_a_picture(run: commanding.Run, tmp_path: Path) -> None:
    target = tmp_path / "team.png"
    assert run(f"freport team by hour -S today --png {target}") == ""
    assert target.read_bytes().startswith(b"\x89PNG\r\n")


def test_a_statement_is_one_file_with_everything_in_it(run: commanding.Run, tmp_path: Path) -> None:
    target = tmp_path / "red.html"
    assert run(f"freport team --month 2026-11 -A red --html {target}") == ""
    page = target.read_text()
    for words in ("<h1>red</h1>", "November 2026", "4.02", "ann", "3600.00", "<svg", "UTC"):
        assert words in page
    assert "blue" not in page
    assert "bob" not in page
    assert not re.search(
        r"(?:src|href|url)\s*[=(]\s*[\"']?(?!#)", page.replace('xlink:href="#', "#")
    )
    assert "<script" not in page
    both = tmp_path / "all.html"
    run(f"freport team --month 2026-11 --html {both}")
    assert both.read_text().count("<section>") == 2
    mine = tmp_path / "mine.html"
    run(f"freport team --month 2026-11 --html {mine}", who=world.ANN)
    assert "Only the use of ann" in mine.read_text()
    nothing = f"freport team --month 2026-10 --html {mine}"
    assert "there is no statement" in run(nothing, code=1)
    said = run(f"freport team --month 2026-10 -A red --html {mine}")
    assert said == (
        "freport: red: nothing is recorded; Window: 2026-10-01T00:00:00 - 2026-11-01T00:00:00 (UTC)\n"
    )
    assert "Nothing was recorded from 1 October 2026" in mine.read_text()


@pytest.mark.parametrize("report", ["team", "waste", "reconcile"])
def test_a_report_says_that_today_is_not_in_it(run: commanding.Run, report: str) -> None:
    def window(line: str) -> str:
        return run(f"freport {report} {line}").splitlines()[2]

    began = "Window: 2026-11-26T12:30:00 - "
    assert window("-S now-1day") == (
        f"{began}2026-11-27T00:00:00 (UTC); today is not in it: -E now adds it"
    )
    assert window("-S now-1day -E now") == f"{began}2026-11-27T12:30:00 (UTC)"
    assert window("-S today") == "Window: 2026-11-27T00:00:00 - 2026-11-27T12:30:00 (UTC)"
    assert window("") == "Window: 2026-11-26T00:00:00 - 2026-11-27T00:00:00 (UTC)"


def test_freport_reconcile(run: commanding.Run) -> None:
    assert run("freport reconcile -S today -P") == (
        "Lease|SlurmJobID|GPUs|Forebay|Sacct|Difference|Allowed|Agrees|Note\n"
        "l-1|41|4|40.0|40.0|0.0|4.0|yes|\n"
    )


def test_freport_reconcile_by_account_shows_three_books(run: commanding.Run) -> None:
    line = "freport reconcile by account -S 2026-11-27T12:00 -E 2026-11-27T13:30 -P"
    assert run(line) == (
        "Account|Forebay|Sacct|Sreport|Note\n"
        "forebay|40.0|40.0|41.0|\n"
        "other|0.0|0.0|7200.0|no lease of Forebay's\n"
    )
    assert "T12:00:00 - 2026-11-27T13:00:00" in run(line.removesuffix(" -P"))
    assert "shown to admins" in run(line, who=world.BOB, code=1)
    assert "by lease or by account" in run("freport reconcile by planet", code=1)
    assert "whole hours only" in run("freport reconcile by account -S 2026-11-27T12:10", code=1)


def test_what_could_not_be_read_is_said_and_the_exit_code_tells(
    run: commanding.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = commanding.Gateway.call

    def call(self: commanding.Gateway, *args: Any, **named: Any) -> ports.ApiResponse:
        answer = real(self, *args, **named)
        answer.json.update(problems=["x.parquet: damaged"], truncated=True)
        return answer

    monkeypatch.setattr(commanding.Gateway, "call", call)
    text = run("facct -n -P -X -o jobid", code=1)
    assert text.splitlines()[-2:] == [
        "facct: warning: x.parquet: damaged",
        "facct: warning: there are more rows than one answer holds: narrow the window with -S and -E",
    ]


def test_all_measures_and_no_empty_lines_where_gpu_time_is_not_shown(run: commanding.Run) -> None:
    head = run("freport team -S today -T all").splitlines()[4].split()
    assert {"GPU", "Cost", "TokensPerGPUHour"} <= set(head)
    assert "(idle)" in run("freport team -S today -T all")
    assert "(idle)" not in run("freport team -S today -T cost")
    rows = json.loads(run("freport team -S today -T cost --json"))["rows"]
    assert "idle" in {row["what"] for row in rows}

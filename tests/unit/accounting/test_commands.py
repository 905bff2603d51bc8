"""facct and freport as a user sees them: the text, the refusals, the exit codes."""

import csv
import datetime
import io
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fastapi
import pyarrow.parquet as pq
import pytest
from fastapi import testclient

from accounting import (
    billing,
    billing_routes,
    facct,
    freport,
    freport_rows,
    rates,
    routes,
    settings,
)
from scheduler.contracts import clock, ports, requests
from scheduler.contracts.command_line import CommandError
from tests.unit.accounting import world

NOW = datetime.datetime(2026, 11, 27, 12, 30, tzinfo=datetime.UTC)


JOB = {"job_id": 12, "state": "RUNNING", "name": "nightly", "reason": "", "lines": {"total": 9}}


class Gateway:
    """The commands' way to a real router, as one caller."""

    def __init__(self, state: Path, caller: requests.Caller) -> None:
        app = fastapi.FastAPI()
        port: Any = world.Books()
        app.include_router(routes.router(state, port=port, accounts=world.AccountBooks()))
        table = settings.Accounting()
        app.include_router(billing_routes.router(state, table=table, time=clock.FakeClock()))

        @app.middleware("http")
        async def _who(request: fastapi.Request, forward: Any) -> Any:
            request.state.caller = caller
            return await forward(request)

        @app.get("/forebay/v1/jobs")
        async def _jobs(ids: str) -> dict[str, Any]:
            assert ids == "12"
            return {"jobs": [JOB]}

        self.client = testclient.TestClient(app)

    def call(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: Mapping[str, str] | None = None,
        upload: Path | None = None,
        download: Path | None = None,
    ) -> ports.ApiResponse:
        answer = self.client.request(method, path, params=params)
        if answer.status_code >= 400:
            raise CommandError(answer.json()["error"]["message"])
        return ports.ApiResponse(answer.status_code, answer.json(), answer.content)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


Run = Callable[..., str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    state = tmp_path_factory.mktemp("state")
    world.write(state)
    prices = {
        rates.Use.UNCACHED: 500_000,
        rates.Use.OUTPUT: 1_500_000,
        rates.Use.GPU: 3_600_000_000,
    }
    billing.Billing(state, settings.Accounting()).add_rates(
        rates.body("*", "*", prices, 1), author="ops", reason="first list", now_us=world.NOON
    )
    ways: dict[requests.Caller, Gateway] = {}

    def call(
        line: str,
        *,
        who: requests.Caller = world.ADMIN,
        code: int = 0,
        terminal: bool = False,
        **env: str,
    ) -> str:
        prog, *argv = line.split()
        out, err = Terminal() if terminal else io.StringIO(), io.StringIO()
        main = {"facct": facct.facct, "freport": freport.freport}[prog]
        if who not in ways:
            ways[who] = Gateway(state, who)
        way = ways[who]
        done = main(argv, api=way, out=out, err=err, env=env, now=NOW, tz=datetime.UTC)
        text = out.getvalue() + err.getvalue()
        assert done == code, text
        return text

    return call


def test_facct_looks_like_sacct(run: Run) -> None:
    assert run("facct") == (
        "JobID                      Team      User        Model        Tier      State "
        "PromptTokens CachedTokens OutputTokens     TTFT    Elapsed\n"
        "-------------------- ---------- --------- ------------ ----------- ---------- "
        "------------ ------------ ------------ -------- ----------\n"
        "q1                          red       ann         chat interactive  COMPLETED "
        "           8            0           14            00:00:01\n"
        "r1                          red       rob         chat interactive     FAILED "
        "           0            0            0            00:00:00\n"
        "12                         blue       bob         chat       batch    RUNNING "
        "          18            3           17            00:00:02\n"
        "12.x                       blue       bob         chat       batch  COMPLETED "
        "          12            2           10            00:00:02\n"
        "12.y                       blue       bob         chat       batch  COMPLETED "
        "           6            1            7            00:00:01\n"
    )


def test_facct_says_its_window_on_a_terminal_only(run: Run) -> None:
    first = run("facct -n", terminal=True).splitlines()[0]
    assert first == "Window: 2026-11-27T00:00:00 - 2026-11-27T12:30:00 (UTC)"
    assert "Window" not in run("facct -P", terminal=True)
    assert run("facct -n -j q1", terminal=True).startswith("Window: the beginning - ")


def test_formats_widths_and_the_plus_of_a_cut_cell(run: Run) -> None:
    assert (
        run("facct -n -X -u ann -o jobid%-6,endpoint%8,MODEL%-3,state%12")
        == "q1     /v1/cha+ ch+    COMPLETED\n"
    )
    assert run("facct -n -j 12.x -o jobi,attempts", FACCT_FORMAT="state") == (
        "12.x                        2\n"
    )
    assert run("facct -n -j q1", FACCT_FORMAT="state%-9,tier%-20") == "COMPLETED interactive\n"


def test_parsable_lines(run: Run) -> None:
    assert run("facct -P -X -o jobid,state,reason") == (
        "JobID|State|Reason\nq1|COMPLETED|\nr1|FAILED|replica full\n12|RUNNING|\n"
    )
    assert (
        run("facct -p -n -j 12 -X -o jobid,jobname,lines,disp,linesok,preempted")
        == "12|nightly|9|2|2|1|\n"
    )
    assert run("facct -P -n -j q1 -o jobid,team --delimiter ::") == "q1::red\n"


def test_every_attempt_and_states(run: Run) -> None:
    assert run("facct -P -n -D -j q1 -o jobid,attempt,state,outputtokens,payer") == (
        "q1|1|NODE_FAIL|4|platform\nq1|2|COMPLETED|10|team\n"
    )
    assert run("facct -P -n -s f -o jobid") == "r1\n"
    assert run("facct -P -n -s PR -D -o jobid") == "12.x\n"
    assert run("facct -P -n -s PD,completed,r -X -o jobid") == "q1\n12\n"
    assert run("facct -P -n -s PENDING -o jobid") == ""


def test_users_and_teams(run: Run) -> None:
    assert run("facct -P -n -X -o jobid", who=world.ANN) == "q1\n"
    assert run("facct -P -n -X -A red -o jobid") == "q1\nr1\n"
    assert run("facct -P -n -X -A blue -o jobid", who=world.ANN) == ""


def test_leases(run: Run) -> None:
    assert run("facct --leases -P -o lease,slurmjobid,gpus,runs,gpuseconds,start,exitcode") == (
        "Lease|SlurmJobID|GPUs|Runs|GPUSeconds|Start|ExitCode\nl-1|41|4|1|40|2026-11-27T12:00:00|\n"
    )
    assert "ask your team's coordinator" in run("facct --leases", who=world.ANN, code=1)


def test_json_csv_and_parquet_hold_the_same_rows(run: Run, tmp_path: Path) -> None:
    document = json.loads(run("facct -X --json"))
    assert [row["record"] for row in document["rows"]] == ["request", "request", "job"]
    assert document["window"]["end_us"] == world.NOON + 1800 * world.SECOND + 1
    rows = list(csv.DictReader(io.StringIO(run("facct -X --csv -o jobid,outputtokens"))))
    assert rows == [
        {"JobID": "q1", "OutputTokens": "14"},
        {"JobID": "r1", "OutputTokens": "0"},
        {"JobID": "12", "OutputTokens": "17"},
    ]
    target = tmp_path / "out.parquet"
    assert run(f"facct -X --parquet {target}") == ""
    assert pq.read_table(target)["output_tokens"].to_pylist() == [14, 0, 17]


@pytest.mark.parametrize(
    "line",
    [
        "facct -j 99 -X", "facct --leases -j 99", "freport team -S 2020-01-01 -E 2020-01-02",
        "freport bill --month 2020-01", "freport reconcile -S 2020-01-01 -E 2020-01-02",
        "freport reconcile by account -S 2026-11-27T12:00 -E 2026-11-27T13:00 -A nobody",
    ],
)  # fmt: skip
def test_parquet_has_its_columns_whatever_was_found(run: Run, tmp_path: Path, line: str) -> None:
    nothing, some = tmp_path / "nothing.parquet", tmp_path / "some.parquet"
    run(f"{line} --parquet {nothing}")
    found = pq.read_table(nothing)
    assert found.num_columns > 4
    assert not any(str(kind) == "null" for kind in found.schema.types)
    if line.startswith("facct -j"):
        run(f"facct --parquet {some}")
        assert pq.read_table(some).schema.equals(found.schema.remove_metadata())


def test_no_header_with_csv_and_a_column_of_a_job_nobody_knows(run: Run) -> None:
    assert run("facct -X -n --csv -o jobid,lines") == "q1,\nr1,\n12,9\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("facct -o nonsense", 'invalid field requested: "nonsense"'),
        ("facct -o state%x", 'invalid width in "state%x"'),
        ("facct -o ,", "no field requested"),
        ("facct -o jobid%²", 'invalid width in "jobid%²"'),
        ("facct -o jobid%٣", 'invalid width in "jobid%٣"'),
        ("facct -o jobid%99999999", "up to 1000"),
        ("facct -o jobid%-0", "up to 1000"),
        ("facct -P --delimiter x", "begin with a sign or a TAB"),
        ("facct -P --delimiter \\", "begin with a sign or a TAB"),
        ('facct -A "red', "write a name with a comma as"),
        ("facct -S 10000-01-01", "invalid time"),
        ("facct -S now -E now+999999999weeks", "time"),
        ("freport team --month ٢٠٢٦-11", "invalid month"),
        ("freport team --month 9999-12", "invalid month"),
        ("freport team -t Percent -A red", "take -t Hours"),
        ("facct -s XX", "invalid state 'XX'"),
        ("facct -S now-7d", "invalid time"),
        ("facct -S now -E today", "end time is not after"),
        ("facct -Q", "unrecognized arguments: -Q"),
        ("facct --units X", "invalid unit 'X'"),
        ("facct --json --csv", "exclude each other"),
        ("facct --delimiter ;", "--delimiter needs -P"),
        ("facct --leases -D", "do not go with --leases"),
        ("facct -j ,", "-j needs at least one id"),
        ("freport team -T ,", "-T needs one or more of"),
        ("freport team --chart", "--chart draws on a terminal only"),
        ("freport team --chart --csv", "--chart goes with no other output"),
        ("freport bill --png x.png", "--png draws no bill"),
        ("freport bill by day", "a bill is of one month"),
        ("freport bill --month 2026-13", "invalid month '2026-13'"),
        ("freport model --html x.html --month 2026-11", "--html is for a team's month"),
        ("freport team --html x.html --month 2026-11 -u ann", "only -A goes with --html"),
        ("freport team --html /nowhere/x.html --month 2026-11", "/nowhere/x.html: No such file"),
        ("freport team --png /nowhere/x.png -S today", "/nowhere/x.png: No such file"),
        ("freport team -T gpu,joy", "invalid measure 'joy'"),
        ("freport team -t Weeks", "invalid unit 'Weeks'"),
        ("freport team by week", "by hour, by day or by month"),
        ("freport planet", "invalid choice: 'planet'"),
        ("freport team --html x.html", "--html is for a team's month"),
        ("freport team --month 2026-11 -S today", "exclude each other"),
    ],
)
def test_what_is_refused_is_one_line(run: Run, line: str, words: str) -> None:
    text = run(line, code=1)
    assert text.startswith(f"{line.split(maxsplit=1)[0]}: error: ")
    assert words in text
    assert text.count("\n") == 1


def test_freport_team_adds_up(run: Run) -> None:
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


def test_freport_units_and_measures(run: Run) -> None:
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


def test_what_requests_jobs_and_attempts_cost(run: Run) -> None:
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


def test_times_are_truncated_to_the_window(run: Run) -> None:
    line = "facct -P -n -X -j q1 -S 2026-11-27T11:00 -E 2026-11-27T12:00:01 -o end,elapsed"
    assert run(line) == "2026-11-27T12:00:01|00:00:01\n"
    leases = (
        "facct --leases -P -n -S 2026-11-27T12:00:02 -E 2026-11-27T12:00:04 -o start,end,gpuseconds"
    )
    assert run(f"{leases} -T") == "2026-11-27T12:00:02|2026-11-27T12:00:04|8\n"


def test_clusters(run: Run) -> None:
    assert run("facct -P -n -X -M c1 -o jobid") == "q1\nr1\n12\n"
    assert run("facct -P -n -X -M c2 -o jobid") == ""
    assert run("freport team -S today -M c2 -P -n") == ""


def test_freport_cost_and_efficiency(run: Run) -> None:
    assert run("freport endpoint -S today -T cost,efficiency -P").splitlines()[:2] == [
        "Start|Endpoint|Cost|TokensPerGPUHour|CostPer1kTokens",
        "2026-11-27T00:00:00|/v1/chat/completions|8.04496|19800|182.840000",
    ]
    rows = json.loads(run("freport team -S today --json"))
    assert rows["currency"] == "EUR"
    cost = {row["team"]: row["cost_micro"] for row in rows["rows"] if row["what"] == "used"}
    assert cost == {"blue": 4_026_000, "red": 4_018_960}
    assert run("freport team -S today -P -n -o team,cost", who=world.ANN) == "red|4.01896\n"


def test_freport_bill_is_exact_and_everyone_sees_their_own(run: Run) -> None:
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


def test_bars_are_for_terminals(run: Run) -> None:
    plain = run("freport team -S today --chart -T cost", terminal=True, NO_COLOR="1")
    assert "\x1b" not in plain
    assert "█" in plain
    assert [line.split()[0] for line in plain.splitlines() if "4.0" in line] == ["blue", "red"]


def test_a_chart_as_a_picture(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "team.png"
    assert run(f"freport team by hour -S today --png {target}") == ""
    assert target.read_bytes().startswith(b"\x89PNG\r\n")


def test_a_statement_is_one_file_with_everything_in_it(run: Run, tmp_path: Path) -> None:
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


def test_freport_reconcile(run: Run) -> None:
    assert run("freport reconcile -S today -P") == (
        "Lease|SlurmJobID|GPUs|Forebay|Sacct|Difference|Allowed|Agrees|Note\n"
        "l-1|41|4|40.0|40.0|0.0|4.0|yes|\n"
    )


def test_freport_reconcile_by_account_shows_three_books(run: Run) -> None:
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
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Gateway.call

    def call(self: Gateway, *args: Any, **named: Any) -> ports.ApiResponse:
        answer = real(self, *args, **named)
        answer.json.update(problems=["x.parquet: damaged"], truncated=True)
        return answer

    monkeypatch.setattr(Gateway, "call", call)
    text = run("facct -n -P -X -o jobid", code=1)
    assert text.splitlines()[-2:] == [
        "facct: warning: x.parquet: damaged",
        "facct: warning: there are more rows than one answer holds: narrow the window with -S and -E",
    ]


def test_a_batch_job_whose_state_nobody_tells_is_unknown_not_finished(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Gateway.call

    def call(self: Gateway, method: str, path: str, **named: Any) -> ports.ApiResponse:
        if path == "/forebay/v1/jobs":
            raise CommandError("the registry does not answer: try again later")
        return real(self, method, path, **named)

    monkeypatch.setattr(Gateway, "call", call)
    text = run("facct -P -n -j 12 -X -o jobid,state,lines,exitcode", code=1)
    assert text.startswith("12|Unknown|Unknown|0:0\n")
    assert "states of batch jobs: the registry does not answer" in text


def test_helpformat_and_help_fit_and_have_examples(run: Run) -> None:
    assert run("facct --helpformat").startswith("JobID ")


def test_all_measures_and_no_empty_lines_where_gpu_time_is_not_shown(run: Run) -> None:
    head = run("freport team -S today -T all").splitlines()[4].split()
    assert {"GPU", "Cost", "TokensPerGPUHour"} <= set(head)
    assert "(idle)" in run("freport team -S today -T all")
    assert "(idle)" not in run("freport team -S today -T cost")
    rows = json.loads(run("freport team -S today -T cost --json"))["rows"]
    assert "idle" in {row["what"] for row in rows}

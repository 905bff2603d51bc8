"""facct and freport as a user sees them: the text, the refusals, the exit codes."""

import csv
import datetime
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fastapi
import pyarrow.parquet as pq
import pytest
from fastapi import testclient

from accounting import commands, routes
from scheduler.contracts import ports, requests
from scheduler.contracts.command_line import CommandError
from tests.unit.accounting import world

NOW = datetime.datetime(2026, 11, 27, 12, 30, tzinfo=datetime.UTC)


JOB = {"job_id": 12, "state": "RUNNING", "name": "nightly", "reason": "", "lines": {"total": 9}}


class Gateway:
    """The commands' way to a real router, as one caller."""

    def __init__(self, state: Path, caller: requests.Caller) -> None:
        app = fastapi.FastAPI()
        port: Any = world.Books()
        app.include_router(routes.router(state, port=port))

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
        main = {"facct": commands.facct, "freport": commands.freport}[prog]
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
    ("line", "words"),
    [
        ("facct -o nonsense", 'invalid field requested: "nonsense"'),
        ("facct -o state%x", 'invalid width in "state%x"'),
        ("facct -o ,", "no field requested"),
        ("facct -s XX", "invalid state 'XX'"),
        ("facct -S now-7d", "invalid time"),
        ("facct -S now -E today", "end time is not after"),
        ("facct -T", "unrecognized arguments: -T"),
        ("facct --json --csv", "exclude each other"),
        ("facct --delimiter ;", "--delimiter needs -P"),
        ("facct --leases -D", "do not go with --leases"),
        ("facct -j ,", "-j needs at least one id"),
        ("freport team -T cost", "needs rates"),
        ("freport team -T gpu,joy", "invalid measure 'joy'"),
        ("freport team -t Weeks", "invalid unit 'Weeks'"),
        ("freport team by week", "by hour, by day or by month"),
        ("freport planet", "invalid choice: 'planet'"),
        ("freport team --html x.html", "unrecognized arguments: --html"),
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
        "Start               Team                GPU   Requests   Uncached     Cached     Output   Platform\n"
        "------------------- ------------ ---------- ---------- ---------- ---------- ---------- ----------\n"
        "2026-11-27T00:00:00 blue                  4          3         10          2         14          9\n"
        "2026-11-27T00:00:00 red                   4          2          8          0         10          4\n"
        "2026-11-27T00:00:00 (idle)               28\n"
        "2026-11-27T00:00:00 (waste)               4\n"
    )


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
        "2026-11-27T12:00:00|chat|5|18|2|24|13"
    )
    assert "only admins" in run("freport team -S today -t percent", who=world.BOB, code=1)
    assert run("freport team -P -n") == ""  # yesterday


def test_freport_reconcile(run: Run) -> None:
    assert run("freport reconcile -S today -P") == (
        "Lease|SlurmJobID|GPUs|Forebay|Sacct|Difference|Allowed|Agrees|Note\n"
        "l-1|41|4|40.0|40.0|0.0|4.0|yes|\n"
    )


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

"""facct as a user sees it: the text, the formats, what is refused."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from scheduler.contracts import ports
from scheduler.contracts.command_line import CommandError
from tests.unit.accounting import commanding, world

run = commanding.run  # the fixture


def test_facct_looks_like_sacct(run: commanding.Run) -> None:
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


def test_facct_says_its_window_on_a_terminal_only(run: commanding.Run) -> None:
    first = run("facct -n", terminal=True).splitlines()[0]
    assert first == "Window: 2026-11-27T00:00:00 - 2026-11-27T12:30:00 (UTC)"
    assert "Window" not in run("facct -P", terminal=True)
    assert run("facct -n -j q1", terminal=True).startswith("Window: the beginning - ")


def test_formats_widths_and_the_plus_of_a_cut_cell(run: commanding.Run) -> None:
    assert (
        run("facct -n -X -u ann -o jobid%-6,endpoint%8,MODEL%-3,state%12")
        == "q1     /v1/cha+ ch+    COMPLETED\n"
    )
    assert run("facct -n -j 12.x -o jobi,attempts", FACCT_FORMAT="state") == (
        "12.x                        2\n"
    )
    assert run("facct -n -j q1", FACCT_FORMAT="state%-9,tier%-20") == "COMPLETED interactive\n"


def test_parsable_lines(run: commanding.Run) -> None:
    assert run("facct -P -X -o jobid,state,reason") == (
        "JobID|State|Reason\nq1|COMPLETED|\nr1|FAILED|replica full\n12|RUNNING|\n"
    )
    assert (
        run("facct -p -n -j 12 -X -o jobid,jobname,lines,disp,linesok,preempted")
        == "12|nightly|9|2|2|1|\n"
    )
    assert run("facct -P -n -j q1 -o jobid,team --delimiter ::") == "q1::red\n"


def test_every_attempt_and_states(run: commanding.Run) -> None:
    assert run("facct -P -n -D -j q1 -o jobid,attempt,state,outputtokens,payer") == (
        "q1|1|NODE_FAIL|4|platform\nq1|2|COMPLETED|10|team\n"
    )
    assert run("facct -P -n -s f -o jobid") == "r1\n"
    assert run("facct -P -n -s PR -D -o jobid") == "12.x\n"
    assert run("facct -P -n -s PD,completed,r -X -o jobid") == "q1\n12\n"
    assert run("facct -P -n -s PENDING -o jobid") == ""


def test_a_line_that_was_sent_again_has_its_attempts_numbered_through(run: commanding.Run) -> None:
    """Each try of the batch runner is a request of its own, whose attempts begin at 1."""
    asked = "facct -P -n -j 12 -o jobid,requestid,attempt,attempts,state"
    assert run(f"{asked} -D").splitlines()[1:] == [
        "12.x|b1|1|1|PREEMPTED",
        "12.x|b2|2|1|COMPLETED",
        "12.y|b3|1|1|COMPLETED",
    ]
    assert run(asked).splitlines()[1:] == ["12.x|b2|2|2|COMPLETED", "12.y|b3|1|1|COMPLETED"]
    assert run(f"{asked} -D -s CD").splitlines()[0] == "12.x|b2|2|1|COMPLETED"


def test_users_and_teams(run: commanding.Run) -> None:
    assert run("facct -P -n -X -o jobid", who=world.ANN) == "q1\n"
    assert run("facct -P -n -X -A red -o jobid") == "q1\nr1\n"
    assert run("facct -P -n -X -A blue -o jobid", who=world.ANN) == ""


def test_leases(run: commanding.Run) -> None:
    assert run("facct --leases -P -o lease,slurmjobid,gpus,runs,gpuseconds,start,exitcode") == (
        "Lease|SlurmJobID|GPUs|Runs|GPUSeconds|Start|ExitCode\nl-1|41|4|1|40|2026-11-27T12:00:00|\n"
    )
    assert "ask your team's coordinator" in run("facct --leases", who=world.ANN, code=1)


def test_json_csv_and_parquet_hold_the_same_rows(run: commanding.Run, tmp_path: Path) -> None:
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
def test_parquet_has_its_columns_whatever_was_found(
    run: commanding.Run, tmp_path: Path, line: str
) -> None:
    nothing, some = tmp_path / "nothing.parquet", tmp_path / "some.parquet"
    run(f"{line} --parquet {nothing}", code=int(" -j 99" in line))
    found = pq.read_table(nothing)
    assert found.num_columns > 4
    assert not any(str(kind) == "null" for kind in found.schema.types)
    if line.startswith("facct -j"):
        run(f"facct --parquet {some}")
        assert pq.read_table(some).schema.equals(found.schema.remove_metadata())


def test_no_header_with_csv_and_a_column_of_a_job_nobody_knows(run: commanding.Run) -> None:
    assert run("facct -X -n --csv -o jobid,lines") == "q1,\nr1,\n12,9\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("facct -o nonsense", 'invalid field requested: "nonsense"'),
        ("facct -o state%x", 'invalid width in "state%x"'),
        ("facct -o ,", "no field requested"),
        ("facct -o x", "see --helpformat"),
        ("freport tier -o x", 'invalid field requested: "x": there are Start, Tier, GPU,'),
        ("facct -s ,", "-s needs at least one state"),
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
def test_what_is_refused_is_one_line(run: commanding.Run, line: str, words: str) -> None:
    text = run(line, code=1)
    assert text.startswith(f"{line.split(maxsplit=1)[0]}: error: ")
    assert words in text
    assert text.count("\n") == 1


def test_a_batch_job_whose_state_nobody_tells_is_unknown_not_finished(
    run: commanding.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = commanding.Gateway.call

    def call(self: commanding.Gateway, method: str, path: str, **named: Any) -> ports.ApiResponse:
        if path == "/forebay/v1/jobs":
            raise CommandError("the registry does not answer: try again later")
        return real(self, method, path, **named)

    monkeypatch.setattr(commanding.Gateway, "call", call)
    text = run("facct -P -n -j 12 -X -o jobid,state,lines,exitcode", code=1)
    assert text.startswith("12|Unknown|Unknown|0:0\n")
    assert "states of batch jobs: the registry does not answer" in text


def test_helpformat_and_help_fit_and_have_examples(run: commanding.Run) -> None:
    assert run("facct --helpformat").startswith("JobID ")

"""facct beside names that other tools choke on, and leases that ran more than once."""

import csv
import datetime
import io
import json
import re
from pathlib import Path
from typing import Any, TextIO

import pytest

from accounting import facct, freport, spool
from scheduler.contracts import clock
from tests.unit.accounting import commanding, samples, world

NAMES = [
    "a|b",
    "x\ny",
    "caf\udce9",
    "back\\slash",
    "tab\there",
    "naïve 漢字",
    "\x1b[31mred",
    '"q",r',
]


FORMULA = '=cmd|"/C calc"!A0'


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> commanding.Gateway:
    state = tmp_path_factory.mktemp("state")
    sink = spool.Spool(state / "spool" / "g", "g", clock=clock.FakeClock())
    for number, name in enumerate(NAMES):
        sink.append(samples.row("close", f"q{number}", user=name, reason=name))
        line: dict[str, Any] = {"user": "bob", "custom_id": name, "batch_job_id": 12}
        sink.append(samples.row("close", f"b{number}", **line))
    sink.append(samples.row("close", "q-formula", user="@x", team="a, b", reason=FORMULA))
    start = world.NOON
    for run, seconds in enumerate((100, 200, 50)):
        sink.append(samples.gpu(0, seconds, run=run, start_us=start))
        start += (seconds + 30) * world.SECOND
    sink.close()
    return commanding.Gateway(state, world.ADMIN)


def run(api: commanding.Gateway, line: str, out: TextIO | None = None) -> str:
    shown, err = out or io.StringIO(), io.StringIO()
    prog, *argv = line.split()
    assert prog == "facct"
    code = facct.facct(
        argv, api=api, out=shown, err=err, env={}, now=commanding.NOW, tz=datetime.UTC
    )
    assert (code, err.getvalue()) == (0, "")
    return shown.getvalue() if isinstance(shown, io.StringIO) else ""


def fields(line: str) -> list[str]:
    """Split a parsable line as its documentation says: at delimiters without a backslash before them."""
    return re.findall(r"(?:^|\|)((?:[^|\\]|\\.)*)", line)


def test_no_name_shifts_a_field_or_breaks_a_line(api: commanding.Gateway) -> None:
    """L10, facct's half."""
    lines = run(api, "facct -P -o user,customid,state,reason").splitlines()
    rows = [fields(line) for line in lines]
    assert len(rows) == 3 + 2 * len(NAMES)  # the header, the job, the formula
    assert {len(row) for row in rows} == {4}
    shown = {r"a\|b", r"x\ny", "naïve 漢字", r"\x1b[31mred"}
    assert shown <= {row[0] for row in rows}
    assert shown <= {row[1] for row in rows if row[0] == "bob"}
    assert shown <= {row[3] for row in rows}
    closed = run(api, "facct -p -n -o user,state").splitlines()
    assert all(line.endswith("|") for line in closed)
    table = run(api, "facct -n -o user%-20,customid%-20,state%-10").splitlines()
    assert len(table) == len(closed) == len(lines) - 1


def test_csv_and_json_keep_the_names_as_they_are(api: commanding.Gateway) -> None:
    text = run(api, "facct --csv -X -o user,state")
    users = [
        row["User"] for row in csv.DictReader(io.StringIO(text)) if row["State"] == "COMPLETED"
    ]
    assert {"a|b", "x\ny", '"q",r', "naïve 漢字"} <= set(users)


def test_no_cell_of_csv_is_a_formula_and_json_says_what_it_was(api: commanding.Gateway) -> None:
    text = run(api, "facct --csv -X -j q-formula -o user,reason")
    (row,) = csv.DictReader(io.StringIO(text))
    assert row == {"User": "'@x", "Reason": f"'{FORMULA}"}
    (row,) = json.loads(run(api, "facct --json -X -j q-formula"))["rows"]
    assert (row["user"], row["reason"]) == ("@x", FORMULA)


def test_a_name_with_a_comma_is_quoted_in_a_list(api: commanding.Gateway) -> None:
    out, err = io.StringIO(), io.StringIO()
    argv = ["-A", '"a, b",red', "-X", "-P", "-n", "-o", "jobid", "-j", "q-formula,q0"]
    facct.facct(argv, api=api, out=out, err=err, env={}, now=commanding.NOW, tz=datetime.UTC)
    assert sorted(out.getvalue().split()) == ["q-formula", "q0"]


def test_a_statement_of_a_team_with_a_comma_is_that_teams(
    api: commanding.Gateway, tmp_path: Path
) -> None:
    target, out, err = tmp_path / "ab.html", io.StringIO(), io.StringIO()
    argv = ["team", "--month", "2026-11", "-A", '"a, b"', "--html", str(target)]
    code = freport.freport(
        argv, api=api, out=out, err=err, env={}, now=commanding.NOW, tz=datetime.UTC
    )
    assert (code, err.getvalue()) == (0, "")
    page = target.read_text()
    assert page.count("<section>") == 1
    assert "<h1>a, b</h1>" in page
    assert "<dt>Requests</dt><dd>1</dd>" in page


def test_a_terminal_without_unicode_still_gets_every_row(api: commanding.Gateway) -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii", errors="backslashreplace")
    run(api, "facct -P -n -X -o user", out)
    out.flush()
    assert rb"na\xefve \u6f22\u5b57" in raw.getvalue()


def test_every_run_of_a_requeued_lease_is_in_its_gpu_seconds(api: commanding.Gateway) -> None:
    """A8: runs of 100, 200 and 50 s on 4 GPUs."""
    assert run(api, "facct --leases -P -n -o lease,gpus,runs,gpuseconds") == "l-1|4|3|1400\n"


def test_times_are_said_as_unknown_and_exit_codes_as_slurm_writes_them(
    api: commanding.Gateway,
) -> None:
    line = run(api, "facct -P -n -j q0 -o firsttoken,exitcode,ttft")
    assert line == "Unknown|0:0|\n"

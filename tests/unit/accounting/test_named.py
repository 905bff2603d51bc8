"""facct -j: a job whose lines all wait is a row, and an id of nothing is said, not passed over."""

from typing import Any

import pytest

from scheduler.contracts import ports
from scheduler.contracts.command_line import CommandError
from tests.unit.accounting import commanding, world

run = commanding.run  # the fixture


def test_a_job_that_waits_is_shown_as_sacct_does(run: commanding.Run) -> None:
    wanted = "facct -P -n -X -o jobid,state,reason,jobname,lines,dispatched,submit,start,cost"
    assert run(f"{wanted} -j 13") == (
        "13|PENDING|Priority|later|4|0|2026-11-27T12:00:00|Unknown|0.00\n"
    )
    both = run(f"{wanted} -j 12,13").splitlines()
    assert [line.split("|")[0] for line in both] == ["12", "13"]
    early = "-S 2026-11-01 -E 2026-11-02"
    assert "no batch job" in run(f"{wanted} -j 13 {early}", code=1)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-j 999", "999: no batch job, line or request of yours has this id here"),
        (f"-j {'9' * 30}", f"{'9' * 30}: no batch job, line or request of yours has this id here"),
        ("-j 999,q1", "999: no batch job, line or request of yours has this id here"),
        ("-j q1 -S 2026-01-01 -E 2026-01-02", "q1: no batch job, line or request of yours has this id "
         "in this window"),
        ("-j 12.zz", "12.zz: no batch job, line or request of yours has this id here"),
        ("-j 12_3", "12_3: no batch job, line or request of yours has this id here"),
        ("--leases -j 999,l-2,l-1", "999, l-2: no lease of yours has this id here"),
        ("-j 999 --json", "999: no batch job, line or request of yours has this id here"),
    ],
)  # fmt: skip
def test_an_id_of_nothing_is_said(run: commanding.Run, line: str, said: str) -> None:
    assert run(f"facct {line}", code=1).splitlines()[-1] == f"facct: error: {said}"


@pytest.mark.parametrize("line", ["-j q1", "-j 12", "-j 12.x,12", "--leases -j 41", "-j 12.x -X"])
def test_what_is_there_is_not_missed(run: commanding.Run, line: str) -> None:
    assert "error" not in run(f"facct {line}")


@pytest.mark.parametrize(
    "line", ["-j 12 -s NF", "-j q1 -u bob", "-j 999 -A red", "-j q1 --model x"]
)
def test_a_filter_that_lets_nothing_through_is_no_fault(run: commanding.Run, line: str) -> None:
    assert run(f"facct -n -P {line}") == ""


def test_another_users_request_does_not_exist_for_a_user(run: commanding.Run) -> None:
    assert "q1: no batch job" in run("facct -j q1", who=world.BOB, code=1)


def test_where_jobs_cannot_be_told_none_is_called_unknown(
    run: commanding.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = commanding.Gateway.call

    def call(self: commanding.Gateway, method: str, path: str, **named: Any) -> ports.ApiResponse:
        if path == "/forebay/v1/jobs":
            raise CommandError("the registry does not answer")
        return real(self, method, path, **named)

    monkeypatch.setattr(commanding.Gateway, "call", call)
    text = run("facct -n -P -j 13", code=1)
    assert text == "facct: warning: batch jobs that wait: the registry does not answer\n"

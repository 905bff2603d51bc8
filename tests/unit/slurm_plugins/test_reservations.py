"""Reservations as scontrol and slurmrestd tell them, and who may start beside one in the embedded Slurm."""

import dataclasses
from typing import Any

import pytest

from scheduler.contracts import slurm
from slurm_plugins import embedded_schedule, embedded_store, parse_reservation

TEXT = (
    "ReservationName=patch day StartTime=2026-12-01T06:00:00 EndTime=2026-12-01T10:00:00 "
    "Duration=04:00:00 Nodes=n[1-2,4] NodeCnt=3 CoreCnt=24 Features=(null) PartitionName=(null) "
    "Flags=MAINT,IGNORE_JOBS,SPEC_NODES TRES=cpu=24 Users=root,ada Groups=(null) Accounts=(null) "
    "Licenses=(null) State=INACTIVE BurstBuffer=(null) MaxStartDelay=(null)\n"
    "ReservationName=lic StartTime=2026-12-01T06:00:00 EndTime=2026-12-02T06:00:00 Nodes=(null) "
    "Flags=ANY_NODES Users=(null) Accounts=physics Licenses=matlab:5\n"
)
SIX_US = 1_796_104_800_000_000


def test_scontrols_text() -> None:
    patch, licences = parse_reservation.text(TEXT)
    assert patch == slurm.Reservation(
        "patch day",
        SIX_US,
        SIX_US + 4 * 3_600_000_000,
        ("n1", "n2", "n4"),
        frozenset({"MAINT", "IGNORE_JOBS", "SPEC_NODES"}),
        ("root", "ada"),
    )
    assert patch.maintenance
    assert (licences.nodes, licences.accounts, licences.maintenance) == ((), ("physics",), False)
    assert parse_reservation.text("No reservations in the system\n") == ()


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ("", "empty"),
        (TEXT[:-30], "cut"),
        (TEXT.replace("EndTime=2026-12-01T10:00:00", "EndTime=Unknown"), "no end"),
        (TEXT.replace("n[1-2,4]", "n[4-1]"), "host list"),
    ],
)
def test_an_answer_that_would_hide_a_window_is_garbled(said: str, fault: str) -> None:
    with pytest.raises(slurm.SlurmGarbled, match=fault):
        parse_reservation.text(said)


@pytest.mark.parametrize("structured", [False, True])
def test_slurmrestds_json_in_both_forms(structured: bool) -> None:
    def number(value: int) -> Any:
        return {"set": True, "infinite": False, "number": value} if structured else value

    entry = {
        "name": "patch", "start_time": number(1000), "end_time": number(2000),
        "node_list": "n[1-2]", "flags": ["MAINT", "SPEC_NODES"], "users": "root", "accounts": "",
    }  # fmt: skip
    (found,) = parse_reservation.answer({"reservations": [entry]})
    assert (found.starts_us, found.ends_us, found.nodes) == (10**9, 2 * 10**9, ("n1", "n2"))
    assert found.maintenance
    with pytest.raises(slurm.SlurmGarbled, match="no end"):
        parse_reservation.answer({"reservations": [{**entry, "end_time": number(0)}]})


def test_a_job_that_waits_for_a_reservations_end_keeps_nobody_else_waiting() -> None:
    shape = embedded_schedule.Shape(nodes=2, gpus=4)
    kept = slurm.Reservation("patch", 1_000_000_000, 9_000_000_000, ("e1", "e2"))
    spec = slurm.JobSpec(
        name="job", script="#!/bin/sh\n", partitions=("serve",), time_limit_s=600, output="o",
        directory="/", gpus_per_node=4,
    )  # fmt: skip

    def job(number: int, limit_s: int, partition: str = "serve") -> embedded_store.Record:
        asked = dataclasses.replace(spec, partitions=(partition,))
        return embedded_store.Record(str(number), asked, "u", "", limit_s, 1)

    closed = embedded_schedule.Closed(0, (kept,))
    jobs = [job(1, 1200), job(2, 900), job(3, 900, "backfill")]
    decision = embedded_schedule.decide(jobs, shape, closed)
    assert [start.job_id for start in decision.starts] == ["2", "3"]
    assert decision.reasons == {"1": "ReqNodeNotAvail, Reserved for maintenance"}
    assert decision.preempt == ()
    later = embedded_schedule.Closed(9_000_000_000, (kept,))
    assert [start.job_id for start in embedded_schedule.decide(jobs, shape, later).starts] == [
        "1",
        "2",
    ]

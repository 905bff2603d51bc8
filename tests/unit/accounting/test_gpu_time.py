"""GPU-seconds of a lease over all its runs, and Slurm's figure beside them."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from accounting import books, gpu_time, reconcile, spool
from scheduler.contracts import clock, ids, slurm, usage
from tests.unit.accounting import samples

SECOND = 1_000_000


class Books:
    """The accounting part of a Slurm, as a test says it is."""

    def __init__(self, answer: list[slurm.JobRun] | Exception) -> None:
        self.answer = answer
        self.calls = 0

    def accounting(self, job_id: ids.SlurmJobId) -> tuple[slurm.JobRun, ...]:
        self.calls += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return tuple(run for run in self.answer if run.job_id == job_id)


def run(seconds: int, number: int = 0, gpus: int | None = 4, ended: bool = True) -> slurm.JobRun:
    return slurm.JobRun(
        job_id=ids.SlurmJobId("41"),
        run=number,
        state=slurm.JobState.COMPLETED,
        started_us=samples.NOON,
        ended_us=samples.NOON + seconds * SECOND if ended else 0,
        elapsed_s=seconds,
        gpus=gpus,
    )


def compared(books: Books, seconds: float = 350) -> reconcile.Compared:
    leases = gpu_time.by_lease([samples.gpu(seconds=seconds)])
    (answer,) = reconcile.reconcile(books, leases)  # type: ignore[arg-type]  # the part that is asked
    return answer


def test_every_run_of_a_requeued_lease_counts_as_sacct_d_counts_it() -> None:
    """A8: runs of 100, 200 and 50 s on 4 GPUs are 1,400 GPU-seconds in both books."""
    rows, start = [], samples.NOON
    for number, seconds in enumerate([100, 200, 50]):
        for seq in range(0, seconds, 25):
            begin = start + seq * SECOND
            rows.append(samples.gpu(seq // 25, 25, run=number, start_us=begin))
        start += (seconds + 30) * SECOND
    (lease,) = gpu_time.by_lease([*rows, *rows])  # each written twice: a take-over
    assert lease.gpu_us == 1400 * SECOND
    assert lease.runs == 3
    books = Books([run(100, 0), run(200, 1), run(50, 2)])
    (answer,) = reconcile.reconcile(books, [lease])  # type: ignore[arg-type]  # the part that is asked
    assert (answer.sacct_us, answer.agrees, answer.note) == (1400 * SECOND, True, "")


@pytest.mark.parametrize(("seconds", "agrees"), [(353.5, True), (353.6, False), (346.4, False)])
def test_one_percent_apart_is_the_limit(seconds: float, agrees: bool) -> None:
    assert compared(Books([run(350)]), seconds).agrees is agrees


@pytest.mark.parametrize(("seconds", "agrees"), [(11, True), (11.1, False)])
def test_or_a_second_for_each_gpu(seconds: float, agrees: bool) -> None:
    assert compared(Books([run(10)]), seconds).agrees is agrees


def test_a_running_job_is_shown_and_not_judged() -> None:
    answer = compared(Books([run(10, ended=False)]))
    assert (answer.agrees, answer.sacct_us, answer.note) == (None, 40 * SECOND, "still running")


def test_the_teardown_of_a_cancelled_job_is_held_and_not_in_slurms_count() -> None:
    cancelled = dataclasses.replace(run(100), state=slurm.JobState.CANCELLED)
    answer = compared(Books([cancelled]), seconds=112)
    assert (answer.agrees, answer.late_us) == (True, 4 * 12 * SECOND)
    assert answer.note == "held 12.0 s after Slurm ended it"
    assert compared(Books([run(100)]), seconds=112).agrees is False  # it ended by itself


def test_the_launch_before_the_scripts_first_line_is_in_slurms_count() -> None:
    """A site's prolog of 12 s: Slurm counts it and the agent can't; an hour is no prolog."""
    for lag_s, agrees in ((12, True), (3600, False)):
        early = dataclasses.replace(run(100 + lag_s), started_us=samples.NOON - lag_s * SECOND)
        answer = compared(Books([early]), seconds=100)
        assert (answer.agrees, answer.early_us) == (agrees, 4 * 12 * SECOND if agrees else 0)
        assert answer.note == ("began 12.0 s after Slurm's start" if agrees else "")


def requeued(*, lag_s: int, held_s: int, ours: int = 3) -> reconcile.Compared:
    """Three runs of 20 s by Slurm; the agent began later in each, and left later where it was told to."""
    slurms, rows = [], []
    for number in range(3):
        start = samples.NOON + number * 300 * SECOND
        last = number == 2
        state = slurm.JobState.COMPLETED if last else slurm.JobState.PENDING
        slurms.append(
            dataclasses.replace(
                run(20, number), state=state, started_us=start, ended_us=start + 20 * SECOND
            )
        )
        seconds = 20 - lag_s + (0 if last else held_s)
        if number >= 3 - ours:
            begin = start + lag_s * SECOND
            rows.append(samples.gpu(0, seconds, run=number, start_us=begin))
    (lease,) = gpu_time.by_lease(rows)
    assert len(lease.spans) == ours
    books: Any = Books(slurms[::-1])
    (answer,) = reconcile.reconcile(books, [lease])
    return answer


def test_launch_and_teardown_of_every_run_are_known() -> None:
    """A8: three launches of 2 s are 24 GPU-seconds apart, and no fault of either book."""
    answer = requeued(lag_s=2, held_s=5)
    assert (answer.early_us, answer.late_us) == (3 * 4 * 2 * SECOND, 2 * 4 * 5 * SECOND)
    assert (answer.agrees, answer.sacct_us) == (True, 240 * SECOND)
    assert answer.note == "began 6.0 s after Slurm's start; held 10.0 s after Slurm ended it"


@pytest.mark.parametrize("ours", [1, 2])
def test_a_run_that_one_book_lacks_is_apart(ours: int) -> None:
    """A8: the last run alone is not the job."""
    assert requeued(lag_s=2, held_s=5, ours=ours).agrees is False


def test_where_slurm_does_not_know_the_lease_is_unreconciled() -> None:
    assert "no record" in compared(Books([])).note
    assert "no GPUs" in compared(Books([run(350, gpus=None)])).note


@pytest.mark.parametrize(
    "error",
    [
        slurm.AccountingOff("sacct: Slurm accounting storage is disabled"),
        slurm.SlurmUnavailable("sacct: Problem talking to the database: Connection refused"),
    ],
)
def test_accounting_that_is_off_or_down_is_no_error_and_asked_once_l7(
    error: slurm.SlurmError,
) -> None:
    books = Books(error)
    leases = gpu_time.by_lease([samples.gpu(lease_id=f"l-{n}") for n in range(3)])
    answers = reconcile.reconcile(books, leases)  # type: ignore[arg-type]  # the part that is asked
    assert books.calls == 1
    assert {answer.agrees for answer in answers} == {None}
    assert all((a.note, a.sacct_us) == (f"unreconciled: {error}", None) for a in answers)


def test_a_garbled_answer_costs_that_lease_only() -> None:
    books = Books(slurm.SlurmGarbled("cut short"))
    leases = gpu_time.by_lease([samples.gpu(lease_id=f"l-{n}") for n in range(3)])
    reconcile.reconcile(books, leases)  # type: ignore[arg-type]  # the part that is asked
    assert books.calls == 3


def test_a_row_that_runs_backwards_counts_nothing_and_is_counted() -> None:
    rows = [samples.gpu(0, 60), samples.gpu(1, -3600, start_us=samples.NOON)]
    (lease,) = gpu_time.by_lease(rows)
    assert (lease.gpu_us, lease.backwards) == (240 * SECOND, 1)


def test_no_moment_of_a_run_counts_twice() -> None:
    again = samples.gpu(0, 90)  # an agent that began anew within the run
    (lease,) = gpu_time.by_lease([samples.gpu(0, 60), samples.gpu(1, 60), again])
    assert lease.gpu_us == 4 * 120 * SECOND
    other_run = samples.gpu(0, 60, run=1, start_us=samples.NOON)
    (lease,) = gpu_time.by_lease([samples.gpu(0, 60), other_run])
    assert lease.gpu_us == 4 * 120 * SECOND


def test_the_end_of_a_lease_that_was_lost_with_its_node_is_slurms_word_and_said_so() -> None:
    rows = [samples.gpu(seq, 60) for seq in range(3)]
    lost = samples.gpu(10**9, 212, start_us=samples.NOON, lost=1)
    (lease,) = gpu_time.by_lease([lost, *rows])
    assert (lease.gpu_us, lease.lost_us) == (4 * 212 * SECOND, 4 * 32 * SECOND)
    ended = dataclasses.replace(run(212), state=slurm.JobState.NODE_FAIL)
    (answer,) = reconcile.reconcile(Books([ended]), [lease])  # type: ignore[arg-type]
    assert answer.agrees
    assert answer.note == "lost with its node or agent: the last 32.0 s by Slurm"
    (without,) = reconcile.reconcile(Books([ended]), gpu_time.by_lease(rows))  # type: ignore[arg-type]
    assert without.agrees is False
    # An agent that told all leaves nothing to write off.
    (whole,) = gpu_time.by_lease([*rows, samples.gpu(10**9, 170, start_us=samples.NOON, lost=1)])
    assert (whole.gpu_us, whole.lost_us) == (4 * 180 * SECOND, 0)


def test_the_nightly_check_lists_leases_that_are_apart_and_keeps_all(tmp_path: Path) -> None:
    sink = spool.Spool(tmp_path / "spool" / "a", "agent", clock=clock.FakeClock())
    for lease, seconds in (("l-1", 100), ("l-2", 150)):
        sink.append(samples.gpu(0, seconds, lease_id=lease))
    sink.close()
    midnight = (samples.NOON // samples.DAY_US + 1) * samples.DAY_US
    port = Books([run(100)])
    said = reconcile.nightly(books.Books(tmp_path), port, midnight, tmp_path / "kept")  # type: ignore[arg-type]  # the part that is asked
    assert said == [
        "lease l-2 (job 41): Forebay counted 600.0 GPU-seconds, sacct 400, allowed 4.0: "
        "see freport reconcile"
    ]
    kept = json.loads((tmp_path / "kept" / "reconciled.json").read_text())
    assert [lease["agrees"] for lease in kept["leases"]] == [True, False]
    later = midnight + 7 * samples.DAY_US
    assert reconcile.nightly(books.Books(tmp_path), port, later, tmp_path / "kept") == []  # type: ignore[arg-type]  # as above


def test_the_nightly_check_holds_no_rows_but_those_of_its_leases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A year of rows may lie beside the two days that are looked at."""
    sink = spool.Spool(tmp_path / "spool" / "a", "agent", clock=clock.FakeClock())
    for day in range(5):
        start = samples.NOON - day * samples.DAY_US
        sink.append(
            samples.gpu(0, 100, lease_id=f"l-{day}", start_us=start, slurm_job_id=f"4{day}")
        )
    sink.close()
    held: list[list[str]] = []
    really = gpu_time.tiled

    def tiled(rows: Iterable[usage.GpuRow]) -> list[usage.GpuRow]:
        found = really(rows)
        held.append(sorted(row.lease_id for row in found))
        return found

    monkeypatch.setattr(gpu_time, "tiled", tiled)
    midnight = (samples.NOON // samples.DAY_US + 1) * samples.DAY_US
    reconcile.nightly(books.Books(tmp_path), Books([run(100)]), midnight, tmp_path / "kept")  # type: ignore[arg-type]  # the part that is asked
    assert {tuple(each) for each in held} == {("l-0", "l-1")}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_rows_that_disagree_under_one_key_are_read_alike_in_any_order(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    """A take-over wrote a key again with other words: which one counts is not a matter of files."""
    end = samples.NOON + 60 * SECOND
    for name in order:
        sink = spool.Spool(
            tmp_path / "spool" / f"w{order.index(name)}", "w", clock=clock.FakeClock()
        )
        sink.append(samples.gpu(0, 60, node=f"n{name}", team=f"t{name}"))
        sink.append(
            samples.replica(
                "serving", samples.NOON, end, busy_us=name, steps=9 - name, model=f"m{name}"
            )
        )
        sink.close()
    with books.Books(tmp_path).reading() as reading:
        (lease,) = reading.query("SELECT node, team FROM gpu_rows")
        (replica,) = reading.query("SELECT model, busy_us FROM replica_rows")
    assert (lease, replica) == ({"node": "n0", "team": "t0"}, {"model": "m0", "busy_us": 0})


@pytest.mark.parametrize(
    ("shared", "agrees", "note"),
    [
        ({"shard": 3}, True, ""),
        ({"shard": 4}, False, ""),
        ({}, None, "unreconciled: AllocTRES has no parts of GPUs"),
    ],
)
def test_a_lease_of_shards_is_its_fraction_of_a_gpu_in_both_books(
    shared: dict[str, int], agrees: bool | None, note: str
) -> None:
    (lease,) = gpu_time.by_lease([samples.gpu(seconds=400, gpus=3, parts=4)])
    assert (lease.gpu_us, lease.gpus, lease.parts) == (300 * SECOND, 1, 4)
    told = dataclasses.replace(run(400, gpus=None), shared=shared)
    (answer,) = reconcile.reconcile(Books([told]), [lease])  # type: ignore[arg-type]
    assert answer.agrees is agrees
    assert answer.note.startswith(note)


def test_how_long_a_part_of_a_gpu_was_held_is_told_and_not_the_part_of_it() -> None:
    rows = [
        samples.gpu(0, 60, gpus=1, parts=4),
        samples.gpu(10**9, 400, start_us=samples.NOON, gpus=1, parts=4, lost=1),
    ]
    told = dataclasses.replace(run(400, gpus=None), shared={"shard": 1})
    (answer,) = reconcile.reconcile(Books([told]), gpu_time.by_lease(rows))  # type: ignore[arg-type]
    assert answer.agrees
    assert answer.note == "lost with its node or agent: the last 340.0 s by Slurm"

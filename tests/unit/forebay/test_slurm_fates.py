"""Slurm's jobs as those of ours see them that wait for them."""

from typing import Any, cast

import pytest

from batch_jobs.dependencies import Fate
from forebay import installation, slurm_fates
from scheduler.contracts import slurm
from scheduler.contracts.slurm import JobState


class Port:
    """A Slurm that knows some jobs, and remembers one in its books alone."""

    def __init__(self, *, down: bool = False, books: bool = True) -> None:
        self.down = down
        self.books = books

    def states(self, job_ids: Any) -> dict[Any, JobState]:
        if self.down:
            raise slurm.SlurmUnavailable("slurmctld does not answer")
        known = {"1": JobState.RUNNING, "2": JobState.COMPLETED, "3": JobState.TIMEOUT}
        return {each: known.get(each, JobState.UNKNOWN) for each in job_ids}

    def accounting(self, job_id: Any) -> tuple[Any, ...]:
        if not self.books:
            raise slurm.AccountingOff("no slurmdbd")
        run = type("Run", (), {"state": JobState.COMPLETED})
        return (run,) if job_id == "4" else ()


def fates(port: Port) -> slurm_fates.Fates:
    class Here:
        def connect_slurm(self) -> Port:
            return port

    return slurm_fates.Fates(cast("installation.Installation", Here()))


def test_states_and_books_are_read() -> None:
    assert fates(Port())([1, 2, 3, 4, 5]) == {
        1: Fate.RUNNING,
        2: Fate.OK,
        3: Fate.NOT_OK,
        4: Fate.OK,
        5: Fate.UNKNOWN,
    }
    assert fates(Port(books=False))([4]) == {4: Fate.UNKNOWN}


def test_a_slurm_that_does_not_answer_is_no_end_of_a_job() -> None:
    with pytest.raises(OSError, match="does not answer"):
        fates(Port(down=True))([1])


@pytest.mark.parametrize("state", list(JobState))
def test_every_state_means_something(state: JobState) -> None:
    assert isinstance(slurm_fates.fate(state), Fate)

"""Slurm's own sreport and sacct take our questions, and we their answers."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_plugins import sreport
from tests.contract import slurm_subject
from tests.contract.slurm_subject import eventually, final

HOUR_US = 3_600_000_000


@pytest.fixture
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[slurm_subject.Subject]:
    yield from slurm_subject.make("cli", tmp_path, request)


@pytest.mark.slurm
def test_the_real_books_by_account(subject: slurm_subject.Subject) -> None:
    books = sreport.AccountBooks(Path(subject.conf))
    job_id = subject.port.submit(subject.spec("exit 0")).job_id
    subject.until(job_id, final)
    eventually(lambda: books.accounts([job_id]) == {job_id: "physics"}, "the account")
    now = int(time.time() * 1_000_000) // HOUR_US * HOUR_US
    # The cluster is younger than its first hourly sum: what counts is that nothing is refused.
    assert all(seconds >= 0 for seconds in books.gpu_seconds(now - HOUR_US, now).values())

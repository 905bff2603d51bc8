"""What batch jobs still want of each model."""

import dataclasses

from batch_jobs import model
from forebay import batch_work
from scheduler.contracts import ports

JOB = model.BatchJob(
    1, "physics", "ada", model="chat", counts=model.Counts(total=100, ok=20, failed=5)
)


def test_lines_left_and_their_tokens_by_what_was_sampled_so_far() -> None:
    used = dataclasses.replace(JOB, used=model.Used(output_tokens=2_000), deadline_us=90)
    fresh = dataclasses.replace(JOB, job_id=2, counts=model.Counts(total=10), deadline_us=50)
    found = batch_work.of_jobs([used, fresh], 10)
    tokens = 75 * 100 + 10 * batch_work.TOKENS_A_LINE
    assert found == {"chat": ports.BatchWork(85, tokens, 50)}


def test_what_may_not_run_now_wants_nothing() -> None:
    not_now = (
        {"held": "user"},
        {"begin_us": 11},
        {"cancel_us": 1},
        {"model": ""},
        {"counts": model.Counts(total=10, ok=9, failed=1)},
    )
    jobs = [dataclasses.replace(JOB, **changes) for changes in not_now]
    assert batch_work.of_jobs(jobs, 10) == {}

"""What batch jobs still want of each model."""

import dataclasses
from pathlib import Path

import pytest

from batch_jobs import intake, model, results
from forebay import batch_work
from scheduler.contracts import ports

JOB = model.BatchJob(
    1, "physics", "ada", model="chat", counts=model.Counts(total=100, ok=20, failed=5)
)


def nothing(job_id: int) -> dict[str, float]:
    return {}


def test_lines_left_and_their_tokens_by_what_was_sampled_so_far() -> None:
    used = dataclasses.replace(JOB, used=model.Used(output_tokens=2_000), deadline_us=90)
    fresh = dataclasses.replace(JOB, job_id=2, counts=model.Counts(total=10), deadline_us=50)
    found = batch_work.of_jobs([used, fresh], 10, nothing)
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
    assert batch_work.of_jobs(jobs, 10, nothing) == {}


def test_lines_count_for_the_model_that_they_name(tmp_path: Path) -> None:
    """A job mostly names no model itself: its lines do."""
    folder = intake.job_folder(tmp_path, 1)
    folder.mkdir(parents=True)
    line = '{"custom_id": "a", "body": {%s}}\n'
    text = 3 * (line % '"model": "small"') + line % '"model": "large"' + line % '"x": 1'
    (folder / results.INPUT).write_text(text)
    fresh = dataclasses.replace(JOB, counts=model.Counts(total=100))
    found = batch_work.of_jobs([fresh], 10, batch_work.Sampled(tmp_path))
    assert {name: work.lines for name, work in found.items()} == {
        "small": 60,
        "large": 20,
        "chat": 20,
    }


@pytest.mark.parametrize(
    "text", [b"", b"{", b"not json\n", b"[1]\n", b'{"body": 3}\n', b'{"body": {"model": 7}}\n']
)
def test_a_file_that_names_nothing_says_nothing(text: bytes) -> None:
    assert batch_work.named(text) in ({}, {"": 1.0})


def test_a_file_that_is_not_there_yet_is_looked_at_again(tmp_path: Path) -> None:
    sampled = batch_work.Sampled(tmp_path)
    assert sampled(1) == {}
    folder = intake.job_folder(tmp_path, 1)
    folder.mkdir(parents=True)
    (folder / results.INPUT).write_text('{"body": {"model": "chat"}}\n')
    assert sampled(1) == {"chat": 1.0}

"""What batch jobs still want of each model."""

import dataclasses
from pathlib import Path

import pytest

from batch_jobs import intake, lines, model
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
    """A job mostly names no model itself: its lines do, wherever in the file they stand."""
    rules = lines.Rules(model="chat", endpoint="/v1/chat/completions")
    taken = intake.Intake(tmp_path, rules, 1 << 16)
    names = 3_000 * ['"model": "small"'] + 1_000 * ['"model": "large"'] + 1_000 * ['"x": 1']
    for number, said in enumerate(names):
        taken.feed(b'{"custom_id": "c%d", "body": {%s}}\n' % (number, said.encode()))
    taken.feed(b"not json\n")
    assert taken.finish().total == 5_001
    taken.place(1)
    fresh = dataclasses.replace(JOB, counts=model.Counts(total=100))
    found = batch_work.of_jobs([fresh], 10, batch_work.Noted(tmp_path))
    assert {name: work.lines for name, work in found.items()} == {
        "small": 60,
        "large": 20,
        "chat": 20,
    }


def test_of_many_models_the_rest_counts_for_the_jobs_own(tmp_path: Path) -> None:
    taken = intake.Intake(tmp_path, lines.Rules(endpoint="/v1/chat/completions"), 1 << 16)
    for number in range(100):
        taken.feed(b'{"custom_id": "c%d", "body": {"model": "m%d"}}\n' % (number, number))
    taken.finish()
    taken.place(1)
    shares = batch_work.Noted(tmp_path)(1)
    assert len(shares) == 65
    assert shares[intake.OTHERS] == 0.36
    fresh = dataclasses.replace(JOB, counts=model.Counts(total=100))
    assert batch_work.of_jobs([fresh], 10, batch_work.Noted(tmp_path))["chat"].lines == 36


@pytest.mark.parametrize("text", [None, "", "{", "not json"])
def test_what_was_not_noted_counts_for_the_jobs_own_and_is_looked_at_again(
    tmp_path: Path, text: str | None
) -> None:
    noted = batch_work.Noted(tmp_path)
    folder = intake.job_folder(tmp_path, 1)
    folder.mkdir(parents=True)
    if text is not None:
        (folder / intake.MODELS).write_text(text)
    assert noted(1) == {}
    (folder / intake.MODELS).write_text('{"chat": 3}')
    assert noted(1) == {"chat": 1.0}
    (folder / intake.MODELS).unlink()
    assert noted(1) == {"chat": 1.0}


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "3",
        '"chat"',
        "null",
        '{"chat": "3"}',
        '{"chat": -1}',
        '{"chat": true}',
        pytest.param(100_000 * "[", id="deep"),
    ],
)
def test_a_damaged_note_is_said_once_and_hides_no_other_job(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever was no object of numbers raised in the broker, and it planned nothing any more."""
    for job_id, said in ((1, text), (2, '{"small": 3}')):
        folder = intake.job_folder(tmp_path, job_id)
        folder.mkdir(parents=True)
        (folder / intake.MODELS).write_text(said)
    jobs = [dataclasses.replace(JOB, job_id=job_id) for job_id in (1, 2)]
    noted = batch_work.Noted(tmp_path)
    for _ in range(2):
        assert {*batch_work.of_jobs(jobs, 10, noted)} == {"chat", "small"}
    (line,) = caplog.messages
    assert str(intake.job_folder(tmp_path, 1) / intake.MODELS) in line
    assert "remove it" in line


def test_a_note_of_no_line_counts_for_the_jobs_own(tmp_path: Path) -> None:
    folder = intake.job_folder(tmp_path, 1)
    folder.mkdir(parents=True)
    (folder / intake.MODELS).write_text('{"small": 0}')
    assert batch_work.Noted(tmp_path)(1) == {}

"""How a job's states and moments look at OpenAI's door."""

import pytest

from batch_jobs import model, openai_shape

State = model.State


@pytest.mark.parametrize(
    ("state", "changes", "status", "slurm"),
    [
        (State.PENDING, {}, "validating", "PD"),
        (State.PENDING, {"cancel_us": 5}, "cancelling", "PD"),
        (State.PENDING, {"started_us": 5, "requeues": 1}, "in_progress", "PD"),  # put back
        (State.RUNNING, {"started_us": 5}, "in_progress", "R"),
        (State.RUNNING, {"started_us": 5, "cancel_us": 6}, "cancelling", "R"),
        (State.COMPLETING, {"started_us": 5}, "finalizing", "CG"),
        (State.COMPLETING, {"started_us": 5, "cancel_us": 6}, "cancelling", "CG"),
        (State.COMPLETED, {"ended_us": 9}, "completed", "CD"),
        (State.FAILED, {"ended_us": 9}, "failed", "F"),
        (State.TIMEOUT, {"ended_us": 9}, "expired", "TO"),
        (State.CANCELLED, {"ended_us": 9}, "cancelled", "CA"),
    ],
)
def test_each_state_has_a_name_at_both_doors(
    state: State, changes: dict[str, int], status: str, slurm: str
) -> None:
    job = model.BatchJob(12, "physics", "alice", state=state, submitted_us=1, **changes)  # type: ignore[arg-type]
    shown = openai_shape.batch(job)
    assert (shown["id"], shown["object"], shown["status"]) == ("batch_12", "batch", status)
    assert state.short == slurm
    ended = {name: shown[f"{name}_at"] for name in ("completed", "failed", "expired", "cancelled")}
    assert {name for name, at in ended.items() if at is not None} == (
        {status} if state.final else set()
    )


def test_every_moment_is_filled_in_seconds() -> None:
    at = {"submitted_us": 1, "started_us": 2, "finalizing_us": 3, "ended_us": 4, "deadline_us": 9}
    job = model.BatchJob(
        1,
        "physics",
        "alice",
        state=State.CANCELLED,
        cancel_us=2_500_000,
        **{name: moment * 1_000_000 for name, moment in at.items()},  # type: ignore[arg-type]
    )
    shown = openai_shape.batch(job)
    assert {name: shown[name] for name in shown if name.endswith("_at")} == {
        "created_at": 1,
        "in_progress_at": 2,
        "finalizing_at": 3,
        "cancelling_at": 2,
        "cancelled_at": 4,
        "expires_at": 9,
        "completed_at": None,
        "failed_at": None,
        "expired_at": None,
    }

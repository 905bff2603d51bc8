"""States and events: the table, and nothing outside it."""

import itertools

import pytest

from batch_jobs import model
from batch_jobs.model import Event, State

LISTED = {
    (State.PENDING, Event.START): State.RUNNING,
    (State.PENDING, Event.CANCEL): State.COMPLETING,
    (State.PENDING, Event.EXPIRE): State.COMPLETING,
    (State.PENDING, Event.FAIL): State.FAILED,
    (State.RUNNING, Event.REQUEUE): State.PENDING,
    (State.RUNNING, Event.DRAINED): State.COMPLETING,
    (State.RUNNING, Event.CANCEL): State.COMPLETING,
    (State.RUNNING, Event.EXPIRE): State.COMPLETING,
    (State.RUNNING, Event.FAIL): State.FAILED,
    (State.COMPLETING, Event.PUBLISHED): State.COMPLETED,
    (State.COMPLETING, Event.PUBLISHED_CANCELLED): State.CANCELLED,
    (State.COMPLETING, Event.PUBLISHED_EXPIRED): State.TIMEOUT,
    (State.COMPLETING, Event.FAIL): State.FAILED,
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_an_event_leads_where_the_table_says_and_an_unlisted_one_raises(
    state: State, event: Event
) -> None:
    if (state, event) in LISTED:
        assert model.after(state, event) is LISTED[state, event]
    else:
        with pytest.raises(model.WrongEvent, match=f"a {state} job knows no event {event}"):
            model.after(state, event)


def test_nothing_leads_out_of_a_final_state() -> None:
    assert not {state for state, _ in model.TRANSITIONS} & model.FINAL


@pytest.mark.parametrize(
    ("state", "ending"),
    [
        (State.PENDING, model.Ending.CANCELLED),
        (State.PENDING, model.Ending.EXPIRED),
        *((State.RUNNING, ending) for ending in model.Ending),
    ],
)
def test_each_ending_has_a_way_to_a_final_state(state: State, ending: model.Ending) -> None:
    assert model.after(model.after(state, ending.event), ending.published).final


def test_limits_and_reasons_by_the_clock() -> None:
    job = model.BatchJob(1, "t", "u", begin_us=10, deadline_us=100)
    assert model.waiting_reason(job, 9) is model.Reason.BEGIN
    assert model.waiting_reason(job, 10) is None
    assert model.overdue(job, 99) is None
    assert model.overdue(job, 100) is model.Reason.DEADLINE
    running = model.BatchJob(1, "t", "u", started_us=5_000_000, time_limit_s=2, held="admin")
    assert model.overdue(running, 6_999_999) is None
    assert model.overdue(running, 7_000_000) is model.Reason.TIME_LIMIT
    assert model.waiting_reason(running, 0) is model.Reason.HELD_ADMIN


def test_the_public_form_hides_unix_ids_and_fills_patterns() -> None:
    job = model.BatchJob(7, "t", "u", uid=0, gid=0, name="a/b", output_path="/x/%x-%j.jsonl")
    shown = job.public(0)
    assert shown["output_path"] == "/x/a_b-7.jsonl"
    assert shown["error_path"] == ""
    assert not {"uid", "gid", "umask"} & shown.keys()
    assert shown["lines"]["done"] == 0

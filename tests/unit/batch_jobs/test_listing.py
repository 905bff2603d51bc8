"""squeue's format over jobs: widths, letters, states by name."""

import datetime
from typing import Any

import pytest

from batch_jobs import listing, model
from scheduler.contracts import command_line


def job(**fields: Any) -> dict[str, Any]:
    counts = fields.pop("counts", model.Counts(total=200, ok=57))
    base: dict[str, Any] = {
        "job_id": 12,
        "team": "physics",
        "user": "alice",
        "name": "requests.jsonl",
    }
    return model.BatchJob(**{**base, "counts": counts, **fields}).public(90_000_000)


def shown(text: str, **fields: Any) -> str:
    return listing.Format(text, datetime.UTC).row(job(**fields))


def test_the_default_looks_like_squeue() -> None:
    form = listing.Format(listing.DEFAULT, datetime.UTC)
    running = job(state=model.State.RUNNING, started_us=1_000_000)
    held = job(held="user")
    assert listing.lines([running, held], form, header=True) == [
        "             JOBID      TIER     NAME     USER ST       TIME  LINES (REASON)",
        "                12     batch requests    alice  R       1:29 57/200",
        "                12     batch requests    alice PD       0:00 57/200 (JobHeldUser)",
    ]
    assert len(listing.lines([running], form, header=False)) == 1


def test_lines_that_failed_are_told_though_the_job_completed() -> None:
    counts = model.Counts(total=12, failed=12)
    assert shown("%t %R", state=model.State.COMPLETED, counts=counts) == "CD (12 failed)"
    assert shown("%R", held="user", counts=counts) == "(JobHeldUser)", "why it waits comes first"


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("%i", "12"),
        ("%5i|", "12   |"),
        ("%.5i|", "   12|"),
        ("%3j", "req"),
        ("%D", "57/200"),
        ("%.5D", "  28%"),
        ("%T %t", "PENDING PD"),
        ("%a %u %P", "physics alice batch"),
        ("%l %L", "UNLIMITED UNLIMITED"),
        ("%S %V", "N/A 1970-01-01T00:00:01"),
        ("%r", "None"),
        ("id=%i, ok", "id=12, ok"),
    ],
)
def test_letters_and_widths(text: str, row: str) -> None:
    assert shown(text, submitted_us=1_000_000) == row


@pytest.mark.parametrize(
    ("fields", "row", "state"),
    [
        ({"state": "RUNNING", "started_us": 1, "reason": "Resources", "counts": model.Counts(9, preempted=1)},
         "PD PENDING (Resources,RQ)", model.State.PENDING),
        ({"state": "RUNNING", "started_us": 1, "counts": model.Counts(9, preempted=1)},
         "R RUNNING", model.State.RUNNING),
        ({"state": "RUNNING", "started_us": 1, "reason": "Resources"},
         "R RUNNING (Resources)", model.State.RUNNING),
        ({"state": "PENDING", "started_us": 1, "reason": "Priority"},
         "PD PENDING (Priority,RQ)", model.State.PENDING),
        ({"state": "PENDING", "reason": "Priority"}, "PD PENDING (Priority)", model.State.PENDING),
    ],
)  # fmt: skip
def test_a_preempted_job_waits_again(fields: dict[str, Any], row: str, state: model.State) -> None:
    """All its lines gave their seats back, or it was put back: PD with flag RQ, also to -t."""
    fields = {**fields, "state": model.State(fields["state"])}
    assert shown("%t %T %R", **fields) == row
    one = job(**fields)
    for wanted in ((model.State.PENDING,), (model.State.RUNNING,)):
        assert bool(listing.within([one], wanted)) is (state in wanted)
        assert not listing.within([one], wanted) or one["state"] in listing.asked(wanted)
    assert listing.within([one], ()) == [one]


def test_fields_by_their_long_names() -> None:
    assert listing.long_format("JobArrayID, name:5,State:.12,lines:0") == "%20i%5j%.12T%0D"
    for wrong in ("", "nonsense", "name:", "name:x", "name:.", "jobid,,name"):
        with pytest.raises(command_line.CommandError, match="unknown '"):
            listing.long_format(wrong)


def test_a_control_character_in_a_name_moves_no_line() -> None:
    assert shown("%j|%i", name="x\ny\x1b[31m") == "x?y?[31m|12"


def test_an_unknown_letter_is_refused() -> None:
    with pytest.raises(command_line.CommandError, match="unknown '%w'"):
        listing.Format("%i %w", datetime.UTC)


@pytest.mark.parametrize(
    ("text", "states"),
    [
        ("PD", (model.State.PENDING,)),
        ("pd,running", (model.State.PENDING, model.State.RUNNING)),
        ("CD,f", (model.State.COMPLETED, model.State.FAILED)),
        ("CA,TO,CG", (model.State.CANCELLED, model.State.TIMEOUT, model.State.COMPLETING)),
        ("all", tuple(model.State)),
    ],
)
def test_states_by_short_and_full_name(text: str, states: tuple[model.State, ...]) -> None:
    assert listing.states(text) == states


def test_an_unknown_state_is_an_error() -> None:
    with pytest.raises(command_line.CommandError, match="unknown state 'XX'"):
        listing.states("PD,XX")


def test_an_arrays_tasks_that_wait_alike_are_one_row() -> None:
    """As squeue: those that run, wait for another reason or were put back stand by themselves."""

    def task(number: int, **fields: Any) -> dict[str, Any]:
        return job(job_id=20 + number, array_id=20, array_task=number, array_limit=2, **fields)

    running = model.State.RUNNING
    jobs = [task(0, state=running, started_us=1), task(1), task(2), task(4), task(5, held="user")]
    jobs += [task(6, started_us=1), job(job_id=30), job(job_id=31)]
    rows = [(row["shown_id"], row["lines"]["total"]) for row in listing.collapsed(jobs)]
    assert rows == [
        ("20_0", 200),
        ("20_[1-2,4%2]", 600),
        ("20_5", 200),
        ("20_6", 200),
        ("30", 200),
        ("31", 200),
    ]
    assert len(jobs) == 8

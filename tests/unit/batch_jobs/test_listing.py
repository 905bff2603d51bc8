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
        "                12     batch requests    alice  R   00:01:29 57/200",
        "                12     batch requests    alice PD   00:00:00 57/200 (JobHeldUser)",
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

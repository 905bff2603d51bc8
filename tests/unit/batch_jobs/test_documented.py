"""docs/batch.md names what fqueue --json prints, every reason and every state."""

import re
from pathlib import Path
from typing import Any

from batch_jobs import foretold, model

TEXT = (Path(__file__).parents[3] / "docs" / "batch.md").read_text()


def keys(value: Any) -> set[str]:
    """Return the names of an object, and of the objects in it."""
    if not isinstance(value, dict):
        return set()
    return {*value, *(name for each in value.values() for name in keys(each))}


def test_every_name_of_fqueues_json_is_documented() -> None:
    said = set(re.findall(r"`(\w+)`", TEXT))
    assert keys(model.BatchJob(1, "physics", "ada").public(0)) - said == set()
    assert {"rank", "fairshare"} <= said  # the place in the queue beside it
    assert keys(foretold.Error().public()) - said == set()


def test_every_reason_and_state_is_documented() -> None:
    assert [str(reason) for reason in model.Reason if f"`{reason}`" not in TEXT] == []
    assert [str(state) for state in model.State if f"| {state.short} {state}" not in TEXT] == []

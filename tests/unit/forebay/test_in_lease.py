"""What runs in a lease ends at once when its work is done: others wait for its last process."""

import logging
import os
from pathlib import Path

import pytest

from forebay import cli, in_lease


@pytest.mark.parametrize("part", ["agent", "slot", "replica"])
def test_agent_and_slot_take_no_interpreter_down(
    part: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    monkeypatch.setattr(in_lease, part, lambda told: 3)
    assert cli.main([part, "--spec", str(tmp_path / "spec.json")]) == 3
    # A replica's last spans are sent as its interpreter ends.
    assert codes == ([] if part == "replica" else [3])

"""What runs in a lease ends at once when its work is done: others wait for its last process."""

import logging
import os
from pathlib import Path

import pytest

from engines.replica import child
from forebay import cli, in_lease
from scheduler.contracts import command_line, usage


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


@pytest.mark.parametrize("env", [{}, {in_lease.LAUNCHER: "[]"}, {in_lease.LAUNCHER: "{"}])
def test_an_agent_that_nobody_started_in_a_lease_says_so(env: dict[str, str]) -> None:
    with pytest.raises(
        command_line.CommandError, match="started by the broker, in a job of Slurm's"
    ):
        in_lease.launcher(env)


@pytest.mark.parametrize("text", [None, "root:x:0:0", "{}", "[]"])
def test_a_replica_without_its_papers_says_so_in_a_line(
    text: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engines.processes.die_with_parent", lambda parent: None)
    path = tmp_path / "r-1.json"
    if text is not None:
        path.write_text(text)
    assert child.run(path, lambda writer: usage.MemorySink()) == 1
    (record,) = caplog.records
    assert record.exc_info is None
    assert str(path) in record.getMessage()

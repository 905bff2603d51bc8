"""The end of a slot whose lease is given back: its supervisor's last word is enough."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from engines.agent import slots, spec
from scheduler.contracts import clock
from scheduler.contracts.v1 import control_pb2 as pb


class Step:
    """A step whose process takes for ever to end, unless somebody ends it."""

    pid = 0

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.killed = False

    async def wait(self) -> int:
        await self.over.wait()
        return 0

    async def terminate(self) -> None:
        raise AssertionError("it was not late")

    async def kill(self) -> None:
        self.killed = True


class Launcher:
    """Starts that one."""

    def __init__(self) -> None:
        self.step = Step()
        self.begun = asyncio.Event()

    async def start(
        self, argv: Sequence[str], *, gpus: int, cpus: int, env: Mapping[str, str], log: Path,
        node: int | None = None,
    ) -> Step:  # fmt: skip
        self.begun.set()
        return self.step


@pytest.mark.parametrize("leaving", [True, False])
async def test_a_slot_that_leaves_with_its_lease_waits_for_no_step(
    tmp_path: Path, leaving: bool
) -> None:
    """What is left of the step Slurm ends with the job; a slot whose GPUs others get waits for it."""
    launcher = Launcher()
    told = spec.AgentSpec("c", "l", "serve", "t", 4, "", "", str(tmp_path), ("slot",), (), "")
    means = slots.Means(
        told=told, job=spec.Job("7", 0, 0), node="n1", machine="m", address="a:1",
        token_file=tmp_path / "token", launcher=launcher, time=clock.FakeClock(),
        changed=lambda: None, leaving=lambda: leaving,
    )  # fmt: skip
    slot = slots.Slot(pb.SlotDesired(slot_id="s0", gpus=4, close=False), means)
    life = asyncio.create_task(slot.run())
    await launcher.begun.wait()
    slot.want(pb.SlotDesired(slot_id="s0", gpus=4, close=True))
    slot.reported(pb.SlotReport(slot_id="s0", state="closed", reason="asked"))
    if not leaving:
        assert slot.report.state == "closing"
        assert not slot.final
        launcher.step.over.set()
    await life
    assert (slot.report.state, slot.final) == ("closed", True)
    assert not launcher.step.killed

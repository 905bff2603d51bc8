"""Rung 2 where the engine sleeps: the process stays and its GPUs go; what goes wrong ends the process."""

import asyncio
import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from engines import processes
from engines.replica import engine
from engines.slot import control, occupancy
from scheduler.contracts import fleet
from tests.unit.engines import keeping
from tests.unit.engines import test_parking as parking

PARKED = parking.PARKED
AWAKE = dataclasses.replace(keeping.WISH, role=fleet.Role.INTERACTIVE)


class Bed:
    """`engine.SleepPort` that does as the test says."""

    def __init__(self, *, sleep: str = "", wake: str = "") -> None:
        self.faults = {"sleep": sleep, "wake": wake}
        self.calls: list[str] = []
        self.asked = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    async def sleep(self) -> engine.Slept:
        await self._call("sleep")
        return engine.Slept(1, 14 * 10**9)

    async def wake(self) -> None:
        await self._call("wake")

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        self.asked.set()
        await self.gate.wait()
        if self.faults[name]:
            raise engine.SleepError(self.faults[name])


async def serving(at: keeping.Play, inner: keeping.Sick, bed: Bed) -> Any:
    inner.sleeper = bed
    report = await at.until(lambda r: r.state == "serving")
    await at.until(lambda _: at.one._vitals.sleeps)
    return report


async def test_it_sleeps_with_its_process_and_wakes_as_another_incarnation(tmp_path: Path) -> None:
    async with keeping.play(tmp_path) as at:
        child, bed = await at.starter.child, Bed()
        async with keeping.listening(child) as inner:
            before = await serving(at, inner, bed)
            at.one.want(PARKED)
            report = await at.until(lambda r: r.state == "asleep")
            assert report.reason == "parked: asleep at level 1, 14.0 GB of GPU memory freed"
            assert (report.address, at.one.gpus, parking._notes(tmp_path)) == ("", (), [])
            assert not report.HasField("stats")
            at.one.want(AWAKE)
            report = await at.until(lambda r: r.state == "serving")
            assert (report.address, report.incarnation) == (before.address, 2)
            assert (report.role, at.one.gpus) == ("interactive", ("0", "1"))
            assert list(report.phases_s) == ["load"]
            assert sorted(parking._notes(tmp_path)) == ["6", "7"]
            assert (bed.calls, child.signals) == (["sleep", "wake"], [])
            # It takes requests again, and what it says of itself is of the new incarnation.
            remote = at.one._remote()
            said = await remote.state()
            assert (said["draining"], said["incarnation"]) == (False, 2)


async def test_a_sleep_that_failed_ends_the_process_and_says_why(tmp_path: Path) -> None:
    async with keeping.play(tmp_path) as at:
        child = await at.starter.child
        async with keeping.listening(child) as inner:
            await serving(at, inner, Bed(sleep="nothing was freed"))
            at.one.want(PARKED)
            report = await at.until(lambda r: r.state == "asleep")
        assert report.reason == "parked by the end of its process: nothing was freed"
        assert signal.SIGTERM in child.signals
        await asyncio.sleep(0)
        assert at.one.report().reason == report.reason


async def test_one_that_does_not_wake_is_started_anew(tmp_path: Path) -> None:
    async with keeping.play(tmp_path) as at:
        child = await at.starter.child
        async with keeping.listening(child) as inner:
            await serving(at, inner, Bed(wake="CUDA is gone"))
            at.one.want(PARKED)
            await at.until(lambda r: r.state == "asleep")
            at.starter.again()
            at.one.want(AWAKE)
            second = await at.starter.child
            assert signal.SIGTERM in child.signals
        assert second.order.record.incarnation == 2
        async with keeping.listening(second, incarnation=2):
            assert (await at.until(lambda r: r.state == "serving")).incarnation == 2


async def test_one_whose_process_dies_asleep_is_parked_all_the_same(tmp_path: Path) -> None:
    async with keeping.play(tmp_path) as at:
        child = await at.starter.child
        async with keeping.listening(child) as inner:
            await serving(at, inner, Bed())
            at.one.want(PARKED)
            await at.until(lambda r: r.state == "asleep")
            child.end(-9)
            report = await at.until(lambda r: "ended in its sleep" in r.reason)
        assert report.state == "asleep"
        at.starter.again()
        at.one.want(AWAKE)
        async with keeping.listening(await at.starter.child, incarnation=2):
            await at.until(lambda r: r.state == "serving")


async def test_told_to_stop_asleep_or_on_its_way_there_it_stops(tmp_path: Path) -> None:
    async with keeping.play(tmp_path) as at:
        async with keeping.listening(await at.starter.child) as inner:
            await serving(at, inner, Bed())
            at.one.want(PARKED)
            await at.until(lambda r: r.state == "asleep")
            at.one.stop(at_once=False)
            report = await at.end()
        assert (report.state, report.reason) == ("stopped", "told to stop while it was parked")
    hung = Bed()
    hung.gate.clear()
    async with (
        keeping.play(tmp_path / "second") as at,
        keeping.listening(await at.starter.child) as inner,
    ):
        await serving(at, inner, hung)
        at.one.want(PARKED)
        await hung.asked.wait()
        at.one.stop(at_once=True)
        assert (await at.end()).state == "stopped"


async def test_woken_while_another_holds_its_gpus_it_is_lost_as_any_start(tmp_path: Path) -> None:
    async with keeping.play(tmp_path) as at:
        async with keeping.listening(await at.starter.child) as inner:
            bed = Bed()
            await serving(at, inner, bed)
            at.one.want(PARKED)
            await at.until(lambda r: r.state == "asleep")
            other = occupancy.Holder(
                os.getpid(), processes.start_time(os.getpid()), "l-2", "l-2.s0", "r-2"
            )
            occupancy.Occupancy(tmp_path / "gpus", "n1").take(["7"], other)
            at.one.want(AWAKE)
            report = await at.end()
        assert report.state == "lost"
        assert "GPU 7 is held by replica r-2" in report.reason
        assert bed.calls == ["sleep"]


async def test_one_that_hangs_on_its_way_to_sleep_is_ended(tmp_path: Path) -> None:
    bed = Bed()
    bed.gate.clear()
    async with keeping.play(tmp_path, sleep_timeout_s=0.05) as at:
        async with keeping.listening(await at.starter.child) as inner:
            await serving(at, inner, bed)
            at.one.want(PARKED)
            report = await at.until(lambda r: r.state == "asleep")
        assert report.reason.startswith("parked by the end of its process: POST /forebay/sleep")


async def test_a_replica_that_is_not_drained_does_not_sleep(tmp_path: Path) -> None:
    async with (
        keeping.play(tmp_path) as at,
        keeping.listening(await at.starter.child) as inner,
    ):
        bed = Bed()
        await serving(at, inner, bed)
        with pytest.raises(control.ControlError, match="HTTP 400"):
            await at.one._remote().sleep(5.0)
        assert not bed.calls

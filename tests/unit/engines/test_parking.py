"""Rung 2: a replica is parked and woken in its slot; its process, its GPUs and its memory go in between."""

import dataclasses
import signal
from pathlib import Path

from engines.slot import wanted
from scheduler.contracts import fleet
from tests.unit.engines import keeping

PARKED = dataclasses.replace(keeping.WISH, asleep=True)


async def test_parked_it_holds_nothing_and_woken_it_is_another_incarnation(tmp_path: Path) -> None:
    async with keeping.play(tmp_path) as at:
        first = await at.starter.child
        async with keeping.listening(first):
            before = await at.until(lambda r: r.state == "serving")
            assert at.one.gpus == ("0", "1")
            at.one.want(PARKED)
            report = await at.until(lambda r: r.state == "asleep")
        assert not report.address
        assert not at.one.gpus
        assert not _notes(tmp_path)
        assert signal.SIGTERM in first.signals
        assert not Path(before.secret_file).exists()
        at.starter.again()
        at.one.want(dataclasses.replace(keeping.WISH, role=fleet.Role.INTERACTIVE))
        second = await at.starter.child
        assert second.order.record.incarnation == 2
        assert second.order.record.role is fleet.Role.INTERACTIVE
        assert (await at.until(lambda r: r.state == "warm")).reason == "waking"
        async with keeping.listening(second, incarnation=2):
            report = await at.until(lambda r: r.state == "serving")
            assert (report.replica_id, report.incarnation) == (before.replica_id, 2)
            assert report.role == "interactive"


async def test_woken_while_it_drains_it_is_parked_first(tmp_path: Path) -> None:
    """A gate that drains takes nothing new again: the wish is met by a new process."""
    async with keeping.play(tmp_path) as at:
        first = await at.starter.child
        async with keeping.listening(first):
            await at.until(lambda r: r.state == "serving")
            at.one.want(PARKED)
            await at.until(lambda r: r.state == "draining")
            at.starter.again()
            at.one.want(keeping.WISH)
            second = await at.starter.child
        async with keeping.listening(second, incarnation=2):
            await at.until(lambda r: r.state == "serving")


async def test_one_that_is_to_stop_while_parked_is_stopped(tmp_path: Path) -> None:
    async with keeping.play(tmp_path, wish=PARKED) as at:
        await at.until(lambda r: r.state == "asleep")
        at.one.want(dataclasses.replace(PARKED, run=False))
        assert (await at.end()).state == "stopped"


async def test_one_that_does_not_wake_is_lost_and_says_why(tmp_path: Path) -> None:
    async with keeping.play(tmp_path, wish=PARKED) as at:
        await at.until(lambda r: r.state == "asleep")
        at.one.want(wanted.Wish(fleet.Role.SHARED, True, 5.0))
        (await at.starter.child).end(1, "no memory left")
        report = await at.end()
        assert (report.state, report.reason) == (
            "lost",
            "did not start: exit code 1: no memory left",
        )


def _notes(folder: Path) -> list[str]:
    """Return the names of the node's notes about who holds a GPU."""
    return [each.name for each in (folder / "gpus" / "n1").iterdir() if each.name != ".lock"]

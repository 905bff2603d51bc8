"""Syncs that the kernel does for the event loop: the same promises, and a thread where it can't."""

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from accounting import datasync, decoding, segment, spool
from scheduler.contracts import clock, usage
from tests import services
from tests.unit.accounting import samples


def kernel() -> datasync.DataSync:
    found = datasync.open_()
    services.require(found is not None, "Linux asynchronous I/O")
    assert found is not None
    return found


def ids(folder: Path) -> list[str]:
    rows = [row for path in folder.glob("*.seg") for row in decoding.read_segment(path).rows]
    return sorted(row.identity.request_id for row in rows if isinstance(row, usage.UsageRow))


async def begun(folder: Path) -> spool.Spool:
    """Return a spool whose segment is known on disk, so that the plain way is open."""
    books = spool.Spool(folder, "w", clock=clock.FakeClock())
    books.append(samples.row(request_id="first"))
    await books.sync()
    return books


async def test_a_file_is_synced_and_a_bad_descriptor_is_an_errno(tmp_path: Path) -> None:
    made = kernel()
    with (tmp_path / "f").open("wb") as file:
        file.write(b"x")
        file.flush()
        for fd, wanted in ((file.fileno(), 0), (file.fileno(), 0)):
            told: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            assert made.begin(fd, told.set_result)
            assert made.flying
            assert await told == wanted
            assert not made.flying
    assert not made.begin(10_000, lambda fault: None)
    made.land()  # nothing is under way: returns at once
    made.close()


async def test_rows_are_synced_without_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel().close()
    books = await begun(tmp_path)

    def never(fd: int) -> None:
        raise AssertionError("a thread did it")

    monkeypatch.setattr(os, "fdatasync", never)
    for number in range(50):
        books.append(samples.row(request_id=f"q{number:02}"))
        await asyncio.gather(books.sync(), books.sync())
    monkeypatch.undo()
    assert len(ids(tmp_path)) == 51
    books.close()


class Broken(datasync.DataSync):
    """Says what a test wants."""

    def __init__(self, fault: int | None) -> None:
        self.fault = fault
        self.asked = 0

    @property
    def flying(self) -> bool:
        return False

    def begin(self, fd: int, landed: datasync.Landed) -> bool:
        self.asked += 1
        if self.fault is None:
            return False
        landed(self.fault)
        return True

    def land(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize("fault", [None, errno.EIO])
async def test_what_the_kernel_refuses_a_thread_does_elsewhere(
    tmp_path: Path, fault: int | None
) -> None:
    books = await begun(tmp_path)
    broken = Broken(fault)
    books._kernel = broken
    for number in range(3):
        books.append(samples.row(request_id=f"q{number}"))
        await books.sync()
    # A failed sync is never tried again on the same file: its rows are in the next one too.
    assert set(ids(tmp_path)) == {"first", "q0", "q1", "q2"}
    assert (len(ids(tmp_path)) > 4) is bool(fault)
    assert books._kernel is None if fault is None else broken.asked >= 1
    books._kernel = None
    books.close()


async def test_a_segment_that_is_taken_while_it_is_synced_is_written_again(tmp_path: Path) -> None:
    books = await begun(tmp_path)
    (path,) = tmp_path.glob("*.seg")
    books.append(samples.row(request_id="late"))
    waiting = asyncio.create_task(books.sync())
    await asyncio.sleep(0)
    path.with_suffix(segment.TAKEN).touch()
    await waiting
    assert len(list(tmp_path.glob("*.seg"))) == 2
    assert ids(tmp_path) == ["first", "late", "late"]
    books.close()


@pytest.mark.parametrize("inside", [True, False])
async def test_closing_waits_for_the_sync_under_way(tmp_path: Path, inside: bool) -> None:
    books = await begun(tmp_path)
    books.append(samples.row(request_id="last"))
    waiting = asyncio.create_task(books.sync())
    await asyncio.sleep(0)
    if inside:
        books.close()
    else:
        await asyncio.to_thread(books.close)
    await asyncio.wait_for(waiting, 20)
    (path,) = tmp_path.glob("*.seg")
    assert decoding.read_segment(path).sealed
    assert ids(tmp_path) == ["first", "last"]


async def test_who_gives_up_waiting_harms_nobody(tmp_path: Path) -> None:
    books = await begun(tmp_path)
    books.append(samples.row(request_id="a"))
    tasks: list[Any] = [asyncio.create_task(books.sync()) for _ in range(5)]
    await asyncio.sleep(0)
    for task in tasks[:4]:
        task.cancel()
    await tasks[4]
    books.append(samples.row(request_id="b"))
    await books.sync()
    assert ids(tmp_path) == ["a", "b", "first"]
    books.close()


def test_a_spool_outlives_an_event_loop(tmp_path: Path) -> None:
    books = asyncio.run(begun(tmp_path))
    for name in ("a", "b"):
        books.append(samples.row(request_id=name))
        asyncio.run(books.sync())
    assert ids(tmp_path) == ["a", "b", "first"]
    books.close()

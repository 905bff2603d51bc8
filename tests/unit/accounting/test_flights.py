"""A disk that hangs keeps nobody for long, and loses nothing: the rows are on it once it answers."""

import asyncio
import os
import threading
from pathlib import Path

import pytest

from accounting import datasync, flights
from scheduler.contracts import errors
from tests.unit.accounting import samples
from tests.unit.accounting.test_datasync import begun, ids


class Hung(datasync.DataSync):
    """A kernel whose sync ends when the test says so; those after it end at once."""

    def __init__(self) -> None:
        self._held: datasync.Landed | None = None
        self.going = False

    @property
    def flying(self) -> bool:
        return self._held is not None

    def begin(self, fd: int, landed: datasync.Landed) -> bool:
        if self.going:
            landed(0)
        else:
            self._held = landed
        return True

    def answer(self) -> None:
        held, self._held, self.going = self._held, None, True
        assert held is not None
        held(0)

    def land(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "thread"])
async def test_a_disk_that_hangs_is_waited_for_with_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kernel: bool
) -> None:
    monkeypatch.setattr(flights, "LOOK_S", 0.002)
    books = await begun(tmp_path)
    hung, going = Hung(), threading.Event()
    if books._kernel is not None:
        books._kernel.close()
    books._kernel = hung if kernel else None
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (going.wait(20), real(fd))[1])
    books.append(samples.row(request_id="waits"))
    answers = await asyncio.wait_for(
        asyncio.gather(books.sync(), books.sync(), return_exceptions=True), 20
    )
    assert all(isinstance(answer, errors.RecordingUnavailable) for answer in answers)
    with pytest.raises(errors.RecordingUnavailable, match="does not answer"):
        books.ready()  # nothing is begun that could not be recorded
    books.append(samples.row(request_id="ends meanwhile"))
    with pytest.raises(errors.RecordingUnavailable, match="does not answer"):
        await asyncio.wait_for(books.sync(), 20)

    monkeypatch.setattr(flights, "LOOK_S", 60.0)  # from here on the disk is slow at worst
    going.set()
    if kernel:
        hung.answer()
    while books._flights.hung:  # noqa: ASYNC110 - it rings no bell
        await asyncio.sleep(0)
    books.ready()
    await books.sync()
    assert ids(tmp_path) == ["ends meanwhile", "first", "waits"]
    assert caplog.text.count("does not answer") == 1
    assert caplog.text.count("answers again") == 1
    books.close()


async def test_only_looks_at_one_sync_count(tmp_path: Path) -> None:
    """A disk that is slow ends one sync after the other, and is no hung one."""
    found, loop = flights.Flights(tmp_path), asyncio.get_running_loop()
    one, other = loop.create_future(), loop.create_future()
    found._flight = one
    found._look(other, flights.HUNG_LOOKS - 1)
    assert not found.hung
    found._look(one, flights.HUNG_LOOKS - 1)
    assert found.hung

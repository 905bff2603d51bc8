"""The spool's promises: durable after sync, full disks seen early, one writer, nothing lost."""

import asyncio
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from accounting import decoding, segment, spool
from scheduler.contracts import clock, errors, usage
from tests.unit.accounting import samples


def rows_in(folder: Path) -> list[usage.Row]:
    found: list[usage.Row] = []
    for path in sorted(folder.glob("*.seg"), key=lambda each: int(each.name.split(".")[3])):
        read = decoding.read_segment(path)
        assert read.problem == ""
        found += read.rows
    return found


@pytest.fixture
def books(tmp_path: Path, fake_clock: clock.FakeClock) -> Iterator[spool.Spool]:
    one = spool.Spool(tmp_path, "w", segment_bytes=1, clock=fake_clock)
    yield one
    one.close()


async def test_rows_are_on_disk_after_sync_and_sealed_after_close(
    tmp_path: Path, books: spool.Spool
) -> None:
    rows: list[usage.Row] = [samples.row(request_id=f"q{n}") for n in range(5)]
    for row in rows:
        books.append(row)
    await books.sync()
    (path,) = tmp_path.glob("*.seg")
    assert decoding.read_segment(path) == (rows, "", False, decoding.read_segment(path).header)
    books.close()
    assert decoding.read_segment(path).sealed
    assert path.stat().st_size < 10_000  # the preallocated rest is given back
    with pytest.raises(errors.RecordingUnavailable, match="closed"):
        books.append(rows[0])


async def test_many_waiters_share_a_few_syncs(
    books: spool.Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    real = os.fdatasync

    def fdatasync(fd: int) -> None:
        calls.append(fd)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)

    async def one(n: int) -> None:
        books.append(samples.row(request_id=f"q{n}"))
        await books.sync()

    await asyncio.gather(*[one(n) for n in range(200)])
    assert 1 <= len(calls) <= 3


async def test_segments_rotate_by_size_and_nothing_is_lost_in_between(
    tmp_path: Path, books: spool.Spool
) -> None:
    rows: list[usage.Row] = [samples.row(request_id=f"q{n}") for n in range(5000)]
    for n, row in enumerate(rows):
        books.append(row)
        if n % 500 == 0:
            await books.sync()
    await books.sync()
    books.close()
    assert len(list(tmp_path.glob("*.seg"))) >= 3
    assert rows_in(tmp_path) == rows


async def test_segments_rotate_by_age_at_the_next_row(
    tmp_path: Path, books: spool.Spool, fake_clock: clock.FakeClock
) -> None:
    books.append(samples.row())
    await fake_clock.advance(61)
    books.append(samples.row(request_id="q2"))
    await books.sync()
    first, second = sorted(tmp_path.glob("*.seg"), key=lambda path: int(path.name.split(".")[3]))
    assert decoding.read_segment(first).sealed
    assert not decoding.read_segment(second).sealed


async def test_an_empty_segment_is_left_before_the_shipper_forgets_its_writer(
    tmp_path: Path, books: spool.Spool, fake_clock: clock.FakeClock
) -> None:
    (old,) = tmp_path.glob("*.seg")
    await fake_clock.advance(3601)
    books.append(samples.row())
    await books.sync()
    (fresh,) = tmp_path.glob("*.seg")
    assert fresh != old
    assert decoding.read_segment(fresh).rows == [samples.row()]


async def test_the_wall_clock_stepping_back_an_hour_changes_nothing(
    tmp_path: Path, books: spool.Spool, fake_clock: clock.FakeClock
) -> None:
    rows: list[usage.Row] = [samples.row(request_id=f"q{n}") for n in range(2000)]
    for n, row in enumerate(rows):
        books.append(row)
        if n == 700:
            fake_clock.step_wall(-3_600_000_000)
    await books.sync()
    books.close()
    assert rows_in(tmp_path) == rows


def refuse_space(monkeypatch: pytest.MonkeyPatch) -> None:
    def fallocate(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fallocate)


async def test_a_full_disk_shows_before_those_in_flight_lose_their_room(
    tmp_path: Path, books: spool.Spool, fake_clock: clock.FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_space(monkeypatch)
    books.ready()  # the segment in hand still has room
    admitted = 0
    full = ""
    while not full:
        try:
            books.ready()
        except errors.RecordingUnavailable as error:
            full = error.message
        else:
            admitted += 1
            books.append(samples.row("open", request_id=f"q{admitted}"))
    assert "No space left" in full
    assert "free space there" in full
    assert admitted > 100
    for n in range(1, 150):  # and their closing rows are kept
        books.append(samples.row("close", request_id=f"q{n}"))
    await books.sync()
    assert len(rows_in(tmp_path)) == admitted + 149
    monkeypatch.undo()
    with pytest.raises(errors.RecordingUnavailable):
        books.ready()  # the disk is not asked again at once
    await fake_clock.advance(1)
    books.ready()


def test_no_first_segment_no_spool(
    tmp_path: Path, fake_clock: clock.FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_space(monkeypatch)
    with pytest.raises(errors.RecordingUnavailable) as caught:
        spool.Spool(tmp_path, "w", clock=fake_clock)
    assert "\n" not in caught.value.message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="a folder that refuses needs another way as non-root")
def test_a_folder_that_is_a_file_is_one_clear_line(
    tmp_path: Path, fake_clock: clock.FakeClock
) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(errors.RecordingUnavailable, match=r"Not a directory|File exists"):
        spool.Spool(tmp_path / "f", "w", clock=fake_clock)


async def test_a_failed_fdatasync_moves_the_rows_to_another_segment(
    tmp_path: Path, books: spool.Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fdatasync
    failures = [errno.EIO]

    def fdatasync(fd: int) -> None:
        if failures:
            raise OSError(failures.pop(), "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    books.append(samples.row())
    await books.sync()
    files = list(tmp_path.glob("*.seg"))
    assert len(files) == 2
    assert all(
        decoding.read_segment(path).rows == [samples.row()] for path in files
    )  # twice, one key


async def test_a_disk_that_refuses_every_sync_is_told_to_every_waiter(
    books: spool.Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fdatasync(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fdatasync)
        books.append(samples.row())
        answers = await asyncio.gather(books.sync(), books.sync(), return_exceptions=True)
        assert all(isinstance(answer, errors.RecordingUnavailable) for answer in answers)
    await books.sync()  # and once it is well again, the row is kept after all


async def test_rows_of_a_segment_that_was_taken_over_are_written_again(
    tmp_path: Path, books: spool.Spool
) -> None:
    books.append(samples.row(request_id="acknowledged"))
    await books.sync()
    books.append(samples.row(request_id="late"))
    (path,) = tmp_path.glob("*.seg")
    path.with_suffix(segment.TAKEN).touch()
    await books.sync()
    fresh = [each for each in tmp_path.glob("*.seg") if each != path]
    assert rows_in(tmp_path).count(samples.row(request_id="acknowledged")) == 1
    assert decoding.read_segment(fresh[0]).rows == [samples.row(request_id="late")]


async def test_the_same_after_the_shipper_removed_it(tmp_path: Path, books: spool.Spool) -> None:
    books.append(samples.row())
    next(tmp_path.glob("*.seg")).unlink()
    await books.sync()
    assert rows_in(tmp_path) == [samples.row()]


async def test_two_writers_in_one_folder_never_share_a_segment(
    tmp_path: Path, books: spool.Spool, fake_clock: clock.FakeClock
) -> None:
    other = spool.Spool(tmp_path, "w", clock=fake_clock)
    books.append(samples.row(request_id="a"))
    other.append(samples.row(request_id="b"))
    books.close()
    other.close()
    assert sorted(len(decoding.read_segment(path).rows) for path in tmp_path.glob("*.seg")) == [
        1,
        1,
    ]


def test_a_fork_may_not_write_to_its_parents_segment(
    books: spool.Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(errors.RecordingUnavailable, match="not to its fork"):
        books.append(samples.row())


async def test_a_waiter_that_is_cancelled_leaves_the_others_served(
    tmp_path: Path, books: spool.Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (go.wait(10), real(fd))[1])
    books.append(samples.row())
    first, second = asyncio.ensure_future(books.sync()), asyncio.ensure_future(books.sync())
    await asyncio.sleep(0)
    first.cancel()
    go.set()
    await second
    assert first.cancelled()
    assert rows_in(tmp_path) == [samples.row()]


def test_what_an_engines_environment_can_load(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; import accounting.spool; "
        "bad = {'pyarrow', 'duckdb', 'grpc', 'sqlalchemy', 'pydantic', 'aiohttp'} & set(sys.modules); "
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

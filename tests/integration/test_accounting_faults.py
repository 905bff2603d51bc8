"""Full disks, clocks that are set back and many writers: rows out are attempts made, exactly once."""

import contextlib
import errno
import os
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from accounting import books, compact, decoding, manifest, rolling, rollup, ship, spool
from scheduler.contracts import clock, errors
from tests import services
from tests.integration import accounting_killed as killed
from tests.integration import accounting_victims
from tests.unit.accounting import samples

HOUR_US = 3_600_000_000
DISK_BYTES = 8 * 1024 * 1024


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = False
    if os.geteuid() == 0:
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
        mounted = subprocess.run(command, check=False, capture_output=True).returncode == 0
    services.require(mounted, "root and mount, for a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def leave(folder: Path, some: int) -> None:
    """Fill a disk but for ``some`` bytes, more or less."""
    free = os.statvfs(folder)
    size = free.f_bavail * free.f_bsize - some
    with (folder / "filler").open("wb") as stream:
        os.posix_fallocate(stream.fileno(), 0, max(size, 1))


def spooled(state: Path, first: int, number: int, time: clock.Clock) -> None:
    """Write attempts as a gateway does."""
    sink = spool.Spool(state / "spool" / "g", "g", segment_bytes=1, clock=time)
    for n in range(first, first + number):
        sink.append(samples.row("open", f"q{n}"))
        sink.append(samples.row("close", f"q{n}", output_tokens=n))
    sink.close()


def names(state: Path) -> Counter[str]:
    return Counter(name for name, _, _ in killed.closed(state))


async def test_a_really_full_disk_refuses_early_and_loses_nothing(
    small_disk: Path, fake_clock: clock.FakeClock
) -> None:
    leave(small_disk, 1024 * 1024)
    sink = spool.Spool(small_disk / "spool", "w", segment_bytes=1, clock=fake_clock)
    admitted = 0
    refusal = ""
    while not refusal:
        try:
            sink.ready()
        except errors.RecordingUnavailable as error:
            refusal = error.message
        else:
            sink.append(samples.row("open", f"q{admitted}"))
            await sink.sync()
            admitted += 1
    assert "No space left on device" in refusal
    assert admitted > 300
    for number in range(admitted - 100, admitted):  # those in flight
        sink.append(samples.row("close", f"q{number}"))
    await sink.sync()
    sink.close()
    rows = [row for path in ship.segments(small_disk) for row in decoding.read_segment(path).rows]
    assert len(rows) == admitted + 100


def test_a_disk_that_is_full_while_rows_are_shipped_merged_and_summed_loses_nothing(
    small_disk: Path,
) -> None:
    now, want = clock.SystemClock(), Counter(f"q{n}" for n in range(600))
    spooled(small_disk, 0, 300, now)
    ship.ship(small_disk, now, batch_bytes=1)
    spooled(small_disk, 300, 300, now)
    before = manifest.load(small_disk / "parquet")
    for stage in ("ship", "compact", "roll"):
        leave(small_disk, 0)
        with pytest.raises((OSError, duckdb.Error)) as refused:
            one_stage(stage, small_disk)
        assert refused.value.args[0] == errno.ENOSPC or "No space left" in str(refused.value)
        (small_disk / "filler").unlink()
        assert names(small_disk) == want
        one_stage(stage, small_disk)
        assert names(small_disk) == want
    assert manifest.load(small_disk / "parquet") != before
    assert killed.rolled_up(small_disk) == 600
    assert ship.segments(small_disk) == []


def one_stage(name: str, state: Path) -> None:
    if name == "ship":
        assert ship.ship(state, clock.SystemClock(), batch_bytes=1).problems == ()
    elif name == "compact":
        assert compact.compact(state, accounting_victims.LATER).problems == ()
    else:
        assert rolling.roll(books.Books(state), accounting_victims.LATER).problems == ()


@pytest.mark.parametrize("step_us", [-HOUR_US, -25 * HOUR_US, 2 * HOUR_US])
def test_a_clock_that_is_set_moves_no_row_and_counts_none_twice(
    tmp_path: Path, step_us: int
) -> None:
    """Spool, shipper, compaction and rollups each live through the step."""
    now = clock.FakeClock(accounting_victims.LATER.wall_us())
    made = 0
    for stage in range(4):
        if stage == 2:
            now.step_wall(step_us)
        spooled(tmp_path, made, 50, now)
        made += 50
        assert names(tmp_path) == Counter(f"q{n}" for n in range(made))
        assert ship.ship(tmp_path, now).rows == 100
        assert rolling.roll(books.Books(tmp_path), now).problems == ()
        assert compact.compact(tmp_path, now).problems == ()
        assert names(tmp_path) == Counter(f"q{n}" for n in range(made))
        with rollup.opened(rollup.path_of(tmp_path)) as session:
            for level in ("hours", "days"):
                text = f"SELECT sum(attempts), sum(output_tokens) FROM usage_{level}"
                assert session.execute(text).fetchall() == [(made, sum(range(made)))]
    current = manifest.load(tmp_path / "parquet")
    assert current is not None
    assert sum(each.rows for each in current.files) == made
    assert max([*current.retired.values(), *current.segments.values()]) <= now.wall_us()


@pytest.mark.parametrize("step_us", [-HOUR_US, -25 * HOUR_US, 2 * HOUR_US])
def test_who_read_a_segment_before_the_clock_was_set_does_not_count_it_again(
    tmp_path: Path, step_us: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader has the segment in hand; it is shipped, the clock is set, and another is shipped."""
    now = clock.FakeClock(accounting_victims.LATER.wall_us())
    spooled(tmp_path, 0, 20, now)
    plain = manifest.load
    meanwhile = [True]

    def load(folder: Path) -> manifest.Manifest | None:
        if meanwhile:
            meanwhile.clear()
            ship.ship(tmp_path, now)
            now.step_wall(step_us)
            spooled(tmp_path, 20, 20, now)
            ship.ship(tmp_path, now)
        return plain(folder)

    monkeypatch.setattr(manifest, "load", load)
    assert names(tmp_path) == Counter(f"q{n}" for n in range(40))
    assert not meanwhile


def test_many_writers_of_one_folder_beside_the_shipper_lose_nothing(tmp_path: Path) -> None:
    """All of one name, as on a shared file system: each has its own files, and nobody locks."""
    stop = threading.Event()
    faults: list[str] = []

    def keep() -> None:
        while not stop.wait(0.05):
            faults.extend(ship.ship(tmp_path, clock.SystemClock()).problems)

    keeper = threading.Thread(target=keep)
    keeper.start()
    lines: list[bytes] = []
    try:
        with contextlib.ExitStack() as stack:
            writers = [
                stack.enter_context(killed.victim("write", str(tmp_path), f"w{n}-"))
                for n in range(4)
            ]
            for process in writers:
                assert process.stdout is not None
                lines += [process.stdout.readline() for _ in range(400)]
            for process in writers:
                process.kill()
            for process in writers:
                assert process.stdout is not None
                lines += process.stdout.readlines()
    finally:
        stop.set()
        keeper.join()
    faults += ship.ship(tmp_path, clock.SystemClock()).problems
    assert faults == []
    assert ship.segments(tmp_path) == []
    acknowledged = {line.decode().strip() for line in lines if line.endswith(b"\n")}
    assert len(acknowledged) >= 1600
    found = names(tmp_path)
    assert set(found.values()) == {1}
    assert {f"q{name}" for name in acknowledged} <= found.keys()

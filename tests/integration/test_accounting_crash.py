"""Killed anywhere, rows out = rows acknowledged, exactly once; readers never see a row twice."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from accounting import books, manifest, schema, segment, ship, spool
from scheduler.contracts import clock, errors
from tests import services
from tests.unit.accounting import samples

ROOT = Path(__file__).parents[2]
SEEDS = range(20)


@contextlib.contextmanager
def victim(*argv: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.integration.accounting_victims", *argv]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def closed(state: Path) -> list[tuple[str, str, int]]:
    with books.Books(state).reading() as reading:
        assert reading.problems == ()
        rows = reading.query("SELECT request_id, outcome, output_tokens FROM usage")
    return [(row["request_id"], row["outcome"], row["output_tokens"]) for row in rows]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_writer_killed_at_any_point_keeps_what_it_acknowledged(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    wanted = chance.randrange(1, 700)
    with victim("write", str(tmp_path)) as process:
        assert process.stdout is not None
        acknowledged = [process.stdout.readline() for _ in range(wanted)]
        process.send_signal(signal.SIGKILL)
        acknowledged += process.stdout.readlines()  # printed before it died
    numbers = {int(line) for line in acknowledged if line.endswith(b"\n")}
    assert len(numbers) >= wanted
    before = sorted(closed(tmp_path))
    done = ship.ship(tmp_path, clock.SystemClock())
    assert done.problems == ()
    assert ship.segments(tmp_path) == []
    after = sorted(closed(tmp_path))
    assert after == before
    ids = Counter(request_id for request_id, _, _ in after)
    assert set(ids.values()) == {1}
    kept = {(name, outcome, tokens) for name, outcome, tokens in after}
    assert {(f"q{number}", "ok", number) for number in numbers} <= kept


@pytest.mark.parametrize("seed", range(5))
def test_a_frozen_writer_that_was_thought_dead_wakes_and_loses_nothing(
    seed: int, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    acknowledged: list[bytes] = []
    with victim("write", str(tmp_path)) as process:
        assert process.stdout is not None
        for _ in range(3):
            acknowledged += [process.stdout.readline() for _ in range(chance.randrange(1, 150))]
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            long_ago = clock.SystemClock().wall_us() / 1e6 - 600
            for path in ship.segments(tmp_path):
                os.utime(path, (long_ago, long_ago))
            ship.ship(tmp_path, clock.SystemClock())
            assert ship.segments(tmp_path) == []
            process.send_signal(signal.SIGCONT)
        acknowledged += [process.stdout.readline() for _ in range(50)]
        process.send_signal(signal.SIGKILL)
        acknowledged += process.stdout.readlines()
    numbers = {int(line) for line in acknowledged if line.endswith(b"\n")}
    for _ in range(2):
        after = closed(tmp_path)
        assert set(Counter(name for name, _, _ in after).values()) == {1}
        assert {(f"q{number}", "ok", number) for number in numbers} <= set(after)
        ship.ship(tmp_path, clock.SystemClock())
    assert ship.segments(tmp_path) == []


def a_spool(state: Path) -> set[str]:
    """Three segments of attempts on two days, one of them of a writer that was not closed."""
    names = set()
    for part in range(3):
        sink = spool.Spool(state / "spool" / f"w{part}", "w", clock=clock.FakeClock())
        for number in range(20):
            name = f"q{part}-{number}"
            names.add(name)
            day = samples.NOON + (number % 2) * samples.DAY_US
            sink.append(samples.row("open", name, started_us=day))
            sink.append(samples.row("close", name, started_us=day))
        sink.close()
    return names


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str], int]:
    state = tmp_path_factory.mktemp("prepared")
    names = a_spool(state)
    trial = tmp_path_factory.mktemp("trial") / "state"
    shutil.copytree(state, trial)
    with victim("steps", str(trial)) as process:
        assert process.stdout is not None
        steps = int(process.stdout.read())
    return state, names, steps


@pytest.mark.parametrize("part", range(20))
def test_a_shipper_killed_at_any_step_leaves_every_row_once(
    part: int, prepared: tuple[Path, set[str], int], tmp_path: Path
) -> None:
    source, names, steps = prepared
    assert steps >= 20
    state = tmp_path / "state"
    shutil.copytree(source, state)
    with victim("ship", str(state), str(part * steps // 20)) as process:
        assert process.wait(60) == -signal.SIGKILL
    assert Counter(name for name, _, _ in closed(state)) == Counter(names)
    ship.ship(state, clock.SystemClock())
    assert Counter(name for name, _, _ in closed(state)) == Counter(names)
    assert ship.segments(state) == []
    current = manifest.load(state / "parquet")
    assert current is not None
    assert sum(each.rows for each in current.files) == 2 * len(names)  # OPEN and CLOSE, stored once
    listed = {each.path for each in current.files}
    folder = state / "parquet"
    assert {str(path.relative_to(folder)) for path in folder.glob("*/day=*/*")} == listed


def test_a_thousand_readings_while_shipping_never_see_a_row_twice_or_not_at_all(
    tmp_path: Path,
) -> None:
    stop = threading.Event()
    written: list[str] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            number = 0
            while not stop.is_set():
                sink = spool.Spool(tmp_path / "spool" / "w", "w", clock=clock.SystemClock())
                for _ in range(3):
                    sink.append(samples.row("close", f"q{number}"))
                    written.append(f"q{number}")
                    number += 1
                sink.close()
                ship.ship(tmp_path, clock.SystemClock())
        except BaseException as error:
            failures.append(error)

    shipper = threading.Thread(target=work)
    shipper.start()
    kept = books.Books(tmp_path)
    counted: dict[str, list[str]] = {}
    try:
        for turn in range(1000):
            sure = list(written)[:-1]  # the newest may be on its way
            if turn % 100 == 0:
                with kept.reading() as reading:
                    names = [row["request_id"] for row in reading.query("SELECT * FROM usage_rows")]
            else:
                found = kept.snapshot()
                assert found.problems == ()
                names = found.live[schema.USAGE]["request_id"].to_pylist()
                for file in found.files[schema.USAGE]:
                    if file.path not in counted:
                        path = tmp_path / "parquet" / file.path
                        column = pq.read_table(path, columns=["request_id"])["request_id"]
                        counted[file.path] = column.to_pylist()
                    names += counted[file.path]
            assert len(names) == len(set(names))
            assert set(sure) <= set(names)
    finally:
        stop.set()
        shipper.join()
    assert failures == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = False
    if os.geteuid() == 0:
        command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
        mounted = subprocess.run(command, check=False, capture_output=True).returncode == 0
    services.require(mounted, "root and mount, for a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


async def test_a_really_full_disk_refuses_early_and_loses_nothing(
    small_disk: Path, fake_clock: clock.FakeClock
) -> None:
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
    rows = [row for path in ship.segments(small_disk) for row in segment.read_segment(path).rows]
    assert len(rows) == admitted + 100

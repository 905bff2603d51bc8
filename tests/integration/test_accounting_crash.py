"""Killed anywhere, rows out = rows acknowledged, exactly once; readers never see a row twice."""

import os
import random
import shutil
import signal
import threading
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from accounting import (
    books,
    compact,
    manifest,
    schema,
    ship,
    spool,
    tokens,
)
from scheduler.contracts import clock
from tests.integration import accounting_killed as killed
from tests.integration import accounting_victims
from tests.unit.accounting import samples

SEEDS = range(20)
LONG_SEEDS = range(20, 520)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_writer_killed_at_any_point_keeps_what_it_acknowledged(seed: int, tmp_path: Path) -> None:
    writer_killed(seed, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", LONG_SEEDS)
def test_five_hundred_writers_killed(seed: int, tmp_path: Path) -> None:
    writer_killed(seed, tmp_path)


def writer_killed(seed: int, tmp_path: Path) -> None:
    """Kill a writer under load and count what comes out of every stage after it."""
    chance = random.Random(seed)
    wanted = chance.randrange(1, 700)
    with killed.victim("write", str(tmp_path)) as process:
        assert process.stdout is not None
        acknowledged = [process.stdout.readline() for _ in range(wanted)]
        process.send_signal(signal.SIGKILL)
        acknowledged += process.stdout.readlines()  # printed before it died
    numbers = {int(line) for line in acknowledged if line.endswith(b"\n")}
    assert len(numbers) >= wanted
    before = sorted(killed.closed(tmp_path))
    killed.shipped_whole(tmp_path)
    after = sorted(killed.closed(tmp_path))
    # What the dead writer left open ends when its segment is taken over, or else at compaction.
    given_up = sorted((n, "error" if end == "open" else end, t) for n, end, t in before)
    assert sorted((n, "error" if end == "open" else end, t) for n, end, t in after) == given_up
    assert {end for _, end, _ in set(after) - set(before)} <= {"error"}
    ids = Counter(request_id for request_id, _, _ in after)
    assert set(ids.values()) == {1}
    kept = {(name, outcome, tokens) for name, outcome, tokens in after}
    assert {(f"q{number}", "ok", number) for number in numbers} <= kept
    compact.compact(tmp_path, accounting_victims.LATER)
    assert sorted(killed.closed(tmp_path)) == given_up
    assert killed.rolled_up(tmp_path) == len(after)


@pytest.mark.parametrize("seed", range(2))
def test_everybody_killed_again_and_again_loses_nothing(seed: int, tmp_path: Path) -> None:
    everybody_killed(seed, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 52))
def test_everybody_killed_fifty_times(seed: int, tmp_path: Path) -> None:
    everybody_killed(seed, tmp_path)


def everybody_killed(seed: int, tmp_path: Path) -> None:
    """Kill writers, shippers, compactions and rollups at random, then count."""
    chance = random.Random(seed)
    attempts: set[str] = set()
    for life in range(3):
        with (
            killed.victim("write", str(tmp_path), f"w{life}-") as writer,
            killed.victim("keep", str(tmp_path)) as keeper,
        ):
            assert writer.stdout is not None
            lines = [writer.stdout.readline() for _ in range(chance.randrange(200, 1500))]
            first, second = (writer, keeper) if chance.random() < 0.5 else (keeper, writer)
            first.send_signal(signal.SIGKILL)
            if first is keeper:
                lines += [writer.stdout.readline() for _ in range(chance.randrange(100))]
            second.send_signal(signal.SIGKILL)
            lines += writer.stdout.readlines()
        attempts |= {line.decode().strip() for line in lines if line.endswith(b"\n")}
    killed.shipped_whole(tmp_path)
    found = killed.closed(tmp_path)
    assert set(Counter(name for name, _, _ in found).values()) == {1}
    assert {f"q{name}" for name in attempts} <= {
        name for name, outcome, _ in found if outcome == "ok"
    }
    compact.compact(tmp_path, accounting_victims.LATER)
    assert len(killed.closed(tmp_path)) == len(found)
    assert killed.rolled_up(tmp_path) == len(found)


@pytest.mark.parametrize("seed", range(5))
def test_a_frozen_writer_that_was_thought_dead_wakes_and_loses_nothing(
    seed: int, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    acknowledged: list[bytes] = []
    with killed.victim("write", str(tmp_path)) as process:
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
        after = killed.closed(tmp_path)
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
    with killed.victim("steps", str(trial)) as process:
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
    with killed.victim("ship", str(state), str(part * steps // 20)) as process:
        assert process.wait(60) == -signal.SIGKILL
    assert Counter(name for name, _, _ in killed.closed(state)) == Counter(names)
    ship.ship(state, clock.SystemClock())
    assert Counter(name for name, _, _ in killed.closed(state)) == Counter(names)
    assert ship.segments(state) == []
    current = manifest.load(state / "parquet")
    assert current is not None
    assert sum(each.rows for each in current.files) == 2 * len(names)  # OPEN and CLOSE, stored once
    listed = {each.path for each in current.files}
    folder = state / "parquet"
    assert {str(path.relative_to(folder)) for path in folder.glob("*/day=*/*")} == listed


@pytest.fixture(scope="module")
def shipped(
    prepared: tuple[Path, set[str], int], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, set[str]]:
    state = tmp_path_factory.mktemp("shipped") / "state"
    shutil.copytree(prepared[0], state)
    ship.ship(state, clock.SystemClock(), batch_bytes=1)
    return state, prepared[1]


@pytest.fixture(scope="module")
def steps(
    shipped: tuple[Path, set[str]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, int]:
    """How many steps a compaction and a rollup of `shipped` have."""
    trial = tmp_path_factory.mktemp("trial")
    found = {
        what: killed.steps_of(what, shutil.copytree(shipped[0], trial / what))
        for what in ("compact", "roll")
    }
    assert min(found.values()) > 20
    return found


@pytest.mark.parametrize("part", range(6))
def test_a_compaction_killed_at_any_step_leaves_every_row_once(
    part: int, shipped: tuple[Path, set[str]], steps: dict[str, int], tmp_path: Path
) -> None:
    source, names = shipped
    state = shutil.copytree(source, tmp_path / "state")
    with killed.victim("compact", str(state), str(part * steps["compact"] // 6 + 1)) as process:
        assert process.wait(60) == -signal.SIGKILL
    assert Counter(name for name, _, _ in killed.closed(state)) == Counter(names)
    compact.compact(state, accounting_victims.LATER)
    assert Counter(name for name, _, _ in killed.closed(state)) == Counter(names)
    assert killed.rolled_up(state) == len(names)


@pytest.mark.parametrize("part", range(6))
def test_a_leader_killed_in_a_rollup_leaves_its_effect_once_s8(
    part: int, shipped: tuple[Path, set[str]], steps: dict[str, int], tmp_path: Path
) -> None:
    """S8: whoever leads next does the period again, and it counts once."""
    source, names = shipped
    state = shutil.copytree(source, tmp_path / "state")
    with killed.victim("roll", str(state), str(part * steps["roll"] // 6 + 1)) as process:
        assert process.wait(60) == -signal.SIGKILL
    for _ in range(2):
        assert killed.rolled_up(state) == len(names)


AHEAD = pytest.mark.parametrize(
    "ahead_us", [5 * samples.DAY_US, samples.DAY_US // 8], ids=["days", "hours"]
)


@AHEAD
def test_readings_beside_shipping_and_compaction_see_each_row_once(
    ahead_us: int, tmp_path: Path
) -> None:
    read_beside_compaction(tmp_path, 500, ahead_us)


@pytest.mark.long
@AHEAD
def test_ten_thousand_readings_beside_compaction_see_each_row_once(
    ahead_us: int, tmp_path: Path
) -> None:
    read_beside_compaction(tmp_path, 10_000, ahead_us)


class Later(clock.SystemClock):
    """The machine's clock, set some time after the samples."""

    def __init__(self, ahead_us: int) -> None:
        self._ahead_us = samples.NOON + ahead_us - super().wall_us()

    def wall_us(self) -> int:
        """Return the time there, UTC µs."""
        return super().wall_us() + self._ahead_us


def read_beside_compaction(tmp_path: Path, readings: int, ahead_us: int) -> None:
    """Read again and again while rows are shipped and days, or hours of a day that goes on, compacted."""
    now = Later(ahead_us)
    stop = threading.Event()
    written: list[str] = []
    failures: list[BaseException] = []
    unlinking = threading.Lock()
    compactions = 0

    def work() -> None:
        nonlocal compactions
        try:
            while not stop.is_set():
                for _ in range(4):
                    sink = spool.Spool(tmp_path / "spool" / "w", "w", clock=now)
                    for _ in range(3):
                        sink.append(samples.row("close", f"q{len(written)}", output_tokens=1))
                        written.append(f"q{len(written)}")
                    sink.close()
                    ship.ship(tmp_path, now)
                compactions += compact.compact(tmp_path, now, loose_files=1).files_after
                # The files that it replaced are unlinked a generation later, as by a clock that ran on.
                later = clock.FakeClock(now.wall_us() + 2 * ship.RETIRED_US)
                if compactions % 5 == 0:
                    with unlinking:  # no query lasts a quarter of an hour
                        ship.ship(tmp_path, later)
        except BaseException as error:
            failures.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    kept = books.Books(tmp_path)
    counted: dict[str, list[str]] = {}
    try:
        for turn in range(readings):
            sure = max(0, len(written) - 1)  # the newest may be on its way
            if turn % 200 == 0:
                with unlinking, kept.reading() as reading:
                    names = [row["request_id"] for row in reading.query("SELECT * FROM usage_rows")]
            else:
                names = names_in(kept, counted)
            if turn % 200 == 100:
                summed = tokens.take(kept, [(0, books.MAX_US)], ("team",)).sums
                assert sure <= sum(each.output_tokens for each in summed) <= len(written)
            assert len(names) == len(set(names))
            assert set(written[:sure]).issubset(names) if turn % 20 == 0 else len(names) >= sure
    finally:
        stop.set()
        worker.join()
    assert failures == []
    assert compactions > 1


def names_in(kept: books.Books, counted: dict[str, list[str]]) -> list[str]:
    """Return the request ids of one snapshot; a file's are read once, if it is still there."""
    while True:
        found = kept.snapshot()
        assert found.problems == ()
        names = list(found.live[schema.USAGE]["request_id"].to_pylist())
        try:
            for file in found.files[schema.USAGE]:
                if file.path not in counted:
                    path = kept.state_dir / "parquet" / file.path
                    column = pq.read_table(path, columns=["request_id"])["request_id"]
                    counted[file.path] = column.to_pylist()
                names += counted[file.path]
        except FileNotFoundError:
            continue  # its quarter of an hour is over in no time here
        return names

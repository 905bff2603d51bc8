"""Hours in which GPUs were held and nobody asked for anything."""

from pathlib import Path

from accounting import (
    books,
    gpu_minutes,
    gpu_sums,
    public,
    settings,
    ship,
    spool,
    stepcost,
    windows,
)
from scheduler.contracts import clock
from tests.unit.accounting import samples

HOUR = 3_600_000_000
SECOND = 1_000_000
NOON = samples.NOON - samples.NOON % HOUR


def test_hours_without_any_attempt_are_written_and_add_up(tmp_path: Path) -> None:
    time = clock.FakeClock(wall_us=NOON + 12 * HOUR)
    writer = spool.Spool(tmp_path / "spool" / "agent", "agent", clock=time)
    for hour in range(4):
        begin = NOON + hour * HOUR
        writer.append(samples.gpu(hour, 3_600, start_us=begin))
        writer.append(samples.replica("serving", begin, begin + HOUR, seq=hour, measured=1))
    asked = {
        "started_us": NOON + SECOND,
        "arrived_us": NOON + SECOND,
        "ended_us": NOON + 5 * SECOND,
    }
    writer.append(samples.row("close", "first hour only", output_tokens=5, **asked))
    writer.close()
    ship.ship(tmp_path, time)
    done = gpu_minutes.roll(tmp_path, time, stepcost.Cost(1, 4))
    assert done.problems == ()
    written = [
        hour for hour, _ in gpu_minutes.hours(tmp_path / "gpu_minutes", NOON, NOON + 4 * HOUR)
    ]
    assert written == [NOON + n * HOUR for n in range(4)]
    assert gpu_minutes.roll(tmp_path, time, stepcost.Cost(1, 4)).hours == 0


def test_an_hour_that_later_rows_touch_is_shared_out_live_until_it_is_rolled_again(
    tmp_path: Path,
) -> None:
    time = clock.FakeClock(wall_us=NOON + 12 * HOUR)

    def recorded(name: str, lease: str) -> None:
        writer = spool.Spool(tmp_path / "spool" / name, name, clock=time)
        writer.append(samples.gpu(0, 3_600, start_us=NOON, lease_id=lease, gpus=1))
        writer.close()
        ship.ship(tmp_path, time)

    def told() -> tuple[int, int]:
        cuts, cost = [NOON, NOON + HOUR], stepcost.Cost(1, 4)
        (share,), problems = gpu_sums.by_owner(books.Books(tmp_path), cuts, cost)
        assert problems == ()
        with public.opened(tmp_path, settings.Accounting(), windows.Window(*cuts)) as tables:
            (sum_us,) = tables.session.execute("SELECT sum(gpu_us) FROM gpu_minutes").fetchone()
        return share.allocated, int(sum_us)

    recorded("one", "l-1")
    gpu_minutes.roll(tmp_path, time, stepcost.Cost(1, 4))
    assert list(gpu_minutes.current(tmp_path, NOON, NOON + HOUR)) == [NOON]
    assert told() == (HOUR, HOUR)
    recorded("two", "l-2")
    assert gpu_minutes.current(tmp_path, NOON, NOON + HOUR) == {}
    assert told() == (2 * HOUR, 2 * HOUR)
    gpu_minutes.roll(tmp_path, time, stepcost.Cost(1, 4))
    assert list(gpu_minutes.current(tmp_path, NOON, NOON + HOUR)) == [NOON]
    assert told() == (2 * HOUR, 2 * HOUR)

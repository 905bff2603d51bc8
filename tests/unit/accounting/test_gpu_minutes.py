"""Hours in which GPUs were held and nobody asked for anything."""

from pathlib import Path

from accounting import gpu_minutes, ship, spool, stepcost
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

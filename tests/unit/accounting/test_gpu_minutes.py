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


def test_what_a_dead_node_held_until_slurm_ended_its_lease_is_waste_and_counts_once(
    tmp_path: Path,
) -> None:
    """The broker's row reaches back over the agent's rows, which stay as they are."""
    time = clock.FakeClock(wall_us=NOON + 12 * HOUR)
    agent = spool.Spool(tmp_path / "spool" / "agent", "agent", clock=time)
    for minute in range(3):
        begin = NOON + minute * 60 * SECOND
        agent.append(samples.gpu(minute, 60, start_us=begin))
        agent.append(
            samples.replica("serving", begin, begin + 60 * SECOND, seq=minute, gpus=2, measured=1)
        )
    agent.close()
    broker = spool.Spool(tmp_path / "spool" / "broker", "broker", clock=time)
    broker.append(samples.gpu(10**9, 212, start_us=NOON, lost=1))
    broker.close()
    ship.ship(tmp_path, time)
    assert gpu_minutes.roll(tmp_path, time, stepcost.Cost(1, 4)).problems == ()
    found: dict[tuple[str, str, str], int] = {}
    window = windows.Window(NOON, NOON + HOUR)
    with public.opened(tmp_path, settings.Accounting(), window) as tables:
        rows = tables.session.execute(
            "SELECT kind, why, replica_id, sum(gpu_us) FROM gpu_minutes GROUP BY ALL"
        )
        found = {(kind, why, replica): int(us) for kind, why, replica, us in rows.fetchall()}
    assert found == {
        ("idle", "", "r-1"): 2 * 180 * SECOND,
        ("idle", "unassigned", ""): 2 * 180 * SECOND,
        ("waste", "lost", ""): 4 * 32 * SECOND,
    }
    with books.Books(tmp_path).reading() as reading:
        spans = reading.query("SELECT start_us, end_us FROM gpu_rows WHERE lost = 1")
    assert spans == [{"start_us": NOON + 180 * SECOND, "end_us": NOON + 212 * SECOND}]


def test_replicas_on_shards_of_one_gpu_add_up_to_their_part_of_it(tmp_path: Path) -> None:
    """Three of a GPU's four shards for a minute: two replicas hold one each, the third is nobody's."""
    time = clock.FakeClock(wall_us=NOON + 12 * HOUR)
    agent = spool.Spool(tmp_path / "spool" / "agent", "agent", clock=time)
    agent.append(samples.gpu(0, 60, start_us=NOON, gpus=3, parts=4))
    for name in ("r-1", "r-2"):
        agent.append(
            samples.replica(
                "serving", NOON, NOON + 60 * SECOND, replica_id=name, gpus=1, measured=1
            )
        )
    agent.close()
    ship.ship(tmp_path, time)
    assert gpu_minutes.roll(tmp_path, time, stepcost.Cost(1, 4)).problems == ()
    with public.opened(tmp_path, settings.Accounting(), windows.Window(NOON, NOON + HOUR)) as read:
        rows = read.session.execute(
            "SELECT replica_id, sum(gpu_us) FROM gpu_minutes GROUP BY ALL ORDER BY ALL"
        ).fetchall()
    assert [(name, int(us)) for name, us in rows] == [
        ("", 15 * SECOND),
        ("r-1", 15 * SECOND),
        ("r-2", 15 * SECOND),
    ]

"""GPU-seconds that add up: a simulated day on the real path, spool to table, checked minute by minute."""

import collections
from pathlib import Path
from typing import Any

import duckdb
import pytest

from accounting import books, compact, gpu_minutes, gpu_sums, ship, spool, stepcost
from scheduler.contracts import clock as clocks
from scheduler.contracts import usage
from tests.integration import gpu_fleet

pytestmark = pytest.mark.timeout(900)

DAY_US = 86_400_000_000
START = 1_795_737_600_000_000  # 2026-11-27T00:00Z
GIVEN = stepcost.Cost(1.0, 4.0)


class Made:
    """A state folder with a day in it; every row went through a spool and the shipper."""

    def __init__(self, state_dir: Path, replicas: int = 50, hours: int = 24) -> None:
        self.state_dir = state_dir
        self.clock = clocks.FakeClock(START + DAY_US + 600_000_000)
        self.day = gpu_fleet.make(7, START, replicas=replicas, hours=hours)
        half = len(self.day.rows) // 2
        self.write(self.day.rows[:half])
        self.write(self.day.rows[half:])

    def write(self, rows: list[usage.Row]) -> None:
        sink = spool.Spool(self.state_dir / "spool" / "one", "one", clock=self.clock)
        for row in rows:
            sink.append(row)
        sink.close()
        assert ship.ship(self.state_dir, self.clock).problems == ()

    def roll(self) -> gpu_minutes.Rolled:
        return gpu_minutes.roll(self.state_dir, self.clock, GIVEN)

    @property
    def folder(self) -> Path:
        return self.state_dir / gpu_minutes.FOLDER

    def hours(self) -> dict[int, gpu_minutes.Hour]:
        return dict(gpu_minutes.hours(self.folder, 0, books.MAX_US))

    def table(self, text: str) -> list[tuple[Any, ...]]:
        with duckdb.connect() as session:
            paths = [str(self.folder / hour.file) for hour in self.hours().values()]
            session.read_parquet(paths, hive_partitioning=False).create_view("gpu_minutes")
            found: list[tuple[Any, ...]] = session.execute(text).fetchall()
            return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    world = Made(tmp_path_factory.mktemp("day"))
    done = world.roll()
    assert done.problems == ()
    assert done.hours == len(world.hours()) >= 24
    return world


def truth(day: gpu_fleet.Day) -> dict[tuple[str, str, int], int]:
    sums: collections.Counter[tuple[str, str, int]] = collections.Counter()
    for key, amount in day.held(START, START + DAY_US):
        sums[key] += amount
    return {key: amount for key, amount in sums.items() if amount}


def test_every_replica_minute_of_a_day_adds_up_to_what_was_allocated(made: Made) -> None:
    rows = made.table(
        "SELECT lease_id, replica_id, minute_us, kind, sum(gpu_us) FROM gpu_minutes GROUP BY ALL"
    )
    found: collections.Counter[tuple[str, str, int]] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    for lease_id, replica_id, minute, kind, amount in rows:
        found[lease_id, replica_id, minute] += int(amount)
        kinds[kind] += int(amount)
    assert found == truth(made.day)
    assert set(kinds) == {"attributed", "idle", "start-up", "waste"}
    assert all(share > sum(kinds.values()) / 1000 for share in kinds.values())


def test_start_up_sleep_and_dedicated_floors_are_what_the_agents_said(made: Made) -> None:
    def said(state: str) -> int:
        return sum(
            span.gpus * (span.end_us - span.start_us)
            for span in made.day.spans
            if span.state == state
        )

    sums = dict(
        made.table(
            "SELECT kind || why, sum(gpu_us) FROM gpu_minutes WHERE kind IN ('start-up', 'idle') GROUP BY 1"
        )
    )
    assert sums["start-up"] == said("starting")
    assert sums["idleasleep"] == said("asleep")
    owners = made.table(
        "SELECT DISTINCT model, team FROM gpu_minutes WHERE kind IN ('start-up', 'idle') "
        "AND replica_id <> ''"
    )
    assert set(owners) == {("chat", ""), ("code", "law"), ("embed", "")}


def test_costs_are_those_of_the_engines_steps(made: Made) -> None:
    last = made.hours()[max(made.hours())]
    for model in gpu_fleet.MODELS:
        cost = stepcost.Cost(*last.costs[model])  # type: ignore[arg-type]  # JSON's own types
        assert cost.fitted
        assert cost.prefill_us == pytest.approx(80, rel=0.05)
        assert cost.decode_us == pytest.approx(900, rel=0.05)


def test_the_same_again_changes_nothing_and_compaction_is_no_revision(tmp_path: Path) -> None:
    made = Made(tmp_path, replicas=4, hours=3)
    made.roll()
    before = made.hours()
    assert made.roll().hours == 0
    compacted = compact.compact(made.state_dir, clocks.FakeClock(START + 10 * DAY_US))
    assert compacted.files_after < compacted.files_before
    done = made.roll()
    assert (done.hours, done.revisions) == (len(before), 0)
    assert {hour: each.sha256 for hour, each in made.hours().items()} == {
        hour: each.sha256 for hour, each in before.items()
    }


def test_a_report_from_the_table_is_one_from_the_rows(made: Made) -> None:
    """Borders at half hours and within a minute; the newest hours are not in the table."""
    records = books.Books(made.state_dir)
    cuts = [START + 90 * gpu_fleet.MINUTE, START + 300 * gpu_fleet.MINUTE + 17, START + DAY_US // 2]
    stored, problems = gpu_sums.by_owner(records, cuts, GIVEN)
    assert problems == ()
    expected = truth(made.day)
    whole = sum(
        amount for (_, _, minute), amount in expected.items() if cuts[0] <= minute < cuts[-1]
    )
    assert sum(share.allocated for share in stored) == whole
    for share in stored:
        parts = [*share.attributed.values(), *share.dedicated.values()]
        assert share.allocated == sum(parts) + share.idle + share.starting + share.waste
    assert {owner[1] for share in stored for owner in share.attributed} == set(gpu_fleet.TEAMS)
    assert {owner[1] for share in stored for owner in share.dedicated} == {"law"}


def test_late_rows_are_a_revision_and_what_was_allocated_stays(made: Made) -> None:
    before = made.hours()
    unclaimed = "SELECT sum(gpu_us) FROM gpu_minutes WHERE why = 'unclaimed'"
    total = "SELECT sum(gpu_us) FROM gpu_minutes"
    ((nobodys,),), ((allocated,),) = made.table(unclaimed), made.table(total)
    made.write(made.day.late)
    done = made.roll()
    assert done.revisions > 0
    after = made.hours()
    assert any(each.revision == before[hour].revision + 1 for hour, each in after.items())
    assert made.table(total) == [(allocated,)]
    assert made.table(unclaimed)[0][0] < nobodys

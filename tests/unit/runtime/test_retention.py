"""The registry and the leader's memory stay bounded over ten thousand leases, and keep what is needed."""

import collections
import dataclasses
import itertools

import pytest
import sqlalchemy as sa

from scheduler.contracts import clock, fleet, ids, slurm, spec_json
from scheduler.core import replicas, snapshot
from scheduler.runtime import entries, live
from scheduler.runtime.registry import holdings, retention, store, tables

LEASES = 10_000
HOUR_US = 3_600_000_000
SPEC = spec_json.write(fleet.ReplicaSpec("chat", "v1", fleet.EngineKind.SIMULATED, seats=4))
OPEN = fleet.Lease(
    lease_id=ids.LeaseId("l-open"),
    cluster="alpha",
    kind=fleet.LeaseKind.SERVE,
    team="physics",
    state=fleet.LeaseState.RUNNING,
    gpus=4,
    requested_us=5,
)


@pytest.fixture
def epoch(registry: store.Registry) -> int:
    taken = registry.lead.take("me", 0, 10_000_000)
    assert taken is not None
    return taken


def fill(registry: store.Registry, first: int, count: int) -> None:
    """Insert leases that have ended, one an hour, with a slot and two replicas each."""
    numbers = range(first, first + count)
    others: dict[str, object] = {"nodes": [], "exclude": [], "hardware": {}}
    lease = {
        column.name: others.get(column.name, "")
        for column in tables.Lease.__table__.columns
        if not isinstance(column.type, sa.BigInteger)
    } | dict.fromkeys(
        [
            "gpus",
            "walltime_s",
            "requested_us",
            "started_us",
            "revision",
            "whole_nodes",
            "time_min_s",
        ],
        0,
    )
    with registry.database.write() as session:
        session.execute(
            sa.insert(tables.Lease),
            [
                lease
                | {
                    "kind": "serve",
                    "lease_id": f"l-{n:06}",
                    "state": "ended",
                    "ended_us": n * HOUR_US,
                }
                for n in numbers
            ],
        )
        session.execute(
            sa.insert(tables.Slot),
            [
                {"slot_id": f"l-{n:06}.s0", "lease_id": f"l-{n:06}", "gpus": 1, "cpus": 1,
                 "close": True, "state": "closed"}
                for n in numbers
            ],
        )  # fmt: skip
        session.execute(
            sa.insert(tables.Replica),
            [
                {"replica_id": f"r-{n:06}-{k}", "lease_id": f"l-{n:06}", "slot_id": f"l-{n:06}.s0",
                 "model": "chat", "version": "v1", "spec": SPEC, "run": False, "role": "shared",
                 "drain_s": 0.0, "drain_asked": False, "state": "stopped", "reason": "",
                 "created_us": n, "ended_us": n * HOUR_US + k}
                for n in numbers for k in (0, 1)
            ],
        )  # fmt: skip


def counts(registry: store.Registry) -> tuple[int, ...]:
    kinds = (tables.Lease, tables.Slot, tables.Replica)
    with registry.database.read() as session:
        return tuple(session.scalar(sa.select(sa.func.count()).select_from(k)) or 0 for k in kinds)


def forget_all(registry: store.Registry, epoch: int, before_us: int, most: int) -> None:
    while registry.retention.forget(epoch, before_us, most).more:
        pass


@pytest.mark.slow
def test_rows_stay_bounded_over_ten_thousand_leases(registry: store.Registry, epoch: int) -> None:
    """A lease an hour, looked at every thousand: never more than the bound and what came since."""
    registry.holdings.save_lease(epoch, OPEN, 1)
    for first in range(1, LEASES, 1000):
        fill(registry, first, 1000)
        now_us = (first + 1000) * HOUR_US
        forget_all(registry, epoch, now_us - 60 * 24 * HOUR_US, 10_000)
        leases, slots, inside = counts(registry)
        assert leases <= 60 * 24 + 2
        assert slots == leases - 1
        assert inside <= 2 * leases
    # What people ask for and what a leader needs: the newest, and all that is open.
    held = registry.holdings.load()
    assert registry.holdings.leases()[0].lease_id == "l-open"
    assert [lease.lease_id for lease in held.leases] == ["l-open"]
    assert f"l-{LEASES:06}" in held.ended
    assert len(held.ended) == holdings.ENDED_KEPT
    newest = {row.replica.replica_id for row in registry.holdings.replica_rows(limit=4)}
    assert f"r-{LEASES:06}-1" in newest


def test_a_site_that_ends_many_in_a_short_time_is_bounded_by_their_number(
    registry: store.Registry, epoch: int
) -> None:
    fill(registry, 1, 2_500)
    assert not registry.retention.forget(epoch, 0, 3_000).leases  # few and young: nothing goes
    forget_all(registry, epoch, 0, 1_200)
    assert counts(registry) == (1_200, 1_200, 1_200)
    forget_all(registry, epoch, 10 * LEASES * HOUR_US, 1_200)  # all are old
    assert counts(registry)[0] == holdings.ENDED_KEPT


def test_a_lease_that_goes_on_keeps_its_newest_slots_and_those_in_use(
    registry: store.Registry, epoch: int
) -> None:
    registry.holdings.save_lease(epoch, OPEN, 1)
    slots = [
        snapshot.Slot(ids.SlotId(f"l-open.s{n}"), OPEN.lease_id, 1, state=replicas.SlotState.LOST)
        for n in range(120)
    ]
    slots[3] = dataclasses.replace(slots[3], state=replicas.SlotState.READY)
    registry.holdings.save_wishes(epoch, OPEN.lease_id, 1, slots=slots)
    registry.retention.forget(epoch, 0, 10_000)
    kept = {retention.number(slot.slot_id) for slot in registry.holdings.load().slots}
    assert kept == {3, *range(70, 120)}


def test_leases_whose_old_slots_are_in_use_leave_room_for_the_others(
    registry: store.Registry, epoch: int
) -> None:
    """As many leases as a pass looks at have one slot too many for ever; the last has ended ones."""
    for number in range(retention.AT_ONCE // retention.SLOTS_KEPT + 1):
        lease = dataclasses.replace(OPEN, lease_id=ids.LeaseId(f"l-{number:02}"))
        registry.holdings.save_lease(epoch, lease, 1)
        slots = [
            snapshot.Slot(
                ids.SlotId(f"{lease.lease_id}.s{n}"),
                lease.lease_id,
                1,
                state=replicas.SlotState.LOST,
            )
            for n in range(120)
        ]
        slots[3] = dataclasses.replace(slots[3], state=replicas.SlotState.READY)
        registry.holdings.save_wishes(epoch, lease.lease_id, 1, slots=slots)
    for _ in range(2):
        registry.retention.forget(epoch, 0, 10_000)
    counted = collections.Counter(slot.lease_id for slot in registry.holdings.load().slots)
    assert set(counted.values()) == {retention.SLOTS_KEPT + 1}


def test_a_leader_that_is_over_forgets_nothing(registry: store.Registry, epoch: int) -> None:
    fill(registry, 1, 10)
    with pytest.raises(Exception, match="another broker leads"):
        registry.retention.forget(epoch + 1, LEASES * HOUR_US, 1_000)


def job(number: int, state: slurm.JobState = slurm.JobState.RUNNING) -> slurm.Job:
    lease_id = ids.LeaseId(f"l-{number:06}")
    return slurm.Job(
        ids.SlurmJobId(str(number)), "alpha", "forebay", "u", "a", "serve", state,
        stamp=slurm.Stamp("alpha", lease_id, "serve", "forebay"),
    )  # fmt: skip


@pytest.mark.slow
async def test_a_leaders_memory_stays_bounded_over_ten_thousand_leases(
    fake_clock: clock.FakeClock,
) -> None:
    """A lease a minute comes and goes; an early one is named by Slurm for ever and is not forgotten."""
    picture = live.Live(1, "alpha", entries.Pauses(1.0, 60.0), fake_clock.monotonic())
    stuck = job(0)
    for number in range(LEASES):
        now = fake_clock.monotonic()
        lease = dataclasses.replace(
            OPEN, lease_id=ids.LeaseId(f"l-{number:06}"), slurm_job_id=str(number)
        )
        picture.leases[lease.lease_id] = entries.LeaseEntry(lease, since=now)
        picture.cancels[ids.SlurmJobId(str(number))] = now
        picture.change_lease(dataclasses.replace(lease, state=fleet.LeaseState.ENDED), now)
        await fake_clock.advance(60.0)
        picture.absorb_poll((stuck, job(number)), (), fake_clock.monotonic())
        assert len(picture.ended) <= live.ENDED_KEPT + 1
        assert len(picture.cancels) <= 1
    assert not picture.leases
    assert stuck.stamp is not None
    assert stuck.stamp.lease_id in picture.ended
    assert ids.LeaseId(f"l-{LEASES - 1:06}") in picture.ended
    assert ids.LeaseId("l-000001") not in picture.ended


def test_slots_that_ended_are_dropped_from_memory_and_numbers_go_on() -> None:
    slots = {
        ids.SlotId(f"l-open.s{n}"): snapshot.Slot(
            ids.SlotId(f"l-open.s{n}"), OPEN.lease_id, 1, state=replicas.SlotState.CLOSED
        )
        for n in range(200)
    }
    entry = entries.LeaseEntry(OPEN, since=0.0, slots=slots)
    used = ids.SlotId("l-open.s7")
    entry.forget_slots({used})
    assert len(entry.slots) == retention.SLOTS_KEPT + 1
    assert used in entry.slots
    assert max(map(retention.number, entry.slots)) == 199
    assert all(
        retention.number(b) > retention.number(a) for a, b in itertools.pairwise(entry.slots)
    )

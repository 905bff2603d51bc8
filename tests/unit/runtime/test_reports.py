"""What the leader makes of agents' reports: words that it does not know, and what has no fault."""

import dataclasses
import logging

import pytest

from scheduler.contracts import clock, fleet, ids, wire
from scheduler.contracts.v1 import control_pb2 as pb
from scheduler.core import replicas, snapshot
from scheduler.runtime import entries, live, settings, snapshots

R, SLOT = fleet.ReplicaState, replicas.SlotState
LEASE = ids.LeaseId("l-1")
SPEC = fleet.ReplicaSpec("chat", "v1", fleet.EngineKind.SIMULATED)


def picture() -> live.Live:
    """Return a leader's picture with one lease, a slot in it and a replica that serves there."""
    found = live.Live(1, "alpha", entries.Pauses(1.0, 60.0), 0.0)
    lease = fleet.Lease(LEASE, "alpha", fleet.LeaseKind.SERVE, "t", fleet.LeaseState.RUNNING, 4)
    found.leases[LEASE] = entries.LeaseEntry(lease, since=0.0)
    slot = snapshot.Slot(ids.SlotId("l-1.s0"), LEASE, 4, state=SLOT.READY)
    found.leases[LEASE].slots[slot.slot_id] = slot
    replica = fleet.Replica(
        ids.ReplicaId("r-1"),
        "alpha",
        LEASE,
        slot.slot_id,
        "7",
        "n1",
        SPEC,
        R.SERVING,
        fleet.Role.SHARED,
    )
    found.replicas[replica.replica_id] = entries.ReplicaEntry(
        replica, True, fleet.Role.SHARED, 1.0, 0.0
    )
    return found


def report(state: str = "serving", role: str = "shared", slot: str = "ready") -> pb.LeaseReport:
    item = pb.ReplicaReport(
        replica_id="r-1", state=state, role=role, address="h:1", spec=wire.spec_to_pb(SPEC)
    )
    held = pb.SlotReport(slot_id="l-1.s0", gpus=4, state=slot, replicas=[item])
    return pb.LeaseReport(lease_id=LEASE, epoch=1, slots=[held])


def state(of: live.Live) -> fleet.ReplicaState:
    return of.replicas[ids.ReplicaId("r-1")].replica.state


@pytest.mark.parametrize("words", [{"state": "hovering"}, {"role": "referee"}])
def test_a_replica_that_a_newer_agent_tells_of_is_kept_as_unknown(
    words: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """The word ended the agent's link: its whole lease was silent, lost, and given back."""
    of = picture()
    with caplog.at_level(logging.WARNING):
        for now in (1.0, 2.0, 3.0):
            assert of.absorb_report(report(**words), now)
    assert state(of) is R.UNKNOWN
    (word,) = words.values()
    (said,) = caplog.messages
    assert f"replica r-1: {next(iter(words))} {word!r}" in said
    assert "upgrade this broker" in said
    of.absorb_report(report(), 4.0)
    assert state(of) is R.SERVING
    of.absorb_report(report("starting"), 5.0)
    assert state(of) is R.SERVING, "what serves does not begin anew"


def test_a_slot_in_an_unknown_state_is_neither_taken_nor_free(
    caplog: pytest.LogCaptureFixture,
) -> None:
    of = picture()
    of.absorb_report(report(slot="in orbit"), 1.0)
    (slot,) = of.leases[LEASE].slots.values()
    assert (slot.state, slot.state.takes, slot.state.final) == (SLOT.UNKNOWN, False, False)
    assert "slot l-1.s0: state 'in orbit'" in caplog.text
    of.absorb_report(report(), 2.0)
    (slot,) = of.leases[LEASE].slots.values()
    assert slot.state is SLOT.READY


def test_a_stranger_of_a_newer_agent_is_a_stranger_all_the_same() -> None:
    of = picture()
    told = report("hovering")
    told.slots[0].replicas[0].replica_id = "r-2"
    told.slots[0].replicas[0].spec.engine = "abacus"
    of.absorb_report(told, 1.0)
    (stranger,) = of.leases[LEASE].strangers
    assert (stranger.replica.state, stranger.replica.spec.engine) == (
        R.UNKNOWN,
        fleet.EngineKind.HTTP,
    )


@pytest.mark.parametrize("away", ["warm", "hovering"])
def test_how_long_a_replica_is_off_the_routes_is_counted_from_there(away: str) -> None:
    of = picture()

    def known(now: float) -> snapshot.KnownReplica:
        time = clock.FakeClock(monotonic=now)
        (found,) = snapshots.collect(of, time, settings.Settings()).replicas
        return found

    assert (known(1000.0).away_s, known(1000.0).coming_s, known(1000.0).budget_s) == (None, 1000, 0)
    for now in (1000.0, 1003.0):
        of.absorb_report(report(away), now)
    assert (known(1005.0).away_s, known(1005.0).coming_s) == (5.0, 5.0)
    assert known(1005.0).budget_s > 0, "after that another one is started beside it"
    of.absorb_report(report(), 1006.0)
    assert (known(1007.0).away_s, known(1007.0).budget_s) == (None, 0)
    assert of.starts.cold() == {}, "it has not started anew"


def test_what_ends_with_its_slot_is_no_fault_of_its_model() -> None:
    of = picture()
    entry = of.leases[LEASE]
    (slot,) = entry.slots.values()
    of.absorb_report(report("asleep"), 1.0)
    entry.slots[slot.slot_id] = dataclasses.replace(slot, close=True)
    of.absorb_report(report("stopped", slot="closing"), 2.0)
    assert (of.replicas, of.failures) == ({}, {})


def test_the_next_run_of_a_requeued_lease_waits_for_its_own_agent() -> None:
    """The silence of its first run's agent gave it back as soon as it ran again, and cordoned its node."""
    of = picture()
    told = report()
    told.closing = "sigterm"
    of.absorb_report(told, 1.0)
    entry = of.leases[LEASE]
    of.change_lease(dataclasses.replace(entry.lease, state=fleet.LeaseState.PENDING), 2.0)
    of.change_lease(dataclasses.replace(entry.lease, state=fleet.LeaseState.RUNNING), 600.0)
    assert (entry.seen, entry.leaving, entry.since) == (None, "", 600.0)


@pytest.mark.parametrize("served", [True, False])
def test_what_had_served_is_no_failed_start_when_it_ends(served: bool) -> None:
    """Off the routes for a moment and then killed, it was a step towards its model's quarantine."""
    of = picture()
    of.replicas[ids.ReplicaId("r-1")].served = served
    of.absorb_report(report("warm"), 1.0)
    of.absorb_report(report("lost"), 2.0)
    (failures,) = of.failures.values()
    assert (failures.count, failures.until) == (0 if served else 1, 3.0)

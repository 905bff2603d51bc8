"""The lives of replicas, leases and slots as transition tables; every rule of them stands here.

An event that a state does not list raises `UnlistedEvent`: whoever reports it is wrong or out of date,
and the state stays what it was.
"""

import enum
from collections.abc import Mapping
from typing import TypeVar

from scheduler.contracts import fleet, slurm

State = TypeVar("State", bound=enum.Enum)
Event = TypeVar("Event", bound=enum.Enum)


class UnlistedEvent(Exception):
    """An event that can't happen in this state."""


class ReplicaEvent(enum.StrEnum):
    """What can happen to a replica."""

    BEGAN = "began"  # starts, as far as its agent can be read again
    LOADED = "loaded"  # weights in memory
    SERVED = "served"  # takes requests
    DRAINED = "drained"  # told to take nothing new
    SLEPT = "slept"  # parked, its GPUs lent
    STOPPED = "stopped"  # ended as it was told
    FAILED = "failed"  # ended by itself, or never came up
    BARRED = "barred"  # its slot will not start it again
    VANISHED = "vanished"  # its lease, node or slot is gone
    UNREAD = "unread"  # its agent says of it what only a newer release knows


class LeaseEvent(enum.StrEnum):
    """What can happen to a lease."""

    QUEUED = "queued"  # Slurm has it and it waits (also: requeued)
    RAN = "ran"  # Slurm runs it
    CLOSED = "closed"  # we give it back
    VANISHED = "vanished"  # Slurm answered and did not name it
    ENDED = "ended"  # Slurm names a final state, or refused it


class SlotState(enum.StrEnum):
    """A slot's life, in the words of its supervisor's reports."""

    STARTING = "starting"
    READY = "ready"
    CLOSING = "closing"
    CLOSED = "closed"  # final
    LOST = "lost"  # final
    UNKNOWN = "unknown"  # its agent says what only a newer release knows

    @classmethod
    def _missing_(cls, value: object) -> "SlotState":
        del value
        return cls.UNKNOWN

    @property
    def final(self) -> bool:
        """Whether its GPUs are free again."""
        return self in {SlotState.CLOSED, SlotState.LOST}

    @property
    def takes(self) -> bool:
        """Whether a replica could be started in it, now or when it has come up."""
        return self in {SlotState.STARTING, SlotState.READY}


_R = fleet.ReplicaState
_ALWAYS = {
    ReplicaEvent.STOPPED: _R.STOPPED,
    ReplicaEvent.FAILED: _R.LOST,
    ReplicaEvent.BARRED: _R.QUARANTINED,
    ReplicaEvent.VANISHED: _R.LOST,
    ReplicaEvent.UNREAD: _R.UNKNOWN,
}
REPLICA: Mapping[fleet.ReplicaState, Mapping[ReplicaEvent, fleet.ReplicaState]] = {
    _R.STARTING: {
        ReplicaEvent.LOADED: _R.WARM,
        ReplicaEvent.SERVED: _R.SERVING,
        ReplicaEvent.DRAINED: _R.DRAINING,
        **_ALWAYS,
    },
    _R.WARM: {
        ReplicaEvent.SERVED: _R.SERVING,
        ReplicaEvent.DRAINED: _R.DRAINING,
        ReplicaEvent.SLEPT: _R.ASLEEP,
        **_ALWAYS,
    },
    _R.SERVING: {
        ReplicaEvent.LOADED: _R.WARM,  # it left the routes and stays loaded
        ReplicaEvent.DRAINED: _R.DRAINING,
        ReplicaEvent.SLEPT: _R.ASLEEP,
        **_ALWAYS,
    },
    _R.DRAINING: {
        ReplicaEvent.SLEPT: _R.ASLEEP,
        **_ALWAYS,
    },
    _R.ASLEEP: {
        ReplicaEvent.LOADED: _R.WARM,
        ReplicaEvent.SERVED: _R.SERVING,
        ReplicaEvent.DRAINED: _R.DRAINING,
        **_ALWAYS,
    },
    _R.UNKNOWN: {
        ReplicaEvent.BEGAN: _R.STARTING,
        ReplicaEvent.LOADED: _R.WARM,
        ReplicaEvent.SERVED: _R.SERVING,
        ReplicaEvent.DRAINED: _R.DRAINING,
        ReplicaEvent.SLEPT: _R.ASLEEP,
        **_ALWAYS,
    },
    _R.STOPPED: {},
    _R.QUARANTINED: {},
    _R.LOST: {},
}

FINALS = frozenset(state for state, events in REPLICA.items() if not events)

_L = fleet.LeaseState
LEASE: Mapping[fleet.LeaseState, Mapping[LeaseEvent, fleet.LeaseState]] = {
    _L.REQUESTED: {
        LeaseEvent.QUEUED: _L.PENDING,
        LeaseEvent.RAN: _L.RUNNING,
        LeaseEvent.CLOSED: _L.CLOSING,
        LeaseEvent.ENDED: _L.ENDED,
    },
    _L.PENDING: {
        LeaseEvent.RAN: _L.RUNNING,
        LeaseEvent.CLOSED: _L.CLOSING,
        LeaseEvent.VANISHED: _L.UNKNOWN,
        LeaseEvent.ENDED: _L.ENDED,
    },
    _L.RUNNING: {
        LeaseEvent.QUEUED: _L.PENDING,
        LeaseEvent.CLOSED: _L.CLOSING,
        LeaseEvent.VANISHED: _L.UNKNOWN,
        LeaseEvent.ENDED: _L.ENDED,
    },
    _L.UNKNOWN: {
        LeaseEvent.QUEUED: _L.PENDING,
        LeaseEvent.RAN: _L.RUNNING,
        LeaseEvent.CLOSED: _L.CLOSING,
        LeaseEvent.ENDED: _L.ENDED,
    },
    _L.CLOSING: {LeaseEvent.ENDED: _L.ENDED},
    _L.ENDED: {},
}

_REPORTED: Mapping[fleet.ReplicaState, ReplicaEvent] = {
    _R.STARTING: ReplicaEvent.BEGAN,
    _R.WARM: ReplicaEvent.LOADED,
    _R.SERVING: ReplicaEvent.SERVED,
    _R.DRAINING: ReplicaEvent.DRAINED,
    _R.ASLEEP: ReplicaEvent.SLEPT,
    _R.STOPPED: ReplicaEvent.STOPPED,
    _R.QUARANTINED: ReplicaEvent.BARRED,
    _R.LOST: ReplicaEvent.FAILED,
    _R.UNKNOWN: ReplicaEvent.UNREAD,
}
_OF_JOB: Mapping[slurm.JobState, LeaseEvent | None] = {
    slurm.JobState.PENDING: LeaseEvent.QUEUED,
    slurm.JobState.RUNNING: LeaseEvent.RAN,
    # Suspended and completing jobs still hold their GPUs; an unnamed one says nothing.
    slurm.JobState.SUSPENDED: None,
    slurm.JobState.COMPLETING: None,
    slurm.JobState.UNKNOWN: LeaseEvent.VANISHED,
}


def replica_after(state: fleet.ReplicaState, event: ReplicaEvent) -> fleet.ReplicaState:
    """Return the state that ``event`` leads to; raises `UnlistedEvent`."""
    return _after(REPLICA, state, event)


def lease_after(state: fleet.LeaseState, event: LeaseEvent) -> fleet.LeaseState:
    """Return the state that ``event`` leads to; raises `UnlistedEvent`."""
    return _after(LEASE, state, event)


def lease_lists(state: fleet.LeaseState, event: LeaseEvent) -> bool:
    """Return whether ``event`` can happen in ``state``."""
    return event in LEASE[state]


def reported(state: fleet.ReplicaState) -> ReplicaEvent:
    """Return the event behind a state that an agent reports."""
    return _REPORTED[state]


def of_job(state: slurm.JobState) -> LeaseEvent | None:
    """Return what a Slurm state means for a lease, None if it changes nothing."""
    return LeaseEvent.ENDED if state.final else _OF_JOB[state]


def replica_final(state: fleet.ReplicaState) -> bool:
    """Return whether a replica in ``state`` holds nothing any more."""
    return state in FINALS


def _after(table: Mapping[State, Mapping[Event, State]], state: State, event: Event) -> State:
    found = table[state].get(event)
    if found is None:
        raise UnlistedEvent(f"{event.value} can't happen to what is {state.value}")
    return found

"""The planner: a snapshot goes in, a plan comes out, each action with its reason.

It follows Slurm, writes off what is gone, decides how many replicas of each deployment there should be
(`targets`), moves roles along the ladder (`roles`), and turns numbers into starts, stops and leases
(`filling`). It knows no clock and does nothing itself; the applier does, and checks again first. Applying a
plan and planning again yields nothing new.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Protocol

from scheduler.contracts import fleet
from scheduler.core import (
    actions,
    autoscale,
    cordons,
    filling,
    ladder,
    leases,
    members,
    roles,
    rollover,
    snapshot,
    targets,
    unwanted,
)


class Settings(filling.Settings, roles.Settings, targets.Settings, cordons.Settings, Protocol):
    """What the planner needs to be told; `scheduler.runtime.settings.Settings` is one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What to do now.

    Attributes:
        actions: in the order in which they are to be applied.
        notes: what is not as wanted and why nothing is done about it now, one line each.
        ladder_memory, scale_memory, lent_at: what the next plan must be told of this one.
        wanted: deployment to how many replicas it should have, and the signal behind it.
    """

    actions: tuple[actions.Action, ...]
    notes: tuple[str, ...]
    ladder_memory: Mapping[str, ladder.Memory]
    scale_memory: Mapping[members.Key, autoscale.Memory] = dataclasses.field(default_factory=dict)
    lent_at: float | None = None
    wanted: Mapping[members.Key, targets.Target] = dataclasses.field(default_factory=dict)


def plan(snap: snapshot.Snapshot, settings: Settings) -> Plan:
    """Return what to do about ``snap``."""
    todo: list[actions.Action] = list(leases.follow(snap, settings))
    notes: list[str] = []
    if snap.jobs is None:
        notes.append("Slurm does not answer: leases are left as they are, serving goes on")
    todo += [
        actions.AdoptReplica(stranger, "its agent reports it and the registry does not know it")
        for stranger in snap.strangers
    ]
    todo += _write_off(snap, settings)
    if snap.settling:
        notes.append("new leader: waiting for agents to come back")
        return Plan(tuple(todo), tuple(notes), snap.ladder_memory, snap.scale_memory, snap.lent_at)
    todo += cordons.suspects(snap, settings)
    todo += unwanted.late(snap, settings)
    counted = members.counted(snap, rollover.rolling(snap, settings))
    wanted = targets.decide(snap, settings, counted)
    notes += wanted.notes
    filled = list(filling.fill(snap, settings, wanted.of, counted, notes))
    # Roles are shared out among those that stay: a replica that stops here and its share of the roles would
    # otherwise be given to another one, and taken back by the next plan.
    leaving = {
        action.replica_id
        for action in (*todo, *filled)
        if isinstance(action, actions.StopReplica | actions.ParkReplica)
    }
    staying = {
        key: [known for known in mine if known.replica.replica_id not in leaving]
        for key, mine in counted.items()
    }
    moved, memory = roles.roles(snap, settings, staying, wanted.of, notes)
    todo += moved  # before anything that takes longer
    todo += filled
    return Plan(
        tuple(todo),
        tuple(dict.fromkeys(notes)),
        memory,
        wanted.scale_memory,
        wanted.lent_at,
        wanted.of,
    )


def _write_off(snap: snapshot.Snapshot, settings: Settings) -> Iterator[actions.Action]:
    """Replicas whose lease or slot is gone, or that their agent does not know."""
    held = {item.lease.lease_id: item for item in snap.leases}
    gone = {slot.slot_id: slot for item in snap.leases for slot in item.slots if slot.state.final}
    for known in snap.replicas:
        replica = known.replica
        if replica.lease_id not in held:
            yield actions.MarkLost(replica.replica_id, f"lease {replica.lease_id} has ended")
        elif replica.slot_id in gone:
            why = gone[replica.slot_id].reason
            reason = f"slot {replica.slot_id} is gone{f': {why}' if why else ''}"
            yield actions.MarkLost(replica.replica_id, reason)
        elif _given_up(held[replica.lease_id], settings):
            yield actions.MarkLost(replica.replica_id, held[replica.lease_id].lease.reason)
        elif known.missing_s > settings.agent_silent_s:
            yield actions.MarkLost(replica.replica_id, "its agent does not know it")


def _given_up(held: snapshot.HeldLease, settings: Settings) -> bool:
    """Return whether a lease was given back for want of its agent: Slurm may name its job for long after."""
    lost = held.silent_s is not None and held.silent_s > settings.agent_lost_s
    return lost and held.lease.state is fleet.LeaseState.CLOSING

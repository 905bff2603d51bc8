"""The planner: a snapshot goes in, a plan comes out, each action with its reason.

It keeps as many replicas of each deployment as are wanted, in leases that it asks for and gives back,
and moves roles along the ladder. It knows no clock and does nothing itself; the applier does, and
checks again first. Applying a plan and planning again yields nothing new.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from scheduler.contracts import fleet
from scheduler.core import actions, ladder, leases, placement, replicas, snapshot


class Settings(leases.Settings, ladder.Settings, Protocol):
    """What the planner needs to be told; `scheduler.runtime.settings.Settings` is one."""

    @property
    def stats_stale_s(self) -> float:
        """Age in seconds from which stats are not used."""
        ...

    @property
    def lease_gpus(self) -> int:
        """GPUs of one lease; 0: as many as the replica."""
        ...

    @property
    def lease_team(self) -> str:
        """Team that leases are charged to which are no team's own."""
        ...

    @property
    def pending_leases(self) -> int:
        """Most leases in Slurm's queue at once."""
        ...

    @property
    def idle_lease_s(self) -> float:
        """Seconds after which an empty lease is given back."""
        ...

    @property
    def start_timeout_s(self) -> float:
        """Seconds within which a replica must serve."""
        ...

    @property
    def quarantine_after(self) -> int:
        """Failed starts in a row that lead to quarantine."""
        ...

    @property
    def quarantine_s(self) -> float:
        """Seconds of quarantine."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What to do now.

    Attributes:
        actions: in the order in which they are to be applied.
        notes: what is not as wanted and why nothing is done about it now, one line each.
        ladder_memory: the ladder's memory for the next plan.
    """

    actions: tuple[actions.Action, ...]
    notes: tuple[str, ...]
    ladder_memory: Mapping[str, ladder.Memory]


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
        return Plan(tuple(todo), tuple(notes), snap.ladder_memory)
    todo += _late(snap, settings)
    moved, memory = _roles(snap, settings, notes)
    todo += moved
    todo += _fill(snap, settings, notes)
    return Plan(tuple(todo), tuple(dict.fromkeys(notes)), memory)


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
        elif known.missing_s > settings.agent_silent_s:
            yield actions.MarkLost(replica.replica_id, "its agent does not know it")


def _late(snap: snapshot.Snapshot, settings: Settings) -> Iterator[actions.Action]:
    """Replicas that do not come up, and those that an admin wants gone."""
    for known in snap.replicas:
        if not known.run:
            continue
        coming = known.replica.state in {fleet.ReplicaState.STARTING, fleet.ReplicaState.WARM}
        if coming and known.age_s > settings.start_timeout_s:
            reason = f"not serving after {known.age_s:.0f} s"
            yield actions.StopReplica(known.replica.replica_id, 0.0, reason, failed=True)
        elif known.drain_asked:
            reason = "an admin drains it"
            yield actions.StopReplica(known.replica.replica_id, settings.drain_s, reason)


def _roles(
    snap: snapshot.Snapshot, settings: Settings, notes: list[str]
) -> tuple[list[actions.Action], dict[str, ladder.Memory]]:
    """Rung 1: which replicas take what, model by model."""
    todo: list[actions.Action] = []
    memory: dict[str, ladder.Memory] = {}
    shared: dict[str, list[snapshot.KnownReplica]] = {}
    for deployment in snap.deployments:
        role = fleet.Role.INTERACTIVE if deployment.hold_batch else deployment.role
        members = [known for known in _counted(snap, deployment) if _serves(known)]
        if role is fleet.Role.SHARED:
            shared.setdefault(deployment.spec.model, []).extend(members)
            continue
        reason = "an admin holds batch" if deployment.hold_batch else f"deployed as {role}"
        todo += [
            actions.SetRole(known.replica.replica_id, role, reason)
            for known in members
            if known.wanted_role is not role
        ]
    for model, members in shared.items():
        signal = _signal(snap, model, members, settings)
        memory[model] = ladder.step(snap.ladder_memory.get(model), signal, snap.now, settings)
        if signal.predicted_s is None and members:
            notes.append(f"{model}: {_blind(snap, model, settings)}, so roles stay as they are")
            continue
        todo += _turn(members, memory[model].interactive, signal, settings)
    return todo, memory


def _blind(snap: snapshot.Snapshot, model: str, settings: Settings) -> str:
    """Say what is missing to predict a model's wait."""
    if _fresh(snap, model, settings):
        return "no gateway has told its demand"
    return (
        f"stale stats: none of its replicas has reported for {settings.stats_stale_s:g} s; gateways "
        "send requests round and batch to seats known to be free"
    )


def _fresh(snap: snapshot.Snapshot, model: str, settings: Settings) -> list[fleet.ReplicaStats]:
    return [
        known.replica.stats
        for known in snap.replicas
        if known.replica.spec.model == model
        and _serves(known)
        and known.replica.stats is not None
        and known.stats_age_s is not None
        and known.stats_age_s <= settings.stats_stale_s
    ]


def _signal(
    snap: snapshot.Snapshot,
    model: str,
    members: Sequence[snapshot.KnownReplica],
    settings: Settings,
) -> ladder.Signal:
    fresh = _fresh(snap, model, settings)
    predicted = ladder.predicted_wait(snap.demand.get(model), fresh)
    if members and not fresh:
        predicted = None
    turned = sum(known.wanted_role is fleet.Role.INTERACTIVE for known in members)
    return ladder.Signal(predicted, turned, len(members))


def _turn(
    members: Sequence[snapshot.KnownReplica],
    wanted: int,
    signal: ladder.Signal,
    settings: Settings,
) -> Iterator[actions.Action]:
    """Make ``wanted`` of a model's shared replicas interactive: first those that are, then the cheapest."""

    def cost(known: snapshot.KnownReplica) -> tuple[bool, int, str]:
        stats = known.replica.stats
        kept = known.wanted_role is not fleet.Role.INTERACTIVE
        return (kept, stats.batch if stats else 0, known.replica.replica_id)

    for place, known in enumerate(sorted(members, key=cost)):
        role = fleet.Role.INTERACTIVE if place < wanted else fleet.Role.SHARED
        if known.wanted_role is role:
            continue
        if role is fleet.Role.INTERACTIVE:
            reason = (
                f"predicted wait {signal.predicted_s or 0.0:.2f} s is over half the TTFT SLO "
                f"({settings.ttft_slo_ms:g} ms): rung 1"
            )
        else:
            reason = f"calm for {settings.calm_s:g} s: shared with batch again"
        yield actions.SetRole(known.replica.replica_id, role, reason)


def _fill(
    snap: snapshot.Snapshot, settings: Settings, notes: list[str]
) -> Iterator[actions.Action]:
    """Start what is missing, stop what is too much, ask for leases and give them back."""
    stopping = {
        action.replica_id
        for action in _late(snap, settings)
        if isinstance(action, actions.StopReplica)
    }
    available = placement.rooms(snap, silent_s=settings.agent_silent_s, stopping=stopping)
    for deployment in snap.deployments:
        members = [
            known
            for known in _counted(snap, deployment)
            if known.replica.replica_id not in stopping
        ]
        surplus = len(members) - deployment.replicas
        for known in sorted(members, key=_least_missed)[: max(0, surplus)]:
            reason = f"{len(members)} replicas of {_name(deployment)}, {deployment.replicas} wanted"
            yield actions.StopReplica(known.replica.replica_id, settings.drain_s, reason)
        if surplus < 0:
            yield from _grow(snap, settings, notes, deployment, -surplus, available)
    known_models = {deployment.key for deployment in snap.deployments}
    for known in snap.replicas:
        if known.run and known.key not in known_models:
            model, version = known.key
            reason = f"{model} {version} is not deployed any more"
            yield actions.StopReplica(known.replica.replica_id, settings.drain_s, reason)
    if snap.jobs is not None:
        yield from _give_back(snap, settings, available)


def _grow(
    snap: snapshot.Snapshot,
    settings: Settings,
    notes: list[str],
    deployment: snapshot.Deployment,
    missing: int,
    available: list[placement.Room],
) -> Iterator[actions.Action]:
    """Start ``missing`` replicas where there is room; ask for a lease for each that has none."""
    name = _name(deployment)
    if deployment.quarantined_until_us > snap.now_us:
        notes.append(f"{name}: quarantined: {deployment.quarantine_reason}")
        return
    failures = snap.failures.get(deployment.key)
    if failures is not None and failures.count >= settings.quarantine_after:
        reason = f"{failures.count} failed starts in a row, the last: {failures.reason}"
        until = snap.now_us + round(settings.quarantine_s * 1_000_000)
        yield actions.Quarantine(*deployment.key, until, reason)
        return
    paused = failures is not None and failures.waits(snap.now)
    owners = {each.spec.dedicated for each in snap.deployments} - {"", settings.lease_team}
    for _ in range(missing):
        mine = placement.open_to(available, deployment.spec.dedicated, owners)
        place = placement.take(mine, deployment.spec.gpus, new_slots=snap.jobs is not None)
        if paused and failures is not None:
            pause = failures.until - snap.now
            notes.append(f"{name}: next start in {pause:.1f} s, after: {failures.reason}")
        elif place is not None and not place.waits_for and place.room.lease_id is not None:
            role = fleet.Role.INTERACTIVE if deployment.hold_batch else deployment.role
            yield actions.StartReplica(
                place.room.lease_id,
                place.slot_id,
                deployment.spec,
                role,
                f"{missing} of {deployment.replicas} replicas of {name} missing",
            )
        elif place is not None and place.close:
            for slot in place.close:
                reason = f"{name} needs {deployment.spec.gpus} GPUs in one slot"
                yield actions.CloseSlot(slot.lease_id, slot.slot_id, reason)
        elif place is not None:
            notes.append(f"{name}: {place.waits_for}")
        else:
            yield from _ask(snap, settings, notes, deployment, available)


def _ask(
    snap: snapshot.Snapshot,
    settings: Settings,
    notes: list[str],
    deployment: snapshot.Deployment,
    available: list[placement.Room],
) -> Iterator[actions.Action]:
    name = _name(deployment)
    pending = sum(
        held.lease.state in {fleet.LeaseState.REQUESTED, fleet.LeaseState.PENDING}
        for held in snap.leases
    ) + sum(room.lease_id is None for room in available)
    if snap.jobs is None:
        notes.append(f"{name}: no room, and Slurm does not answer")
    elif snap.lease_pause.waits(snap.now):
        pause = snap.lease_pause.until - snap.now
        notes.append(f"{name}: next lease asked for in {pause:.1f} s: {snap.lease_pause.reason}")
    elif pending >= settings.pending_leases:
        notes.append(f"{name}: {pending} leases wait in Slurm's queue already (pending_leases)")
    else:
        gpus = max(settings.lease_gpus, deployment.spec.gpus)
        room = placement.Room(
            None,
            False,
            gpus - deployment.spec.gpus,
            [],
            used=True,
            waits_for="a lease is asked for",
            team=deployment.spec.dedicated,
        )
        available.append(room)
        reason = f"{name} needs {deployment.spec.gpus} GPUs and no lease has them"
        yield actions.RequestLease(fleet.LeaseKind.SERVE, gpus, reason, deployment.spec.dedicated)


def _give_back(
    snap: snapshot.Snapshot, settings: Settings, available: Sequence[placement.Room]
) -> Iterator[actions.Action]:
    """Close leases that nothing is in, nothing of this plan needs, and that have been so for a while."""
    used = {room.lease_id for room in available if room.used}
    holding = {known.replica.lease_id for known in snap.replicas}
    holding |= {stranger.replica.lease_id for stranger in snap.strangers}
    for held in snap.leases:
        lease = held.lease
        if lease.lease_id in used or lease.lease_id in holding:
            continue
        if lease.state is fleet.LeaseState.PENDING:
            yield actions.CloseLease(lease.lease_id, "still waiting in Slurm and no longer needed")
        elif (
            lease.state is fleet.LeaseState.RUNNING
            and held.idle_s > settings.idle_lease_s
            and not leases.silent(held, settings)
        ):
            yield actions.CloseLease(lease.lease_id, f"nothing in it for {held.idle_s:.0f} s")


def _counted(
    snap: snapshot.Snapshot, deployment: snapshot.Deployment
) -> list[snapshot.KnownReplica]:
    """Return the replicas that count towards what is wanted: told to run, in a lease that stays."""
    staying = {
        held.lease.lease_id
        for held in snap.leases
        if held.lease.state in {fleet.LeaseState.RUNNING, fleet.LeaseState.UNKNOWN}
        and not held.leaving
    }
    gone = {slot.slot_id for held in snap.leases for slot in held.slots if slot.state.final}
    return [
        known
        for known in snap.replicas
        if known.key == deployment.key
        and known.run
        and known.replica.lease_id in staying
        and known.replica.slot_id not in gone
        and not replicas.replica_final(known.replica.state)
    ]


def _serves(known: snapshot.KnownReplica) -> bool:
    return known.run and known.replica.state is fleet.ReplicaState.SERVING


def _least_missed(known: snapshot.KnownReplica) -> tuple[bool, int, float, str]:
    """Order victims: not yet serving, then least interactive work, then the youngest."""
    stats = known.replica.stats
    serving = known.replica.state is fleet.ReplicaState.SERVING
    return (serving, stats.interactive if stats else 0, known.age_s, known.replica.replica_id)


def _name(deployment: snapshot.Deployment) -> str:
    return f"{deployment.spec.model} {deployment.spec.version}"

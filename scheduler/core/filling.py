"""From wanted numbers to starts, stops, lease asks and leases given back.

What is too much stops first, so that its GPUs count as room that comes; then what is missing starts, large
models first, so that they find whole holes. What is in a lease that rolls over goes on until its successor
serves. Whether interactive and batch replicas share leases (rungs 0 to 2) or live apart in serve and backfill
leases (rung 3 alone) is decided here and nowhere else.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from scheduler.contracts import fleet, ids
from scheduler.core import (
    actions,
    asks,
    gaps,
    leases,
    members,
    packing,
    placement,
    reclaim,
    rollover,
    snapshot,
    targets,
    unwanted,
)


class Settings(
    asks.Settings, gaps.Settings, leases.Settings, rollover.Settings, unwanted.Settings, Protocol
):
    """What filling needs to be told."""

    @property
    def idle_lease_s(self) -> float:
        """Seconds after which an empty lease is given back."""
        ...

    @property
    def quarantine_after(self) -> int:
        """Failed starts in a row that lead to quarantine."""
        ...

    @property
    def quarantine_s(self) -> float:
        """Seconds of quarantine."""
        ...


def fill(
    snap: snapshot.Snapshot,
    settings: Settings,
    wanted: Mapping[members.Key, targets.Target],
    counted: Mapping[members.Key, list[snapshot.KnownReplica]],
    notes: list[str],
) -> Iterator[actions.Action]:
    """Start what is missing, stop what is too much, ask for leases and give them back."""
    rolling = rollover.rolling(snap, settings)
    stopping: set[ids.ReplicaId] = {action.replica_id for action in unwanted.late(snap, settings)}
    lacking: list[gaps.Gap] = []
    for deployment in snap.deployments:
        mine = [
            known
            for known in counted.get(deployment.key, ())
            if known.replica.replica_id not in stopping
        ]
        for part in _parts(snap, settings, deployment, wanted[deployment.key], mine):
            surplus, gap = part
            for action in surplus:
                stopping.add(action.replica_id)
                yield action
            if gap is not None:
                lacking.append(gap)
    yield from unwanted.undeployed(snap, settings)
    for stop in _rolled(snap, settings, wanted, counted, rolling):
        stopping.add(stop.replica_id)
        yield stop
    lacking = list(gaps.in_order(lacking))
    gone = rolling | frozenset(
        held.lease.lease_id for held in snap.leases if snap.cordoned & set(held.lease.nodes)
    )
    taken = _taken_back(snap, settings, lacking, stopping, gone)
    if snap.jobs is not None:
        taken += asks.crossing(snap, settings)
        known = {action.lease_id for action in taken}
        again = asks.passed_over(snap, gone | known)
        taken += [action for action in again if action.lease_id not in known]
    yield from taken
    gone |= {action.lease_id for action in taken}
    available = placement.rooms(
        snap,
        silent_s=settings.agent_silent_s,
        stopping=stopping,
        closed={ids.LeaseId(lease_id) for lease_id in gone},
    )
    for gap in lacking:
        yield from _grow(snap, settings, notes, gap, available, gone, stopping)
    if snap.jobs is not None:
        closing = {action.lease_id for action in taken}
        for close in _give_back(snap, settings, available, rolling):
            if close.lease_id not in closing:
                yield close


def _taken_back(
    snap: snapshot.Snapshot,
    settings: Settings,
    lacking: Sequence[gaps.Gap],
    stopping: set[ids.ReplicaId],
    gone: frozenset[str],
) -> list[actions.CloseLease]:
    """Return the backfill leases that are closed for what serve leases have no room for."""
    if snap.jobs is None or 3 not in settings.rungs:
        return []
    if all(gap.kind is not fleet.LeaseKind.SERVE for gap in lacking):
        return []
    rooms = placement.rooms(
        snap,
        silent_s=settings.agent_silent_s,
        stopping=stopping,
        closed={ids.LeaseId(lease_id) for lease_id in gone},
    )
    wanted, spoken = gaps.unplaced(snap, settings, lacking, rooms)
    return list(reclaim.take_back(snap, wanted, stopping, spoken))


def _parts(
    snap: snapshot.Snapshot,
    settings: Settings,
    deployment: snapshot.Deployment,
    target: targets.Target,
    mine: Sequence[snapshot.KnownReplica],
) -> Iterator[tuple[list[actions.StopReplica | actions.ParkReplica], gaps.Gap | None]]:
    """Yield surplus and gap of a deployment: in one pool, or apart for serve and backfill leases."""
    shared = fleet.Role.INTERACTIVE if deployment.hold_batch else deployment.role
    if deployment.scaling is None or 2 in settings.rungs:
        pools = [(fleet.LeaseKind.SERVE, target.total, shared, list(mine))]
    else:
        kinds = members.kinds(snap)
        apart = fleet.Role.INTERACTIVE if shared is fleet.Role.SHARED else shared
        pools = [
            (kind, number, role, [k for k in mine if kinds[k.replica.lease_id] is kind])
            for kind, number, role in (
                (
                    fleet.LeaseKind.SERVE,
                    target.need - target.borrowed,
                    apart if 0 not in settings.rungs else shared,
                ),
                (fleet.LeaseKind.BACKFILL, target.lent + target.borrowed, fleet.Role.BATCH),
            )
        ]
    for kind, number, role, pool in pools:
        overdue = [known for known in pool if _overdue(known) and deployment.scaling is not None]
        # One that is late may still come: whichever is ready first stays, the others are surplus then.
        lacking = max(0, number - sum(map(members.serves, pool)))
        enough = number + min(len(overdue), lacking)
        surplus = len(pool) - enough
        stops = _surplus(snap, settings, deployment, pool, surplus) if surplus > 0 else []
        gap = None
        if surplus < 0:
            why = target.reason if deployment.scaling is not None else ""
            if overdue:
                why += f"; {len(overdue)} missed their budget of {overdue[0].budget_s:.0f} s"
            gap = gaps.Gap(deployment, -surplus, enough, kind, role, why)
        yield stops, gap


def _overdue(known: snapshot.KnownReplica) -> bool:
    """Return whether a start, or a wake, has missed the budget of the rung that ordered it."""
    # One that waits for its weights is not slow: their source is, and elsewhere it would be too.
    return 0 < known.budget_s < known.coming_s and not known.replica.staging


def _surplus(
    snap: snapshot.Snapshot,
    settings: Settings,
    deployment: snapshot.Deployment,
    pool: Sequence[snapshot.KnownReplica],
    surplus: int,
) -> list[actions.StopReplica | actions.ParkReplica]:
    """Choose victims: the least missed; those of a scaled model where they free whole holes."""
    wanted = len(pool) - surplus
    order = sorted(pool, key=members.least_missed)
    if deployment.scaling is not None:
        order = sorted(order, key=_gathered(pool))
    room = {held.lease.lease_id: held.park_gb for held in snap.leases}
    found: list[actions.StopReplica | actions.ParkReplica] = []
    for known in order[:surplus]:
        reason = f"{len(pool)} replicas of {members.name(deployment)}, {wanted} wanted"
        replica = known.replica
        size = deployment.scaling.park_gb if deployment.scaling else 0.0
        serving = replica.state is fleet.ReplicaState.SERVING
        if 2 in settings.rungs and serving and 0 < size <= room.get(replica.lease_id, 0.0):
            room[replica.lease_id] -= size
            found.append(actions.ParkReplica(replica.replica_id, settings.drain_s, reason))
        else:
            found.append(actions.StopReplica(replica.replica_id, settings.drain_s, reason))
    return found


def _gathered(pool: Sequence[snapshot.KnownReplica]) -> "_Key":
    """Order by role (batch goes first), then so that one lease after another empties."""
    counts: dict[str, int] = {}
    for known in pool:
        if known.wanted_role is fleet.Role.BATCH or not members.serves(known):
            counts[known.replica.lease_id] = counts.get(known.replica.lease_id, 0) + 1

    def key(known: snapshot.KnownReplica) -> tuple[bool, bool, int, str]:
        return (
            members.serves(known),
            known.wanted_role is not fleet.Role.BATCH,
            -counts.get(known.replica.lease_id, 0),
            known.replica.lease_id,
        )

    return key


class _Key(Protocol):
    def __call__(self, known: snapshot.KnownReplica) -> tuple[bool, bool, int, str]: ...


def _rolled(
    snap: snapshot.Snapshot,
    settings: Settings,
    wanted: Mapping[members.Key, targets.Target],
    counted: Mapping[members.Key, list[snapshot.KnownReplica]],
    rolling: frozenset[str],
) -> Iterator[actions.StopReplica]:
    """Stop what is in a lease that rolls once its successors serve, or when its time is nearly over."""
    if not rolling:
        return
    left = {held.lease.lease_id: rollover.left_s(held, snap) for held in snap.leases}
    whys = {held.lease.lease_id: rollover.why(held, snap) for held in snap.leases}
    serving = {key: sum(members.serves(known) for known in mine) for key, mine in counted.items()}
    for known in snap.replicas:
        replica = known.replica
        if replica.lease_id not in rolling or not known.run:
            continue
        target = wanted.get(known.key)
        enough = target is None or serving.get(known.key, 0) >= target.total
        if enough:
            reason = f"{whys[replica.lease_id]}, others serve"
        elif left[replica.lease_id] <= settings.drain_s * 1.5:
            reason = f"{whys[replica.lease_id]}: it drains now"
        else:
            continue
        yield actions.StopReplica(replica.replica_id, settings.drain_s, reason)


def _grow(
    snap: snapshot.Snapshot,
    settings: Settings,
    notes: list[str],
    gap: gaps.Gap,
    available: list[placement.Room],
    rolling: frozenset[str],
    stopping: set[ids.ReplicaId],
) -> Iterator[actions.Action]:
    """Start what is missing where there is room; ask for a lease for each that has none."""
    deployment, name = gap.deployment, members.name(gap.deployment)
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
    teams = gaps.owners(snap, settings)
    for _ in range(gap.missing):
        mine = gaps.open_to(gap, available, settings, teams)
        place = placement.find(
            mine, deployment.spec, new_slots=snap.jobs is not None, key=deployment.key
        )
        if paused and failures is not None:
            pause = failures.until - snap.now
            notes.append(f"{name}: next start in {pause:.1f} s, after: {failures.reason}")
        elif place is not None:
            yield from _placed(gap, place, notes)
        else:
            asked, why = asks.ask(snap, settings, deployment, gap.kind, available, rolling)
            if asked is None:
                notes.append(why)
                if deployment.scaling is not None and 2 in settings.rungs:
                    yield from _make_hole(snap, settings, gap, mine, stopping)
                return  # the next one would hear the same
            available.append(asks.promised(asked, deployment))
            yield asked


def _make_hole(
    snap: snapshot.Snapshot,
    settings: Settings,
    gap: gaps.Gap,
    rooms: Sequence[placement.Room],
    stopping: set[ids.ReplicaId],
) -> Iterator[actions.Action]:
    """Move small replicas together where the GPUs are there and scattered."""
    movable = [
        known
        for known in snap.replicas
        if members.serves(known) and known.replica.replica_id not in stopping
    ]
    spec = gap.deployment.spec
    alike = [room for room in rooms if room.hardware.place == spec.hardware.place]
    hole = packing.make_hole(alike, movable, spec.gpus, spec.hardware.memory_gb)
    for known in hole.moved if hole else ():
        stopping.add(known.replica.replica_id)
        reason = f"moved: {members.name(gap.deployment)} needs {spec.gpus} GPUs together"
        yield actions.StopReplica(known.replica.replica_id, settings.drain_s, reason)
    if hole is not None:
        # Nothing else of this plan may take what is to be its hole.
        hole.room.free_gpus, hole.room.used = 0, True
        hole.room.empty, hole.room.leaving = [], []


def _placed(gap: gaps.Gap, place: placement.Place, notes: list[str]) -> Iterator[actions.Action]:
    deployment, name = gap.deployment, members.name(gap.deployment)
    reason = f"{gap.missing} of {gap.wanted} replicas of {name} missing"
    if gap.why:
        reason += f": {gap.why}"
    if place.wakes is not None:
        yield actions.WakeReplica(place.wakes, gap.role, reason)
    elif not place.waits_for and place.room.lease_id is not None:
        yield actions.StartReplica(
            place.room.lease_id, place.slot_id, deployment.spec, gap.role, reason
        )
    elif place.close:
        for slot in place.close:
            why = f"{name} needs {deployment.spec.gpus} GPUs in one slot"
            yield actions.CloseSlot(slot.lease_id, slot.slot_id, why)
    else:
        notes.append(f"{name}: {place.waits_for}")


def _give_back(
    snap: snapshot.Snapshot,
    settings: Settings,
    available: Sequence[placement.Room],
    rolling: frozenset[str],
) -> Iterator[actions.CloseLease]:
    """Close leases that nothing is in, nothing of this plan needs, and that have been so for a while."""
    used = {room.lease_id for room in available if room.used}
    holding = {known.replica.lease_id for known in snap.replicas if not known.parked}
    holding |= {stranger.replica.lease_id for stranger in snap.strangers}
    for held in snap.leases:
        lease = held.lease
        if lease.lease_id in used or lease.lease_id in holding:
            continue
        if lease.state is fleet.LeaseState.PENDING:
            drained = held.drain_asked and f"drained by {held.drain_asked}"
            reason = drained or "still waiting in Slurm and no longer needed"
            yield actions.CloseLease(lease.lease_id, reason)
        elif lease.state is not fleet.LeaseState.RUNNING or leases.silent(held, settings):
            continue
        elif lease.lease_id in rolling:
            reason = held.drain_asked and rollover.why(held, snap)
            yield actions.CloseLease(lease.lease_id, reason or "its successor serves")
        elif held.idle_s > settings.idle_lease_s:
            yield actions.CloseLease(lease.lease_id, f"nothing in it for {held.idle_s:.0f} s")

"""Leases, slots and replicas in the registry: the leader's memory of what it holds and wants."""

import dataclasses
from collections.abc import Iterable, Sequence

import sqlalchemy as sa
from sqlalchemy import orm

from scheduler.contracts import errors, fleet, ids, spec_json, stored
from scheduler.core import replicas, snapshot
from scheduler.runtime.registry import database, journal, tables

_KINDS, _STATES = frozenset(fleet.LeaseKind), frozenset(fleet.LeaseState)
ENDED_KEPT = 1000  # ended leases whose stamps are still known; older jobs are long gone from Slurm


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaRow:
    """A replica as the registry keeps it."""

    replica: fleet.Replica
    run: bool
    wanted_role: fleet.Role
    drain_s: float
    drain_asked: bool
    created_us: int
    asleep: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """Everything that a new leader has to know: what is open, and which leases have ended."""

    leases: tuple[fleet.Lease, ...]
    revisions: dict[ids.LeaseId, int]
    slots: tuple[snapshot.Slot, ...]
    replicas: tuple[ReplicaRow, ...]
    ended: frozenset[ids.LeaseId]


class Holdings:
    """Reads and writes of leases, slots and replicas. Writes are fenced by the leader's epoch."""

    def __init__(self, base: database.Database) -> None:
        self._base = base

    def load(self) -> Held:
        """Return what is open."""
        with self._base.read() as session:
            rows = session.scalars(
                sa.select(tables.Lease)
                .where(tables.Lease.state != fleet.LeaseState.ENDED)
                .order_by(tables.Lease.requested_us, tables.Lease.lease_id)
            ).all()
            leases = tuple(_lease(row) for row in rows)
            open_ids = [row.lease_id for row in rows]
            by_id = {lease.lease_id: lease for lease in leases}
            slots = session.scalars(
                sa.select(tables.Slot)
                .where(tables.Slot.lease_id.in_(open_ids))
                .order_by(tables.Slot.slot_id)
            ).all()
            known = session.scalars(
                sa.select(tables.Replica)
                .where(tables.Replica.state.not_in(replicas.FINALS))
                .order_by(tables.Replica.created_us, tables.Replica.replica_id)
            ).all()
            ended = session.scalars(
                sa.select(tables.Lease.lease_id)
                .where(tables.Lease.state == fleet.LeaseState.ENDED)
                .order_by(tables.Lease.ended_us.desc())
                .limit(ENDED_KEPT)
            ).all()
            return Held(
                leases=leases,
                revisions={ids.LeaseId(row.lease_id): row.revision for row in rows},
                slots=tuple(_slot(row) for row in slots),
                replicas=tuple(_replica(row, by_id) for row in known),
                ended=frozenset(ids.LeaseId(lease_id) for lease_id in ended),
            )

    def leases(self, *, limit: int = 200) -> tuple[fleet.Lease, ...]:
        """Return leases for people: open ones first, then the newest ended."""
        order = sa.case((tables.Lease.state == fleet.LeaseState.ENDED, 1), else_=0)
        query = sa.select(tables.Lease).order_by(order, tables.Lease.requested_us.desc())
        with self._base.read() as session:
            return tuple(_lease(row) for row in session.scalars(query.limit(limit)))

    def replica_rows(self, *, limit: int = 500) -> tuple[ReplicaRow, ...]:
        """Return replicas for people, the newest first, ended ones too."""
        query = sa.select(tables.Replica).order_by(tables.Replica.created_us.desc()).limit(limit)
        with self._base.read() as session:
            rows = session.scalars(query).all()
            wanted = {row.lease_id for row in rows}
            found = session.scalars(
                sa.select(tables.Lease).where(tables.Lease.lease_id.in_(wanted))
            )
            by_id = {ids.LeaseId(row.lease_id): _lease(row) for row in found}
            return tuple(_replica(row, by_id) for row in rows)

    def ask_drain(self, replica_id: str) -> None:
        """Note that an admin wants a replica gone; raises `errors.NotFound`."""
        with self._base.write() as session:
            row = session.get(tables.Replica, replica_id)
            if row is None or replicas.replica_final(fleet.ReplicaState(row.state)):
                raise errors.NotFound(f"{replica_id}: no such replica; see `fctl show replicas`")
            row.drain_asked = True

    def drains(self) -> frozenset[ids.ReplicaId]:
        """Return the replicas that admins want gone and that still run."""
        query = sa.select(tables.Replica.replica_id).where(
            tables.Replica.drain_asked.is_(True), tables.Replica.run.is_(True)
        )
        with self._base.read() as session:
            return frozenset(ids.ReplicaId(found) for found in session.scalars(query))

    def save_lease(self, epoch: int, lease: fleet.Lease, now_us: int) -> None:
        """Insert or overwrite a lease; a new state is an event."""
        with self._base.write(epoch) as session:
            row = session.get(tables.Lease, lease.lease_id)
            if row is None:
                row = tables.Lease(lease_id=lease.lease_id, revision=0, kind=lease.kind.value)
                session.add(row)
            before = row.state
            _fill_lease(row, lease)
            if before != lease.state:
                journal.note(
                    session, now_us, lease.lease_id, f"{lease.state}: {lease.reason}".rstrip(": ")
                )

    def save_wishes(
        self,
        epoch: int,
        lease_id: ids.LeaseId,
        revision: int,
        *,
        slots: Iterable[snapshot.Slot] = (),
        wishes: Iterable[ReplicaRow] = (),
    ) -> None:
        """Write what is newly wanted in a lease, with the revision that its agent will be told."""
        with self._base.write(epoch) as session:
            row = session.get(tables.Lease, lease_id)
            if row is None:
                raise errors.NotFound(f"{lease_id}: no such lease")
            row.revision = max(row.revision, revision)
            for slot in slots:
                _fill_slot(session, slot)
            session.flush()
            for wish in wishes:
                _fill_replica(session, wish)

    def save_news(
        self,
        epoch: int,
        news: Sequence[fleet.Replica],
        slots: Sequence[snapshot.Slot],
        now_us: int,
    ) -> None:
        """Write down what replicas and slots have become; unknown ones are left out."""
        if not news and not slots:
            return
        with self._base.write(epoch) as session:
            for replica in news:
                row = session.get(tables.Replica, replica.replica_id)
                if row is None:
                    continue
                row.phases = dict(replica.phases_s)
                row.state = replica.state.value
                row.reason = replica.reason
                if replicas.replica_final(replica.state) and not row.ended_us:
                    row.ended_us = now_us
                journal.note(
                    session,
                    now_us,
                    replica.replica_id,
                    f"{replica.state}: {replica.reason}".rstrip(": "),
                )
            for slot in slots:
                found = session.get(tables.Slot, slot.slot_id)
                if found is not None:
                    found.state = slot.state.value


def _lease(row: tables.Lease) -> fleet.Lease:
    return fleet.Lease(
        lease_id=ids.LeaseId(row.lease_id),
        cluster=row.cluster,
        # What only a newer release knows is protected, and is Slurm's to tell.
        kind=fleet.LeaseKind(row.kind) if row.kind in _KINDS else fleet.LeaseKind.SERVE,
        team=row.team,
        state=fleet.LeaseState(row.state) if row.state in _STATES else fleet.LeaseState.UNKNOWN,
        gpus=row.gpus,
        gres_type=row.gres_type,
        hardware=stored.read(fleet.Hardware, row.hardware),
        partition=row.partition,
        slurm_job_id=row.slurm_job_id,
        nodes=tuple(row.nodes),
        walltime_s=row.walltime_s,
        requested_us=row.requested_us,
        started_us=row.started_us,
        ended_us=row.ended_us,
        reason=row.reason,
        whole_nodes=row.whole_nodes,
        time_min_s=row.time_min_s,
        exclude=tuple(row.exclude),
    )


def _fill_lease(row: tables.Lease, lease: fleet.Lease) -> None:
    row.cluster = lease.cluster
    row.team = lease.team
    row.state = lease.state.value
    row.gpus = lease.gpus
    row.gres_type = lease.gres_type
    row.hardware = {} if lease.hardware == fleet.ANY_NODE else dataclasses.asdict(lease.hardware)
    row.partition = lease.partition
    row.slurm_job_id = lease.slurm_job_id
    row.nodes = list(lease.nodes)
    row.walltime_s = lease.walltime_s
    row.requested_us = lease.requested_us
    row.started_us = lease.started_us
    row.ended_us = lease.ended_us
    row.reason = lease.reason
    row.whole_nodes = lease.whole_nodes
    row.time_min_s = lease.time_min_s
    row.exclude = list(lease.exclude)


def _slot(row: tables.Slot) -> snapshot.Slot:
    return snapshot.Slot(
        slot_id=ids.SlotId(row.slot_id),
        lease_id=ids.LeaseId(row.lease_id),
        gpus=row.gpus,
        cpus=row.cpus,
        close=row.close,
        state=replicas.SlotState(row.state),
    )


def _fill_slot(session: orm.Session, slot: snapshot.Slot) -> None:
    row = session.get(tables.Slot, slot.slot_id)
    if row is None:
        row = tables.Slot(slot_id=slot.slot_id, lease_id=slot.lease_id)
        session.add(row)
    row.gpus = slot.gpus
    row.cpus = slot.cpus
    row.close = slot.close
    row.state = slot.state.value


def _replica(row: tables.Replica, leases: dict[ids.LeaseId, fleet.Lease]) -> ReplicaRow:
    lease = leases.get(ids.LeaseId(row.lease_id))
    what = spec_json.of_others(row.spec, row.model, row.version, lease.gpus if lease else 1)
    role = fleet.role_of_others(row.role)
    over = lease.spread(what.gpus) if lease else 1
    replica = fleet.Replica(
        replica_id=ids.ReplicaId(row.replica_id),
        cluster=lease.cluster if lease else "",
        lease_id=ids.LeaseId(row.lease_id),
        slot_id=ids.SlotId(row.slot_id),
        slurm_job_id=lease.slurm_job_id if lease else "",
        node=lease.nodes[0] if lease and lease.nodes else "",
        spec=what,
        state=fleet.ReplicaState(row.state),
        role=role,
        reason=row.reason,
        phases_s=row.phases,
        nodes=lease.nodes if lease and 1 < over == len(lease.nodes) else (),
    )
    return ReplicaRow(
        replica,
        row.run,
        role,
        row.drain_s,
        row.drain_asked,
        row.created_us,
        row.asleep,
    )


def _fill_replica(session: orm.Session, wish: ReplicaRow) -> None:
    replica = wish.replica
    row = session.get(tables.Replica, replica.replica_id)
    if row is None:
        row = tables.Replica(
            replica_id=replica.replica_id,
            lease_id=replica.lease_id,
            slot_id=replica.slot_id,
            model=replica.spec.model,
            version=replica.spec.version,
            spec=spec_json.write(replica.spec),
            drain_asked=False,
            created_us=wish.created_us,
            ended_us=0,
        )
        session.add(row)
    row.run = wish.run
    row.role = wish.wanted_role.value
    row.drain_s = wish.drain_s
    row.asleep = wish.asleep
    row.state = replica.state.value
    row.reason = replica.reason
    row.phases = dict(replica.phases_s)

"""Writes wishes: the registry first, fenced by the epoch, then the lease's revision counts."""

import asyncio

from scheduler.contracts import clock, fleet, ids
from scheduler.core import snapshot
from scheduler.runtime import entries, live, writeoff
from scheduler.runtime.registry import store


class Stale(Exception):
    """The state has moved on since the plan was made: the action is left out."""


class Writer:
    """What every action needs: the newest state of what it is about, and a way to write it down."""

    def __init__(
        self,
        picture: live.Live,
        registry: store.Registry,
        time: clock.Clock,
        write_off: writeoff.WriteOff = writeoff.nowhere,
    ) -> None:
        self.write_off = write_off
        self._live = picture
        self._registry = registry
        self._time = time

    async def wish(
        self,
        entry: entries.LeaseEntry,
        *,
        slot: snapshot.Slot | None = None,
        known: entries.ReplicaEntry | None = None,
    ) -> None:
        """Write a wish with the lease's next revision, then let it count."""
        revision = entry.revision + 1
        await asyncio.to_thread(
            self._registry.holdings.save_wishes,
            self._live.epoch,
            entry.lease.lease_id,
            revision,
            slots=[slot] if slot is not None else [],
            wishes=[known.row()] if known is not None else [],
        )
        # Its own, if what is kept in memory alone has moved it meanwhile: each says something else.
        entry.revision += 1

    async def save_lease(self, lease: fleet.Lease) -> None:
        """Insert or overwrite a lease."""
        await asyncio.to_thread(
            self._registry.holdings.save_lease, self._live.epoch, lease, self._time.wall_us()
        )

    def confirm(self) -> None:
        """Raise `database.Fenced` if another broker leads; blocks; asked right before Slurm is told."""
        self._registry.lead.confirm(self._live.epoch)

    def lease(self, lease_id: ids.LeaseId) -> entries.LeaseEntry:
        """Return an open lease; raises `Stale`."""
        entry = self._live.leases.get(lease_id)
        if entry is None:
            raise Stale(f"lease {lease_id} has ended")
        return entry

    def replica(self, replica_id: ids.ReplicaId) -> entries.ReplicaEntry:
        """Return a replica that is not final; raises `Stale`."""
        known = self._live.replicas.get(replica_id)
        if known is None:
            raise Stale(f"replica {replica_id} has ended")
        return known

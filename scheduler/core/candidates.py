"""The fleet as routing reads it: made ready when a view comes, so that a decision builds nothing.

A group holds the replicas that a kind of request may go to as far as that changes only with a view
(model, version, adapter, role, state); what changes with each request (load, room, marks) is kept by its
pool or read by the decision itself. Pure: the time is an argument.
"""

import collections
from collections.abc import Iterable

from scheduler.contracts import fleet, ids
from scheduler.core import load
from scheduler.core.contenders import PREFILL_STEPS, Member
from scheduler.core.groups import Group, Pool

_Kind = tuple[str, str, bool]  # model, version, whether batch


class Fleet:
    """Every serving replica, in groups.

    Args:
        loads: what we have in flight.
        long_share: part of a group's replicas that take long prompts.
        prefill_steps: steps of a replica's engine that it is given prompts for ahead.
    """

    def __init__(
        self,
        loads: load.Loads,
        long_share: float = 0.25,
        prefill_steps: float = PREFILL_STEPS,
    ) -> None:
        self._loads = loads
        self._long_share = long_share
        self._prefill_steps = prefill_steps
        self._members: dict[ids.ReplicaId, Member] = {}
        self._pools: dict[_Kind, Pool] = {}
        self._groups: dict[tuple[str, str, str | None, bool], Group] = {}
        self._shapes: tuple[object, ...] = ()

    def observe(self, replicas: Iterable[fleet.Replica], now: float) -> None:
        """Take in the newest view, received at monotonic second ``now``."""
        members: dict[ids.ReplicaId, Member] = {}
        for replica in replicas:
            member = self._members.get(replica.replica_id)
            if member is None or member.replica.incarnation != replica.incarnation:
                member = Member(replica, self._loads.at(replica.replica_id), self._prefill_steps)
            member.update(replica, now)
            members[replica.replica_id] = member
        self._members = members
        self._loads.forget(members.keys())
        shapes = tuple(_shape(member.replica) for member in members.values())
        if shapes != self._shapes:
            self._shapes = shapes
            self._regroup()
        else:
            for pool in self._pools.values():
                pool.refresh()

    def members(self) -> Iterable[Member]:
        """Return every replica of the newest view."""
        return self._members.values()

    def member(self, replica_id: ids.ReplicaId) -> Member | None:
        """Return a replica of the newest view."""
        return self._members.get(replica_id)

    def pools(self) -> Iterable[Pool]:
        """Return every pool of the newest view."""
        return self._pools.values()

    def group(self, model: str, version: str, adapter: str | None, *, batch: bool) -> Group | None:
        """Return the replicas that serve this kind of request, or None if there is none."""
        return self._groups.get((model, version, adapter, batch))

    def _regroup(self) -> None:
        """Sort serving replicas into pools and groups; groups with the same members are one object."""
        for pool in self._pools.values():
            pool.close()
        pools: collections.defaultdict[_Kind, list[Member]] = collections.defaultdict(list)
        for member in self._members.values():
            replica = member.replica
            if replica.state is not fleet.ReplicaState.SERVING or not replica.address:
                continue
            if replica.role is not fleet.Role.BATCH:
                pools[replica.spec.model, replica.spec.version, False].append(member)
            if replica.role is not fleet.Role.INTERACTIVE:
                pools[replica.spec.model, replica.spec.version, True].append(member)
        self._groups = {}
        self._pools = {}
        for kind, members in pools.items():
            pool = self._pools[kind] = Pool(members, batch=kind[2])
            self._divide(kind, pool)

    def _divide(self, kind: _Kind, pool: Pool) -> None:
        """Make a pool's groups: all of it, and those that have each adapter."""
        model, version, batch = kind
        lists: collections.defaultdict[str | None, list[Member]] = collections.defaultdict(list)
        for member in pool.members:
            for adapter in (None, *member.replica.adapters_ready):
                lists[adapter].append(member)
        made: dict[tuple[ids.ReplicaId, ...], Group] = {}
        for adapter, members in lists.items():
            names = tuple(member.replica_id for member in members)
            if names not in made:
                made[names] = Group(pool, members, self._long_share)
            self._groups[model, version, adapter, batch] = made[names]


def _shape(replica: fleet.Replica) -> tuple[object, ...]:
    """Return what decides a replica's groups, cheap to compare."""
    spec = replica.spec
    return (
        replica.replica_id,
        replica.incarnation,
        replica.state,
        replica.role,
        replica.address,
        spec.model,
        spec.version,
        spec.max_context,
        replica.adapters_ready,
    )

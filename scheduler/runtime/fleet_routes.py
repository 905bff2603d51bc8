"""/admin: what an operator does to the running fleet (drain, resume, preempt, hold batch); one replica whole.

A change is a wish in the registry (`registry.wishes`); the leading broker carries it out within a second.
"""

import dataclasses
from typing import Any

import fastapi
import pydantic

from scheduler.contracts import clock, errors, fleet, ports
from scheduler.core import startup
from scheduler.runtime import admin, fleet_metrics, listing, showing
from scheduler.runtime.registry import cordons, store, wishes

_SERVING = fleet.ReplicaState.SERVING


class Why(pydantic.BaseModel):
    """Why something is done, for those who look later."""

    model_config = pydantic.ConfigDict(extra="forbid")

    reason: admin.Name = ""


def router(
    registry: store.Registry, source: ports.FleetSource, time: clock.Clock
) -> fastapi.APIRouter:
    """Return the routes."""
    routes = fastapi.APIRouter(prefix="/admin", tags=["admin"], route_class=admin.Guarded)
    _add_reads(routes, registry, source)
    _add_batch(routes, registry, time)
    _add_drains(routes, registry, time)
    _add_preempt(routes, registry, source, time)
    return routes


def _add_reads(
    routes: fastapi.APIRouter, registry: store.Registry, source: ports.FleetSource
) -> None:
    @routes.get("/wishes")
    def standing(who: admin.Reader) -> dict[str, Any]:
        return dataclasses.asdict(registry.wishes.read())

    @routes.get("/fleet-metrics")
    def metrics(who: admin.Admin) -> fastapi.Response:
        return fastapi.Response(fleet_metrics.text(registry), media_type=fleet_metrics.PATH_TYPE)

    @routes.get("/forecast")
    def forecast(who: admin.Reader) -> dict[str, Any]:
        fact = registry.journal.fact("forecast")
        return {"at_us": fact.at_us, **fact.body} if fact else {"models": [], "learned_us": 0}

    @routes.get("/replicas/{replica_id}")
    def replica(who: admin.Reader, replica_id: str) -> dict[str, Any]:
        found = _replica(registry, source, replica_id)
        leases = {lease.lease_id: lease for lease in registry.holdings.leases()}
        lease = leases.get(found.lease_id)
        fact = registry.journal.fact("starts")
        key = f"{found.spec.model} {found.spec.version}"
        usual = (fact.body.get(key) if fact else None) or {}
        log = registry.journal.events(1000)
        return {
            "replica": showing.told(found, registry.catalog.routes().get(found.spec.model), who),
            "lease": None if lease is None else dataclasses.asdict(lease),
            "phases_s": {
                name: found.phases_s[name] for name in startup.PHASES if name in found.phases_s
            },
            "usual_s": usual,
            "events": [
                {"at_us": entry.at_us, **entry.body} for entry in log if entry.name == replica_id
            ][:20],
        }


def _add_batch(routes: fastapi.APIRouter, registry: store.Registry, time: clock.Clock) -> None:
    @routes.post("/batch/hold")
    def hold(who: admin.Admin, why: Why | None = None) -> dict[str, Any]:
        registry.wishes.hold_batch(_mark(who.user, why, time))
        return {"batch": "held"}

    @routes.post("/batch/release")
    def release(who: admin.Admin) -> dict[str, Any]:
        registry.wishes.release_batch(who.user, time.wall_us())
        return {"batch": "released"}


def _add_drains(routes: fastapi.APIRouter, registry: store.Registry, time: clock.Clock) -> None:
    @routes.post("/leases/{lease_id}/drain")
    def drain_lease(who: admin.Admin, lease_id: str, why: Why | None = None) -> dict[str, Any]:
        _open_lease(registry, lease_id)
        registry.wishes.drain(lease_id, _mark(who.user, why, time))
        return {"lease_id": lease_id, "drain": True}

    @routes.post("/leases/{lease_id}/resume")
    def resume_lease(who: admin.Admin, lease_id: str) -> dict[str, Any]:
        registry.wishes.resume(lease_id, who.user, time.wall_us())
        return {"lease_id": lease_id, "drain": False}

    @routes.post("/nodes/{node}/drain")
    def drain_node(who: admin.Admin, node: str, why: Why | None = None) -> dict[str, Any]:
        known = registry.journal.fact("nodes")
        if known is not None and node not in {each["name"] for each in known.body["nodes"]}:
            raise errors.NotFound(f"{node}: no such node; see `fctl show nodes`")
        mark = _mark(who.user, why, time)
        # Kept off as well, or what leaves would come back.
        registry.cordons.add(
            cordons.Cordon(node, mark.reason or "drained", who.user, mark.since_us)
        )
        registry.wishes.drain(node, mark)
        return {"node": node, "drain": True}

    @routes.post("/nodes/{node}/resume")
    def resume_node(who: admin.Admin, node: str) -> dict[str, Any]:
        now_us = time.wall_us()
        drained = node in registry.wishes.read().drains
        if drained:
            registry.wishes.resume(node, who.user, now_us)
        cordon = registry.cordons.all().get(node)
        if cordon is not None and cordon.holds(now_us):
            registry.cordons.end(node, who.user, now_us)
        elif not drained:
            raise errors.NotFound(f"{node}: neither drained nor cordoned; see `fctl show nodes`")
        return {"node": node, "drain": False}


def _add_preempt(
    routes: fastapi.APIRouter,
    registry: store.Registry,
    source: ports.FleetSource,
    time: clock.Clock,
) -> None:
    @routes.post("/replicas/{replica_id}/preempt")
    def preempt(
        who: admin.Admin, replica_id: str, dry_run: bool = False, why: Why | None = None
    ) -> dict[str, Any]:
        found = _replica(registry, source, replica_id)
        if found.state in _OVER:
            raise errors.NotFound(f"{replica_id}: it is {found.state}; see `fctl show replicas`")
        told = consequences(found, source.view(), _targets(registry))
        if not dry_run:
            registry.wishes.preempt(replica_id, _mark(who.user, why, time))
        return {**told, "done": not dry_run}


_OVER = frozenset(
    {fleet.ReplicaState.STOPPED, fleet.ReplicaState.LOST, fleet.ReplicaState.QUARANTINED}
)


def consequences(
    victim: fleet.Replica, view: fleet.FleetView | None, targets: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return what taking a replica's GPUs does, by what is known now: who is hit and who takes over."""
    stats = victim.stats or fleet.ReplicaStats(0, victim.spec.seats)
    others = [
        replica
        for replica in (view.replicas if view else ())
        if replica.spec.model == victim.spec.model
        and replica.replica_id != victim.replica_id
        and replica.state is _SERVING
    ]
    takers = [replica for replica in others if replica.role is not fleet.Role.BATCH]
    free = sum(replica.stats.free if replica.stats else replica.spec.seats for replica in takers)
    wanted = sum(
        target["need"] + target["lent"]
        for target in targets
        if (target["model"], target["version"]) == (victim.spec.model, victim.spec.version)
    )
    same = sum(replica.spec.version == victim.spec.version for replica in others)
    return {
        "replica_id": victim.replica_id,
        "model": victim.spec.model,
        "version": victim.spec.version,
        "state": victim.state.value,
        "role": victim.role.value,
        "lease_id": victim.lease_id,
        "node": victim.node,
        "gpus": listing.whole(victim.spec.gpus / victim.spec.hardware.parts),
        "streams": stats.interactive,
        "batch_lines": stats.batch,
        "others_serving": len(takers),
        "free_seats": free,
        "without_seat": max(0, stats.interactive - free),
        "wanted": wanted,
        "replaced": wanted > same,
    }


def _targets(registry: store.Registry) -> list[dict[str, Any]]:
    fact = registry.journal.fact("broker")
    return list(fact.body.get("targets", ())) if fact else []


def _replica(registry: store.Registry, source: ports.FleetSource, replica_id: str) -> fleet.Replica:
    view = source.view()
    for replica in view.replicas if view else ():
        if replica.replica_id == replica_id:
            return replica
    for row in registry.holdings.replica_rows():
        if row.replica.replica_id == replica_id:
            return row.replica
    raise errors.NotFound(f"{replica_id}: no such replica; see `fctl show replicas -a`")


def _open_lease(registry: store.Registry, lease_id: str) -> fleet.Lease:
    for lease in registry.holdings.leases():
        if lease.lease_id == lease_id and lease.state is not fleet.LeaseState.ENDED:
            return lease
    raise errors.NotFound(f"{lease_id}: no such lease; see `fctl show leases`")


def _mark(user: str, why: Why | None, time: clock.Clock) -> wishes.Mark:
    return wishes.Mark(user, why.reason if why else "", time.wall_us())

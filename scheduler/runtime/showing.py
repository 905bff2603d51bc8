"""What /admin shows of models, replicas and plans, and to whom: no secret, no other team's adapter."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from scheduler.contracts import errors, fleet, ports, requests
from scheduler.runtime import listing, overlap
from scheduler.runtime.registry import store, wishes


def model_list(
    registry: store.Registry, source: ports.FleetSource, who: requests.Caller
) -> list[dict[str, Any]]:
    """Return each model that a caller may know of: its versions, wanted, and how many in which state."""
    view = source.view()
    replicas = view.replicas if view is not None else ()
    routes = registry.catalog.routes()
    tiers = registry.catalog.tiers()
    targets = _targets(registry)
    expected = _expected(registry)
    found: dict[str, dict[str, Any]] = {}
    for deployment in registry.catalog.deployments():
        spec = deployment.spec
        route = routes.get(spec.model)
        if not _open_to(who, spec.model, route):
            continue
        entry = found.setdefault(
            spec.model,
            {
                "model": spec.model,
                "max_context": route.max_context if route else spec.max_context,
                "tiers": list(tiers.get(spec.model, ())),
                "adapters": _own(route.adapters, route, who) if route else [],
                "hold_batch": deployment.hold_batch,
                "forecast": expected.get(spec.model),
                "versions": [],
            },
        )
        states: dict[str, int] = {}
        for replica in replicas:
            if (replica.spec.model, replica.spec.version) == deployment.key:
                states[replica.state.value] = states.get(replica.state.value, 0) + 1
        entry["versions"].append(
            {
                "version": spec.version,
                "engine": spec.engine.value,
                "weight": route.weights.get(spec.version, 0) if route else 0,
                "wanted": deployment.replicas,
                "states": states,
                "role": deployment.role.value,
                "seats": spec.seats,
                "gpus": listing.whole(spec.gpus / spec.hardware.parts),
                "quarantined_until_us": deployment.quarantined_until_us,
                "quarantine_reason": deployment.quarantine_reason,
                "target": targets.get(deployment.key),
            }
        )
    return list(found.values())


def _targets(registry: store.Registry) -> dict[tuple[str, str], dict[str, Any]]:
    """Return what the planner wanted last of each deployment."""
    broker = registry.journal.fact("broker")
    listed = broker.body.get("targets", ()) if broker else ()
    return {(target["model"], target["version"]): target for target in listed}


def _expected(registry: store.Registry) -> dict[str, dict[str, Any]]:
    """Return what the forecast says of each model's next hour."""
    fact = registry.journal.fact("forecast")
    models = fact.body["models"] if fact else ()
    return {
        model["model"]: max(model["hours"][:2], key=lambda hour: hour["upper"])
        for model in models
        if model["hours"]
    }


def drained(lease: fleet.Lease, drains: Mapping[str, wishes.Mark]) -> str:
    """Return who drains a lease, or a node of it, and why."""
    marks = (drains.get(name) for name in (lease.lease_id, *lease.nodes))
    return next((f"drained by {mark.told()}" for mark in marks if mark is not None), "")


def _open_to(who: requests.Caller, model: str, route: fleet.Route | None) -> bool:
    """Return whether a caller may know of a model: the key names it, and the model its team."""
    if who.admin:
        return True
    if who.models and model not in who.models:
        return False
    return route is None or not route.callers or who.team in route.callers


def _own(names: Iterable[str], route: fleet.Route | None, who: requests.Caller) -> list[str]:
    """Return the adapters that a caller may know of: everybody's, and those of its own team."""
    teams = {} if route is None or who.admin else route.adapter_teams
    return [name for name in names if teams.get(name, who.team) == who.team]


def replica_list(
    registry: store.Registry, source: ports.FleetSource, who: requests.Caller, *, ended: bool
) -> list[dict[str, Any]]:
    """Return the replicas that gateways see, and the ended ones of the registry if asked for."""
    view = source.view()
    live = {replica.replica_id: replica for replica in (view.replicas if view else ())}
    rows = {row.replica.replica_id: row.replica for row in registry.holdings.replica_rows()}
    over = {fleet.ReplicaState.STOPPED, fleet.ReplicaState.LOST, fleet.ReplicaState.QUARANTINED}
    found = [
        *live.values(),
        *(
            replica
            for replica_id, replica in rows.items()
            if replica_id not in live and (ended or replica.state not in over)
        ),
    ]
    routes = registry.catalog.routes()
    return [told(replica, routes.get(replica.spec.model), who) for replica in found]


def explanation(
    registry: store.Registry, source: ports.FleetSource, who: requests.Caller, model: str
) -> dict[str, Any]:
    """Return why things are as they are: notes of the last tick, the last plan, and the models."""
    models = model_list(registry, source, who)
    if model:
        models = [entry for entry in models if entry["model"] == model]
        if not models:
            raise errors.ModelNotFound(f"{model}: not deployed here; see `fctl show models`")
    broker = registry.journal.fact("broker")
    rolled = registry.journal.fact(overlap.FACT)
    plans = registry.journal.plans(1)
    return {
        "broker": {"at_us": broker.at_us, **broker.body} if broker else None,
        "plan": {"at_us": plans[0].at_us, **plans[0].body} if plans else None,
        "wishes": dataclasses.asdict(registry.wishes.read()),
        "models": models,
        "rollover": rolled.body if rolled else None,
    }


def told(replica: fleet.Replica, route: fleet.Route | None, who: requests.Caller) -> dict[str, Any]:
    """Return a replica without the path of its secret, and without other teams' adapters."""
    entry = dataclasses.asdict(replica)
    del entry["secret_file"]
    spec = entry["spec"]
    spec["adapters"] = {name: spec["adapters"][name] for name in _own(spec["adapters"], route, who)}
    if replica.adapters is not None:
        own = set(_own((one.name for one in replica.adapters), route, who))
        entry["adapters"] = [one for one in entry["adapters"] if one["name"] in own]
    return entry

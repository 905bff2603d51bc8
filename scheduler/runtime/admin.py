"""/admin: what operators see and change, mounted by the gateway behind its authentication.

Reading models, replicas, leases, nodes, queues and the last plan needs any credential; API keys and
every change need an admin. A change is a wish in the registry; the leading broker carries it out. No
answer holds a secret, except the token of a key that was just made.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any

import fastapi
import pydantic
from sqlalchemy import exc

from scheduler.contracts import clock, errors, fleet, ports, requests, times
from scheduler.runtime import showing
from scheduler.runtime.registry import cordons, keys, store

MAX_REPLICAS = 10_000  # far above any site; a slip of the finger must not flood Slurm with jobs


def _printable(text: str) -> str:
    """Names end up in tables, logs and reports, each of them one line of a terminal."""
    if not text.isprintable():
        raise ValueError(
            "must not contain control characters, line breaks or half a surrogate pair"
        )
    return text


Name = Annotated[str, pydantic.Field(max_length=256), pydantic.AfterValidator(_printable)]
Reason = Annotated[str, pydantic.Field(max_length=1024), pydantic.AfterValidator(_printable)]


class NewKey(pydantic.BaseModel):
    """What an API key should allow; `expires_us` is UTC µs, 0 for never."""

    model_config = pydantic.ConfigDict(extra="forbid")

    team: Name
    user: Name
    tiers: list[requests.Tier] = [requests.Tier.INTERACTIVE, requests.Tier.STANDARD]
    models: list[Name] = pydantic.Field([], max_length=1000)
    admin: bool = False
    coordinator: bool = False
    comment: Name = ""
    expires_us: int = pydantic.Field(0, ge=0, le=times.LAST_US)


class Scale(pydantic.BaseModel):
    """How many replicas of a model's version are kept warm; null: what forebay.toml says."""

    model_config = pydantic.ConfigDict(extra="forbid")

    replicas: int | None = pydantic.Field(ge=0, le=MAX_REPLICAS)
    version: Name | None = None


class Cordon(pydantic.BaseModel):
    """Why a node is kept off."""

    model_config = pydantic.ConfigDict(extra="forbid")

    reason: Name = pydantic.Field(min_length=1)


def router(
    registry: store.Registry, source: ports.FleetSource, time: clock.Clock
) -> fastapi.APIRouter:
    """Return the routes; the app must set ``request.state.caller`` and map `errors.ForebayError`."""
    routes = fastapi.APIRouter(prefix="/admin", tags=["admin"], route_class=Guarded)
    _add_reads(routes, registry, source, time)
    _add_keys(routes, registry, time)
    _add_changes(routes, registry)
    _add_nodes(routes, registry, time)
    return routes


class Guarded(fastapi.routing.APIRoute):
    """Turns a registry that does not answer into an error that callers know."""

    def get_route_handler(self) -> Callable[[fastapi.Request], Any]:
        """Wrap the route."""
        handler = super().get_route_handler()

        async def guarded(request: fastapi.Request) -> fastapi.Response:
            try:
                return await handler(request)
            except exc.SQLAlchemyError as error:
                raise errors.NoReplica(
                    "registry does not answer: nothing was changed, try again later",
                    retry_after_s=5.0,
                ) from error

        return guarded


def caller(request: fastapi.Request) -> requests.Caller:
    """Return who asks; raises `errors.Unauthenticated`."""
    found = getattr(request.state, "caller", None)
    if not isinstance(found, requests.Caller):
        raise errors.Unauthenticated("no credential: set FOREBAY_API_KEY or use MUNGE")
    return found


def admin(request: fastapi.Request) -> requests.Caller:
    """Return who asks, if that is an admin; raises `errors.Forbidden`."""
    found = caller(request)
    if not found.admin:
        raise errors.Forbidden(f"user {found.user} is no admin: ask one to do this")
    return found


Reader = Annotated[requests.Caller, fastapi.Depends(caller)]
Admin = Annotated[requests.Caller, fastapi.Depends(admin)]


def _add_reads(
    routes: fastapi.APIRouter,
    registry: store.Registry,
    source: ports.FleetSource,
    time: clock.Clock,
) -> None:
    @routes.get("/models")
    def models(who: Reader) -> dict[str, Any]:
        return {"models": showing.model_list(registry, source, who)}

    @routes.get("/replicas")
    def replicas(who: Reader, all: bool = False) -> dict[str, Any]:
        return {"replicas": showing.replica_list(registry, source, who, ended=all)}

    @routes.get("/leases")
    def leases(who: Reader, all: bool = False) -> dict[str, Any]:
        found = registry.holdings.leases()
        open_ones = [item for item in found if all or item.state is not fleet.LeaseState.ENDED]
        drains = registry.wishes.read().drains
        return {
            "leases": [
                {**dataclasses.asdict(lease), "drain": showing.drained(lease, drains)}
                for lease in open_ones
            ]
        }

    @routes.get("/queue")
    def queue(who: Reader) -> dict[str, Any]:
        fact = registry.journal.fact("queue")
        return {"queue": fact.body if fact else {}, "at_us": fact.at_us if fact else 0}

    @routes.get("/plan")
    def plan(who: Reader, limit: Annotated[int, fastapi.Query(ge=1, le=1000)] = 1) -> Any:
        broker = registry.journal.fact("broker")
        return {
            "targets": broker.body.get("targets", []) if broker else [],
            "targets_us": broker.at_us if broker else 0,
            "plans": [
                {"at_us": entry.at_us, "leader": entry.name, **entry.body}
                for entry in registry.journal.plans(limit)
            ],
        }

    @routes.get("/events")
    def events(who: Reader, limit: Annotated[int, fastapi.Query(ge=1, le=1000)] = 50) -> Any:
        return {
            "events": [
                {"at_us": entry.at_us, "subject": entry.name, **entry.body}
                for entry in registry.journal.events(limit)
            ]
        }

    @routes.get("/explain")
    def explain(who: Reader, model: str = "") -> dict[str, Any]:
        view = source.view()
        age = None if view is None else round(time.monotonic() - view.received, 3)
        return {**showing.explanation(registry, source, who, model), "view_age_s": age}


def _add_keys(routes: fastapi.APIRouter, registry: store.Registry, time: clock.Clock) -> None:
    @routes.get("/keys")
    def list_keys(who: Admin) -> dict[str, Any]:
        return {"keys": [dataclasses.asdict(key) for key in registry.keys.list()]}

    @routes.post("/keys", status_code=201)
    def create_key(who: Admin, wish: NewKey) -> dict[str, Any]:
        key, token = registry.keys.create(
            keys.Key(
                key_id="",
                team=wish.team,
                user=wish.user,
                tiers=tuple(wish.tiers),
                models=tuple(wish.models),
                admin=wish.admin,
                coordinator=wish.coordinator,
                comment=wish.comment,
                expires_us=wish.expires_us,
            ),
            time.wall_us(),
        )
        return {**dataclasses.asdict(key), "token": token}

    @routes.delete("/keys/{key_id}")
    def revoke_key(who: Admin, key_id: str) -> dict[str, Any]:
        registry.keys.revoke(key_id, time.wall_us())
        return {"key_id": key_id, "revoked": True}


def _add_changes(routes: fastapi.APIRouter, registry: store.Registry) -> None:
    @routes.post("/models/{model:path}/scale")
    def scale(who: Admin, model: str, wish: Scale) -> dict[str, Any]:
        registry.catalog.scale(model, wish.replicas, wish.version)
        return {"model": model, "replicas": wish.replicas}

    @routes.post("/models/{model:path}/hold")
    def hold(who: Admin, model: str) -> dict[str, Any]:
        registry.catalog.hold_batch(model, True)
        return {"model": model, "hold_batch": True}

    @routes.post("/models/{model:path}/release")
    def release(who: Admin, model: str) -> dict[str, Any]:
        registry.catalog.hold_batch(model, False)
        return {"model": model, "hold_batch": False}

    @routes.post("/models/{model:path}/resume")
    def resume(who: Admin, model: str) -> dict[str, Any]:
        registry.catalog.resume(model)
        return {"model": model, "quarantined": False}

    @routes.post("/replicas/{replica_id}/drain")
    def drain(who: Admin, replica_id: str) -> dict[str, Any]:
        registry.holdings.ask_drain(replica_id)
        return {"replica_id": replica_id, "drain": True}


def _add_nodes(routes: fastapi.APIRouter, registry: store.Registry, time: clock.Clock) -> None:
    @routes.get("/nodes")
    def nodes(who: Reader) -> dict[str, Any]:
        now_us = time.wall_us()
        held = {
            node: dataclasses.asdict(cordon)
            for node, cordon in registry.cordons.all().items()
            if cordon.holds(now_us)
        }
        told = _fact(registry, "nodes", {"nodes": [], "error": "no broker has led here yet"})
        named = [{**node, "cordon": held.pop(node["name"], None)} for node in told["nodes"]]
        return {**told, "nodes": named, "cordons_elsewhere": list(held.values())}

    @routes.post("/nodes/{node}/cordon")
    def cordon(who: Admin, node: str, wish: Cordon) -> dict[str, Any]:
        made = cordons.Cordon(node, wish.reason, who.user, time.wall_us())
        registry.cordons.add(made)
        return dataclasses.asdict(made)

    @routes.post("/nodes/{node}/uncordon")
    def uncordon(who: Admin, node: str) -> dict[str, Any]:
        if node in registry.wishes.read().drains:
            # What leaves it would come back, and be drained again.
            raise errors.BadRequest(f"{node}: drains; `fctl resume {node}` ends both")
        registry.cordons.end(node, who.user, time.wall_us())
        return {"node": node, "cordoned": False}


def _fact(registry: store.Registry, name: str, absent: dict[str, Any]) -> dict[str, Any]:
    fact = registry.journal.fact(name)
    return absent if fact is None else {**fact.body, "at_us": fact.at_us}

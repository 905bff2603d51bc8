"""/admin/catalog: what is declared of models, its history, and every change of it.

Anybody with a credential may read; changes need an admin, and are one revision each with author and reason.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import fastapi
import pydantic

from scheduler.contracts import errors
from scheduler.runtime import adapter_pools, admin
from scheduler.runtime.models import document, running, service
from scheduler.runtime.registry import declared

Kind = Literal["profile", "model", "version", "route", "adapter"]
_BODIES: Mapping[str, type[document.Frozen]] = document.KINDS


class _Signed(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    reason: admin.Reason = ""
    dry_run: bool = False


class Named(_Signed):
    """Which entry: a profile has no model, a model and its route have no name of their own."""

    model: admin.Name = ""
    name: admin.Name = ""


class Add(Named):
    """A new entry; `spec` is of the kind's own schema."""

    spec: dict[str, Any] = {}


class Update(Named):
    """Fields to set: `x.y` one item of the table `x`, null for the default."""

    set: dict[admin.Name, Any]


class Apply(_Signed):
    """A whole document; `prune` removes models and profiles that it does not name."""

    document: dict[str, Any]
    prune: bool = False


class Revert(_Signed):
    """Back to a revision."""

    revision: int = pydantic.Field(ge=0, le=2**62)


def router(site: service.Site) -> fastapi.APIRouter:
    """Return the routes under /admin/catalog."""
    routes = fastapi.APIRouter(prefix="/admin/catalog", tags=["models"], route_class=admin.Guarded)

    @routes.get("")
    def show(who: admin.Reader) -> dict[str, Any]:
        revision, found = site.registry.declared.read()
        return {"revision": revision, "document": _visible(found, who)}

    @routes.get("/adapters")
    def adapters(who: admin.Reader) -> dict[str, Any]:
        _, found = site.registry.declared.read()
        return _loaded(site, _visible(found, who), who)

    @routes.get("/schema")
    def schema(who: admin.Reader) -> dict[str, Any]:
        return document.Document.model_json_schema()

    @routes.get("/history")
    def history(
        who: admin.Admin,
        limit: Annotated[int, fastapi.Query(ge=1, le=1000)] = 50,
        model: str = "",
    ) -> dict[str, Any]:
        return {"history": [_told(one) for one in site.registry.declared.history(limit, model)]}

    @routes.post("/apply")
    def apply(who: admin.Admin, wish: Apply) -> dict[str, Any]:
        signed = _wish(who.user, wish)
        found = service.apply(site, wish.document, signed, prune=wish.prune)
        return _changed(site, found, wish)

    @routes.post("/revert")
    def revert(who: admin.Admin, wish: Revert) -> dict[str, Any]:
        return _changed(site, service.revert(site, wish.revision, _wish(who.user, wish)), wish)

    _add_changes(routes, site)
    return routes


def _add_changes(routes: fastapi.APIRouter, site: service.Site) -> None:
    @routes.post("/{kind}", status_code=201)
    def add(who: admin.Admin, kind: Kind, wish: Add) -> dict[str, Any]:
        key = _key(kind, wish)
        return _changed(site, service.add(site, key, wish.spec, _wish(who.user, wish)), wish)

    @routes.patch("/{kind}")
    def update(who: admin.Admin, kind: Kind, wish: Update) -> dict[str, Any]:
        key = _key(kind, wish)
        return _changed(site, service.update(site, key, wish.set, _wish(who.user, wish)), wish)

    @routes.delete("/{kind}")
    def remove(
        who: admin.Admin,
        kind: Kind,
        model: admin.Name = "",
        name: admin.Name = "",
        reason: admin.Reason = "",
        dry_run: bool = False,
    ) -> dict[str, Any]:
        wish = Named(model=model, name=name, reason=reason, dry_run=dry_run)
        if kind == "route":
            raise errors.BadRequest("a model has a route as long as it has versions: change it")
        found = service.remove(site, _key(kind, wish), _wish(who.user, wish))
        return _changed(site, found, wish)


def _key(kind: str, named: Named) -> document.Key:
    wanted: Mapping[str, Callable[[], document.Key]] = {
        "profile": lambda: (kind, "", named.name),
        "model": lambda: (kind, named.model, ""),
        "route": lambda: (kind, named.model, ""),
        "version": lambda: (kind, named.model, named.name),
        "adapter": lambda: (kind, named.model, named.name),
    }
    key = wanted[kind]()
    for field, given in (("model", named.model), ("name", named.name)):
        used = given and given in key
        needed = (kind != "profile") if field == "model" else kind not in {"model", "route"}
        if bool(given) != needed or (given and not used):
            verb = "must be given" if needed else "is not used"
            raise errors.BadRequest(f"{field}: {verb} for a {kind}", param=field)
    for given in key[1:]:
        if given:
            _name(given)
    return key


def _name(given: str) -> None:
    try:
        pydantic.TypeAdapter(document.Name).validate_python(given)
    except pydantic.ValidationError as error:
        raise errors.BadRequest(
            f"{given!r}: a name is letters, digits and . _ : / @ + -, and begins with one of the first two",
            param="name",
        ) from error


def _wish(author: str, given: _Signed) -> service.Wish:
    return service.Wish(author, given.reason, given.dry_run)


def _changed(site: service.Site, found: declared.Revision, given: _Signed) -> dict[str, Any]:
    """Return what came of a wish, and whose replicas run as before."""
    applied = bool(found.changes) and not given.dry_run
    told = {**_told(found), "applied": applied, "notes": []}
    if applied:
        models = {change.key[1] for change in found.changes}
        newer = {
            change.key[1:]
            for change in found.changes
            if change.key[0] == "version" and change.after is not None
        }
        now = [
            one
            for one in site.registry.catalog.deployments()
            if one.spec.model in models or "" in models
        ]
        rows = site.registry.holdings.replica_rows()
        told["notes"] = [
            *running.notes(now, (row.replica for row in rows)),
            *(
                f"{' '.join(one.key)}: {unseen}"
                for one in now
                if one.key in newer and (unseen := site.inspector.blind(one.spec))
            ),
        ]
    return told


def _told(found: declared.Revision) -> dict[str, Any]:
    return {
        "revision": found.revision,
        "at_us": found.at_us,
        "author": found.author,
        "reason": found.reason,
        "changes": [change.to_json() for change in found.changes],
        "text": [change.text for change in found.changes],
    }


def _loaded(site: service.Site, seen: Mapping[str, Any], who: Any) -> dict[str, Any]:
    """Return where the adapters that a caller may see are loaded, and why some are not."""
    fact = site.registry.journal.fact(adapter_pools.FACT)
    known: Mapping[str, Any] = fact.body if fact is not None else {}
    models = {
        name: {
            adapter: known.get("models", {}).get(name, {}).get(adapter)
            for adapter in model.get("adapters", {})
        }
        for name, model in seen["models"].items()
        if model.get("adapters")
    }
    told: dict[str, Any] = {"at_us": fact.at_us if fact is not None else 0, "models": models}
    if who.admin:
        told |= {name: known.get(name, []) for name in ("notes", "changes")}
    return told


def _visible(found: document.Document, who: Any) -> dict[str, Any]:
    """Return what a caller may see: no other team's adapters, no model that is closed to its team."""
    told: dict[str, Any] = found.model_dump(mode="json", exclude_defaults=True)
    if who.admin:
        return told
    models: dict[str, Any] = {}
    for name, model in found.models.items():
        if (model.callers and who.team not in model.callers) or (
            who.models and name not in who.models
        ):
            continue
        models[name] = told["models"][name]
        for adapter, one in model.adapters.items():
            if one.team not in {"", who.team}:
                del models[name]["adapters"][adapter]
    return {**told, "models": models}

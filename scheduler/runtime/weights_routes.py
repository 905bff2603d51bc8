"""/admin/weights: what nodes' disks hold, and what an admin wants done with it."""

import dataclasses
from typing import Any, Literal

import fastapi
import pydantic

from scheduler.contracts import clock, errors, ids, weights
from scheduler.runtime import admin, node_weights
from scheduler.runtime.registry import store, weight_acts


class Wish(pydantic.BaseModel):
    """Which weights: a model's (its version's, if it has several), or a place."""

    model_config = pydantic.ConfigDict(extra="forbid")

    act: Literal["stage", "rm", "verify"]
    name: admin.Name = pydantic.Field(min_length=1)
    version: admin.Name = ""
    node: admin.Name = ""


def router(registry: store.Registry, time: clock.Clock) -> fastapi.APIRouter:
    """Return the routes under /admin/weights."""
    routes = fastapi.APIRouter(prefix="/admin/weights", tags=["weights"], route_class=admin.Guarded)
    acts = weight_acts.WeightActs(registry.database)

    @routes.get("")
    def show(who: admin.Reader) -> dict[str, Any]:
        fact = registry.journal.fact(node_weights.FACT)
        held = {"nodes": {}, "done": {}} if fact is None else fact.body
        return {**held, "asked": [dataclasses.asdict(act) for act in acts.all()]}

    @routes.post("", status_code=202)
    def ask(who: admin.Admin, wish: Wish) -> dict[str, Any]:
        uri, digest = _named(registry, wish)
        if wish.node:
            _known(registry, wish.node)
        act = node_weights.Act(ids.short_id("w"), wish.act, uri, digest, wish.node, time.wall_us())
        acts.add(act, who.user)
        return dataclasses.asdict(act)

    return routes


def _named(registry: store.Registry, wish: Wish) -> tuple[str, str]:
    """Return place and digest of what a wish names."""
    if "://" in wish.name:
        try:
            return str(weights.parse(wish.name)), ""
        except weights.WeightsError as error:
            raise errors.BadRequest(str(error)) from error
    found = [
        one.spec
        for one in registry.catalog.deployments()
        if one.spec.model == wish.name and wish.version in {"", one.spec.version}
    ]
    if not found:
        what = f"{wish.name} {wish.version}".rstrip()
        raise errors.ModelNotFound(f"{what}: not deployed here; see `fctl show models`")
    if len({(spec.weights, spec.weights_digest) for spec in found}) > 1:
        known = ", ".join(spec.version for spec in found)
        raise errors.BadRequest(
            f"{wish.name} has several versions ({known}): name one with --version"
        )
    spec = found[0]
    if not weights.staged(spec.weights):
        raise errors.BadRequest(
            f"{wish.name}: its weights are loaded from {spec.weights or 'nowhere'} and never "
            "staged: name them as "
            "file://, s3:// or hf:// to have them on nodes' disks"
        )
    return spec.weights, spec.weights_digest


def _known(registry: store.Registry, node: str) -> None:
    fact = registry.journal.fact(node_weights.FACT)
    nodes = () if fact is None else fact.body["nodes"]
    if node not in nodes:
        known = ", ".join(nodes) or "none"
        raise errors.NotFound(f"{node}: Forebay holds no lease there; it holds some on: {known}")

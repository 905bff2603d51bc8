"""Models, versions, routes and deployments in the registry."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import orm

from scheduler.contracts import errors, fleet
from scheduler.core import autoscale, snapshot
from scheduler.runtime import config, scaling
from scheduler.runtime.registry import database, tables


class Catalog:
    """What is served, and how much of it."""

    def __init__(self, base: database.Database) -> None:
        self._base = base

    def declare(self, models: Sequence[config.ModelSettings], now_us: int) -> None:
        """Make the registry say what forebay.toml says; an admin's scaling and holds stay.

        Models that the file no longer names keep their rows and are wanted no more.
        """
        with self._base.write() as session:
            named = {(model.name, model.version) for model in models}
            for row in session.scalars(sa.select(tables.Deployment)):
                if (row.model, row.version) not in named:
                    row.configured = 0
                    row.scaled = None
            for model in models:
                _declare(session, model, now_us)
            for name in {model.name for model in models}:
                weights = {item.version: item.weight for item in models if item.name == name}
                route = session.get(tables.Route, name)
                if route is None:
                    session.add(tables.Route(model=name, weights=_percent(weights)))
                else:
                    route.weights = _percent(weights)

    def deployments(self) -> tuple[snapshot.Deployment, ...]:
        """Return every deployment, models by name."""
        query = (
            sa.select(tables.Deployment, tables.Version.spec)
            .join(
                tables.Version,
                sa.and_(
                    tables.Version.model == tables.Deployment.model,
                    tables.Version.version == tables.Deployment.version,
                ),
            )
            .order_by(tables.Deployment.model, tables.Deployment.version)
        )
        with self._base.read() as session:
            return tuple(
                snapshot.Deployment(
                    spec=spec_from_json(spec),
                    replicas=row.configured if row.scaled is None else row.scaled,
                    role=fleet.Role(row.role),
                    scaling=_scaling(row),
                    hold_batch=row.hold_batch,
                    quarantined_until_us=row.quarantined_until_us,
                    quarantine_reason=row.quarantine_reason,
                )
                for row, spec in session.execute(query)
            )

    def routes(self, cluster: str = "") -> dict[str, fleet.Route]:
        """Return every model's route, to its replicas on ``cluster``."""
        with self._base.read() as session:
            adapters: dict[str, set[str]] = {}
            for version in session.scalars(sa.select(tables.Version)):
                names = version.spec.get("adapters", {})
                adapters.setdefault(version.model, set()).update(names)
            query = sa.select(tables.Route, tables.Model.max_context).join(
                tables.Model, tables.Model.name == tables.Route.model
            )
            return {
                route.model: fleet.Route(
                    model=route.model,
                    weights={name: int(weight) for name, weight in route.weights.items()},
                    max_context=context,
                    adapters=tuple(sorted(adapters.get(route.model, ()))),
                    cluster=cluster,
                )
                for route, context in session.execute(query)
            }

    def tiers(self) -> dict[str, tuple[str, ...]]:
        """Return the tiers that each model is offered in."""
        with self._base.read() as session:
            return {row.name: tuple(row.tiers) for row in session.scalars(sa.select(tables.Model))}

    def scale(self, model: str, replicas: int | None, version: str | None = None) -> None:
        """Set how many replicas are kept warm, None: as configured; raises `errors.ModelNotFound`."""
        if replicas is not None and replicas < 0:
            raise errors.BadRequest(f"replicas {replicas}: must be 0 or more", param="replicas")
        with self._base.write() as session:
            found = _deployments(session, model, version)
            if len(found) > 1:
                raise errors.BadRequest(
                    f"{model} has {len(found)} versions: name one", param="version"
                )
            found[0].scaled = replicas

    def hold_batch(self, model: str, hold: bool) -> None:
        """Keep batch off a model, or let it back; raises `errors.ModelNotFound`."""
        with self._base.write() as session:
            for row in _deployments(session, model, None):
                row.hold_batch = hold

    def quarantine(self, epoch: int, model: str, version: str, until_us: int, reason: str) -> None:
        """Write a quarantine down; the leader's business."""
        with self._base.write(epoch) as session:
            row = session.get(tables.Deployment, (model, version))
            if row is not None:
                row.quarantined_until_us = until_us
                row.quarantine_reason = reason

    def resume(self, model: str) -> None:
        """End a model's quarantine; raises `errors.ModelNotFound`."""
        with self._base.write() as session:
            for row in _deployments(session, model, None):
                row.quarantined_until_us = 0
                row.quarantine_reason = ""


def spec_to_json(spec: fleet.ReplicaSpec) -> dict[str, Any]:
    """Return a spec as JSON."""
    return {**dataclasses.asdict(spec), "engine": spec.engine.value}


def spec_from_json(value: Mapping[str, Any]) -> fleet.ReplicaSpec:
    """Return a spec from JSON; keys of a newer release are left out."""
    names = {field.name for field in dataclasses.fields(fleet.ReplicaSpec)}
    known = {key: item for key, item in value.items() if key in names}
    return fleet.ReplicaSpec(**{**known, "engine": fleet.EngineKind(value["engine"])})


def _declare(session: orm.Session, model: config.ModelSettings, now_us: int) -> None:
    row = session.get(tables.Model, model.name)
    if row is None:
        row = tables.Model(name=model.name, created_us=now_us)
        session.add(row)
    row.max_context = model.max_context
    row.tiers = [tier.value for tier in model.tiers]
    session.flush()
    version = session.get(tables.Version, (model.name, model.version))
    if version is None:
        version = tables.Version(model=model.name, version=model.version, created_us=now_us)
        session.add(version)
    version.spec = spec_to_json(model.spec())
    session.flush()
    wanted = session.get(tables.Deployment, (model.name, model.version))
    if wanted is None:
        wanted = tables.Deployment(
            model=model.name,
            version=model.version,
            scaled=None,
            hold_batch=False,
            quarantined_until_us=0,
            quarantine_reason="",
        )
        session.add(wanted)
    wanted.configured = model.replicas
    wanted.role = model.role.value
    wanted.scaling = dict(model.scaling)
    wanted.gpus = model.gpus


def _scaling(row: tables.Deployment) -> autoscale.Scaling | None:
    """Return the autoscaler's bounds; an admin's number goes before them."""
    if row.scaled is not None or not row.scaling:
        return None
    known = {name: value for name, value in row.scaling.items() if name in scaling.NAMES}
    return scaling.from_mapping(known)


def _deployments(
    session: orm.Session, model: str, version: str | None
) -> Sequence[tables.Deployment]:
    query = sa.select(tables.Deployment).where(tables.Deployment.model == model)
    if version is not None:
        query = query.where(tables.Deployment.version == version)
    found = session.scalars(query).all()
    if not found:
        what = f"{model} {version}" if version else model
        raise errors.ModelNotFound(f"{what}: not deployed here; `fctl show models` lists what is")
    return found


def _percent(weights: Mapping[str, int]) -> dict[str, Any]:
    """Return weights that add up to 100; the first version takes what rounding leaves."""
    total = sum(weights.values())
    if total == 0:
        weights, total = dict.fromkeys(weights, 1), len(weights)
    shares = {name: weight * 100 // total for name, weight in weights.items()}
    first = next(iter(shares))
    shares[first] += 100 - sum(shares.values())
    return shares

"""Models, versions, routes and deployments in the registry."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import orm

from scheduler.contracts import errors, fleet, requests, spec_json, stored, times
from scheduler.core import autoscale, replicas, snapshot
from scheduler.runtime import config, scaling
from scheduler.runtime.registry import database, declared, tables

log = logging.getLogger(__name__)
_ROLES, _ENGINES = frozenset(fleet.Role), frozenset(fleet.EngineKind)


class Catalog:
    """What is served, and how much of it."""

    def __init__(self, base: database.Database) -> None:
        self._base = base
        self._said: set[str] = set()  # what was logged of a newer release's versions

    def declare(self, models: Sequence[config.ModelSettings], now_us: int) -> None:
        """Take up what forebay.toml says; an admin's scaling and holds stay, see `models.imported`.

        Models that the file no longer names keep their rows and are wanted no more.
        """
        declared.Catalogue(self._base).declare(tuple(models), now_us)

    def deployments(self) -> tuple[snapshot.Deployment, ...]:
        """Return every deployment, models by name.

        One that a newer release has declared in words that are not known here is left as it is: what runs of
        it goes on, and a quarantine that says so keeps anything else from being started.
        """
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
                self._deployment(session, row, spec) for row, spec in session.execute(query)
            )

    def _deployment(
        self, session: orm.Session, row: tables.Deployment, spec: Mapping[str, Any]
    ) -> snapshot.Deployment:
        try:
            return _read(row, spec)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            return self._left_alone(session, row, spec, error)

    def _left_alone(
        self,
        session: orm.Session,
        row: tables.Deployment,
        spec: Mapping[str, Any],
        error: Exception,
    ) -> snapshot.Deployment:
        name, what = f"{row.model} {row.version}", _unknown(row, spec)
        reason = (
            f"{what or f'it cannot be read ({error!r})'}: a newer release declared it; nothing is started of "
            "it and what runs is left alone: upgrade this broker"
        )
        if f"{name} {reason}" not in self._said:
            self._said.add(f"{name} {reason}")
            log.warning("%s: %s", name, reason)
        running = sa.select(sa.func.count()).where(
            tables.Replica.model == row.model,
            tables.Replica.version == row.version,
            tables.Replica.state.not_in(replicas.FINALS),
            tables.Replica.run.is_(True),
        )
        return snapshot.Deployment(
            spec=spec_json.of_others(spec, row.model, row.version, row.gpus),
            replicas=session.scalar(running) or 0,
            role=fleet.role_of_others(row.role),
            pinned=True,
            hold_batch=row.hold_batch,
            quarantined_until_us=times.LAST_US,  # until another release leads
            quarantine_reason=reason,
        )

    def routes(self, cluster: str = "") -> dict[str, fleet.Route]:
        """Return every model's route, to its replicas on ``cluster``."""
        with self._base.read() as session:
            adapters: dict[str, set[str]] = {}
            for route in session.scalars(sa.select(tables.Route)):
                adapters[route.model] = set(route.rules.get("adapters", {}))
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
                    **_rules(route.rules),
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
            declared.moved(session)

    def hold_batch(self, model: str, hold: bool) -> None:
        """Keep batch off a model, or let it back; raises `errors.ModelNotFound`."""
        with self._base.write() as session:
            for row in _deployments(session, model, None):
                row.hold_batch = hold
            declared.moved(session)

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
            declared.moved(session)


def _rules(rules: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a route's row says beside its percents; what is as for everybody is left out."""
    tiers = tuple(rules.get("tiers", ()))
    shadow = rules.get("shadow") or {}
    return {
        "callers": tuple(rules.get("callers", ())),
        "tiers": () if set(tiers) == set(requests.Tier) else tiers,
        "adapter_teams": {name: team for name, team in rules.get("adapters", {}).items() if team},
        "preload": tuple(rules.get("preload", ())),
        "shadow": shadow.get("version", ""),
        "shadow_percent": shadow.get("percent", 0),
        "pools": tuple(stored.read(fleet.Pool, pool) for pool in rules.get("pools", ())),
        "base_context": rules.get("base_context", 0),
        "runner": rules.get("runner", ""),
    }


def _read(row: tables.Deployment, spec: Mapping[str, Any]) -> snapshot.Deployment:
    return snapshot.Deployment(
        spec=spec_json.read(spec),
        replicas=row.configured if row.scaled is None else row.scaled,
        role=fleet.Role(row.role),
        scaling=_scaling(row),
        pinned=row.scaled is not None,
        hold_batch=row.hold_batch,
        quarantined_until_us=row.quarantined_until_us,
        quarantine_reason=row.quarantine_reason,
    )


def _unknown(row: tables.Deployment, spec: Mapping[str, Any]) -> str:
    """Return the word of a deployment that this release does not know, "" if it is none of these."""
    engine = spec.get("engine")
    if engine not in _ENGINES:
        return f"engine {engine!r} is not known here"
    return "" if row.role in _ROLES else f"role {row.role!r} is not known here"


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

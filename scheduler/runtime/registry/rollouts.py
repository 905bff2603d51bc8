"""Rollouts in the registry: the newest of each model. Their steps move the route by revisions."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import orm

from scheduler.contracts import errors, stored
from scheduler.core import rollouts
from scheduler.runtime.models import document
from scheduler.runtime.registry import database, declared, tables

AUTHOR = "rollout"
_STATES = frozenset(rollouts.State)


class Rollouts:
    """Reads and steps of rollouts."""

    def __init__(self, base: database.Database) -> None:
        self._base = base

    def all(self, *, under_way: bool = False) -> tuple[rollouts.Rollout, ...]:
        """Return each model's newest rollout, or only those that are not over.

        One that only a newer release can read, or whose model only that can, is left out: it stays as it is.
        """
        query = sa.select(tables.Rollout).order_by(tables.Rollout.model)
        if under_way:
            query = query.where(tables.Rollout.state != rollouts.State.OVER.value)
        with self._base.read() as session:
            rows = [row for row in session.scalars(query) if row.body.get("state") in _STATES]
            unread = _unread(session, [row.model for row in rows]) if under_way else frozenset()
            return tuple(_read(row.body) for row in rows if row.model not in unread)

    def get(self, model: str) -> rollouts.Rollout | None:
        """Return a model's newest rollout, None if it never had one.

        Raises:
            errors.BadRequest: only a newer release can read it.
        """
        with self._base.read() as session:
            row = session.get(tables.Rollout, model)
            if row is not None and row.body.get("state") not in _STATES:
                raise errors.BadRequest(
                    f"{model}: its rollout is {row.body.get('state')!r}, which a newer release has begun: "
                    "upgrade this gateway"
                )
            return None if row is None else _read(row.body)

    def begin(self, rollout: rollouts.Rollout, now_us: int) -> None:
        """Keep a new rollout: its version's replicas are wanted from now on.

        Raises:
            errors.BadRequest: one is under way.
            errors.Busy: the model has changed since the rollout was made.
        """
        with self._base.write() as session:
            declared.moved(session)
            model = declared.whole(session).models.get(rollout.model)
            route = {} if model is None else _shares(model.route.versions)
            if model is None or rollout.version not in model.versions or route != rollout.before:
                raise errors.Busy(
                    f"{rollout.model}: others change it too: try again", retry_after_s=1.0
                )
            row = session.get(tables.Rollout, rollout.model)
            if row is not None and row.state != rollouts.State.OVER.value:
                raise errors.BadRequest(
                    f"{rollout.model}: a rollout of {row.body['version']} is under way; "
                    f"`fctl rollback {rollout.model}` ends it",
                    param="version",
                )
            if row is None:
                row = tables.Rollout(model=rollout.model)
                session.add(row)
            row.state, row.body = rollout.state.value, _write(rollout)
            session.flush()
            declared.run(session, declared.whole(session), now_us)

    def advance(
        self,
        before: rollouts.Rollout,
        after: rollouts.Rollout,
        signed: declared.Signed,
        epoch: int | None = None,
    ) -> bool:
        """Take a rollout from one state to the next, its route with it; False: it has moved meanwhile.

        Where a version that it moves requests to is not declared any more, it fails and the route stays.

        Raises:
            database.Fenced: ``epoch`` is a leader's, and not the newest.
        """
        with self._base.write(epoch) as session:
            declared.moved(session)
            row = session.get(tables.Rollout, before.model)
            if row is None or _read(row.body) != before:
                return False
            entries = declared.entries(session)
            moves = after.weights() != before.weights()
            model = document.whole(entries).models.get(before.model)
            known = frozenset() if model is None else model.versions.keys()
            if moves and (gone := sorted(_shares(after.weights()).keys() - known)):
                reason = f"{before.model} {gone[0]} is not declared any more: {after.reason}"
                after, moves = rollouts.back(after, reason, signed.now_us, "failed"), False
            row.state, row.body = after.state.value, _write(after)
            session.flush()
            if moves:
                key: document.Key = ("route", before.model, "")
                entries[key] = _routed(entries.get(key, {}), _shares(after.weights()))
                declared.change(session, entries, signed)
            declared.run(session, document.whole(entries), signed.now_us)
            return True


def _unread(session: orm.Session, models: Sequence[str]) -> frozenset[str]:
    """Return those of some models that only a newer release can read."""
    if not models:
        return frozenset()
    rows = session.scalars(sa.select(tables.Declared).where(tables.Declared.model.in_(models)))
    found = {(row.kind, row.model, row.name): row.body for row in rows}
    return frozenset(model for _, model in document.unread(found))


def _shares(weights: Mapping[str, int]) -> dict[str, int]:
    return {name: share for name, share in weights.items() if share}


def _routed(route: Mapping[str, Any], shares: dict[str, int]) -> dict[str, Any]:
    """Return a route with other percents; a shadow that answers all requests itself is none any more."""
    found = {**route, "versions": shares}
    if shares.get((route.get("shadow") or {}).get("version", "")) == 100:
        del found["shadow"]
    return found


def _write(rollout: rollouts.Rollout) -> dict[str, Any]:
    return {**dataclasses.asdict(rollout), "state": rollout.state.value}


def _read(body: dict[str, Any]) -> rollouts.Rollout:
    state = rollouts.State(body["state"])
    return stored.read(rollouts.Rollout, body, steps=tuple(body["steps"]), state=state)

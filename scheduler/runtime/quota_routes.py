"""/admin/quotas: who may use how much, what is used of it, and who has said so.

Admins set every limit. A coordinator sets limits of users in their own team, never above the team's.
Members see their team's limits, their own and those of their own keys; coordinators all of their team's.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import fastapi
import pydantic

from scheduler.contracts import clock, errors, requests, slurm
from scheduler.core import quota_limits
from scheduler.runtime import admin
from scheduler.runtime.registry import quotas, store

Associations = Callable[[], Sequence[slurm.Association]]


class Wish(pydantic.BaseModel):
    """Limits to set (an amount) or to remove (None), all for one owner; money in micro-units."""

    model_config = pydantic.ConfigDict(extra="forbid")

    team: admin.Name = pydantic.Field(min_length=1)
    user: admin.Name = ""
    key: admin.Name = ""
    model: admin.Name = ""
    tier: requests.Tier | None = None
    limits: dict[
        quota_limits.Kind, Annotated[int, pydantic.Field(ge=0, le=quota_limits.MOST)] | None
    ] = pydantic.Field(min_length=1)
    hard: bool = True
    reason: admin.Name = ""
    force: bool = False

    def keys(self) -> dict[quota_limits.Key, int | None]:
        """Return the wish by counter.

        Raises:
            errors.BadRequest: it names a user and a key, or every team's one user.
        """
        if self.user and self.key:
            raise errors.BadRequest("name a user or a key, not both", param="key")
        name = self.user or self.key
        if self.team == quota_limits.EVERY and name not in {"", quota_limits.EVERY}:
            raise errors.BadRequest(
                f"{name} of every team: name a team, or {quota_limits.EVERY} for each user or key",
                param="team",
            )
        scope = quota_limits.Scope.TEAM
        if name:
            scope = quota_limits.Scope.USER if self.user else quota_limits.Scope.KEY
        tier = self.tier.value if self.tier else ""
        return {
            quota_limits.Key(scope, self.team, name, self.model, tier, kind): amount
            for kind, amount in self.limits.items()
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """What the routes know of the site.

    Attributes:
        registry: limits, counters, keys.
        time: the clock.
        associations: reads Slurm's accounts; blocks, and raises as `slurm.SlurmPort.associations`.
        teams: teams that the configuration names.
        warn_percent: share of a limit at which its state is ``warning``.
    """

    registry: store.Registry
    time: clock.Clock
    associations: Associations
    teams: frozenset[str] = frozenset()
    warn_percent: int = 80

    def known_teams(self) -> frozenset[str]:
        """Return the teams that an account in Slurm, an API key or the configuration names; it blocks.

        Raises:
            errors.NoReplica: Slurm does not answer.
        """
        return self._teams(self._people())

    def _people(self) -> Sequence[slurm.Association] | None:
        """Return Slurm's associations, None where it keeps none."""
        try:
            return self.associations()
        except slurm.AccountingOff:
            return None
        except slurm.SlurmError as error:
            raise errors.NoReplica(
                "Slurm does not answer, so the team can't be checked: try later, or --force",
                retry_after_s=10.0,
            ) from error

    def _teams(self, people: Sequence[slurm.Association] | None) -> frozenset[str]:
        keys = self.registry.keys.list()
        accounts = (row.account for row in people or ())
        return frozenset((*self.teams, *(key.team for key in keys), *accounts))

    def check_owner(self, wish: Wish) -> None:
        """Refuse owners that nobody knows: most are slips of the pen.

        Raises:
            errors.BadRequest: the team, user, key or model is not known; errors.NoReplica: nobody can tell.
        """
        people = self._people()
        if wish.model and wish.model not in self.registry.catalog.tiers():
            raise errors.BadRequest(
                f"model {wish.model}: not known here; see `fctl show models`, or --force",
                param="model",
            )
        keys = self.registry.keys.list()
        if wish.team not in {*self._teams(people), quota_limits.EVERY}:
            raise errors.BadRequest(
                f"team {wish.team}: no such account in Slurm and no API key of it; check the name, "
                "or --force",
                param="team",
            )
        if wish.key and (wish.team, wish.key) not in {
            *((key.team, key.key_id) for key in keys),
            (wish.team, "munge"),
            (wish.team, quota_limits.EVERY),
        }:
            raise errors.BadRequest(
                f"team {wish.team} has no API key {wish.key}; see `fctl key list`, or --force",
                param="key",
            )
        users = {
            quota_limits.EVERY,
            *(key.user for key in keys if key.team == wish.team),
            *(row.user for row in people or () if row.account == wish.team),
        }
        if wish.user and wish.user not in users and people is not None:
            raise errors.BadRequest(
                f"team {wish.team} has no user {wish.user}; check the name, or --force",
                param="user",
            )


def router(site: Site) -> fastapi.APIRouter:
    """Return the routes; the app is as `admin.router` says."""
    routes = fastapi.APIRouter(prefix="/admin/quotas", tags=["admin"], route_class=admin.Guarded)

    @routes.get("")
    def show(who: admin.Reader, team: str = "", user: str = "", key: str = "") -> dict[str, Any]:
        rows = standing(site, who)
        named = (("team", team), ("user", user), ("key", key))
        for scope, asked in named:
            field = "team" if scope == "team" else "name"
            if asked:
                rows = [
                    row for row in rows if row[field] == asked and scope in {"team", row["scope"]}
                ]
        return {"quotas": rows, "at_us": site.time.wall_us()}

    @routes.post("")
    def change(who: admin.Reader, wish: Wish) -> dict[str, Any]:
        wanted = wish.keys()
        if not who.admin:
            _check_coordinator(site.registry.quotas.rules(), who, wish, wanted)
        if not wish.force and any(amount is not None for amount in wanted.values()):
            site.check_owner(wish)
        site.registry.quotas.change(
            wanted,
            hard=wish.hard,
            author=who.user,
            reason=wish.reason,
            now_us=site.time.wall_us(),
        )
        return {"changed": [{**_names(key), "amount": wanted[key]} for key in wanted]}

    @routes.get("/history")
    def history(
        who: admin.Reader, limit: Annotated[int, fastapi.Query(ge=1, le=1000)] = 100
    ) -> dict[str, Any]:
        mine = _visible(site, who)
        return {
            "changes": [
                {
                    **_names(entry.key),
                    "at_us": entry.at_us,
                    "amount": entry.amount,
                    "hard": entry.hard,
                    "author": entry.author,
                    "reason": entry.reason,
                }
                for entry in site.registry.quotas.history(limit)
                if mine(entry.key)
            ]
        }

    return routes


def standing(site: Site, who: requests.Caller) -> list[dict[str, Any]]:
    """Return the limits that a caller may see with what is used, as it was about a second ago.

    A limit for each user, key or team has rows of its own for those that have used something.
    """
    now_us = site.time.wall_us()
    spans = {
        period: quota_limits.window(period, now_us)
        for period in (quota_limits.Period.DAY, quota_limits.Period.MONTH)
    }
    found = {rule.limit.key: rule for rule in site.registry.quotas.rules()}
    rules = quota_limits.Rules(tuple(rule.limit for rule in found.values()))
    sums = site.registry.quotas.sums([start for start, _ in spans.values()])
    running = site.registry.quotas.running(now_us)
    counted = {
        key: counter for (key, start), counter in sums.items() if start == spans[key.kind.period][0]
    }
    rows = []
    for key in {*found, *counted, *running}:
        limit = rules.of(key)
        if limit is None:
            continue
        rule = found.get(key) or next(item for item in found.values() if item.limit == limit)
        nobody = quotas.Counted(running.get(key, 0), 0, 0)
        kept = key.kind.kept
        rows.append(
            {
                **_names(key),
                "of": "" if key in found else f"each {key.scope}",
                **_limit(rule),
                **_use(site, limit.amount, counted.get(key, nobody) if kept else nobody, key),
                "resets_us": spans[key.kind.period][1] if kept else 0,
            }
        )
    mine = _visible(site, who)
    rows = [row for row in rows if mine(_key(row))]
    return sorted(rows, key=lambda row: tuple(_names(_key(row)).values()))


def _limit(rule: quotas.Rule) -> dict[str, Any]:
    return {
        "amount": rule.limit.amount,
        "hard": rule.limit.hard,
        "author": rule.author,
        "reason": rule.reason,
        "created_us": rule.created_us,
    }


def _use(site: Site, amount: int, counted: quotas.Counted, key: quota_limits.Key) -> dict[str, Any]:
    if quota_limits.EVERY in {key.team, key.name}:  # each has its own counter
        return {"used": None, "state": "", "drift": 0, "checked_us": 0}
    used, state = counted.amount, "ok"
    if used >= amount:
        state = "full"
    elif used * 100 >= amount * site.warn_percent:
        state = "warning"
    return {
        "used": used,
        "state": state,
        "drift": counted.drift,
        "checked_us": counted.checked_us,
    }


def _names(key: quota_limits.Key) -> dict[str, str]:
    return {name: str(value) for name, value in key._asdict().items()}


def _key(row: Mapping[str, Any]) -> quota_limits.Key:
    return quota_limits.Key(
        quota_limits.Scope(row["scope"]),
        row["team"],
        row["name"],
        row["model"],
        row["tier"],
        quota_limits.Kind(row["kind"]),
    )


def _visible(site: Site, who: requests.Caller) -> Callable[[quota_limits.Key], bool]:
    """Return which limits a caller may see."""
    if who.admin:
        return lambda key: True
    own = {who.key_id, *(
        key.key_id for key in site.registry.keys.list() if (key.team, key.user) == (who.team, who.user)
    )}  # fmt: skip

    def mine(key: quota_limits.Key) -> bool:
        if key.team not in {who.team, quota_limits.EVERY}:
            return False
        if (
            who.coordinator
            or key.scope is quota_limits.Scope.TEAM
            or key.name == quota_limits.EVERY
        ):
            return True
        return key.name in own if key.scope is quota_limits.Scope.KEY else key.name == who.user

    return mine


def _check_coordinator(
    rules: Sequence[quotas.Rule],
    who: requests.Caller,
    wish: Wish,
    wanted: Mapping[quota_limits.Key, int | None],
) -> None:
    """Refuse what a coordinator may not set.

    Raises:
        errors.Forbidden: another team, no user's limit, or more than the team has.
    """
    if not who.coordinator or wish.team != who.team or not wish.user:
        raise errors.Forbidden(
            f"user {who.user} may not set this: admins set every limit, coordinators those of their "
            "team's users"
        )
    for key, amount in wanted.items():
        for rule in rules:
            cap = rule.limit
            over = (
                amount is not None
                and amount > cap.amount
                and (cap.key.scope, cap.key.kind) == (quota_limits.Scope.TEAM, key.kind)
                and cap.key.team in {who.team, quota_limits.EVERY}
                and cap.key.model in {"", key.model}
                and cap.key.tier in {"", key.tier}
            )
            if over:
                raise errors.Forbidden(
                    f"{key.kind} {key.kind.show(amount or 0)} is more than the team's "
                    f"{key.kind.show(cap.amount)}: ask an admin for more first"
                )

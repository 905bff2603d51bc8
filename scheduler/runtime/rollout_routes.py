"""/admin/rollouts and /admin/shadows, and /admin/models/MODEL/rollout: begin, go on, judge and take back."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import fastapi
import pydantic

from scheduler.contracts import errors, requests
from scheduler.core import rollouts
from scheduler.runtime import admin
from scheduler.runtime.models import rolls, service

Seconds = Annotated[float, pydantic.Field(ge=0, le=30 * 86_400)]


class NewRollout(pydantic.BaseModel):
    """To which version; `percent` one step that stays, or `steps` that follow each other by themselves."""

    model_config = pydantic.ConfigDict(extra="forbid")

    version: admin.Name
    percent: int | None = None
    steps: list[int] | None = pydantic.Field(None, max_length=100)
    hold_s: Seconds | None = None
    least: int | None = pydantic.Field(None, ge=0, le=1_000_000)
    keep_s: Seconds = 600.0
    warm_s: Seconds = 1800.0
    gate: bool = False
    reason: admin.Reason = ""


class Back(pydantic.BaseModel):
    """Why it is taken back."""

    model_config = pydantic.ConfigDict(extra="forbid")

    reason: admin.Reason = ""


class Verdict(Back):
    """What an offline evaluation says of the new version."""

    passed: bool


def router(site: service.Site) -> fastapi.APIRouter:
    """Return the routes; a model's name may hold slashes."""
    routes = fastapi.APIRouter(prefix="/admin", tags=["models"], route_class=admin.Guarded)

    @routes.get("/rollouts")
    def show(who: admin.Reader) -> dict[str, Any]:
        fact = site.registry.journal.fact("rollouts")
        live = {one["model"]: one for one in (fact.body["rollouts"] if fact else ())}
        return {
            "rollouts": [
                {**_told(one), **_live(one, live.get(one.model, {}))}
                for one in site.registry.rollouts.all()
            ]
        }

    @routes.get("/shadows")
    def shadows(who: admin.Reader) -> dict[str, Any]:
        fact = site.registry.journal.fact("shadows")
        _, found = site.registry.declared.read()
        seen = {(one["model"], one["version"]): one for one in fact.body["shadows"]} if fact else {}
        return {
            "shadows": [
                seen.get(
                    (name, shadow.version),
                    {"model": name, "version": shadow.version, "percent": shadow.percent},
                )
                for name, model in sorted(found.models.items())
                if (shadow := model.route.shadow) is not None and _visible(name, model.callers, who)
            ]
        }

    @routes.post("/models/{model:path}/rollout", status_code=201)
    def begin(who: admin.Admin, model: str, wish: NewRollout) -> dict[str, Any]:
        if (wish.percent is None) == (wish.steps is None):
            raise errors.BadRequest("give either percent or steps", param="steps")
        alone = wish.percent is not None
        terms = rolls.Terms(
            steps=[wish.percent] if wish.percent is not None else wish.steps or [],
            hold_s=wish.hold_s if wish.hold_s is not None else (0.0 if alone else 600.0),
            least=wish.least if wish.least is not None else (0 if alone else 20),
            keep_s=wish.keep_s,
            warm_s=wish.warm_s,
            gate=wish.gate,
        )
        signed = service.Wish(who.user, wish.reason)
        return _told(rolls.begin(site, model, wish.version, terms, signed))

    @routes.post("/models/{model:path}/rollback")
    def back(who: admin.Admin, model: str, wish: Back) -> dict[str, Any]:
        return _told(rolls.back(site, model, service.Wish(who.user, wish.reason)))

    @routes.post("/models/{model:path}/gate")
    def gate(who: admin.Admin, model: str, wish: Verdict) -> dict[str, Any]:
        signed = service.Wish(who.user, wish.reason)
        return _told(rolls.judge(site, model, signed, passed=wish.passed))

    return routes


def _visible(name: str, callers: Sequence[str], who: requests.Caller) -> bool:
    team = not callers or who.team in callers
    return who.admin or (team and (not who.models or name in who.models))


def _open(one: rollouts.Rollout) -> bool:
    return one.state is not rollouts.State.OVER


def _live(one: rollouts.Rollout, told: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the leader has told of a rollout, if it was of this one as it is now: it tells later."""
    kept = _told(one)
    same = ("version", "state", "percent", "steps")
    return told if _open(one) and all(told.get(name) == kept[name] for name in same) else {}


def _told(one: rollouts.Rollout) -> dict[str, Any]:
    return {
        "model": one.model,
        "version": one.version,
        "state": one.state.value,
        "outcome": one.outcome,
        "percent": one.percent,
        "steps": list(one.steps),
        "reason": one.reason,
        "author": one.author,
        "began_us": one.began_us,
        "since_us": one.since_us,
    }

"""Rollouts that people begin, go on with, judge and take back: checked, then written."""

import dataclasses
import itertools
from collections.abc import Sequence

from scheduler.contracts import errors
from scheduler.core import rollouts
from scheduler.runtime.models import service
from scheduler.runtime.registry import declared

PERCENT = 100


@dataclasses.dataclass(frozen=True, slots=True)
class Terms:
    """How a rollout goes; see `rollouts.Rollout`."""

    steps: Sequence[int]
    hold_s: float = 600.0
    least: int = 20
    keep_s: float = 600.0
    warm_s: float = 1800.0
    gate: bool = False


def begin(
    site: service.Site, model: str, version: str, terms: Terms, wish: service.Wish
) -> rollouts.Rollout:
    """Begin a rollout, or go on with one of the same version that stays below 100 percent.

    Raises:
        errors.NotFound: the model or the version is not declared.
        errors.BadRequest: the steps are none, the version can have no replica, or another one is under way.
    """
    _, document = site.registry.declared.read()
    found = document.models.get(model)
    if found is None:
        known = ", ".join(sorted(document.models)) or "none"
        raise errors.NotFound(f"model {model}: not declared; known are: {known}")
    if version not in found.versions:
        known = ", ".join(sorted(found.versions)) or "none"
        raise errors.NotFound(f"version {model} {version}: not declared; known are: {known}")
    steps = _steps(terms.steps)
    now = site.registry.rollouts.get(model)
    if now is not None and now.state is not rollouts.State.OVER and now.version == version:
        return _further(site, now, steps, terms, wish)
    before = {name: share for name, share in found.route.versions.items() if share}
    share = before.get(version, 0)
    if share == PERCENT:
        raise errors.BadRequest(f"{model}: {version} answers all requests already", param="version")
    if steps[0] <= share:
        raise errors.BadRequest(
            f"{model}: {version} has {share} percent already: begin above that", param="steps"
        )
    wanted = found.versions[version]
    replicas = found.replicas if wanted.replicas is None else wanted.replicas
    bounds = found.scaling if wanted.scaling is None else wanted.scaling
    if replicas == 0 and not bounds:
        raise errors.BadRequest(
            f"{model}: {version} has no replicas and may have none; "
            f"`fctl version update {model} {version} replicas=1` first",
            param="version",
        )
    now_us = site.time.wall_us()
    made = rollouts.Rollout(
        model,
        version,
        before,
        steps,
        terms.hold_s,
        wish.author,
        since_us=now_us,
        began_us=now_us,
        least=terms.least,
        keep_s=terms.keep_s,
        warm_s=terms.warm_s,
        gate=terms.gate,
        reason=wish.reason,
    )
    site.registry.rollouts.begin(made, now_us)
    return made


def back(site: service.Site, model: str, wish: service.Wish) -> rollouts.Rollout:
    """Take a rollout back: its requests go where they went before.

    Raises:
        errors.NotFound: none is under way.
    """
    reason = wish.reason or "an admin takes it back"
    return _moved(site, model, wish, lambda now, now_us: rollouts.back(now, reason, now_us), reason)


def judge(site: service.Site, model: str, wish: service.Wish, *, passed: bool) -> rollouts.Rollout:
    """Take the verdict of an offline quality gate; raises `errors.NotFound` if no rollout is under way."""
    return _moved(
        site,
        model,
        wish,
        lambda now, _: dataclasses.replace(now, gate_passed=passed, gate_reason=wish.reason),
        wish.reason,
    )


def _further(
    site: service.Site,
    now: rollouts.Rollout,
    steps: tuple[int, ...],
    terms: Terms,
    wish: service.Wish,
) -> rollouts.Rollout:
    def change(was: rollouts.Rollout, _: int) -> rollouts.Rollout:
        if steps[0] <= was.percent:
            raise errors.BadRequest(
                f"{was.model}: {was.version} has {was.percent} percent already; "
                f"`fctl rollback {was.model}` takes it back",
                param="steps",
            )
        return dataclasses.replace(
            was,
            steps=(*was.steps[: was.step + 1], *steps),
            hold_s=terms.hold_s,
            least=terms.least,
            keep_s=terms.keep_s,
            warm_s=terms.warm_s,
            gate=was.gate or terms.gate,
            gate_passed=None if terms.gate else was.gate_passed,
        )

    return _moved(site, now.model, wish, change, wish.reason)


def _moved(
    site: service.Site,
    model: str,
    wish: service.Wish,
    change: "service.RolloutChange",
    reason: str,
) -> rollouts.Rollout:
    for _ in range(service.TRIES):
        now = site.registry.rollouts.get(model)
        if now is None or now.state is rollouts.State.OVER:
            raise errors.NotFound(
                f"{model}: no rollout is under way; `fctl history {model}` and `fctl revert` go further back"
            )
        now_us = site.time.wall_us()
        after = change(now, now_us)
        signed = declared.Signed(wish.author, reason, now_us)
        if site.registry.rollouts.advance(now, after, signed):
            return after
    raise errors.Busy("the rollout moves: try again", retry_after_s=1.0)


def _steps(given: Sequence[int]) -> tuple[int, ...]:
    steps = tuple(given)
    rising = all(low < high for low, high in itertools.pairwise(steps))
    if not steps or not rising or not all(0 < step <= PERCENT for step in steps):
        raise errors.BadRequest(
            f"steps {','.join(map(str, steps)) or 'none'}: must be percents that rise, from 1 to 100",
            param="steps",
        )
    return steps

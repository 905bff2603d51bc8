"""The leader's rollouts: versions are compared by what gateways tell, and each rollout takes its steps."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from scheduler.contracts import clock, fleet, observed
from scheduler.core import rollouts, targets, trials
from scheduler.runtime import live
from scheduler.runtime.registry import declared, store

log = logging.getLogger(__name__)


class Rolling:
    """Steps every rollout that is under way.

    What was compared is kept in memory alone: a new leader begins a comparison of its own.
    """

    def __init__(self, picture: live.Live, registry: store.Registry, time: clock.Clock) -> None:
        self._live = picture
        self._registry = registry
        self._time = time
        self._compared: dict[str, tuple[rollouts.Rollout, trials.Comparison, int]] = {}
        self._told: dict[str, dict[str, Any]] = {}

    async def step(self, wanted: Mapping[tuple[str, str], targets.Target]) -> bool:
        """Look at each rollout once; return whether one has moved, and the catalog with it.

        Raises:
            database.Fenced: another broker leads.
        """
        came = list(self._live.trials)
        self._live.trials.clear()
        moved = False
        for rollout in self._live.rollouts:
            comparison, begun = self._comparison(rollout)
            comparison.note(trial for trial in came if _concerns(trial, rollout))
            seen = self._seen(rollout, comparison, begun, wanted)
            self._told[rollout.model] = told(rollout, seen, comparison)
            after = rollouts.after(rollout, seen)
            if after == rollout:
                continue
            log.info("rollout of %s %s: %s", rollout.model, rollout.version, after.reason)
            signed = declared.Signed(f"rollout ({rollout.author})", after.reason, seen.now_us)
            moved |= await asyncio.to_thread(
                self._registry.rollouts.advance, rollout, after, signed, self._live.epoch
            )
        under_way = {rollout.model for rollout in self._live.rollouts}
        for model in self._compared.keys() - under_way:
            del self._compared[model]
            self._told.pop(model, None)
        return moved

    def facts(self) -> dict[str, Any]:
        """Return what other processes show of the rollouts under way."""
        return {"rollouts": list(self._told.values())}

    def _comparison(self, rollout: rollouts.Rollout) -> tuple[trials.Comparison, int]:
        """Return the rollout's comparison, and the requests that it had when the step began."""
        known = self._compared.get(rollout.model)
        if known is None or known[0].began_us != rollout.began_us:
            comparison, begun = trials.Comparison(rollout.version), 0
        elif known[0].step != rollout.step:
            comparison = known[1]
            begun = comparison.counts(new=True).requests
        else:
            comparison, begun = known[1], known[2]
        self._compared[rollout.model] = (rollout, comparison, begun)
        return comparison, begun

    def _seen(
        self,
        rollout: rollouts.Rollout,
        comparison: trials.Comparison,
        begun: int,
        wanted: Mapping[tuple[str, str], targets.Target],
    ) -> rollouts.Seen:
        key = (rollout.model, rollout.version)
        serving = sum(
            known.run and known.replica.state is fleet.ReplicaState.SERVING
            for known in self._live.replicas.values()
            if (known.replica.spec.model, known.replica.spec.version) == key
        )
        now_us, quarantined, least = self._time.wall_us(), "", 0
        for deployment in self._live.deployments:
            if deployment.key == key:
                least = deployment.replicas if deployment.scaling is None else 1
                if deployment.quarantined_until_us > now_us:
                    quarantined = deployment.quarantine_reason or "quarantined"
        target = wanted.get(key)
        return rollouts.Seen(
            now_us,
            serving,
            max(least, target.need if target is not None else 0),
            quarantined,
            comparison.verdict,
            comparison.counts(new=True).requests - begun,
        )


def _concerns(trial: observed.Trial, rollout: rollouts.Rollout) -> bool:
    """Whether a request says something of a rollout: a pool's are longer, and would be compared with any."""
    compared = {rollout.version, *rollout.before}
    return trial.model == rollout.model and trial.version in compared


def told(
    rollout: rollouts.Rollout, seen: rollouts.Seen, comparison: trials.Comparison
) -> dict[str, Any]:
    """Return a rollout's state for people: what it waits for, and how both versions fare."""
    new, old = comparison.counts(new=True), comparison.counts(new=False)
    return {
        "model": rollout.model,
        "version": rollout.version,
        "state": rollout.state.value,
        "percent": rollout.percent,
        "steps": list(rollout.steps),
        "waits_for": rollouts.waits_for(rollout, seen),
        "stays": rollouts.stays(rollout, seen),
        "new": {
            "requests": new.requests,
            "failed": new.failed,
            "ttft_ms": round(new.ttft_ms, 2),
            "itl_ms": round(new.itl_ms, 3),
        },
        "old": {
            "requests": old.requests,
            "failed": old.failed,
            "ttft_ms": round(old.ttft_ms, 2),
            "itl_ms": round(old.itl_ms, 3),
        },
    }

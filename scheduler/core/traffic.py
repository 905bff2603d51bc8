"""Which part of a model's traffic is a version's: by percent, by the length of prompts, or copies. Pure.

| version | what it answers | known by |
| --- | --- | --- |
| named by the route's percents | its percent of what no pool takes | the model's demand |
| a pool of long prompts | what is long enough | what gateways tell of that version |
| a shadow | copies of so many percent of what callers have under way; they never wait | the model's demand |
"""

import dataclasses
import math
from collections.abc import Mapping

from scheduler.contracts import observed, requests
from scheduler.core import snapshot

_TIERS = (requests.Tier.INTERACTIVE, requests.Tier.STANDARD)
_NOTHING = observed.Demand("", {}, {})


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """What of a model's traffic is a version's.

    Attributes:
        waiting, in_flight: requests of tiers interactive and standard.
        oldest_wait_s: of those that wait.
        rate: requests/s, None where nobody counts them.
        of_model: its part of the model's rate, for what is foreseen of that.
    """

    waiting: int
    in_flight: int
    oldest_wait_s: float
    rate: float | None
    of_model: float


def part(snap: snapshot.Snapshot, deployment: snapshot.Deployment) -> Part:
    """Return a deployment's part of what its model is asked for."""
    model, version = deployment.key
    demand, whole = snap.demand.get(model, _NOTHING), snap.rates.get(model)
    if deployment.traffic is snapshot.Traffic.POOL:
        mine = demand.versions.get(version, observed.VersionDemand())
        rate = snap.version_rates.get(deployment.key)
        of_model = min(1.0, rate / whole) if rate and whole else 0.0
        return Part(mine.waiting, mine.in_flight, mine.oldest_wait_s, rate, of_model)
    pools = {
        each.spec.version
        for each in snap.deployments
        if each.spec.model == model and each.traffic is snapshot.Traffic.POOL
    }
    long = [each for name, each in demand.versions.items() if name in pools]
    others = [each for name, each in demand.versions.items() if name not in pools]
    running = _count(demand.in_flight) - sum(each.in_flight for each in long)
    share = deployment.scaling.share if deployment.scaling is not None else 1.0
    long_rate = sum(snap.version_rates.get((model, name), 0.0) for name in pools)
    left = None if whole is None else max(0.0, whole - long_rate)
    rate = None if left is None else left * share
    of_model = share * (left / whole if left is not None and whole else 1.0)
    if deployment.traffic is snapshot.Traffic.SHADOW:
        return Part(0, portion(running, share), 0.0, rate, of_model)
    waiting = _count(demand.waiting) - sum(each.waiting for each in long)
    oldest = demand.oldest_wait_s
    if long:
        oldest = max((each.oldest_wait_s for each in others), default=0.0)
    return Part(portion(waiting, share), portion(running, share), oldest, rate, of_model)


def of_standard(snap: snapshot.Snapshot, model: str) -> tuple[float, float]:
    """Return which part of a model's requests, and of its rate, is of tier standard; each in [0, 1]."""
    demand, tier = snap.demand.get(model, _NOTHING), requests.Tier.STANDARD
    held = _count(demand.waiting) + _count(demand.in_flight)
    mine = demand.waiting.get(tier, 0) + demand.in_flight.get(tier, 0)
    part = mine / held if held else 0.0
    rate = snap.rates.get(model, 0.0)
    # Nobody came in the last minute: what is foreseen is thought of as what is there.
    return part, min(1.0, snap.standard_rates.get(model, 0.0) / rate) if rate else part


def _count(by_tier: Mapping[str, int]) -> int:
    return sum(by_tier.get(tier, 0) for tier in _TIERS)


def portion(count: int, share: float) -> int:
    """Return a version's part of its model's requests, rounded up: the only one may be for it."""
    return math.ceil(round(max(0, count) * share, 6))


def of_batch(deployment: snapshot.Deployment) -> float:
    """Return a version's part of its model's batch lines, which come by the route's percents alone."""
    if deployment.batch_share is not None:
        return deployment.batch_share
    scaling, by_percent = deployment.scaling, deployment.traffic is snapshot.Traffic.PERCENT
    share = deployment.share if scaling is None else scaling.share
    return share if by_percent else 0.0

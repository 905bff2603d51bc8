"""Which weights a node should have on its disk before a replica wants them. Pure.

A node that we hold a lease on is the likeliest to run any replica that fits it: rungs 2 and 3 start there.
So each lease stages the models that may start in it, those with the most replicas wanted first, as many as
the site says; a node without a lease has nobody who could stage.
"""

from collections.abc import Mapping, Sequence

from scheduler.contracts import fleet, weights
from scheduler.core import snapshot


def wanted(
    deployments: Sequence[snapshot.Deployment],
    routes: Mapping[str, fleet.Route],
    gpus: int,
    most: int,
) -> tuple[fleet.ReplicaSpec, ...]:
    """Return whose weights a lease's node should have, the likeliest first.

    Args:
        deployments: what is deployed.
        routes: versions without a part of their route come last: a rollout may need them.
        gpus: the lease's GPUs on one node.
        most: how many sets of weights.
    """
    fitting = [
        one
        for one in deployments
        if one.spec.engine is fleet.EngineKind.VLLM
        and weights.staged(one.spec.weights)
        and one.spec.hardware.whole(one.spec.gpus) <= gpus
        and _may_start(one)
    ]
    fitting.sort(key=lambda one: (not _routed(one, routes), -one.replicas, one.key))
    found: dict[tuple[str, str], fleet.ReplicaSpec] = {}
    for one in fitting:
        found.setdefault((one.spec.weights, one.spec.weights_digest), one.spec)
    return tuple(found.values())[:most]


def _may_start(one: snapshot.Deployment) -> bool:
    return one.replicas > 0 or one.scaling is not None


def _routed(one: snapshot.Deployment, routes: Mapping[str, fleet.Route]) -> bool:
    route = routes.get(one.spec.model)
    return route is None or route.weights.get(one.spec.version, 0) > 0

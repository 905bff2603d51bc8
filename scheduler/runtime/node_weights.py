"""Weights on nodes' disks as the leader knows them: what agents report, what they shall stage, admins' acts.

Acts (`fctl weights stage|rm|verify`) are wishes in the registry; agents carry each out once and say what came
of it, and the leader forgets one after an hour.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from scheduler.contracts import fleet, ids
from scheduler.contracts.v1 import control_pb2 as pb
from scheduler.core import prestage, snapshot

ACT_KEPT_US = 3_600_000_000
FACT = "weights"
ACTS = ("stage", "rm", "verify")


@dataclasses.dataclass(frozen=True, slots=True)
class Act:
    """What an admin wants done with weights.

    Attributes:
        node: on which node; "": on every one that Forebay holds a lease on.
    """

    act_id: str
    act: str
    uri: str
    digest: str
    node: str
    at_us: int


@dataclasses.dataclass(slots=True)
class _Lease:
    node: str
    held: tuple[dict[str, Any], ...] = ()
    done: Mapping[str, str] = dataclasses.field(default_factory=dict)


class NodeWeights:
    """The leader's picture of nodes' disks.

    Attributes:
        acts: admins' wishes, as the registry has them.
        most: sets of weights that a lease's node has ahead of need.
    """

    def __init__(self, most: int = 0) -> None:
        self.acts: tuple[Act, ...] = ()
        self.most = most
        self._leases: dict[ids.LeaseId, _Lease] = {}

    def absorb(self, report: pb.LeaseReport) -> None:
        """Take an agent's report; an agent tells what came of its newest acts alone."""
        lease_id = ids.LeaseId(report.lease_id)
        asked = {act.act_id for act in self.acts}
        before = self._leases.get(lease_id)
        told = before.done if before is not None else {}
        done = {act_id: outcome for act_id, outcome in told.items() if act_id in asked}
        self._leases[lease_id] = _Lease(
            node=report.node,
            held=tuple(
                {
                    "uri": item.uri,
                    "digest": item.digest,
                    "state": item.state,
                    "size": item.size,
                    "users": item.users,
                    "used_us": item.used_us,
                    "reason": item.reason,
                }
                for item in report.weights
            ),
            done={**done, **report.weights_done},
        )

    def keep(self, leases: Sequence[ids.LeaseId]) -> None:
        """Forget every other lease."""
        for lease_id in self._leases.keys() - set(leases):
            del self._leases[lease_id]

    def fill(
        self,
        desired: pb.LeaseDesired,
        lease: fleet.Lease,
        deployments: Sequence[snapshot.Deployment],
        routes: Mapping[str, fleet.Route],
    ) -> None:
        """Put what a lease's node shall have and do into its desired state."""
        gpus = lease.hardware.whole(lease.gpus) // max(1, lease.whole_nodes)
        for spec in prestage.wanted(deployments, routes, gpus, self.most):
            desired.stage.add(uri=spec.weights, digest=spec.weights_digest, model=spec.model)
        known = self._leases.get(lease.lease_id)
        for act in self.acts:
            # A lease that began after an act is not meant: what it has staged since may stay.
            meant = known is not None and 0 < lease.started_us <= act.at_us
            if not meant or known is None or act.act_id in known.done:
                continue
            # Of two leases on one node the first that we know of does it.
            if act.node in {"", known.node} and self._first(lease.lease_id):
                weights = pb.Weights(uri=act.uri, digest=act.digest)
                desired.weights_acts.add(act_id=act.act_id, act=act.act, weights=weights)

    def _first(self, lease_id: ids.LeaseId) -> bool:
        node = self._leases[lease_id].node
        return lease_id == min(each for each, one in self._leases.items() if one.node == node)

    def fact(self) -> dict[str, Any]:
        """Return what other processes show: weights by node, and what came of acts."""
        nodes: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}
        done: dict[str, dict[str, str]] = {}
        for one in self._leases.values():
            there = nodes.setdefault(one.node, {})
            for item in one.held:
                there[(item["uri"], item["digest"])] = item
            for act_id, outcome in one.done.items():
                done.setdefault(act_id, {})[one.node] = outcome
        return {
            "nodes": {node: list(items.values()) for node, items in sorted(nodes.items())},
            "done": done,
        }

    def over(self, now_us: int) -> list[str]:
        """Return the acts that are old: what came of them has been seen by then."""
        return [act.act_id for act in self.acts if now_us - act.at_us > ACT_KEPT_US]

"""For which replicas the fleet still vouches, so that a dead node's streams need not wait for silence. Pure.

A node that dies says nothing: no end of a connection, no error. The broker hears it first, from its agent's
silence or from Slurm. What it knows for certain (`lost`, `stopped`, a newer incarnation) ends connections at
once. A replica that only is no longer in the view may live on (its agent died, not the node): a connection
that speaks is believed, one that is quiet is not. So it is with one that is off the routes since it answers
nobody (`warm`, which had served): its process stands still, for a moment or for good. The first view of
another leader is not held against anybody: it has not heard of all yet.
"""

import math

from scheduler.contracts import fleet, ids

Owner = tuple[ids.ReplicaId, int]
QUIET_S = (
    1.0  # a sampled token takes a hundredth; what this costs a silent prefill is its computation
)
_ENDED = frozenset({fleet.ReplicaState.LOST, fleet.ReplicaState.STOPPED})
_KEPT = 10_000  # ids of vanished replicas; only those matter that still have connections here


class Vouching:
    """What the newest views say of replicas' incarnations."""

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._known: dict[ids.ReplicaId, tuple[int, fleet.ReplicaState]] = {}
        self._vanished: dict[ids.ReplicaId, None] = {}

    def see(self, view: fleet.FleetView) -> None:
        """Take a view; each must be newer than the one before."""
        known = {each.replica_id: (each.incarnation, each.state) for each in view.replicas}
        if view.epoch == self._epoch:
            self._vanished |= dict.fromkeys(self._known.keys() - known.keys())
        else:
            self._vanished = {}
        for name in self._vanished.keys() & known.keys():
            del self._vanished[name]
        for name in list(self._vanished)[:-_KEPT]:
            del self._vanished[name]
        self._epoch, self._known = view.epoch, known

    def silence_s(self, owner: Owner) -> float:
        """Return how long a connection to ``owner`` may be silent, in seconds: 0 ends it at once."""
        name, incarnation = owner
        if name in self._vanished:
            return QUIET_S
        newest, state = self._known.get(name, (incarnation, fleet.ReplicaState.SERVING))
        if incarnation < newest:
            return 0.0
        if incarnation > newest:
            return math.inf
        if state is fleet.ReplicaState.WARM:
            return QUIET_S
        return 0.0 if state in _ENDED else math.inf

"""Replicas that are stopped whatever the numbers say: those that do not come up, and those nobody wants."""

from collections.abc import Iterator
from typing import Protocol

from scheduler.contracts import fleet
from scheduler.core import actions, snapshot


class Settings(Protocol):
    """What stopping needs to be told."""

    @property
    def drain_s(self) -> float:
        """Seconds that a replica gets to drain."""
        ...

    @property
    def start_timeout_s(self) -> float:
        """Seconds within which a replica must serve."""
        ...


def late(snap: snapshot.Snapshot, settings: Settings) -> Iterator[actions.StopReplica]:
    """Replicas that do not come up, and those that an admin wants gone."""
    for known in snap.replicas:
        if not known.run:
            continue
        coming = known.replica.state in {fleet.ReplicaState.STARTING, fleet.ReplicaState.WARM}
        # One that still waits for its weights is not slow: their source is, and elsewhere it would be too.
        if coming and not known.replica.staging and known.coming_s > settings.start_timeout_s:
            reason = f"not serving after {known.coming_s:.0f} s"
            failed = known.away_s is None
            yield actions.StopReplica(known.replica.replica_id, 0.0, reason, failed=failed)
        elif known.preempt_asked:
            reason = f"its GPUs are taken by {known.preempt_asked}"
            yield actions.StopReplica(known.replica.replica_id, 0.0, reason)
        elif known.drain_asked:
            reason = "an admin drains it"
            yield actions.StopReplica(known.replica.replica_id, settings.drain_s, reason)


def undeployed(snap: snapshot.Snapshot, settings: Settings) -> Iterator[actions.StopReplica]:
    """Replicas of what is not deployed any more."""
    known_models = {deployment.key for deployment in snap.deployments}
    for known in snap.replicas:
        if known.run and known.key not in known_models:
            model, version = known.key
            reason = f"{model} {version} is not deployed any more"
            yield actions.StopReplica(known.replica.replica_id, settings.drain_s, reason)

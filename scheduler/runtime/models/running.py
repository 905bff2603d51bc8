"""What runs otherwise than it is declared by now: changed versions do not reach replicas that run. Pure."""

import collections
from collections.abc import Iterable, Iterator

from scheduler.contracts import fleet
from scheduler.core import replicas, snapshot

# What a replica is started with and keeps; adapters, roles and promises follow while it serves.
_KEPT = (
    "engine",
    "weights",
    "weights_digest",
    "engine_args",
    "tuning",
    "seats",
    "reserved_seats",
    "max_context",
    "gpus",
    "hardware",
)


def notes(
    deployments: Iterable[snapshot.Deployment], running: Iterable[fleet.Replica]
) -> Iterator[str]:
    """Yield a line for each version whose replicas were started as it was before.

    Args:
        deployments: as they are declared now.
        running: replicas; those that have ended do not count.
    """
    declared = {deployment.key: deployment.spec for deployment in deployments}
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    fields: collections.defaultdict[tuple[str, str], set[str]] = collections.defaultdict(set)
    for replica in running:
        key = replica.spec.model, replica.spec.version
        wanted = declared.get(key)
        if wanted is None or replicas.replica_final(replica.state):
            continue
        others = {name for name in _KEPT if getattr(wanted, name) != getattr(replica.spec, name)}
        if others:
            counts[key] += 1
            fields[key] |= others
    for key, count in sorted(counts.items()):
        yield (
            f"{count} of {' '.join(key)} keep the {', '.join(sorted(fields[key]))} that they were started "
            "with: `fctl drain REPLICA` starts one anew; a version of its own could be rolled out and back"
        )

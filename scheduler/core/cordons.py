"""Nodes that are kept off: what a lost lease says of the node that it was on.

Slurm notices a dead node after SlurmdTimeout (300 s by default) and may give it away again before that. So
a node that took its agent with it is cordoned here: no lease is asked for that could start on it, and nothing
new starts in one that is there. One lease that falls silent is its node's fault; when most do at once it is
this host's or the network's, and no node is blamed. The last node that could hold such a lease is never
cordoned.
"""

from collections.abc import Iterator
from typing import Protocol

from scheduler.contracts import fleet, slurm
from scheduler.core import actions, grounds, snapshot

NODE_FAULTS = frozenset({slurm.JobState.NODE_FAIL, slurm.JobState.BOOT_FAIL})


class Settings(Protocol):
    """What cordoning needs to be told."""

    @property
    def agent_lost_s(self) -> float:
        """Seconds of silence after which a lease is given back."""
        ...

    @property
    def cordon_s(self) -> float:
        """Seconds that a node is kept off; 0: no node is."""
        ...


def suspects(snap: snapshot.Snapshot, settings: Settings) -> Iterator[actions.CordonNode]:
    """Yield the nodes to cordon now, each with what was lost there."""
    if snap.jobs is None or not settings.cordon_s:
        return
    stated = {job.job_id: job.state for job in snap.jobs if job.state in NODE_FAULTS}
    failed: dict[str, str] = {}
    silent: dict[str, str] = {}
    used: set[str] = set()
    homes: dict[str, fleet.Lease] = {}
    for held in snap.leases:
        lease = held.lease
        used.update(lease.nodes)
        homes |= dict.fromkeys(lease.nodes, lease)
        found = (
            (job_id, state) for job_id, state in stated.items() if job_id == lease.slurm_job_id
        )
        for job_id, state in found:
            failed |= dict.fromkeys(lease.nodes, f"Slurm: job {job_id} {state}")
        quiet = held.silent_s is not None and held.silent_s > settings.agent_lost_s
        if lease.state is fleet.LeaseState.RUNNING and quiet:
            why = f"lease {lease.lease_id}: agent silent for {held.silent_s:.0f} s"
            silent |= dict.fromkeys(lease.nodes, why)
    if len(silent) == 1 or 2 * len(silent) <= len(used):
        failed = silent | failed
    until = snap.now_us + round(settings.cordon_s * 1_000_000)
    cordoned = set(snap.cordoned)
    for node, why in sorted(failed.items()):
        able = grounds.able(snap.nodes, grounds.of_lease(homes[node]), snap.where)
        if node in cordoned or (able and {other.name for other in able} <= cordoned | {node}):
            continue
        cordoned.add(node)
        yield actions.CordonNode(node, until, why)

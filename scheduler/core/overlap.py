"""What rollover costs now: GPUs that are held twice, by a lease that ends and by the one that follows it."""

from collections.abc import Collection

from scheduler.contracts import fleet
from scheduler.core import snapshot


def held_twice(snap: snapshot.Snapshot, rolling: Collection[str], wanted_gpus: int) -> int:
    """Return the GPUs of leases that roll which others hold again by now.

    Args:
        snap: the picture.
        rolling: leases that are being replaced.
        wanted_gpus: that all deployments together should have; what leases hold beyond them while some
            roll is overlap, at most as much as those hold.
    """
    running = {
        held.lease.lease_id: held.lease.hardware.whole(held.lease.gpus)
        for held in snap.leases
        if held.lease.state in {fleet.LeaseState.RUNNING, fleet.LeaseState.CLOSING}
    }
    ending = sum(gpus for lease_id, gpus in running.items() if lease_id in rolling)
    return min(ending, max(0, sum(running.values()) - wanted_gpus))

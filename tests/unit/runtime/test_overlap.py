"""What rollover costs: GPUs that a lease and its successor hold at once, added up over leaders."""

import dataclasses

from scheduler.contracts import fleet
from scheduler.core import snapshot
from scheduler.runtime import overlap, settings
from tests.unit.scheduler import plans

OPTIONS = settings.Settings()
ENDS_S = 5.0  # soon enough for any lead


def picture(now: float, *leases: snapshot.HeldLease) -> snapshot.Snapshot:
    return dataclasses.replace(plans.picture(leases=leases), now=now)


def test_the_time_counts_from_the_successors_start_to_the_predecessors_end() -> None:
    old = dataclasses.replace(plans.held(1), left_s=ENDS_S)
    waits, runs = plans.held(2, fleet.LeaseState.PENDING), plans.held(2)
    closing = dataclasses.replace(plans.held(1, fleet.LeaseState.CLOSING), left_s=ENDS_S)
    books = overlap.Overlap(None, 0.0, 7)
    for at, leases in enumerate(
        [(old,), (old, waits), (old, runs), (closing, runs), (runs,), (runs,)], start=1
    ):
        books.note(picture(float(at), *leases), OPTIONS, wanted_gpus=4)
    # Seconds 3 (it runs) and 4 (it closes): four GPUs each.
    assert books.fact() == {"leases": 1, "overlap_gpu_s": 8.0, "since_us": 7}
    after = overlap.Overlap(books.fact(), 100.0, 9)
    after.note(picture(101.0, old, runs), OPTIONS, wanted_gpus=4)
    assert after.fact() == {"leases": 1, "overlap_gpu_s": 12.0, "since_us": 7}


def test_what_grows_meanwhile_is_no_overlap() -> None:
    old = dataclasses.replace(plans.held(1), left_s=ENDS_S)
    books = overlap.Overlap(None, 0.0, 0)
    books.note(picture(1.0, old, plans.held(2)), OPTIONS, wanted_gpus=8)
    assert books.fact()["overlap_gpu_s"] == 0.0
    books.note(picture(2.0, old, plans.held(2), plans.held(3)), OPTIONS, wanted_gpus=4)
    assert books.fact()["overlap_gpu_s"] == 4.0, "at most what is in the lease that ends"

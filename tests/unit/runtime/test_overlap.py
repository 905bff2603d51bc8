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


def test_what_falls_into_each_hour_is_kept_for_reports_and_bounded() -> None:
    old = dataclasses.replace(plans.held(1), left_s=ENDS_S)
    hours = {str(at * overlap.HOUR_US): 1.0 for at in range(overlap.HOURS_KEPT)}
    books = overlap.Overlap(None, 0.0, 0, hours)
    assert overlap.HOURS not in books.facts(0.0), "nothing new"
    at_us = overlap.HOURS_KEPT * overlap.HOUR_US + 5
    snap = dataclasses.replace(picture(2.0, old, plans.held(2)), now_us=at_us)
    books.note(snap, OPTIONS, wanted_gpus=4)
    written = books.facts(2.0)[overlap.HOURS]
    assert len(written) == overlap.HOURS_KEPT
    assert "0" not in written
    assert written[str(overlap.HOURS_KEPT * overlap.HOUR_US)] == 8.0
    books.note(dataclasses.replace(snap, now=3.0), OPTIONS, wanted_gpus=4)
    assert overlap.HOURS not in books.facts(3.0), "once a minute"
    assert books.facts(62.5)[overlap.HOURS][str(overlap.HOURS_KEPT * overlap.HOUR_US)] == 12.0

"""Which replica held which GPUs of a lease at which moment: disjoint pieces that tile the lease. Pure.

What agents write may overlap (a row written again, two replicas in a hand-over, a clock's step) and have
gaps. The lease's own rows are the truth about its total: no moment of a run counts twice, a replica counts
once at a time, and replicas get, in the order of their ids, no more than the lease has. What is left over
is held by no replica.
"""

import dataclasses

import numpy as np

from accounting import shares
from accounting.shares import Ints


@dataclasses.dataclass(frozen=True, slots=True)
class Leased:
    """GPUs that leases held: arrays of one length, a row each.

    Attributes:
        lease: number of the lease, from 0.
        run: number of the run, over all leases; runs of one lease have one lease.
        start, end: UTC µs.
        parts: of a GPU that a lease's `gpus` count, those of its replicas too; None: all are whole ones.
    """

    lease: Ints
    run: Ints
    gpus: Ints
    start: Ints
    end: Ints
    parts: Ints | None = None

    def parts_of(self, lease: Ints) -> Ints:
        """Return the parts of a GPU that are counted in each of some leases."""
        if self.parts is None or not len(self.lease):
            return np.ones(len(lease), np.int64)
        each = np.ones(int(self.lease.max()) + 1, np.int64)
        np.maximum.at(each, self.lease, self.parts)
        return each[lease]


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """GPUs that replicas held: arrays of one length, a row each.

    Attributes:
        replica: number of the replica, over all leases, in the order of their ids within a lease.
    """

    lease: Ints
    replica: Ints
    gpus: Ints
    start: Ints
    end: Ints


@dataclasses.dataclass(frozen=True, slots=True)
class Pieces:
    """Disjoint pieces of the leases' GPU time, none across a border of a period.

    Attributes:
        row: the row of `Held` that a piece is of; -1: held by no replica.
        gpus: GPUs of it, at least one.
    """

    lease: Ints
    row: Ints
    gpus: Ints
    start: Ints
    end: Ints


def tile(leased: Leased, held: Held, borders: Ints) -> Pieces:
    """Cut the leases' GPU time within ``borders`` (ascending, at least two) into pieces."""
    first, last = int(borders[0]), int(borders[-1])
    span = last - first + 1

    def key(number: Ints, at: Ints) -> Ints:
        return number * span + np.clip(at, first, last) - first

    lease, gpus, begin, end = _once(leased, first, last)
    begin, end = lease * span + begin, lease * span + end
    from_, to = key(held.lease, held.start), key(held.lease, held.end)
    grid = (np.unique(lease)[:, None] * span + (borders - first)[None, :]).ravel()
    edges = np.unique(np.concatenate([begin, end, from_, to, grid]))
    change = np.zeros(len(edges) + 1, np.int64)
    np.add.at(change, np.searchsorted(edges, begin), gpus)
    np.add.at(change, np.searchsorted(edges, end), -gpus)
    there = np.cumsum(change)[:-1]  # GPUs of the lease from each edge to the next

    row, cell, taken = _taken(
        held, np.searchsorted(edges, from_), np.searchsorted(edges, to), there
    )
    left = there - np.bincount(cell, weights=taken, minlength=len(there)).astype(np.int64)
    spare = np.flatnonzero(left > 0)
    cells = np.concatenate([cell, spare])
    return Pieces(
        lease=edges[cells] // span,
        row=np.concatenate([row, np.full(len(spare), -1)]),
        gpus=np.concatenate([taken, left[spare]]),
        start=edges[cells] % span + first,
        end=edges[cells + 1] % span + first,
    )


def _once(leased: Leased, first: int, last: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Cut off of each row what an earlier one of its run has; returns lease, GPUs, begin and end.

    The times are µs from ``first``. Runs lie one after another on one axis, so that the latest end so far
    is a running maximum that never reaches over to the next run.
    """
    span = last - first + 1
    order = np.lexsort((leased.end, leased.start, leased.run))
    base = leased.run[order] * span
    begin = base + np.clip(leased.start[order], first, last) - first
    end = base + np.clip(leased.end[order], first, last) - first
    latest = np.maximum.accumulate(end)
    begin[1:] = np.maximum(begin[1:], latest[:-1])
    some = (end > begin) & (leased.gpus[order] > 0)
    lease, gpus = leased.lease[order], leased.gpus[order]
    return lease[some], gpus[some], (begin - base)[some], (end - base)[some]


def _taken(held: Held, from_: Ints, to: Ints, there: Ints) -> tuple[Ints, Ints, Ints]:
    """Return which row holds how many GPUs in which cell (row, cell, GPUs; at least one)."""
    order = np.lexsort((held.end, held.start, held.replica))
    item, place = shares.expand(np.maximum(to - from_, 0)[order])
    row = order[item]
    cell = from_[row] + place
    keep = (held.gpus[row] > 0) & (there[cell] > 0)
    row, cell = row[keep], cell[keep]
    order = np.argsort(cell, kind="stable")  # replicas stay in their order
    row, cell = row[order], cell[order]
    if not len(row):
        return row, cell, row
    replica = held.replica[row]
    once = np.r_[True, (cell[1:] != cell[:-1]) | (replica[1:] != replica[:-1])]
    row, cell = row[once], cell[once]
    gpus = held.gpus[row]
    so_far = np.cumsum(gpus) - gpus
    opens = np.r_[True, cell[1:] != cell[:-1]]
    before = so_far - so_far[opens][np.cumsum(opens) - 1]
    taken = np.minimum(gpus, there[cell] - before)
    some = taken > 0
    return row[some], cell[some], taken[some]

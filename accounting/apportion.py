"""Who used the GPU time of which replica in which period: exact in GPU-µs. Pure, on arrays.

For every replica and period: allocated = attributed + idle + start-up + waste, to the microsecond; GPUs of
a lease that no replica holds are idle time of the lease itself, so that leases tile as well.

- A replica that starts makes start-up time; one that sleeps makes idle time.
- One that serves or drains is busy while its engine makes steps, and idle otherwise. An engine that does
  not tell its steps counts as busy while any attempt runs on it.
- The busy time of a row within a period is shared out among the attempts that ran then, by cost:
  a·(uncached prompt tokens) + b·(output tokens). An attempt's prompt is spread evenly over the time to its
  first token, its output over the rest. The parts add up (`shares.largest_remainder`).
- What the platform pays for is waste: attempts of its own, and of others the tokens computed again.
  Busy time that no attempt claims (a warm-up, or a row that never came) is waste as well, and so is the
  time from a node's death to the end of its lease.

What it can't know is in ``docs/gpu-seconds.md``.
"""

import dataclasses
import enum

import numpy as np
import numpy.typing as npt

from accounting import shares, tiling
from accounting.shares import Ints

NOBODY = -1


class Kind(enum.IntEnum):
    """Where GPU time went; `name` in lower case and with dashes is how it is told."""

    ATTRIBUTED = 0
    IDLE = 1  # a replica that could have worked
    ASLEEP = 2
    UNASSIGNED = 3  # GPUs of a lease that no replica held
    START_UP = 4
    RECOMPUTED = 5  # waste: computed again, or for nobody
    UNCLAIMED = 6  # waste: the engine was busy and no attempt says that it was there
    LOST = 7  # waste: the node had died, and Slurm still counted


class State(enum.IntEnum):
    """A replica's state in a row."""

    STARTING = 0
    SERVING = 1  # and draining
    ASLEEP = 2
    LOST = 3  # nobody could say: the lease's own, after its node died


@dataclasses.dataclass(frozen=True, slots=True)
class Activity:
    """What the rows of `tiling.Held` say besides: arrays of the same length.

    Attributes:
        state: of `State`.
        busy_us: µs with steps, even over the row.
        measured: whether the engine tells its steps.
    """

    state: Ints
    busy_us: Ints
    measured: npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What ran: arrays of one length, one item for an attempt, and a second one if part of it is waste.

    Attributes:
        replica: where.
        owner: whose; `NOBODY`: the platform's.
        start, first, end: dispatch, first token (0: none), end; UTC µs.
        prefill, decode: cost of the prompt and of the output, whole numbers of any one unit.
    """

    replica: Ints
    owner: Ints
    start: Ints
    first: Ints
    end: Ints
    prefill: Ints
    decode: Ints


@dataclasses.dataclass(frozen=True, slots=True)
class Lines:
    """Where the time went: arrays of one length.

    Attributes:
        period: number of the period.
        replica: `NOBODY` for GPUs of a lease that no replica held.
        kind: of `Kind`.
        item: which item of `Work`, `NOBODY` where it is nobody's.
        gpu_us: more than 0.
    """

    period: Ints
    lease: Ints
    replica: Ints
    kind: Ints
    item: Ints
    gpu_us: Ints


def attribute(
    leased: tiling.Leased, held: tiling.Held, activity: Activity, work: Work, borders: Ints
) -> Lines:
    """Share out the GPU time of leases.

    Args:
        leased: what the leases held, by their agents' clocks; the truth about the total.
        held: which replica held what.
        activity: what it did then.
        work: the attempts that ran there.
        borders: of the periods, ascending, at least two; what lies outside is left out.
    """
    pieces = tiling.tile(leased, held, borders)
    length = pieces.end - pieces.start
    period = np.searchsorted(borders, pieces.start, side="right") - 1
    mine = pieces.row >= 0
    row = pieces.row[mine]
    busy = np.zeros(len(length), np.int64)
    busy[mine] = _busy(held, activity, work, row, pieces.start[mine], pieces.end[mine])
    kind = np.full(len(length), Kind.UNASSIGNED, np.int64)
    kind[mine] = np.choose(activity.state[row], [Kind.START_UP, Kind.IDLE, Kind.ASLEEP, Kind.LOST])
    replica = np.full(len(length), NOBODY, np.int64)
    replica[mine] = held.replica[row]
    # Of a part of a GPU so much: rounded once a piece, so that what is busy and what is not add up.
    parts = leased.parts_of(pieces.lease)
    spent = pieces.gpus * busy // parts
    rest = Lines(
        period,
        pieces.lease,
        replica,
        kind,
        np.full(len(length), NOBODY, np.int64),
        pieces.gpus * length // parts - spent,
    )
    used = spent > 0
    amounts = spent[used]
    laboured = replica[used], pieces.lease[used], pieces.start[used], amounts
    claimed = _claims(laboured, held, work, borders)
    return summed(_joined(rest, claimed))


def _busy(
    held: tiling.Held, activity: Activity, work: Work, row: Ints, start: Ints, end: Ints
) -> Ints:
    """Return the busy µs of each piece, at most its length."""
    from_, to = held.start[row], held.end[row]
    told = shares.spread(np.minimum(activity.busy_us[row], to - from_), from_, to, start, end)
    busy = np.where(activity.measured[row], told, _running(held.replica[row], start, end, work))
    busy = np.where(activity.state[row] == State.SERVING, busy, 0)
    return np.clip(busy, 0, end - start)


def _running(replica: Ints, start: Ints, end: Ints, work: Work) -> Ints:
    """Return how long any attempt ran on a replica within each interval."""
    if not len(work.start) or not len(start):
        return np.zeros(len(start), np.int64)
    origin = min(int(work.start.min()), int(start.min()))
    span = max(int(work.end.max()), int(end.max())) - origin + 1
    order = np.lexsort((work.start, work.replica))
    base = work.replica[order] * span - origin
    begins, ends = base + work.start[order], np.maximum.accumulate(base + work.end[order])
    fresh = np.r_[True, begins[1:] > ends[:-1]]
    begins, ends = begins[fresh], ends[np.r_[np.flatnonzero(fresh)[1:] - 1, len(ends) - 1]]
    before = np.cumsum(ends - begins) - (ends - begins)

    def until(at: Ints) -> Ints:
        index = np.searchsorted(begins, at, side="right") - 1
        known = np.maximum(index, 0)
        run = before[known] + np.minimum(at, ends[known]) - begins[known]
        return np.where(index < 0, 0, run)

    return until(replica * span + end - origin) - until(replica * span + start - origin)


def _claims(
    pieces: tuple[Ints, Ints, Ints, Ints], held: tiling.Held, work: Work, borders: Ints
) -> Lines:
    """Share out the busy time of each cell among what ran in it.

    A cell is where a row of a replica and a period meet: nothing finer is known of the busy time.

    Args:
        pieces: of busy time: replica, lease, beginning, GPU-µs.
        held: the rows.
        work: the attempts.
        borders: of the periods.
    """
    replica, lease, start, amounts = pieces
    first, span = int(borders[0]), int(borders[-1] - borders[0]) + 1

    def key(number: Ints, at: Ints) -> Ints:
        return number * span + np.clip(at, first, borders[-1]) - first

    grid = (np.unique(replica)[:, None] * span + (borders - first)[None, :]).ravel()
    rows = (key(held.replica, held.start), key(held.replica, held.end))
    edges = np.unique(np.concatenate([grid, *rows]))
    groups, one, of = np.unique(
        np.searchsorted(edges, key(replica, start), side="right") - 1,
        return_index=True,
        return_inverse=True,
    )
    total = np.zeros(len(groups), np.int64)
    np.add.at(total, of, amounts)
    inside = (work.end > first) & (work.start < borders[-1])
    item, cell, weight = _fragments(work, edges, span, first, inside)
    place = np.minimum(np.searchsorted(groups, cell), max(len(groups) - 1, 0))
    known = groups[place] == cell if len(groups) else np.zeros(len(cell), bool)
    item, group, weight = item[known], place[known], weight[known]
    order = np.argsort(group, kind="stable")
    item, group, weight = item[order], group[order], weight[order]
    parts = shares.largest_remainder(total, group, weight)
    kind = np.where(work.owner[item] == NOBODY, Kind.RECOMPUTED, Kind.ATTRIBUTED).astype(np.int64)
    alone = np.ones(len(groups), bool)
    alone[group] = False
    group = np.concatenate([group, np.flatnonzero(alone)])
    return Lines(
        period=np.searchsorted(borders, start[one[group]], side="right") - 1,
        lease=lease[one[group]],
        replica=replica[one[group]],
        kind=np.concatenate([kind, np.full(int(alone.sum()), Kind.UNCLAIMED, np.int64)]),
        item=np.concatenate([item, np.full(int(alone.sum()), NOBODY, np.int64)]),
        gpu_us=np.concatenate([parts, total[alone]]),
    )


def _fragments(
    work: Work, edges: Ints, span: int, first: int, inside: npt.NDArray[np.bool_]
) -> tuple[Ints, Ints, Ints]:
    """Spread each item's cost over the cells it ran in; returns item, cell and cost of each part.

    A replica's cells lie on one axis from ``replica·span`` on, as does everything that ran there.
    """
    which = np.flatnonzero(inside)
    start, end = work.start[which], work.end[which]
    told = np.clip(work.first[which], start, end)
    some = work.first[which] > 0  # without a first token both are spread over all of it
    first_part, second_part = np.where(some, told, end), np.where(some, told, start)
    base = work.replica[which] * span - first
    phases = (
        (start, first_part, work.prefill[which]),
        (second_part, end, work.decode[which]),
    )
    found: list[tuple[Ints, Ints, Ints]] = []
    for begin, finish, cost in phases:
        least, most = base + first, base + first + span - 1
        from_, to = np.clip(base + begin, least, most), np.clip(base + finish, least, most)
        # What takes no time at all belongs to the cell that it lies in, at the attempt's end before it.
        early = (begin == finish) & (begin == end)
        low = np.searchsorted(edges, from_, side="right") - 1
        low = np.where(early, np.searchsorted(edges, from_, side="left") - 1, low)
        high = np.where(to > from_, np.searchsorted(edges, to, side="left"), low + 1)
        out = (base + begin > most) | ((base + finish < least) & (finish > begin))
        low, high = np.maximum(low, 0), np.minimum(high, len(edges) - 1)
        item, place = shares.expand(np.where(out, 0, np.maximum(high - low, 0)))
        cell = low[item] + place
        part = shares.spread(
            cost[item],
            (base + begin)[item],
            (base + finish)[item],
            np.maximum(edges[cell], (base + begin)[item]),
            np.minimum(edges[cell + 1], (base + finish)[item]),
        )
        found.append((which[item], cell, part))
    item, cell, weight = (np.concatenate(columns) for columns in zip(*found, strict=True))
    return item, cell, weight


def _joined(one: Lines, other: Lines) -> Lines:
    return Lines(
        *(
            np.concatenate([getattr(one, field.name), getattr(other, field.name)])
            for field in dataclasses.fields(Lines)
        )
    )


def summed(lines: Lines) -> Lines:
    """Add up lines that differ in nothing but their amount, and leave out empty ones."""
    some = lines.gpu_us > 0
    keys = [getattr(lines, name)[some] for name in ("item", "kind", "replica", "lease", "period")]
    order = np.lexsort(keys)
    item, kind, replica, lease, period = (key[order] for key in keys)
    amount = lines.gpu_us[some][order]
    if not len(amount):
        return Lines(period, lease, replica, kind, item, amount)
    new = np.zeros(len(amount), bool)
    new[0] = True
    for key in (item, kind, replica, lease, period):
        new[1:] |= key[1:] != key[:-1]
    first = np.flatnonzero(new)
    total = np.add.reduceat(amount, first)
    return Lines(period[first], lease[first], replica[first], kind[first], item[first], total)

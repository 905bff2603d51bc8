"""Who used the GPU time: exact in GPU-µs, decided by integers alone. Pure.

For every lease and period: allocated = attributed + waste + idle + starting, to the microsecond.

- The life of a lease is cut wherever a row begins or ends. In each piece its GPUs are either held by a
  replica or by none.
- A replica that starts makes start-up time; so does a lease before its first replica. GPUs that nobody
  holds, a replica asleep and a replica without a request make idle time.
- A piece in which requests run on the replica is theirs. It is split by weight: (a·uncached prompt tokens
  + b·output tokens) of each, spread evenly over the request's duration; if nobody has any weight, evenly.
  What the platform pays for (recomputation, preempted work, our faults) is waste. The split is by largest
  remainder, so that the parts add up to the whole.
- A lease without any replica rows is taken as one replica that holds all of it and serves.

What it can't know: how long a request waited inside the engine, and that prefill and decode of one
request do not cost the same per second. An attempt of which only OPEN is known has no end and gets
nothing.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, TypeVar

Key = tuple[str, ...]
STARTING = "starting"
_ASLEEP = "asleep"
_SCALE_BITS = 40  # weights are divided by durations (µs): keeps integers exact enough for a month


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """GPUs held from `start_us` to `end_us`, by a lease (`replica_id` "") or by one of its replicas."""

    gpus: int
    start_us: int
    end_us: int
    replica_id: str = ""
    state: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """One attempt that ran on a replica.

    Attributes:
        key: whom its GPU time is attributed to; None: the platform (waste).
        weight: a·uncached prompt tokens + b·output tokens.
    """

    key: Key | None
    replica_id: str
    start_us: int
    end_us: int
    weight: int


_T = TypeVar("_T", Held, Work)


@dataclasses.dataclass(slots=True)
class Share:
    """Where GPU-µs went."""

    allocated: int = 0
    idle: int = 0
    starting: int = 0
    waste: int = 0
    attributed: dict[Key, int] = dataclasses.field(default_factory=dict)

    def add(self, other: "Share") -> None:
        """Add another share to this one."""
        self.allocated += other.allocated
        self.idle += other.idle
        self.starting += other.starting
        self.waste += other.waste
        for key, amount in other.attributed.items():
            self.attributed[key] = self.attributed.get(key, 0) + amount


def split(amount: int, weights: Mapping[Key | None, int]) -> dict[Key | None, int]:
    """Share out ``amount`` in proportion to ``weights`` by largest remainder; the sum is ``amount``.

    All weights zero means equal parts. Ties go to the smaller key, None last.
    """
    total = sum(weights.values())
    if total == 0:
        return split(amount, dict.fromkeys(weights, 1))
    parts = {key: amount * weight // total for key, weight in weights.items()}
    rest = amount - sum(parts.values())
    order = sorted(
        weights, key=lambda key: (-(amount * weights[key] % total), key is None, key or ())
    )
    for key in order[:rest]:
        parts[key] += 1
    return parts


def attribute(
    leased: Sequence[Held], held: Sequence[Held], work: Iterable[Work], cuts: Sequence[int]
) -> list[Share]:
    """Share out one lease's GPU time.

    Args:
        leased: what the lease itself held, from its agent's rows; it is the truth about the total.
        held: which replica held what; more than the lease has at a time is cut off, by replica id.
        work: the attempts that ran there.
        cuts: borders of the periods, ascending, at least two; what lies outside is left out.

    Returns:
        One share for each period (one less than there are cuts).
    """
    shares = [Share() for _ in cuts[1:]]
    alone = not held  # no replica rows: the lease stands for one replica
    jobs = [each for each in work if each.end_us > each.start_us]
    edges = _edges([*leased, *held], jobs, cuts)
    first_held = min((each.start_us for each in held), default=0)
    spans, replicas, running = _Active(leased), _Active(held), _Active(jobs)
    for start, end in itertools.pairwise(edges):
        gpus = sum(each.gpus for each in spans.at(start))
        present, busy = replicas.at(start), running.at(start)
        if gpus == 0:
            continue
        share = shares[bisect.bisect_right(cuts, start) - 1]
        length, left = end - start, gpus
        share.allocated += gpus * length
        for replica in sorted(present, key=lambda each: (each.replica_id, each.start_us)):
            taken = min(replica.gpus, left)
            left -= taken
            mine = [each for each in busy if each.replica_id == replica.replica_id]
            _place(share, taken * length, replica.state, mine)
        early = not alone and end <= first_held
        _place(share, left * length, STARTING if early else "", busy if alone else [])
    return shares


def _place(share: Share, amount: int, state: str, busy: Sequence[Work]) -> None:
    if amount == 0:
        return
    if state == STARTING:
        share.starting += amount
    elif state == _ASLEEP or not busy:
        share.idle += amount
    else:
        rates: dict[Key | None, int] = {}
        for each in busy:
            rate = (each.weight << _SCALE_BITS) // (each.end_us - each.start_us)
            rates[each.key] = rates.get(each.key, 0) + rate
        for key, part in split(amount, rates).items():
            if key is None:
                share.waste += part
            else:
                share.attributed[key] = share.attributed.get(key, 0) + part


def _edges(held: Sequence[Held], work: Sequence[Work], cuts: Sequence[int]) -> list[int]:
    edges = set(cuts)
    for span in held:
        edges.update((span.start_us, span.end_us))
    for job in work:
        edges.update((job.start_us, job.end_us))
    return sorted(edge for edge in edges if cuts[0] <= edge <= cuts[-1])


class _Active(Generic[_T]):
    """What is under way at a time that only grows."""

    def __init__(self, items: Sequence[_T]) -> None:
        self._later: list[_T] = sorted(items, key=lambda each: each.start_us, reverse=True)
        self._now: list[_T] = []

    def at(self, us: int) -> list[_T]:
        while self._later and self._later[-1].start_us <= us:
            self._now.append(self._later.pop())
        self._now = [each for each in self._now if each.end_us > us]
        return self._now

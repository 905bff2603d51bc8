"""How one whole number is cut into whole numbers that add up to it. Pure, on arrays.

Two ways: along time (`spread`: the part of an amount that falls into a piece of its interval), and among
claims (`largest_remainder`: in proportion to weights). Neither loses nor makes a unit.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_QUANTA = 1 << 28  # weights are counted in these, or in fewer: an amount times it stays below 2⁶³
_ROOM = 1 << 62
MOST = 1 << 42  # the largest amount: 73,000 GPUs for a minute, with weights to one in a million


def spread(amount: Ints, start: Ints, end: Ints, first: Ints, last: Ints) -> Ints:
    """Return how much of ``amount``, even over ``[start, end)``, falls into ``[first, last)`` of it.

    Pieces that tile the interval get parts that add up to the amount: each border's cumulated amount is
    rounded once, and a part is the difference of two. All arrays have one length; an empty interval has
    all of its amount at its beginning.
    """
    length = np.maximum(end - start, 1).astype(np.float64)

    def until(at: Ints) -> Ints:
        share = np.clip((at - start) / length, 0.0, 1.0)
        return ints(np.rint(amount * share))

    return ints(np.where(end > start, until(last) - until(first), amount))


def largest_remainder(amounts: Ints, group: Ints, weights: Ints) -> Ints:
    """Share out each group's amount in proportion to its members' weights.

    Args:
        amounts: one for each group, 0 to `MOST`.
        group: of each member, ascending; a group without members keeps its amount.
        weights: of each member, not negative; all zero in a group means equal parts.

    Returns:
        One part for each member; those of a group add up to its amount. Equal remainders go to the first.
    """
    if not len(group):
        return np.zeros(0, np.int64)
    if amounts.max() > MOST:
        raise ValueError(f"{amounts.max()} GPU-µs of one replica in one period: more than {MOST}")
    starts = np.flatnonzero(np.r_[True, group[1:] != group[:-1]])
    sizes = np.diff(np.r_[starts, len(group)])
    total = np.repeat(np.add.reduceat(weights, starts), sizes)
    weights = np.where(total == 0, 1, weights)
    total = np.repeat(np.add.reduceat(weights, starts), sizes)
    # By each group's own amount: what others have beside it changes no part of it.
    fine = np.minimum(_QUANTA, _ROOM // np.maximum(amounts, 1))[group]
    quanta = np.rint(weights / total * fine).astype(np.int64)
    whole = np.repeat(np.add.reduceat(quanta, starts), sizes)
    wanted = amounts[group] * quanta
    parts, remainder = wanted // whole, wanted % whole
    rest = amounts[group[starts]] - np.add.reduceat(parts, starts)
    order = np.lexsort((-remainder, group))
    place = np.arange(len(group)) - np.repeat(starts, sizes)
    parts[order] += place < np.repeat(rest, sizes)
    return ints(parts)


def largest_remainder_of(amount: int, weights: Ints) -> list[int]:
    """Share out one amount of any size, as `largest_remainder` does many small ones."""
    total = int(weights.sum())
    wanted = [amount * int(weight) for weight in weights]
    parts = [each // total for each in wanted]
    order = sorted(range(len(parts)), key=lambda place: -(wanted[place] % total))
    for place in order[: amount - sum(parts)]:
        parts[place] += 1
    return parts


def expand(counts: Ints) -> tuple[Ints, Ints]:
    """Return, for items that are repeated ``counts`` times, each copy's item and its place among them."""
    item = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(item)) - np.repeat(np.cumsum(counts) - counts, counts)
    return item, place


def ints(values: Any) -> Ints:
    """Return values as 64-bit integers."""
    return np.asarray(values, dtype=np.int64)

"""Budgets of the ladder's rungs, learned from how long each took, and what a missed one leads to.

A start that has missed its budget no longer counts as coming: another one is begun beside it, and whichever
is ready first stays. A rung whose outcomes vary gets less patience, so that the next one runs beside it.
"""

import math
from collections.abc import Sequence

KEPT = 50  # outcomes that an estimate looks at
FEW = 5  # fewer say little
VARIES = 2.0  # a ninetieth percentile so many times the median is uncertain
PATIENCE = 2.0  # times the ninetieth percentile until a start counts as late
LEAST_S = 10.0  # a second start takes longer than a little more patience with the first


def quantile(outcomes: Sequence[float], share: float) -> float:
    """Return the outcome that ``share`` of the newest ones do not exceed, 0 without any."""
    newest = sorted(outcomes[-KEPT:])
    return newest[min(len(newest) - 1, math.ceil(share * len(newest)) - 1)] if newest else 0.0


def budget_s(outcomes: Sequence[float], usual_s: float) -> float:
    """Return seconds after which a start is late.

    Args:
        outcomes: how long earlier ones took, seconds, oldest first.
        usual_s: what to expect while there are too few of them.
    """
    if len(outcomes) < FEW:
        return max(LEAST_S, PATIENCE * max(usual_s, quantile(outcomes, 1.0)))
    late = quantile(outcomes, 0.9)
    return max(LEAST_S, late if uncertain(outcomes) else PATIENCE * late)


def uncertain(outcomes: Sequence[float]) -> bool:
    """Return whether outcomes vary so much that the median says little about the next one."""
    return quantile(outcomes, 0.9) > VARIES * quantile(outcomes, 0.5)

"""What a token costs a model's engine: a and b of busy time = a·prefill tokens + b·decode tokens. Pure.

Least squares with a, b ≥ 0 over the intervals that replicas report, from sums alone, so that it is kept
up to date by adding: the sums of two hours are those of both. There is no constant term: the time of a
step that reads the weights is borne by the tokens of that step.

How sure: the standard errors of both from the residuals. A fit counts once there are `LEAST` intervals, it
leaves at most `UNEXPLAINED` of the sum of squares, and what either error makes of a typical interval is
at most `UNSURE` of its busy time (so that a prompt may well be found to cost nothing where a step takes
its time whatever is in it); until then the settings' weights hold. An interval in which prefill and decode
always go together by the same ratio can't tell them apart: the errors say so.

Source: Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23; with two unknowns the active
sets can be tried one by one.
"""

import dataclasses
import math
from collections.abc import Iterable

LEAST = 30
UNSURE = 0.1
UNEXPLAINED = 0.2


@dataclasses.dataclass(frozen=True, slots=True)
class Sums:
    """Sums over intervals: of 1, and of the products of prefill (p), decode (d) tokens and busy µs (y)."""

    n: int = 0
    pp: float = 0.0
    pd: float = 0.0
    dd: float = 0.0
    py: float = 0.0
    dy: float = 0.0
    yy: float = 0.0

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(
            *map(sum, zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True))
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """A model's costs.

    Attributes:
        prefill_us, decode_us: busy µs of a token.
        prefill_error, decode_error: their standard errors, 0 where they are given and not fitted.
        n: intervals that it is from.
        fitted: False: the settings' weights hold, whose unit is arbitrary.
    """

    prefill_us: float
    decode_us: float
    prefill_error: float = 0.0
    decode_error: float = 0.0
    n: int = 0
    fitted: bool = False


def of(intervals: Iterable[tuple[int, int, int]]) -> Sums:
    """Return the sums over (prefill tokens, decode tokens, busy µs)."""
    total = Sums()
    for p, d, y in intervals:
        total += Sums(1, p * p, p * d, d * d, p * y, d * y, y * y)
    return total


def fit(sums: Sums, otherwise: Cost) -> Cost:
    """Return the fitted costs, or ``otherwise`` (with n and what was found in doubt left out)."""
    unsure = dataclasses.replace(otherwise, n=sums.n, fitted=False)
    det = sums.pp * sums.dd - sums.pd * sums.pd
    if sums.n < LEAST or det <= 1e-9 * sums.pp * sums.dd:
        return unsure
    a = (sums.py * sums.dd - sums.dy * sums.pd) / det
    b = (sums.dy * sums.pp - sums.py * sums.pd) / det
    if a < 0:
        a, b = 0.0, max(0.0, sums.dy / sums.dd)
    elif b < 0:
        a, b = max(0.0, sums.py / sums.pp), 0.0
    squares = sums.yy - 2 * (a * sums.py + b * sums.dy)
    squares += a * a * sums.pp + 2 * a * b * sums.pd + b * b * sums.dd
    if squares > UNEXPLAINED * sums.yy:
        return unsure
    variance = max(0.0, squares) / (sums.n - 2)
    errors = math.sqrt(variance * sums.dd / det), math.sqrt(variance * sums.pp / det)
    if max(errors[0] * math.sqrt(sums.pp), errors[1] * math.sqrt(sums.dd)) > UNSURE * math.sqrt(
        sums.yy
    ):
        return unsure
    return Cost(a, b, *errors, n=sums.n, fitted=True)

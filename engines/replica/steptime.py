"""The step-time model: t = a + b·prefill tokens + c·decoding sequences + d·KV tokens, fitted as steps come.

Recursive least squares with forgetting (normal equations, each step weighs `FORGET` less than the next
one), so that the fit follows an engine whose clocks or neighbours change. No coefficient is negative: one
that would be is left out and the others are fitted again. A step far off what the model says (a garbage
collection, a stolen core) weighs less, as in Huber's estimator. Pure: no clock.
"""

import dataclasses

import numpy as np
from numpy import typing as npt

FORGET = 0.998  # a step weighs half as much after 350 more
LEAST = 24  # steps before the model says anything
HUBER = 3.0  # mean deviations beyond which a step weighs less
_RIDGE = 1e-6  # of a column's own weight: what was never seen apart is not told apart

Array = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One engine step.

    Attributes:
        ms: its duration.
        prefill: prompt tokens that it computed.
        decode: tokens that it sampled, which is one for each sequence that decodes.
        kv_tokens: tokens in the KV cache of running sequences.
    """

    ms: float
    prefill: int
    decode: int
    kv_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Coefficients:
    """The fit, in milliseconds: per step, per prompt token, per decoding sequence, per KV token."""

    base: float
    prefill: float
    decode: float
    kv: float

    def ms(self, prefill: int, decode: int, kv_tokens: int) -> float:
        """Return what a step should take."""
        return self.base + self.prefill * prefill + self.decode * decode + self.kv * kv_tokens


class Model:
    """The fit of one replica."""

    def __init__(self) -> None:
        self._squares: Array = np.zeros((4, 4))
        self._products: Array = np.zeros(4)
        self._seen = 0
        self._fit: Coefficients | None = None
        self._fitted_at = 0
        self._deviation = 0.0

    @property
    def seen(self) -> int:
        """Steps observed."""
        return self._seen

    def observe(self, step: Step) -> None:
        """Take one step; one without work, or without a duration, is none."""
        if step.ms <= 0 or (step.prefill <= 0 and step.decode <= 0):
            return
        row = np.array([1.0, step.prefill, step.decode, step.kv_tokens])
        weight = self._weight(step)
        self._squares = FORGET * self._squares + weight * np.outer(row, row)
        self._products = FORGET * self._products + weight * step.ms * row
        self._seen += 1
        if self._seen >= LEAST and self._seen - self._fitted_at >= LEAST:
            self._fit, self._fitted_at = _solve(self._squares, self._products), self._seen

    def coefficients(self) -> Coefficients | None:
        """Return the fit, None before `LEAST` steps."""
        return self._fit

    def _weight(self, step: Step) -> float:
        if self._fit is None:
            return 1.0
        off = abs(step.ms - self._fit.ms(step.prefill, step.decode, step.kv_tokens))
        bound = HUBER * self._deviation
        # A lasting change is believed in the end: what is off moves the deviation, though by its cut value.
        cut = off if not bound else min(off, bound)
        self._deviation += 0.05 * (cut - self._deviation) if self._deviation else off
        return 1.0 if not bound or off <= bound else bound / off


def _solve(squares: Array, products: Array) -> Coefficients:
    """Return the least squares without negative coefficients."""
    scale = np.sqrt(np.diag(squares))
    used = [place for place in range(4) if scale[place] > 0]
    while True:
        part = np.ix_(used, used)
        scaled = squares[part] / np.outer(scale[used], scale[used])
        right = products[used] / scale[used]
        found = np.linalg.solve(scaled + _RIDGE * np.eye(len(used)), right) / scale[used]
        negative = [place for place, value in zip(used, found, strict=True) if value < 0]
        if not negative or len(used) == 1:
            break
        worst = min(negative, key=lambda place: found[used.index(place)] * scale[place])
        used.remove(worst)
    values = [0.0] * 4
    for place, value in zip(used, found, strict=True):
        values[place] = max(0.0, float(value))
    return Coefficients(*values)

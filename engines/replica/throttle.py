"""How much batch a shared replica takes: just enough that interactive answers stay within their SLO. Pure.

Two limits on the number of batch sequences, the smaller counts:

* forward: the step-time model says how many may decode beside one more interactive sequence before a
  step takes longer than the inter-token SLO;
* feedback: additive increase, multiplicative decrease on the measured inter-token latency (the steps in
  which interactive sequences ran), which is right where the model is not.

Where the engine alone is slower than the SLO the target is `SLACK` times its step without batch: batch
is not blamed for what it does not cause. Batch's prompts are bounded as well: beside interactive sequences
no more of them are computed at once than keep a step within the target (one prompt always may), and none
enters while an interactive prompt is being computed: it would share that prompt's own step. With no
interactive sequence there is nothing to bound: who arrives waits for the step under way, which the engine's
own chunk ends, and goes before the prompts that wait (bound here as well, a replica stood at two thirds of
its seats where batch's texts are long, though most of them were cached).

A request that samples nothing (an embedding, a ranking, a class) is a prompt from beginning to end, and where
such overlap the last rule would keep batch out for ever: it holds for requests that generate alone. No token
follows another there, so there is no inter-token latency to feed back either; the bound on batch's prompts is
what keeps a step beside interactive ones within the SLO.
"""

import collections
import dataclasses

from engines.replica import steptime
from scheduler.contracts import fleet

WINDOW = 16  # steps of one decision
QUANTILE = 0.95
DECREASE = 0.7
CALM = 0.15  # of the target: what one more batch sequence is taken to cost while nothing is known
FAR = (
    1.25  # of the target: above it the youngest leave at once, below it they may end by themselves
)
SLACK = 1.1
PREFILL_TOKENS = 2048  # a chunk of vLLM's on small machines


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What is to be kept.

    Attributes:
        itl_slo_ms: inter-token latency that interactive answers are promised, ms.
        prefill_tokens: batch prompt tokens that may be computed at once beside interactive sequences.
    """

    itl_slo_ms: float = 25.0
    prefill_tokens: int = PREFILL_TOKENS


class Throttle:
    """The limits of one replica.

    Args:
        seats: seats in all.
        limits: what is to be kept.
    """

    def __init__(self, seats: int, limits: Limits) -> None:
        self.model = steptime.Model()
        self._seats = seats
        self._limits = limits
        self._cap = float(seats)
        self._samples: list[float] = []
        self._kv_each: collections.deque[float] = collections.deque(maxlen=WINDOW)
        self._prefilling: dict[str, int] = {}
        self._urgent: set[str] = set()  # interactive requests without their first token

    def step(self, step: steptime.Step, *, interactive: int, batch: int) -> int:
        """Take one step of the engine.

        Args:
            step: its figures.
            interactive: interactive and standard sequences on seats.
            batch: batch sequences on seats.

        Returns:
            How many batch sequences must leave at once; mostly 0.
        """
        self.model.observe(step)
        if interactive + batch:
            self._kv_each.append(step.kv_tokens / (interactive + batch))
        if not interactive or not step.decode:
            return 0
        self._samples.append(step.ms)
        if len(self._samples) < WINDOW:
            return 0
        ranked = sorted(self._samples)
        late = ranked[min(len(ranked) - 1, int(QUANTILE * len(ranked)))]
        self._samples = []
        target = self._target(interactive)
        if late > target and batch:
            self._cap = max(0.0, DECREASE * min(self._cap, batch))
            return max(0, batch - int(self._cap)) if late > FAR * target else 0
        if late + self._cost(target) <= target:
            self._cap = min(float(self._seats), self._cap + 1.0)
        return 0

    def most(self, interactive: int) -> int:
        """Return how many batch sequences may run beside ``interactive`` others."""
        return min(int(self._cap), self._forward(interactive))

    def calm(self) -> None:
        """No interactive work for a while: feedback begins anew, the forward limit stays."""
        self._cap = float(self._seats)
        self._samples = []

    def refuses(self, role: fleet.Role, interactive: int, batch: int, need: int) -> str:
        """Say why ``need`` more batch sequences may not enter now, or ""."""
        if role is not fleet.Role.SHARED:
            return ""
        most = self.most(interactive)
        if batch + need > most:
            return f"batch is held to {most} sequences to keep inter-token latency"
        if self._urgent:
            return "an interactive prompt is being computed"
        waiting = sum(self._prefilling.values())
        if interactive and self._prefilling and waiting >= self._prompts(interactive, batch):
            return f"{waiting} batch prompt tokens are being computed"
        return ""

    @property
    def urgent(self) -> bool:
        """Whether an interactive prompt is being computed, or waits for its seat."""
        return bool(self._urgent)

    def arrived(self, key: str) -> None:
        """Note that an interactive request came; `prefilled` says when it has its first token, or left."""
        self._urgent.add(key)

    def entered(self, key: str, prompt_tokens: int) -> None:
        """Note that a batch request's prompt is being computed."""
        self._prefilling[key] = prompt_tokens

    def prefilled(self, key: str) -> None:
        """Note that it is computed, or that the request has left."""
        self._prefilling.pop(key, None)
        self._urgent.discard(key)

    def _prompts(self, interactive: int, batch: int) -> float:
        """Return how many batch prompt tokens may be computed at once."""
        fit = self.model.coefficients()
        most = float(self._limits.prefill_tokens)
        if fit is None or fit.prefill <= 0:
            return most
        decoding = interactive + batch
        room = self._target(interactive) - fit.ms(0, decoding, self._kv(decoding))
        return min(most, max(0.0, room / fit.prefill))

    def _target(self, interactive: int) -> float:
        fit = self.model.coefficients()
        alone = 0.0 if fit is None else fit.ms(0, interactive, self._kv(interactive))
        return max(self._limits.itl_slo_ms, SLACK * alone)

    def _forward(self, interactive: int) -> int:
        fit = self.model.coefficients()
        if fit is None:
            return self._seats
        beside = interactive + 1
        each = fit.decode + fit.kv * self._each()
        room = self._target(beside) - fit.ms(0, beside, self._kv(beside))
        return max(0, min(self._seats, int(room / each))) if each > 0 else self._seats

    def _cost(self, target: float) -> float:
        """Return ms that one more batch sequence adds to a step."""
        fit = self.model.coefficients()
        return CALM * target if fit is None else fit.decode + fit.kv * self._each()

    def _each(self) -> float:
        return sum(self._kv_each) / len(self._kv_each) if self._kv_each else 0.0

    def _kv(self, sequences: int) -> int:
        return round(self._each() * sequences)

"""Whether a new version is worse than the old one: a sequential test that may be looked at at any time. Pure.

Requests of both are taken in pairs, and each pair says which fared worse. If the new version is not worse,
"the new one" is said in at most half of the pairs; the test bets on more with a mixture of stakes. Its wealth
is a non-negative supermartingale then, so that it ever reaches 1/alpha with probability alpha at most
(Ville's inequality), however often one looks and whenever one stops (Robbins' mixture SPRT; Ramdas et al.,
"Game-theoretic statistics and safe anytime-valid inference", 2023).
"""

import collections
import dataclasses
import math
from collections.abc import Iterable

from scheduler.contracts import observed

STAKES = (0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.99)  # shares of "worse" betted on
DEATHS_KEPT = 1_000
KEPT = 2_000  # requests of the old version that wait for a partner: all that a last step has of it
SLACK = 1.25  # a time is worse from so many times the other one on


class Wealth:
    """One test: a pair either says "worse" or the opposite; pairs that say nothing are left out."""

    def __init__(self) -> None:
        self._logs = [0.0] * len(STAKES)
        self.pairs = 0
        self.worse = 0

    def note(self, *, worse: bool) -> None:
        """Take what one pair says."""
        self.pairs += 1
        self.worse += worse
        for at, stake in enumerate(STAKES):
            self._logs[at] += math.log(2 * (stake if worse else 1 - stake))

    @property
    def log(self) -> float:
        """Natural logarithm of the wealth, which begins at 1."""
        most = max(self._logs)
        total = sum(math.exp(each - most) for each in self._logs)
        return most + math.log(total / len(STAKES))

    def proven(self, alpha: float) -> bool:
        """Return whether the wealth has reached 1/alpha now."""
        return self.log >= -math.log(alpha)


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """What has been seen of one version."""

    requests: int = 0
    failed: int = 0
    ttft_ms: float = 0.0
    itl_ms: float = 0.0


class Comparison:
    """All that is known of a new version beside the old ones; one for a rollout.

    Args:
        new: the version that is judged.
        alpha: most probability of ever judging it worse if it is not, over all three measures.
        slack: a time counts as worse from so many times the other one on.
    """

    def __init__(self, new: str, alpha: float = 0.001, slack: float = SLACK) -> None:
        self.new = new
        self._alpha = alpha
        self._slack = slack
        self._old: collections.deque[observed.Trial] = collections.deque(maxlen=KEPT)
        self._waiting: collections.deque[observed.Trial] = collections.deque(maxlen=KEPT)
        self._tests = {name: Wealth() for name in ("error rate", "TTFT", "inter-token latency")}
        self._deaths: dict[str, None] = {}
        self._sums: dict[bool, list[float]] = {True: [0.0] * 6, False: [0.0] * 6}
        self._verdict = ""

    def note(self, trials: Iterable[observed.Trial]) -> None:
        """Take requests of either version, in the order in which they ended.

        All requests that one replica's death has cost are one event: they are not independent, which the
        test stands on, and a node that dies would otherwise speak against its version with each of them.
        """
        for trial in trials:
            if trial.death:
                if trial.death in self._deaths:
                    continue
                self._deaths[trial.death] = None
                if len(self._deaths) > DEATHS_KEPT:
                    del self._deaths[next(iter(self._deaths))]
            mine = trial.version == self.new
            _add(self._sums[mine], trial)
            (self._waiting if mine else self._old).append(trial)
        # The newest of the old version first: what the hour does to both must be the same.
        while self._waiting and self._old:
            self._pair(self._waiting.popleft(), self._old.pop())

    def counts(self, *, new: bool) -> Counts:
        """Return what has been seen of the new version, or of the old ones; times are means."""
        requests, failed, ttft, firsts, itl, gaps = self._sums[new]
        return Counts(int(requests), int(failed), _mean(ttft, firsts), _mean(itl, gaps))

    @property
    def verdict(self) -> str:
        """In what the new version is worse, as one line; "" as long as nothing says so.

        What was once proven stays: a test may be looked at at any time, so it may be stopped.
        """
        return self._verdict

    def _pair(self, new: observed.Trial, old: observed.Trial) -> None:
        if new.failed != old.failed:
            self._say("error rate", worse=new.failed)
        if new.failed or old.failed:
            return
        if new.ttft_ms and old.ttft_ms:
            self._say("TTFT", worse=new.ttft_ms > self._slack * old.ttft_ms)
        if new.itl_ms and old.itl_ms:
            self._say("inter-token latency", worse=new.itl_ms > self._slack * old.itl_ms)

    def _say(self, name: str, *, worse: bool) -> None:
        test = self._tests[name]
        test.note(worse=worse)
        if self._verdict or not test.proven(self._alpha / len(self._tests)):
            return
        new, old = self.counts(new=True), self.counts(new=False)
        told = {
            "error rate": f"{new.failed} of {new.requests} failed, {old.failed} of {old.requests} before",
            "TTFT": f"{new.ttft_ms:.1f} ms on average, {old.ttft_ms:.1f} ms before",
            "inter-token latency": f"{new.itl_ms:.2f} ms on average, {old.itl_ms:.2f} ms before",
        }
        self._verdict = f"{name} is worse in {test.worse} of {test.pairs} pairs: {told[name]}"


def _add(sums: list[float], trial: observed.Trial) -> None:
    sums[0] += 1
    sums[1] += trial.failed
    if trial.ttft_ms:
        sums[2] += trial.ttft_ms
        sums[3] += 1
    if trial.itl_ms:
        sums[4] += trial.itl_ms
        sums[5] += 1


def _mean(total: float, count: float) -> float:
    return total / count if count else 0.0

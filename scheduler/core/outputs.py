"""How many tokens a request will take, learned from those that came back: no tokenizer is asked.

A prompt's tokens follow from its characters by a ratio that each model teaches; an output's from what the
same team sampled lately from the same model. Both are estimates for making room: the engine's own "full"
and its preemption by recomputation remain the last word.
"""

import bisect
import collections
import dataclasses

# English prose has about 4 characters a token with the vocabularies in use; code and other languages
# have fewer, which the first answers teach.
FIRST_RATIO = 0.25
# So much text weighs as the first guess until answers outweigh it.
_FIRST_CHARS = 4096.0
# Older answers fade as if this much text were remembered.
_RATIO_CHARS = 1_000_000.0


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """How outputs are estimated.

    Attributes:
        first_tokens: what is thought of a team that the model has not answered yet.
        quantile: which part of the answers the estimate should cover.
        kept: answers remembered of each team and model.
        teams: pairs of model and team remembered, the least recently used go first.
    """

    first_tokens: int = 256
    quantile: float = 0.9
    kept: int = 64
    teams: int = 4096


class _Recent:
    """The newest lengths, in order of time and of size."""

    __slots__ = ("_by_size", "_by_time")

    def __init__(self) -> None:
        self._by_time: collections.deque[int] = collections.deque()
        self._by_size: list[int] = []

    def add(self, value: int, kept: int) -> None:
        self._by_time.append(value)
        bisect.insort(self._by_size, value)
        if len(self._by_time) > kept:
            oldest = self._by_time.popleft()
            del self._by_size[bisect.bisect_left(self._by_size, oldest)]

    def quantile(self, part: float) -> int:
        return self._by_size[min(len(self._by_size) - 1, int(part * len(self._by_size)))]


class Outputs:
    """What each team samples from each model, and how many tokens a model makes of a text."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._lengths: collections.OrderedDict[tuple[str, str], _Recent] = collections.OrderedDict()
        self._ratios: dict[str, tuple[float, float]] = {}  # model → tokens, characters

    def output_tokens(self, model: str, team: str, max_tokens: int) -> int:
        """Return how many tokens an answer is thought to have.

        Args:
            model: the served model.
            team: who asks.
            max_tokens: the most that it may have, which the estimate never exceeds; 0 if not said.
        """
        recent = self._lengths.get((model, team))
        rules = self._rules
        learned = rules.first_tokens if recent is None else recent.quantile(rules.quantile)
        return min(learned, max_tokens) if max_tokens else learned

    def most_tokens(self, model: str, team: str, max_tokens: int) -> int:
        """Return how many tokens a quota has to keep for an answer: ``max_tokens`` where it is said.

        Else the longest of the team's latest answers, and never less than what is thought of a team that
        the model has not answered yet: short answers say nothing about the next one.
        """
        if max_tokens:
            return max_tokens
        recent = self._lengths.get((model, team))
        least = self._rules.first_tokens
        return least if recent is None else max(least, recent.quantile(1.0))

    def prompt_tokens(self, model: str, chars: int) -> int:
        """Return how many tokens a prompt of ``chars`` characters is thought to have."""
        known = self._ratios.get(model)
        ratio = FIRST_RATIO if known is None else known[0] / known[1]
        return int(chars * ratio) + 1

    def learn(self, model: str, team: str, output_tokens: int) -> None:
        """Remember one sequence's length."""
        key = (model, team)
        recent = self._lengths.get(key)
        if recent is None:
            recent = self._lengths[key] = _Recent()
            if len(self._lengths) > self._rules.teams:
                self._lengths.popitem(last=False)
        else:
            self._lengths.move_to_end(key)
        recent.add(output_tokens, self._rules.kept)

    def learn_prompt(self, model: str, chars: int, tokens: int) -> None:
        """Remember what a model made of a text."""
        if chars <= 0 or tokens <= 0:
            return
        tokens = min(
            tokens, 2 * chars
        )  # no tokenizer takes more for text; a template may, for a word
        known = self._ratios.get(model, (FIRST_RATIO * _FIRST_CHARS, _FIRST_CHARS))
        sums = known[0] + tokens, known[1] + chars
        fade = min(1.0, _RATIO_CHARS / sums[1])
        self._ratios[model] = sums[0] * fade, sums[1] * fade


def room_class(tokens: int) -> int:
    """Return the size class of a need for room: its upper bound, in steps of a half to a third.

    Requests of one class can stand in for each other in a lane; a class for each number would be a lane
    for each request.
    """
    if tokens <= 0:
        return 0
    bound = 256
    while bound < tokens:
        if bound + bound // 2 >= tokens:
            return bound + bound // 2
        bound *= 2
    return bound

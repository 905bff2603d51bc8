"""How much service each team has had, so that the one with the least goes first.

Service is counted in weighted tokens and forgotten with a half-life. The rule is the Virtual Token Counter
(Sheng et al., Fairness in Serving Large Language Models, OSDI 2024): the waiting team with the smallest
counter goes first, and a team that comes back after a pause is lifted to the smallest counter of those
that wait, or to the largest if nobody does: nobody was short of anything then. So it gets its share from
now on, and for the time that it asked for nothing no more than a lead of a few requests (`credit`).
"""

import dataclasses
from collections.abc import Mapping

# A sampled token takes a step of its own, a prompt token shares one with hundreds: 2 to 1 is what the
# paper measures with and what price lists are close to. A cached prompt token costs no prefill and still
# holds KV blocks: a tenth, as price lists discount it.
PROMPT_WEIGHT = 1.0
CACHED_WEIGHT = 0.1
OUTPUT_WEIGHT = 2.0

_REBASE_EXPONENT = 256.0  # far below what a double holds (2 ** 1023)


def weighted(uncached_prompt: int, cached_prompt: int, output: int) -> float:
    """Return a request's tokens as service."""
    return PROMPT_WEIGHT * uncached_prompt + CACHED_WEIGHT * cached_prompt + OUTPUT_WEIGHT * output


@dataclasses.dataclass(slots=True)
class _Account:
    total: float = 0.0  # scaled, see Service
    turn: int = -1  # when it was served last: of two equal teams the one longer ago goes first


class Service:
    """What the teams of one band have had.

    Decay shrinks every team alike and so never changes who is first. Instead of shrinking the past, what
    is added grows: a charge counts ``tokens * 2 ** ((now - epoch) / half_life)``. These scaled totals need
    no upkeep with time and can be sort keys; `rebase` moves the epoch long before they overflow.

    Args:
        half_life_s: after so long half of what a team has had is forgotten.
        shares: a team's part of what there is, 1 if it is not named: service counts divided by it.
        credit: weighted tokens by which a team that comes back may lead.
    """

    def __init__(
        self, half_life_s: float, shares: Mapping[str, float] | None = None, credit: float = 0.0
    ) -> None:
        self._half_life_s = half_life_s
        self._credit = credit
        self._shares = shares or {}
        self._epoch: float | None = None
        self._accounts: dict[str, _Account] = {}
        self._turn = 0
        self._top = 0.0

    def key(self, team: str) -> tuple[float, int]:
        """Return what teams are ordered by."""
        account = self._accounts.get(team)
        return (0.0, -1) if account is None else (account.total, account.turn)

    def attained(self, team: str, now: float) -> float:
        """Return the weighted tokens, decayed to ``now``, that a team has had by its share."""
        account = self._accounts.get(team)
        return 0.0 if account is None else account.total * self._shrunk(now)

    def charge(self, team: str, tokens: float, now: float, *, served: bool = False) -> None:
        """Add weighted tokens (negative: give back) to what a team has had.

        Args:
            team: whose.
            tokens: weighted tokens, before the division by the team's share.
            now: monotonic seconds.
            served: it was its turn.
        """
        account = self._accounts.setdefault(team, _Account())
        grown = tokens / self._shares.get(team, 1.0) * self._scale(now)
        account.total = max(0.0, account.total + grown)
        self._top = max(self._top, account.total)
        if served:
            self._turn += 1
            account.turn = self._turn

    def lift(self, team: str, least: str | None, now: float) -> None:
        """Raise a team that comes back to ``least``, the least served of those that wait, if any do."""
        floor = self._top if least is None else self.key(least)[0]
        floor -= self._credit * self._scale(now)
        account = self._accounts.setdefault(team, _Account())
        account.total = max(account.total, floor)

    def due(self, now: float) -> bool:
        """Whether the totals must be rebased before anything is added."""
        if self._epoch is None:
            self._epoch = now
        return (now - self._epoch) / self._half_life_s > _REBASE_EXPONENT

    def rebase(self, now: float) -> None:
        """Move the epoch to ``now``: every key changes. Teams with nothing left are forgotten."""
        factor = self._shrunk(now)
        self._epoch = now
        self._top *= factor
        for team, account in list(self._accounts.items()):
            account.total *= factor
            if account.total < 1.0:
                del self._accounts[team]

    def _shrunk(self, now: float) -> float:
        if self._epoch is None:
            self._epoch = now
        return float(2.0 ** ((self._epoch - now) / self._half_life_s))  # 0.0 after a long pause

    def _scale(self, now: float) -> float:
        if self._epoch is None:
            self._epoch = now
        return float(2.0 ** ((now - self._epoch) / self._half_life_s))

"""What may be limited, for whom, and over which time.

A limit and its counter are named by a tuple, never by a joined string: team ``a:b`` with key ``c`` is
not team ``a`` with key ``b:c``.
"""

import dataclasses
import datetime
import enum
from typing import NamedTuple

EVERY = "*"  # as a team or a name: each one that has no limit of its own
MOST = 10**15  # tokens of many years, or a billion units of money
MONEY = 1_000_000  # micro-units in one unit of the site's currency
_DAY_US = 86_400_000_000
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


class Scope(enum.StrEnum):
    """Whose use is counted together."""

    TEAM = "team"
    USER = "user"  # within a team
    KEY = "key"  # within a team


class Unit(enum.IntEnum):
    """What is counted; also its place in a claim's amounts."""

    TOKENS = 0
    COST = 1
    REQUESTS = 2


class Period(enum.StrEnum):
    """Over which time."""

    MINUTE = "minute"  # any 60 seconds
    DAY = "day"  # UTC
    MONTH = "month"  # UTC
    NOW = "now"  # at once


class Kind(enum.StrEnum):
    """What a limit limits."""

    TOKENS_PER_MINUTE = "tokens_per_minute"
    REQUESTS_PER_MINUTE = "requests_per_minute"
    CONCURRENT = "concurrent"
    TOKENS_PER_DAY = "tokens_per_day"
    TOKENS_PER_MONTH = "tokens_per_month"
    COST_PER_DAY = "cost_per_day"
    COST_PER_MONTH = "cost_per_month"

    @property
    def unit(self) -> Unit:
        """What is counted."""
        return _KINDS[self][0]

    @property
    def period(self) -> Period:
        """Over which time."""
        return _KINDS[self][1]

    @property
    def kept(self) -> bool:
        """Whether its counter outlives the process and can be compared with the ledger."""
        return self.period in {Period.DAY, Period.MONTH}

    def show(self, amount: int) -> str:
        """Return an amount as people read it: money in units of the currency."""
        if self.unit is not Unit.COST:
            return str(amount)
        whole, part = divmod(abs(amount), MONEY)
        digits = f"{part:06d}".rstrip("0").ljust(2, "0")
        return f"{'-' if amount < 0 else ''}{whole}.{digits}"


_KINDS = {
    Kind.TOKENS_PER_MINUTE: (Unit.TOKENS, Period.MINUTE),
    Kind.REQUESTS_PER_MINUTE: (Unit.REQUESTS, Period.MINUTE),
    Kind.CONCURRENT: (Unit.REQUESTS, Period.NOW),
    Kind.TOKENS_PER_DAY: (Unit.TOKENS, Period.DAY),
    Kind.TOKENS_PER_MONTH: (Unit.TOKENS, Period.MONTH),
    Kind.COST_PER_DAY: (Unit.COST, Period.DAY),
    Kind.COST_PER_MONTH: (Unit.COST, Period.MONTH),
}


class Key(NamedTuple):
    """Which counter.

    Attributes:
        scope: whose use is counted together.
        team: the team, or `EVERY` in a limit for teams without one.
        name: the user or the key's id, "" for a team, or `EVERY`.
        model, tier: what is counted, "" for all.
        kind: what is limited.
    """

    scope: Scope
    team: str
    name: str
    model: str
    tier: str
    kind: Kind

    def __str__(self) -> str:
        """Return it as a message names it."""
        who = f"team {self.team}"
        if self.scope is not Scope.TEAM:
            who += f" {self.scope} {self.name}"
        of = "".join(f" {text}" for text in (self.model, self.tier) if text)
        return f"{who}:{of} {self.kind}"


@dataclasses.dataclass(frozen=True, slots=True)
class Limit:
    """How much; a soft one only warns."""

    key: Key
    amount: int
    hard: bool = True


def window(period: Period, at_us: int) -> tuple[int, int]:
    """Return the UTC µs at which the day or month of ``at_us`` begins and ends."""
    if period is Period.DAY:
        start = at_us // _DAY_US * _DAY_US
        return start, start + _DAY_US
    date = (_EPOCH + datetime.timedelta(microseconds=at_us)).replace(
        day=1, hour=0, minute=0, second=0, microsecond=0
    )
    after = date.replace(year=date.year + date.month // 12, month=date.month % 12 + 1)
    return _us(date), _us(after)


def _us(date: datetime.datetime) -> int:
    return (date - _EPOCH) // datetime.timedelta(microseconds=1)


class Rules:
    """Finds the limits that a claim falls under."""

    def __init__(self, limits: tuple[Limit, ...] = ()) -> None:
        self._by_owner: dict[tuple[Scope, str, str], list[Limit]] = {}
        for limit in limits:
            owner = limit.key.scope, limit.key.team, limit.key.name
            self._by_owner.setdefault(owner, []).append(limit)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._by_owner)

    @property
    def periods(self) -> frozenset[Period]:
        """The periods that any of them is for."""
        every = (limit for found in self._by_owner.values() for limit in found)
        return frozenset(limit.key.kind.period for limit in every)

    def of(self, key: Key) -> Limit | None:
        """Return the limit of a counter, as it was set: its own, or one for `EVERY`; None without."""
        names = ("",) if key.scope is Scope.TEAM else (key.name, EVERY)
        for owner in ((key.scope, team, name) for team in (key.team, EVERY) for name in names):
            for limit in self._by_owner.get(owner, ()):
                if limit.key[3:] == key[3:]:
                    return limit
        return None

    def matching(self, team: str, user: str, key_id: str, model: str, tier: str) -> list[Limit]:
        """Return one limit for each counter that the claim moves, named by its real owner.

        A limit for the team or name itself goes before one for `EVERY` of the same model, tier and
        kind; limits for a model and for all models are different counters and hold side by side.
        """
        found: dict[Key, Limit] = {}
        for scope, name in ((Scope.TEAM, ""), (Scope.USER, user), (Scope.KEY, key_id)):
            names = (name,) if scope is Scope.TEAM else (EVERY, name)
            for owner in ((scope, held, called) for held in (EVERY, team) for called in names):
                for limit in self._by_owner.get(owner, ()):
                    if limit.key.model in {"", model} and limit.key.tier in {"", tier}:
                        key = limit.key._replace(team=team, name=name)
                        found[key] = dataclasses.replace(limit, key=key)
        return list(found.values())

"""What a request reserves of its team's and its key's quotas, and gives back when it has ended.

The process that owns a model's admission reserves before a request waits and settles once, on every way
out. Counts are tokens as the usage record counts them; money is whole micro-units of the site's currency
(1,000,000 is one), so that sums are exact.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """What a request may come to use.

    Attributes:
        request_id: whose claim it is; one that is made again (another owner) replaces the first.
        team, user, key_id: who is charged.
        model, tier: for quotas and prices that depend on them.
        prompt_tokens: the prompt, estimated from its bytes where the ids are not known.
        output_tokens: the most that it may sample (max_tokens), or the learned estimate without it.
        now_us: UTC µs.
    """

    request_id: str
    team: str
    user: str
    key_id: str
    model: str
    tier: str
    prompt_tokens: int
    output_tokens: int
    now_us: int


@dataclasses.dataclass(frozen=True, slots=True)
class Spent:
    """What a request has used at its team's cost, over all its attempts; all zero if nothing."""

    uncached_prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Every token, as token quotas count them."""
        return self.uncached_prompt_tokens + self.cached_prompt_tokens + self.output_tokens


NOTHING = Spent()
Headers = tuple[tuple[str, str], ...]
"""OpenAI's x-ratelimit headers, names in lower case; empty without quotas over a minute."""


class Hold(Protocol):
    """A reservation. It ends once; every later call does nothing."""

    def settle(self, spent: Spent, now_us: int) -> None:
        """Replace the reservation by what was used (`NOTHING`: it never ran)."""
        ...

    def headers(self, now_us: int) -> Headers:
        """Return what is left for this minute of the quotas that it falls under, also after it has ended."""
        ...


class Quotas(Protocol):
    """Reserves; `scheduler.core.quota` is the real one."""

    def reserve(self, claim: Claim) -> Hold:
        """Take the claim from every quota that it falls under, all or none; never waits.

        Raises:
            errors.QuotaExceeded: which quota, its limit, and when there is room again.
            errors.LargerThanQuota: it can never fit.
        """
        ...

    def adopt(self, claim: Claim) -> Hold:
        """Take a claim that another owner has granted, whatever the limits: its request may run already."""
        ...


class Free:
    """The reservation of a claim that no limit meets."""

    def settle(self, spent: Spent, now_us: int) -> None:
        """There is nothing to give back."""

    def headers(self, now_us: int) -> Headers:
        """There is nothing to tell."""
        return ()


class Unlimited:
    """No quotas: every claim is granted."""

    def reserve(self, claim: Claim) -> Hold:
        """Grant it."""
        return Free()

    def adopt(self, claim: Claim) -> Hold:
        """Grant it."""
        return Free()


class Pricing(Protocol):
    """What tokens cost; `accounting.rates` is the real one."""

    def cost(self, model: str, tier: str, spent: Spent, at_us: int) -> int:
        """Return micro-units for ``spent`` at the rates that hold at ``at_us``; 0 where no rate is set."""
        ...


class DatedPricing(Pricing, Protocol):
    """Prices that also tell when they change, so that sums over a time can be priced piece by piece."""

    def changes(self, first_us: int, last_us: int) -> Sequence[int]:
        """Return the moments inside ``(first_us, last_us)`` at which any price changes, ascending."""
        ...


class NoPrices:
    """Everything is free: a site without rates."""

    def cost(self, model: str, tier: str, spent: Spent, at_us: int) -> int:
        """Return 0."""
        return 0

    def changes(self, first_us: int, last_us: int) -> Sequence[int]:
        """Return nothing: free it stays."""
        return ()


@dataclasses.dataclass(frozen=True, slots=True)
class Consumed:
    """What requests that arrived in one stretch of time have used, by who pays and what for; attempts summed.

    Attributes:
        from_us: UTC µs at which the stretch begins: an hour, or a cut within one.
        attempts: how many there were; each request has one at least.
        running: whether these requests may go on, so that no owner has settled them yet.
    """

    team: str
    user: str
    key_id: str
    model: str
    tier: str
    from_us: int
    attempts: int
    spent: Spent
    running: bool = False


NEVER_US = 2**63 - 1


class LedgerTotals(Protocol):
    """The ledger's word on what was used; `accounting.totals` is the real one."""

    def consumed(
        self, first_us: int, last_us: int, *, cuts: Sequence[int] = (), over_us: int = NEVER_US
    ) -> Sequence[Consumed]:
        """Return what requests that arrived in ``[first_us, last_us)`` have cost their teams so far.

        Blocks for as long as the reading takes: call it in a thread.

        Args:
            first_us: of the arrivals, UTC µs.
            last_us: their end, not included.
            cuts: moments, ascending, that no stretch may span: a price changes there.
            over_us: a request of which nothing was heard since, and that was not said to have ended, ended.

        Raises:
            errors.RecordingUnavailable: the ledger can't be read whole; compare nothing with it.
        """
        ...


class FixedTotals:
    """The fake ledger: rows that a test sets."""

    def __init__(self, rows: Sequence[Consumed] = ()) -> None:
        self.rows = list(rows)

    def consumed(
        self, first_us: int, last_us: int, *, cuts: Sequence[int] = (), over_us: int = NEVER_US
    ) -> Sequence[Consumed]:
        """Return the rows of stretches that begin in the window, as they were set."""
        return [row for row in self.rows if first_us <= row.from_us < last_us]

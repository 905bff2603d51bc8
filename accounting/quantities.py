"""How much was used at which price: the one place where usage meets rates, for reports and bills.

A period is cut where a rate begins, so that each amount has one price. Tokens belong to the moment at
which their request arrived, GPU time to the moment at which it was held.
"""

import bisect
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from accounting import books, rates, reports


@dataclasses.dataclass(frozen=True, slots=True)
class Amount:
    """An amount of one use by one owner in one period, at one price.

    Attributes:
        period: which of the periods that were asked for.
        owner: values of `reports.OWNER`: cluster, team, user, model, tier, endpoint.
        micro: price in micro-units for `rates.Use.per`.
        amount: tokens or GPU-µs.
    """

    period: int
    owner: tuple[str, ...]
    use: rates.Use
    micro: int
    amount: int


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """Everything that was used in some periods.

    Attributes:
        amounts: what teams used and pay for, in no order; nothing of what the platform pays for.
        nobodys: GPU-µs by (period, idle, starting or waste).
    """

    amounts: Sequence[Amount]
    nobodys: Mapping[tuple[int, str], int]


def take(
    reading: books.Reading, cuts: Sequence[int], known: rates.Rates, weights: reports.Weights
) -> Taken:
    """Return what was used in the periods between ``cuts``.

    Args:
        reading: from `reports.LONGEST_REQUEST_US` before the first border on.
        cuts: borders of the periods, ascending.
        known: the rates.
        weights: how GPU time is shared out.
    """
    fine = sorted({*cuts, *known.changes(cuts[0], cuts[-1])})
    period_of = [bisect.bisect_right(cuts, start) - 1 for start in fine[:-1]]
    found: list[Amount] = []
    for row in _tokens(reading, fine):
        owner, piece = tuple(row[name] for name in reports.OWNER), row["piece"]
        for use in rates.TOKENS:
            if row[use.value]:
                price = known.price(row["model"], row["tier"], use, fine[piece])
                found.append(Amount(period_of[piece], owner, use, price, int(row[use.value])))
    nobodys: dict[tuple[int, str], int] = {}
    for piece, share in enumerate(reports.gpu_shares(reading, fine, weights)):
        period = period_of[piece]
        for owner, amount in share.attributed.items():
            who = dict(zip(reports.OWNER, owner, strict=True))
            price = known.price(who["model"], who["tier"], rates.Use.GPU, fine[piece])
            found.append(Amount(period, owner, rates.Use.GPU, price, amount))
        for what in ("idle", "starting", "waste"):
            if amount := getattr(share, what):
                nobodys[period, what] = nobodys.get((period, what), 0) + amount
    return Taken(found, nobodys)


def _tokens(reading: books.Reading, cuts: Sequence[int]) -> list[dict[str, Any]]:
    pieces = pa.table(
        {
            "piece": pa.array(range(len(cuts) - 1), pa.int64()),
            "piece_start": pa.array(cuts[:-1], pa.int64()),
            "piece_end": pa.array(cuts[1:], pa.int64()),
        }
    )
    reading.session.register("pieces", pieces)
    names = ", ".join(f'"{name}"' for name in reports.OWNER)
    return reading.query(
        f"""
SELECT piece, {names}, sum(uncached_prompt_tokens) AS uncached_prompt,
  sum(cached_prompt_tokens) AS cached_prompt, sum(output_tokens) AS output
FROM usage JOIN pieces ON arrived_us >= piece_start AND arrived_us < piece_end
WHERE payer = 'team' GROUP BY piece, {names}
"""  # noqa: S608 - column names of ours
    )

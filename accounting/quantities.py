"""How much was used at which price: the one place where usage meets rates, for reports and bills.

A period is cut where a rate begins, so that each amount has one price. Tokens belong to the moment at
which their request arrived, GPU time to the moment at which it was held.
"""

import bisect
import dataclasses
import datetime
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from accounting import books, gpu_sums, manifest, rates, reports, rollup, schema, shares


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
        problems: one line for each thing that could not be read beside the reading itself.
    """

    amounts: Sequence[Amount]
    nobodys: Mapping[tuple[int, str], int]
    problems: tuple[str, ...] = ()


def share_idle(taken: Taken) -> Taken:
    """Share out each period's idle GPU time over who used GPUs then, by use; without any use it stays.

    A policy that a report is asked for by name: idle time is nobody's otherwise. Equal claims are told apart
    by their owners' names, so that two who ask are answered alike.
    """
    amounts = sorted(
        taken.amounts, key=lambda each: (each.period, each.owner, each.use, each.micro)
    )
    nobodys = dict(taken.nobodys)
    for (period, what), idle in taken.nobodys.items():
        places = [
            place
            for place, each in enumerate(amounts)
            if each.period == period and each.use is rates.Use.GPU and each.amount > 0
        ]
        if what != "idle" or not places:
            continue
        used = shares.ints([amounts[place].amount for place in places])
        parts = shares.largest_remainder_of(idle, used)
        for place, part in zip(places, parts, strict=True):
            more = amounts[place].amount + part
            amounts[place] = dataclasses.replace(amounts[place], amount=more)
        del nobodys[period, what]
    return dataclasses.replace(taken, amounts=amounts, nobodys=nobodys)


def rolled_until(state_dir: Path, first_us: int = 0) -> int:
    """Return up to when rollups hold whole days from a moment on, UTC µs; 0: none, or they can't be read now.

    It ends at the first day that has rows which no pass has summed: because they came a minute ago, or
    because that day can't be rolled up. The records themselves say what is later.

    Raises:
        manifest.ManifestDamaged: nothing can be said.
    """
    files = (manifest.load(state_dir / "parquet") or manifest.Manifest()).files
    try:
        with rollup.opened(rollup.path_of(state_dir)) as session:
            (newest,) = session.execute("SELECT max(period_us) FROM usage_days").fetchone()
            applied = dict(session.execute("SELECT day, generation FROM applied").fetchall())
    except (FileNotFoundError, rollup.Busy, duckdb.Error):
        return 0
    first_day = schema.day_of(first_us)
    behind = [
        _begin_of(each.day)
        for each in files
        if each.table == schema.USAGE
        and each.day >= first_day
        and each.since > applied.get(each.day, -1)
    ]
    return min([int(newest or 0), *behind])


def _begin_of(day: str) -> int:
    number = datetime.date.fromisoformat(day) - datetime.date(1970, 1, 1)
    return number.days * rollup.DAY_US


def stretches(cuts: Sequence[int], rolled_us: int) -> Iterator[tuple[int, int, int, bool]]:
    """Cut the pieces between ``cuts`` into stretches of whole hours, which rollups hold, and the rest.

    Yields:
        The piece's number, begin and end in UTC µs, and whether it is taken from the rollups.
    """
    hour = rollup.HOUR_US
    for piece, (begin, end) in enumerate(itertools.pairwise(cuts)):
        first, last = -(-begin // hour) * hour, min(end, rolled_us) // hour * hour
        if first >= last:
            yield piece, begin, end, False
            continue
        if begin < first:
            yield piece, begin, first, False
        yield piece, first, last, True
        if last < end:
            yield piece, last, end, False


def read_from(cuts: Sequence[int], known: rates.Rates, rolled_us: int) -> int:
    """Return from when on `take` needs the records themselves: all that it does not take from rollups."""
    fine = sorted({*cuts, *known.changes(cuts[0], cuts[-1])})
    needed = (begin for _, begin, _, rolled in stretches(fine, rolled_us) if not rolled)
    return min(needed, default=cuts[-1] - 1)


def take(
    reading: books.Reading,
    cuts: Sequence[int],
    known: rates.Rates,
    weights: reports.Weights | None,
    rolled_us: int = 0,
) -> Taken:
    """Return what was used in the periods between ``cuts``.

    Args:
        reading: from what `read_from` says on.
        cuts: borders of the periods, ascending.
        known: the rates.
        weights: how GPU time is shared out; None: tokens alone.
        rolled_us: up to when tokens are taken from the rollups where the borders allow it; 0: nowhere.

    Raises:
        rollup.Busy, duckdb.Error: the rollups can't be read (only with ``rolled_us``).
    """
    fine = sorted({*cuts, *known.changes(cuts[0], cuts[-1])})
    period_of = [bisect.bisect_right(cuts, start) - 1 for start in fine[:-1]]
    found: list[Amount] = []
    for row in _tokens(reading, fine, rolled_us):
        owner, piece = tuple(row[name] for name in reports.OWNER), row["piece"]
        for use in rates.TOKENS:
            if row[use.value]:
                price = known.price(row["model"], row["tier"], use, fine[piece])
                found.append(Amount(period_of[piece], owner, use, price, int(row[use.value])))
    nobodys: dict[tuple[int, str], int] = {}
    found_shares: Sequence[gpu_sums.Share] = ()
    problems: tuple[str, ...] = ()
    if weights is not None:
        found_shares, problems = reports.gpu_shares(reading, fine, weights)
    for piece, share in enumerate(found_shares):
        period = period_of[piece]
        for owner, amount in share.attributed.items():
            who = dict(zip(reports.OWNER, owner, strict=True))
            price = known.price(who["model"], who["tier"], rates.Use.GPU, fine[piece])
            found.append(Amount(period, owner, rates.Use.GPU, price, amount))
        for what in ("idle", "starting", "waste"):
            if amount := getattr(share, what):
                nobodys[period, what] = nobodys.get((period, what), 0) + amount
    return Taken(found, nobodys, problems)


_NAMES = ", ".join(f'"{name}"' for name in reports.OWNER)
_SUMS = (
    "sum(uncached_prompt_tokens) AS uncached_prompt, sum(cached_prompt_tokens) AS cached_prompt, "
    "sum(output_tokens) AS output"
)


def _tokens(
    reading: books.Reading, cuts: Sequence[int], rolled_us: int
) -> Iterator[dict[str, Any]]:
    pieces = []
    for piece, begin, end, rolled in stretches(cuts, rolled_us):
        if rolled:
            yield from _rolled(reading, piece, begin, end)
        else:
            pieces.append((piece, begin, end))
    if not pieces:
        return
    columns = zip(*pieces, strict=True)
    names = ("piece", "piece_start", "piece_end")
    table = {
        name: pa.array(column, pa.int64()) for name, column in zip(names, columns, strict=True)
    }
    reading.session.register("pieces", pa.table(table))
    yield from reading.query(
        f"SELECT piece, {_NAMES}, {_SUMS} "  # noqa: S608 - column names of ours
        "FROM usage JOIN pieces ON arrived_us >= piece_start AND arrived_us < piece_end "
        f"WHERE payer = 'team' GROUP BY piece, {_NAMES}"
    )


def _rolled(reading: books.Reading, piece: int, start: int, end: int) -> Iterator[dict[str, Any]]:
    with rollup.sums(reading.records.state_dir, start, end) as session:
        answer = session.execute(
            f"SELECT {_NAMES}, {_SUMS} FROM usage_sums "  # noqa: S608 - column names of ours
            f"WHERE payer = 'team' GROUP BY {_NAMES}"
        )
        names = [column[0] for column in answer.description]
        for row in answer.fetchall():
            yield {"piece": piece, **dict(zip(names, row, strict=True))}

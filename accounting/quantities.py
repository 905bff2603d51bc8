"""How much was used at which price: the one place where usage meets rates, for reports and bills.

A period is cut where a rate begins, so that each amount has one price. Tokens belong to the moment at
which their request arrived, GPU time to the moment at which it was held.
"""

import bisect
import dataclasses
import datetime
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import duckdb

from accounting import (
    books,
    gpu_sums,
    manifest,
    rates,
    reports,
    rollup,
    runs,
    schema,
    shares,
    tokens,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Amount:
    """An amount of one use by one owner in one period, at one price.

    Attributes:
        period: which of the periods that were asked for.
        owner: values of `reports.OWNER`: cluster, team, user, model, tier, endpoint; of tokens "" for
            those that `take` was not asked to tell apart.
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


Stretch = tuple[int, int, int]
_AT_ONCE = 10_000  # rows of rollups that are held as Python objects
_T = TypeVar("_T")


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


def with_rollups(reading: books.Reading, first_us: int, work: Callable[[int], _T]) -> _T:
    """Return what ``work`` makes of the moment up to when rollups say the same as a reading.

    It is called again with 0 (everything from the rows) if the rollups can't be read.

    Args:
        reading: of the rows.
        first_us: what came before it is not asked for.
        work: gets a ``rolled_us`` for `take`.
    """
    query = "SELECT min(arrived_us) AS first FROM usage_live WHERE arrived_us >= $first"
    (live,) = reading.query(query, {"first": first_us})
    until = rolled_until(reading.records.state_dir, first_us)
    if live["first"] is not None:  # of a day that no pass has seen whole
        until = min(until, live["first"] // rollup.DAY_US * rollup.DAY_US)
    try:
        return work(until)
    except duckdb.InterruptException:
        raise
    except (FileNotFoundError, rollup.Busy, duckdb.Error):  # a pass may have set it aside
        return work(0)


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


def parted(cuts: Sequence[int], rolled_us: int) -> tuple[list[Stretch], list[Stretch]]:
    """Return the stretches that rollups hold, and the others: piece, begin and end of each."""
    found: tuple[list[Stretch], list[Stretch]] = ([], [])
    for piece, begin, end, rolled in stretches(cuts, rolled_us):
        found[not rolled].append((piece, begin, end))
    return found


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
    told: Collection[str] = reports.OWNER,
) -> Taken:
    """Return what was used in the periods between ``cuts``.

    Args:
        reading: from what `read_from` says on.
        cuts: borders of the periods, ascending.
        known: the rates.
        weights: how GPU time is shared out; None: tokens alone.
        rolled_us: up to when tokens are taken from the rollups where the borders allow it; 0: nowhere.
        told: names of `reports.OWNER` by which amounts of tokens are told apart. A month has hundreds of
            thousands of owners and days, and each amount is a Python object: ask for no more than is used.

    Raises:
        rollup.Busy, duckdb.Error: the rollups can't be read (only with ``rolled_us``).
    """
    priced = ("model", "tier") if known.all else ()
    keys = tuple(name for name in reports.OWNER if name in told or name in priced)
    fine = sorted({*cuts, *known.changes(cuts[0], cuts[-1])})
    period_of = [bisect.bisect_right(cuts, start) - 1 for start in fine[:-1]]
    found: list[Amount] = []
    owners: dict[tuple[str, ...], tuple[str, ...]] = {}  # one object for all of an owner's days
    price_of = functools.cache(known.price)
    unread: list[str] = []
    for piece, values, amounts in _tokens(reading.records, fine, rolled_us, keys, unread):
        if values not in owners:
            who = dict(zip(keys, values, strict=True))
            owners[values] = tuple(who.get(name, "") for name in reports.OWNER)
        owner = owners[values]
        for use, amount in zip(rates.TOKENS, amounts, strict=True):
            if amount:
                price = price_of(owner[_MODEL], owner[_TIER], use, fine[piece])
                found.append(Amount(period_of[piece], owner, use, price, int(amount)))
    nobodys: dict[tuple[int, str], int] = {}
    found_shares: Sequence[gpu_sums.Share] = ()
    problems: tuple[str, ...] = ()
    if weights is not None:
        found_shares, problems = reports.gpu_shares(reading, fine, weights)
    for piece, share in enumerate(found_shares):
        period = period_of[piece]
        for owner, amount in share.attributed.items():
            who = dict(zip(reports.OWNER, owner, strict=True))
            price = price_of(who["model"], who["tier"], rates.Use.GPU, fine[piece])
            found.append(Amount(period, owner, rates.Use.GPU, price, amount))
        for what in ("idle", "starting", "waste"):
            if amount := getattr(share, what):
                nobodys[period, what] = nobodys.get((period, what), 0) + amount
    return Taken(found, nobodys, (*unread, *problems))


_MODEL, _TIER = reports.OWNER.index("model"), reports.OWNER.index("tier")
_Tokens = Iterator[tuple[int, tuple[str, ...], Sequence[int]]]


def _tokens(
    records: books.Books,
    cuts: Sequence[int],
    rolled_us: int,
    keys: tuple[str, ...],
    problems: list[str],
) -> _Tokens:
    """Yield what was used in each piece between the cuts; adds to ``problems`` what can't be read.

    Yields:
        The piece, the values of ``keys``, and the amounts of `rates.TOKENS`; an owner may come several times.
    """
    rolled, pieces = parted(cuts, rolled_us)
    if rolled:
        yield from _rolled(records, rolled, keys)
    if not pieces:
        return
    spans = [(begin, end) for _, begin, end in pieces]
    taken = tokens.take(records, spans, keys)
    problems += taken.problems
    for span, values, *amounts in taken.sums:
        yield pieces[span][0], tuple(values), amounts


def _rolled(records: books.Books, pieces: Sequence[Stretch], keys: tuple[str, ...]) -> _Tokens:
    by = rollup.quoted(("piece", *keys))
    sums = ", ".join(f"sum({name})" for name in runs.SUMS)
    with rollup.sums(records.state_dir, [(begin, end) for _, begin, end in pieces]) as session:
        answer = session.execute(
            f"SELECT {by}, {sums} FROM usage_sums WHERE payer = 'team' GROUP BY {by}"  # noqa: S608 - ours
        )
        while rows := answer.fetchmany(_AT_ONCE):
            for row in rows:
                yield pieces[row[0]][0], row[1 : 1 + len(keys)], row[1 + len(keys) :]

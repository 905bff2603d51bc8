"""What teams owe for a month: lines from usage and rates, adjustments, and months that are closed. Pure.

A line is one month, team, user, model, tier, use and price: its amount is a whole number of tokens or
GPU-µs, and its cost is rounded once, to the micro-unit. A bill's total is the sum of its lines, exactly.

A closed month has a bill that does not change. What comes to light afterwards (a spool that was found, an
attempt whose end became known, an adjustment for an old month) is a line of the open month, marked late:
of an old month and line it bills the difference to what has been billed, so that all bills together say
what one bill would have said that knew everything.

What the platform pays for (recomputation, preempted work, faults of ours) is in no line.
"""

import dataclasses
import datetime
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from accounting import postings, rates, windows

ADJUSTMENT = "adjustment"
CLOSE = "close"


@dataclasses.dataclass(frozen=True, slots=True)
class Used:
    """An amount of one use at one price.

    Attributes:
        month: ``YYYY-MM`` in which it was used.
        amount: tokens or GPU-µs.
        micro: price in micro-units for `rates.Use.per`.
    """

    month: str
    team: str
    user: str
    model: str
    tier: str
    use: rates.Use
    micro: int
    amount: int


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One line of a bill.

    Attributes:
        month: whose bill it is on, ``YYYY-MM``.
        used_month: when it was used, or what an adjustment is for.
        what: a `rates.Use`, or ``adjustment``.
        amount: tokens or GPU-µs, 0 for an adjustment.
        unit: ``tokens``, ``gpu_us`` or "".
        price: micro-units for 1,000 tokens or a GPU-hour.
        cost: micro-units.
        late: whether `used_month` was closed when it was billed.
        posting: number of the adjustment's posting, else 0.
        author, reason: of an adjustment.
    """

    month: str
    used_month: str
    team: str
    user: str
    model: str
    tier: str
    what: str
    amount: int
    unit: str
    price: int
    cost: int
    late: bool = False
    posting: int = 0
    author: str = ""
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Closed:
    """A closed month.

    Attributes:
        start_us, end_us: the month's borders as they were then, UTC µs.
        file: the bill's file below the postings' folder; `sha256` is of its content.
        total: of its lines, micro-units.
    """

    month: str
    start_us: int
    end_us: int
    file: str
    sha256: str
    lines: int
    total: int
    at_us: int
    author: str


def closed(log: Sequence[postings.Posting]) -> list[Closed]:
    """Return the closed months of a log, in order."""
    return [
        Closed(**posting.body, at_us=posting.at_us, author=posting.author)
        for posting in log
        if posting.kind == CLOSE
    ]


def adjustments(log: Sequence[postings.Posting]) -> list[Line]:
    """Return the adjustments of a log as lines, each on the bill that was open when it was made."""
    lines = []
    last = ""  # the newest closed month so far
    for posting in log:
        if posting.kind == CLOSE:
            last = posting.body["month"]
        elif posting.kind == ADJUSTMENT:
            wanted, late = posting.body["month"], bool(last) and posting.body["month"] <= last
            lines.append(
                Line(
                    month=after(last) if late else wanted,
                    used_month=wanted,
                    team=posting.body["team"],
                    user="",
                    model="",
                    tier="",
                    what=ADJUSTMENT,
                    amount=0,
                    unit="",
                    price=0,
                    cost=posting.body["micro"],
                    late=late,
                    posting=posting.number,
                    author=posting.author,
                    reason=posting.reason,
                )
            )
    return lines


def lines(month: str, used: Iterable[Used]) -> list[Line]:
    """Return the lines of an open month's own usage; equal keys are added up before they are rounded."""
    return [
        _line(month, key, amount, rates.cost(amount, key[5], key[6]))
        for key, amount in sorted(_summed(used).items())
        if amount
    ]


def late(
    month: str,
    months: Collection[str],
    used: Iterable[Used],
    billed: Iterable[Line],
    *,
    unclosed: Collection[str] = (),
) -> list[Line]:
    """Return the lines of bill ``month`` for months that are closed: what they lack by now.

    Of a closed month tokens only: GPU time is shared out among all who were there, and a month's shares
    are final when it is closed.

    Args:
        month: the open month.
        months: the closed months that are looked at.
        used: their usage as it is known now.
        billed: the lines of every bill that was closed in or after them.
        unclosed: those of ``months`` that come before the first closed one; no bill has their GPU time.
    """
    now = {
        key: amount
        for key, amount in _summed(used).items()
        if key[5] is not rates.Use.GPU or key[0] in unclosed
    }
    before: dict[_Key, tuple[int, int]] = {}
    for line in billed:
        if line.what in rates.TOKENS or (line.what != ADJUSTMENT and line.used_month in unclosed):
            key = _key(line)
            amount, cost = before.get(key, (0, 0))
            before[key] = amount + line.amount, cost + line.cost
            if line.used_month in months:
                now.setdefault(key, 0)
    found = []
    for key, amount in sorted(now.items()):
        had, paid = before.get(key, (0, 0))
        if amount != had:
            owed = rates.cost(amount, key[5], key[6]) - paid
            found.append(dataclasses.replace(_line(month, key, amount - had, owed), late=True))
    return found


_Key = tuple[str, str, str, str, str, rates.Use, int]


def _key(line: Line) -> _Key:
    use = rates.Use(line.what)
    return (line.used_month, line.team, line.user, line.model, line.tier, use, line.price)


def _summed(used: Iterable[Used]) -> dict[_Key, int]:
    found: dict[_Key, int] = {}
    for each in used:
        key = each.month, each.team, each.user, each.model, each.tier, each.use, each.micro
        found[key] = found.get(key, 0) + each.amount
    return found


def _line(month: str, key: _Key, amount: int, cost: int) -> Line:
    used_month, team, user, model, tier, use, micro = key
    return Line(
        month, used_month, team, user, model, tier, use.value, amount, use.unit, micro, cost
    )  # fmt: skip


def total(found: Iterable[Line]) -> int:
    """Return the sum of the lines' costs."""
    return sum(line.cost for line in found)


def after(month: str) -> str:
    """Return the month after ``YYYY-MM``."""
    first = datetime.date(int(month[:4]), int(month[5:]), 28) + datetime.timedelta(days=4)
    return f"{first:%Y-%m}"


def before(month: str) -> str:
    """Return the month before ``YYYY-MM``."""
    first = datetime.date(int(month[:4]), int(month[5:]), 1) - datetime.timedelta(days=1)
    return f"{first:%Y-%m}"


def month_of(us: int, tz: datetime.tzinfo) -> str:
    """Return the month of a moment in the zone in which bills are made."""
    return f"{windows.moment(us).astimezone(tz):%Y-%m}"


def close_body(
    month: str, borders: tuple[int, int], file: str, sha256: str, made: Sequence[Line]
) -> dict[str, Any]:
    """Return the body of the posting that closes a month."""
    return {
        "month": month,
        "start_us": borders[0],
        "end_us": borders[1],
        "file": file,
        "sha256": sha256,
        "lines": len(made),
        "total": total(made),
    }


def line_of(row: Mapping[str, Any]) -> Line:
    """Return a line from its flat form."""
    return Line(**{field.name: row[field.name] for field in dataclasses.fields(Line)})

"""Rates, adjustments, bills and closed months of one state folder: reads the books, appends postings.

Rules are decided by `accounting.rates` and `accounting.bill`; this module fetches what they need and
keeps what they decide. A closed month's lines are a Parquet file that is synced before the posting that
names it and its SHA-256, so that a crash in between closes nothing. Every method blocks.
"""

import contextlib
import dataclasses
import hashlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from accounting import (
    beginnings,
    bill,
    books,
    manifest,
    money,
    postings,
    quantities,
    rates,
    reports,
    rollup,
    settings,
    ship,
    standing,
    windows,
)
from scheduler.contracts import errors, times

_BILLS = "bills"
_LOOKED_BACK = 24  # closed months, the most that accounting.late_months may be
_ARROW: Mapping[Any, pa.DataType] = {str: pa.string(), int: pa.int64(), bool: pa.bool_()}
LINES = pa.schema(
    [
        pa.field(
            field.name,
            _ARROW[field.type],
            nullable=False,
        )
        for field in dataclasses.fields(bill.Line)
    ]
)


@dataclasses.dataclass(frozen=True, slots=True)
class Bill:
    """One month's bill.

    Attributes:
        closed: how it was closed, None while the month is open.
        problems: one line for each thing that could not be read.
        doubtful: one line about rows that are on no bill, since their times can't be meant.
    """

    month: str
    start_us: int
    end_us: int
    lines: tuple[bill.Line, ...]
    closed: bill.Closed | None = None
    problems: tuple[str, ...] = ()
    doubtful: tuple[str, ...] = ()


class Billing:
    """The site's rates and bills.

    Args:
        state_dir: Forebay's state folder.
        table: the settings.
    """

    def __init__(self, state_dir: Path, table: settings.Accounting) -> None:
        self._postings = postings.Postings(state_dir)
        self._books = books.Books(state_dir, memory_mb=table.memory_mb)
        self._weights = reports.Weights(table.prefill_weight, table.decode_weight)
        self._late_months = table.late_months
        self._open_us = round(table.open_at_most_s * 1e6)
        self.tz = windows.zone(table.time_zone)
        self.currency = table.currency

    def price_list(self) -> rates.Rates:
        """Return the rates as they are now."""
        return rates.read(self._postings.read())

    def closings(self) -> list[bill.Closed]:
        """Return the closed months, in order."""
        return bill.closed(self._postings.read())

    def add_rates(
        self, wanted: Mapping[str, Any], *, author: str, reason: str, now_us: int
    ) -> postings.Posting:
        """Append rates (`rates.body`).

        Raises:
            errors.BadRequest: they would rewrite what was priced or billed.
        """
        priced_us = self.priced_until(now_us)

        def decide(log: postings.Log) -> postings.Draft:
            known, closed = rates.read(log), bill.closed(log)
            for item in wanted["rates"]:
                if closed and item["from_us"] < closed[-1].end_us:
                    raise errors.BadRequest(
                        f"{closed[-1].month} is closed: a rate may begin after it, not in it",
                        param="from",
                    )
                rewritten = rates.overlapped(known, item, priced_us)
                if rewritten is not None:
                    when = "now"
                    if priced_us > now_us:
                        when = f"at {times.print_point(priced_us + 1_000_000, self.tz)} ({self.tz})"
                    raise errors.BadRequest(
                        f"a rate for {item['use']} of model {rewritten.model}, tier {rewritten.tier} "
                        "held in that time, and what was used is priced by it: let the new one begin "
                        f"{when} or later, and use `fctl adjust` for the past",
                        param="from",
                    )
            return postings.Draft(rates.POSTING, now_us, author, reason, wanted)

        return self._postings.append(decide)

    def priced_until(self, now_us: int) -> int:
        """Return from when on nothing is priced yet (`standing.priced_until`)."""
        return standing.priced_until(self._books, self._postings.read(), now_us)

    def knows(self, team: str) -> bool:
        """Return whether the team has used or owed anything."""
        log = self._postings.read()
        closed = bill.closed(log)
        lines = [*bill.adjustments(log), *(line for one in closed for line in self._kept(one))]
        if any(line.team == team for line in lines):
            return True
        return standing.used(self._books, team, closed[-1].end_us if closed else 0)

    def adjust(
        self, team: str, micro: int, month: str, *, author: str, reason: str, now_us: int
    ) -> bill.Line:
        """Append an adjustment; returns the line, which is on the open bill if ``month`` is closed.

        Raises:
            errors.BadRequest: the month has not begun.
        """
        if month > bill.month_of(now_us, self.tz):
            raise errors.BadRequest(f"{month} has not begun: adjust it then", param="month")
        body = {"team": team, "micro": micro, "month": month}
        draft = postings.Draft(bill.ADJUSTMENT, now_us, author, reason, body)
        made = self._postings.append(lambda _: draft)
        lines = bill.adjustments(self._postings.read())
        return next(line for line in lines if line.posting == made.number)

    def month(self, month: str) -> Bill:
        """Return a month's bill: as it was closed, or of an open month as of now."""
        return self._bill(month, self._postings.read())

    def close(self, month: str, *, author: str, reason: str, now_us: int) -> bill.Closed:
        """Close a month: its bill is written down and does not change any more.

        Raises:
            errors.BadRequest: it has not ended, attempts of it may be open, it is closed, an earlier one is
                open, rows of it are not shipped, or can't be read.
        """

        def decide(log: postings.Log) -> postings.Draft:
            self._may_close(month, log, now_us)
            made = self._bill(month, log, final=True)
            if made.problems:
                raise errors.BadRequest(f"{month} can't be closed: {made.problems[0]}")
            data = _encoded(made.lines)
            digest = hashlib.sha256(data).hexdigest()
            name = f"{_BILLS}/{month}-{digest[:16]}.parquet"
            path = self._postings.folder / name
            path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            manifest.write_durably(path, data)
            borders = made.start_us, made.end_us
            body = bill.close_body(month, borders, name, digest, made.lines)
            return postings.Draft(bill.CLOSE, now_us, author, reason, body)

        (made,) = bill.closed([self._postings.append(decide)])
        return made

    def _may_close(self, month: str, log: postings.Log, now_us: int) -> None:
        closed = bill.closed(log)
        if any(each.month == month for each in closed):
            raise errors.BadRequest(f"{month} is closed already: use `fctl adjust`", param="month")
        end_us = self._borders(month, closed).end_us
        if end_us + self._open_us > now_us:
            raise errors.BadRequest(
                f"{month} has not ended for all its requests, which may run on after it: close it after "
                f"{times.print_point(end_us + self._open_us, self.tz)} ({self.tz})",
                param="month",
            )
        if closed and month != bill.after(closed[-1].month):
            raise errors.BadRequest(
                f"months are closed in order: {bill.after(closed[-1].month)} is next", param="month"
            )
        if not closed:
            first = self._first_month(log)
            if first and first < month:
                raise errors.BadRequest(
                    f"months are closed in order: {first} has usage, GPU time or adjustments and is open",
                    param="month",
                )
        if missing := ship.waiting(self._books.state_dir, end_us):
            raise errors.BadRequest(
                f"{month} may lack rows: {len(missing)} spool segments that began before its end are not "
                f"shipped, the first is {missing[0]}: try again when the leading broker has shipped them, "
                "which takes a minute or two while it runs",
                param="month",
            )

    def _first_month(self, log: postings.Log) -> str:
        first_us = beginnings.of(self._books).first_us
        found = [line.used_month for line in bill.adjustments(log)]
        if first_us is not None:
            found.append(bill.month_of(first_us, self.tz))
        return min(found, default="")

    def _bill(self, month: str, log: postings.Log, *, final: bool = False) -> Bill:
        """Return a bill; a final one rests on the records themselves, and not on sums that may be behind."""
        closed = bill.closed(log)
        for each in closed:
            if each.month == month:
                return Bill(month, each.start_us, each.end_us, self._kept(each), each)
        window = self._borders(month, closed)
        made: list[bill.Line] = []
        problems: tuple[str, ...] = ()
        if closed and month < closed[0].month:
            return Bill(month, window.start_us, window.end_us, ())
        known = rates.read(log)
        used, problems = self._used({month: window}, known, rolled=not final)
        made += bill.lines(month, used)
        earliest = beginnings.of(
            self._books, closed[0].start_us if closed else beginnings.PLAUSIBLE_US
        )
        adjusted = bill.adjustments(log)
        if closed and month == bill.after(closed[-1].month):
            old, more = self._late(month, closed, known, earliest, rolled=not final)
            made += old
            problems = (*problems, *more)
            if early := [line for line in adjusted if line.month < closed[0].month]:
                billed = [line for each in closed for line in self._kept(each)]
                made += beginnings.unbilled(early, month, billed)
        made += [line for line in adjusted if line.month == month]
        told = tuple(dict.fromkeys(problems))
        doubtful = (earliest.doubtful,) if earliest.doubtful else ()
        if closed and month == bill.after(closed[-1].month):
            doubtful = (*doubtful, *self._forgotten(closed, known))
        return Bill(month, window.start_us, window.end_us, tuple(made), None, told, doubtful)

    def _late(
        self,
        month: str,
        closed: Sequence[bill.Closed],
        known: rates.Rates,
        earliest: beginnings.Earliest,
        *,
        rolled: bool,
    ) -> tuple[list[bill.Line], tuple[str, ...]]:
        """Return what closed months and those before the first closed one lack, and what can't be read."""
        spans = {
            each.month: self._borders(each.month, closed) for each in closed[-self._late_months :]
        }
        used, problems = self._used(spans, known, rolled=rolled, gpu=False)
        early: dict[str, windows.Window] = {}
        if earliest.first_us is not None and earliest.first_us < closed[0].start_us:
            early = beginnings.months(earliest.first_us, closed[0], self.tz)
            more, others = self._used(early, known, rolled=rolled)
            used, problems = [*used, *more], (*problems, *others)
        first = "" if early else min(spans)
        billed = [line for one in closed if one.month >= first for line in self._kept(one)]
        months = {*early, *spans}
        return bill.late(month, months, used, billed, unclosed=early), problems

    def _forgotten(self, closed: Sequence[bill.Closed], known: rates.Rates) -> tuple[str, ...]:
        """Name the closed months that are no longer looked at and have more or fewer tokens than were billed.

        By the rollups alone: without them it would be a reading of years, and nothing is said.
        """
        old = closed[-_LOOKED_BACK : -self._late_months]
        if (
            not old
            or quantities.rolled_until(self._books.state_dir, old[0].start_us) < old[-1].end_us
        ):
            return ()
        spans = {one.month: windows.Window(one.start_us, one.end_us) for one in old}
        used, problems = self._used(spans, known, rolled=True, gpu=False)
        if problems:
            return problems
        missing = dict.fromkeys(spans, 0)
        for each in used:
            missing[each.month] += each.amount
        for one in closed:
            for line in self._kept(one):
                if line.what in rates.TOKENS and line.used_month in missing:
                    missing[line.used_month] -= line.amount
        return tuple(
            f"{month}: {abs(tokens)} tokens {'more' if tokens > 0 else 'fewer'} than all bills say, and it "
            f"is older than accounting.late_months = {self._late_months}: raise it, to {_LOOKED_BACK} at most"
            for month, tokens in missing.items()
            if tokens
        )

    def _used(
        self,
        spans: Mapping[str, windows.Window],
        known: rates.Rates,
        *,
        rolled: bool,
        gpu: bool = True,
    ) -> tuple[list[bill.Used], tuple[str, ...]]:
        """Return what was used in adjoining months."""
        weights = self._weights if gpu else None
        begins = min(span.start_us for span in spans.values())
        until = quantities.rolled_until(self._books.state_dir, begins) if rolled else 0
        with contextlib.suppress(rollup.Busy, duckdb.Error):
            return self._taken(spans, known, weights, until)
        return self._taken(spans, known, weights, 0)

    def _taken(
        self,
        spans: Mapping[str, windows.Window],
        known: rates.Rates,
        weights: reports.Weights | None,
        rolled_us: int,
    ) -> tuple[list[bill.Used], tuple[str, ...]]:
        names = list(spans)
        cuts = [span.start_us for span in spans.values()] + [spans[names[-1]].end_us]
        needed = quantities.read_from(cuts, known, rolled_us)
        first = min(needed, max(rolled_us, cuts[0]), cuts[-1] - 1)
        if first <= cuts[0]:
            first = max(0, cuts[0] - reports.LONGEST_REQUEST_US)
        with self._books.reading(first, cuts[-1]) as reading:
            taken = quantities.take(reading, cuts, known, weights, rolled_us, _TOLD)
            used = [
                bill.Used(names[each.period], *_who(each.owner), each.use, each.micro, each.amount)
                for each in taken.amounts
            ]
            return used, (*reading.problems, *taken.problems)

    def _borders(self, month: str, closed: Sequence[bill.Closed]) -> windows.Window:
        """Return a month's borders; an open one begins where the closed one before it ended."""
        window = windows.of_month(month, self.tz)
        for each in closed:
            if each.month == month:
                return windows.Window(each.start_us, each.end_us)
            if bill.after(each.month) == month:
                window = windows.Window(each.end_us, window.end_us)
        return window

    def _kept(self, closed: bill.Closed) -> tuple[bill.Line, ...]:
        path = self._postings.folder / closed.file
        try:
            data = path.read_bytes()
        except OSError as error:
            raise postings.PostingsDamaged(
                f"{path}: {error.strerror}: restore the bill of {closed.month} from a backup"
            ) from error
        if hashlib.sha256(data).hexdigest() != closed.sha256:
            raise postings.PostingsDamaged(
                f"{path} was changed since {closed.month} was closed: restore it from a backup"
            )
        return tuple(bill.line_of(row) for row in pq.read_table(io.BytesIO(data)).to_pylist())


_TOLD = ("team", "user", "model", "tier")  # bills do not tell clusters and endpoints apart


def _who(owner: Sequence[str]) -> tuple[str, str, str, str]:
    _, team, user, model, tier, _ = owner
    return team, user, model, tier


def _encoded(lines: Sequence[bill.Line]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table_of(lines), sink, compression="zstd")
    return sink.getvalue()


def table_of(lines: Sequence[bill.Line]) -> Any:
    """Return lines as a table of schema `LINES`.

    Raises:
        errors.BadRequest: an amount of money does not fit.
    """
    most = 2**63 - 1
    for line in lines:
        if abs(line.cost) > most:
            raise errors.BadRequest(
                f"{line.what} of team {line.team}, model {line.model} in {line.used_month} costs "
                f"{money.show(line.cost)}, more than a bill can hold: check its price in `fctl rate show`"
            )
    return pa.Table.from_pylist([dataclasses.asdict(line) for line in lines], schema=LINES)

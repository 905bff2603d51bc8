"""What is recorded before the first closed month, and rows whose times nobody can have meant.

A clock that was wrong dates a row to 1970: no month of that time is waited for, and no bill has it. It is
named beside every open bill, so that somebody may bill it by hand.
"""

import dataclasses
import datetime
from collections.abc import Sequence

from accounting import bill, books, windows

AHEAD_US = 4_102_444_800_000_000  # 2100-01-01
PLAUSIBLE_US = 946_684_800_000_000  # 2000-01-01, before which nobody served anything

_EARLIEST = """
SELECT min(begun) FILTER (WHERE begun >= $plausible) AS first,
  count(DISTINCT name) FILTER (WHERE begun < $plausible) AS attempts,
  count(*) FILTER (WHERE begun < $plausible AND name IS NULL) AS intervals
FROM (SELECT arrived_us AS begun, request_id || ' ' || attempt AS name FROM usage_rows
  UNION ALL SELECT start_us, NULL FROM gpu_rows WHERE end_us > start_us)
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Earliest:
    """How the records of a reading begin.

    Attributes:
        first_us: the earliest time that can be meant, UTC µs; None: nothing is recorded.
        doubtful: "" or one line about rows that are dated earlier.
    """

    first_us: int | None
    doubtful: str


def of(records: books.Books, until_us: int = books.MAX_US) -> Earliest:
    """Return how the records before a moment begin; blocks."""
    with records.reading(0, until_us) as reading:
        (found,) = reading.query(_EARLIEST, {"plausible": PLAUSIBLE_US})
    doubtful = _ahead(records)
    if found["attempts"] or found["intervals"]:
        begin = f"{doubtful}; " if doubtful else ""
        doubtful = (
            f"{begin}{found['attempts']} attempts and {found['intervals']} GPU intervals are dated before "
            "2000: a clock was wrong; they are on no bill: see `facct -S 1970-01-01`, and use `fctl adjust`"
        )
    return Earliest(found["first"], doubtful)


def _ahead(records: books.Books) -> str:
    """Name attempts whose clock was decades ahead: they belong to a month that nobody will close."""
    with records.reading(AHEAD_US) as reading:
        (found,) = reading.query("SELECT count(*) AS attempts FROM usage")
    if not found["attempts"]:
        return ""
    return (
        f"{found['attempts']} attempts are dated after 2100: a clock was wrong; they are on no bill: see "
        "`facct -S 2100-01-01 -E 9999-12-31`, and use `fctl adjust`"
    )


def months(first_us: int, first: bill.Closed, tz: datetime.tzinfo) -> dict[str, windows.Window]:
    """Return the months from a moment up to the first closed one, which adjoin."""
    last = bill.before(first.month)
    month = min(bill.month_of(first_us, tz), last)
    found: dict[str, windows.Window] = {}
    begin = min(windows.of_month(month, tz).start_us, first_us)
    while month <= last:
        end = first.start_us if month == last else windows.of_month(month, tz).end_us
        if begin < end:
            found[month] = windows.Window(begin, min(end, first.start_us))
            begin = min(end, first.start_us)
        month = bill.after(month)
    return found


def unbilled(
    found: Sequence[bill.Line], month: str, billed: Sequence[bill.Line]
) -> list[bill.Line]:
    """Return the adjustments that no closed bill has although theirs would be over, as late lines.

    Args:
        found: adjustments for months before the first closed one.
        month: the open month.
        billed: the lines of all closed bills.
    """
    had = {line.posting for line in billed}
    return [
        dataclasses.replace(line, month=month, late=True)
        for line in found
        if line.posting not in had
    ]

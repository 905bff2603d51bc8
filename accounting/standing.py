"""What the books say as of now: up to when everything is priced, and which teams they know."""

import contextlib
from collections.abc import Sequence

import duckdb

from accounting import books, postings, rollup

_AHEAD_US = 86_400_000_000
_NEWEST = """
SELECT max(us) AS newest FROM (
  SELECT max(arrived_us) + 1 AS us FROM usage_rows
  UNION ALL SELECT max(end_us) FROM gpu_rows WHERE end_us <= $ahead)
"""
_HAS = """
SELECT EXISTS (SELECT 1 FROM usage_rows WHERE team = $team)
  OR EXISTS (SELECT 1 FROM gpu_rows WHERE team = $team) AS has
"""


def priced_until(records: books.Books, log: Sequence[postings.Posting], now_us: int) -> int:
    """Return from when on nothing is priced yet: now, or later where the clock was set back; blocks.

    A clock that is an hour back says "now" of an hour whose use is priced and posted. What is dated more
    than a day ahead is a clock that was wrong, and holds nobody up.
    """
    ahead_us = now_us + _AHEAD_US
    posted_us = max((each.at_us for each in log if each.at_us < ahead_us), default=0)
    with records.reading(now_us, ahead_us) as reading:
        (found,) = reading.query(_NEWEST, {"ahead": ahead_us})
    return max(now_us, posted_us, int(found["newest"] or 0))


def used(records: books.Books, team: str, since_us: int) -> bool:
    """Return whether a team is in the rollups, or in the records since a moment; blocks."""
    path = rollup.path_of(records.state_dir)
    with (
        contextlib.suppress(FileNotFoundError, rollup.Busy, duckdb.Error),
        rollup.opened(path) as session,
    ):
        text = "SELECT 1 FROM usage_days WHERE team = ? LIMIT 1"
        if session.execute(text, [team]).fetchone():
            return True
    with records.reading(since_us) as reading:
        (found,) = reading.query(_HAS, {"team": team})
    return bool(found["has"])

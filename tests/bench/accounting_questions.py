"""What `make bench-accounting` asks of Forebay and of its peers: a month's bill, and a team's day."""

from typing import Any

from accounting import books, tokens
from tests.bench import accounting_data as data

BILLING = (
    *("request_id", "attempt", "team", "user", "model", "adapter", "tier", "outcome", "payer"),
    *(
        "arrived_us",
        "uncached_prompt_tokens",
        "cached_prompt_tokens",
        "output_tokens",
        "waste_tokens",
    ),
)
TOKENS = """
SELECT team, model, tier, sum(uncached_prompt_tokens)::BIGINT, sum(cached_prompt_tokens)::BIGINT,
  sum(output_tokens)::BIGINT
FROM {source} WHERE payer = 'team' GROUP BY team, model, tier ORDER BY team, model, tier"""


TEAM = "team7"  # whose day is asked for
DAY = data.Day(11, 0, 0)
TEAM_DAY = TOKENS.replace(
    "WHERE",
    f"WHERE team = '{TEAM}' AND arrived_us >= {DAY.start_us} "
    f"AND arrived_us < {DAY.start_us + data.DAY_US} AND",
)


def segments(records: books.Books, first_us: int, last_us: int) -> list[tuple[Any, ...]]:
    """Return what teams owe for, by team, model and tier, as a bill takes it from segments.

    Columns as of `TOKENS`.
    """
    found = tokens.take(records, [(first_us, last_us)], ("team", "model", "tier"))
    if found.problems:
        raise RuntimeError("; ".join(found.problems))
    return sorted((*keys, *sums) for _, keys, *sums in found.sums)


def team_day(records: books.Books) -> list[tuple[Any, ...]]:
    """Return what `TEAM` owes for on `DAY`, taken in the same way."""
    every = segments(records, DAY.start_us, DAY.start_us + data.DAY_US)
    return [row for row in every if row[0] == TEAM]

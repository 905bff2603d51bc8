"""What was used so far, for comparison with the counters of quotas: `contracts.quota.LedgerTotals`.

It reads the rows themselves and not the rollups: those know nothing of keys, and a check should not rest
on sums that may be behind.

A request's attempts are recorded one by one and its quotas are settled once, at its end: until then the
ledger is ahead of every counter. So what may still run is told apart. A request runs while an attempt of it
is open; and for a while after one that another attempt may follow (a lost replica, an engine's error) or
that only its replica has told of (the gateway may still be writing to a slow client).
"""

from collections.abc import Sequence
from pathlib import Path

from accounting import books, manifest
from scheduler.contracts import errors, quota, usage

_LAST = tuple(
    outcome.value
    for outcome in (
        usage.Outcome.OK,
        usage.Outcome.CLIENT_GONE,
        usage.Outcome.CANCELLED,
        usage.Outcome.EXPIRED,
    )
)  # after a gateway's word of one of these no attempt follows
_STATEMENT = """
WITH doubtful AS (
  SELECT DISTINCT request_id FROM usage
  WHERE outcome = 'open' OR (ended_us >= $over
    AND NOT (kind = 'close' AND list_contains($last::VARCHAR[], outcome)))
), unsure AS (
  SELECT request_id FROM usage SEMI JOIN doubtful USING (request_id) GROUP BY request_id
  HAVING NOT arg_max(kind = 'close' AND list_contains($last::VARCHAR[], outcome), attempt)
)
SELECT team, "user", key_id, model, tier,
  greatest(arrived_us // 3600000000 * 3600000000,
    coalesce(list_max(list_filter($cuts::BIGINT[], lambda cut: cut <= arrived_us)), 0)) AS from_us,
  unsure.request_id IS NOT NULL AS running,
  count(*) AS attempts,
  sum(uncached_prompt_tokens)::BIGINT AS uncached,
  sum(cached_prompt_tokens)::BIGINT AS cached,
  sum(output_tokens)::BIGINT AS output
FROM usage LEFT JOIN unsure USING (request_id) WHERE payer = 'team'
GROUP BY ALL
HAVING sum(uncached_prompt_tokens + cached_prompt_tokens + output_tokens) > 0
ORDER BY ALL
"""


class Totals:
    """The ledger's totals.

    Args:
        state_dir: Forebay's state folder.
        memory_mb: DuckDB's memory limit for one reading.
    """

    def __init__(self, state_dir: Path, *, memory_mb: int = 512) -> None:
        self._books = books.Books(state_dir, memory_mb=memory_mb)

    def consumed(
        self,
        first_us: int,
        last_us: int,
        *,
        cuts: Sequence[int] = (),
        over_us: int = quota.NEVER_US,
    ) -> Sequence[quota.Consumed]:
        """Return what requests that arrived in ``[first_us, last_us)`` cost their teams; it blocks.

        Args:
            first_us: of the arrivals, UTC µs.
            last_us: their end, not included.
            cuts: moments, ascending, that no row of the answer may span.
            over_us: of an attempt that ended before it no more is expected.

        Raises:
            errors.RecordingUnavailable: a file is damaged, so that a sum would be too small.
        """
        try:
            with self._books.reading(first_us, last_us) as reading:
                if reading.problems:
                    raise errors.RecordingUnavailable(reading.problems[0])
                asked = {"cuts": list(cuts), "over": over_us, "last": list(_LAST)}
                rows = reading.query(_STATEMENT, asked)
        except manifest.ManifestDamaged as error:
            raise errors.RecordingUnavailable(str(error)) from error
        return [
            quota.Consumed(
                row["team"],
                row["user"],
                row["key_id"],
                row["model"],
                row["tier"],
                row["from_us"],
                row["attempts"],
                quota.Spent(row["uncached"], row["cached"], row["output"]),
                row["running"],
            )
            for row in rows
        ]

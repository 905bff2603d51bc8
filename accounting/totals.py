"""What was used so far, for comparison with the counters of quotas: `contracts.quota.LedgerTotals`.

It reads the rows themselves and not the rollups: those know nothing of keys, and a check should not rest
on sums that may be behind.
"""

from collections.abc import Sequence
from pathlib import Path

from accounting import books, manifest
from scheduler.contracts import errors, quota

_STATEMENT = """
SELECT team, "user", key_id, model, tier, arrived_us // 3600000000 * 3600000000 AS hour_us,
  count(DISTINCT request_id) AS requests,
  sum(uncached_prompt_tokens)::BIGINT AS uncached,
  sum(cached_prompt_tokens)::BIGINT AS cached,
  sum(output_tokens)::BIGINT AS output
FROM usage WHERE payer = 'team'
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

    def consumed(self, first_us: int, last_us: int) -> Sequence[quota.Consumed]:
        """Return what requests that arrived in ``[first_us, last_us)`` cost their teams; it blocks.

        Raises:
            errors.RecordingUnavailable: a file is damaged, so that a sum would be too small.
        """
        try:
            with self._books.reading(first_us, last_us) as reading:
                if reading.problems:
                    raise errors.RecordingUnavailable(reading.problems[0])
                rows = reading.query(_STATEMENT)
        except manifest.ManifestDamaged as error:
            raise errors.RecordingUnavailable(str(error)) from error
        return [
            quota.Consumed(
                row["team"],
                row["user"],
                row["key_id"],
                row["model"],
                row["tier"],
                row["hour_us"],
                row["requests"],
                quota.Spent(row["uncached"], row["cached"], row["output"]),
            )
            for row in rows
        ]

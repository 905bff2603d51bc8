"""What callers asked for, by model and quarter of an hour: the part of the rollups that forecasts read.

A pass of `accounting.rolling` sums the quarters whose minutes it has summed anew, in the same transaction,
and drops what is older than some weeks; rows that come after their minutes were dropped are left out. A
quarter that was never kept (a file of an earlier release, or made again by ``fctl rebuild``) is told as a
fourth of its hour. Batch is no demand here: it waits for what is left.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from accounting import rollup
from scheduler.contracts import ports

QUARTER_US = 15 * rollup.MINUTE_US
KEPT_US = 35 * rollup.DAY_US
_COUNTED = "tier IN ('interactive', 'standard')"
# How long requests stay: to the first token, and from there to the last.
_SUMS = (
    "sum(requests)::BIGINT AS requests, sum(ttft_us + decode_us)::BIGINT AS held_us, "
    "sum(ttft_n)::BIGINT AS held_n"
)


def create(session: Any) -> None:
    """Make the table if it is not there."""
    session.execute(
        "CREATE TABLE IF NOT EXISTS demand_quarters (period_us BIGINT NOT NULL, "
        "cluster VARCHAR NOT NULL, model VARCHAR NOT NULL, requests BIGINT NOT NULL, "
        "held_us BIGINT NOT NULL, held_n BIGINT NOT NULL)"
    )


def replace(session: Any, minutes: Sequence[int]) -> None:
    """Sum the quarters of ``minutes`` anew, from the minutes; within the pass's transaction."""
    quarters = sorted({us // QUARTER_US * QUARTER_US for us in minutes})
    if not quarters:
        return
    session.register("quarters", pa.table({"period_us": pa.array(quarters, pa.int64())}))
    wanted = "IN (SELECT period_us FROM quarters)"
    session.execute(f"DELETE FROM demand_quarters WHERE period_us {wanted}")  # noqa: S608 - ours
    quarter = f"period_us // {QUARTER_US} * {QUARTER_US}"
    session.execute(
        f"INSERT INTO demand_quarters BY NAME SELECT {quarter} AS period_us, cluster, model, {_SUMS} "  # noqa: S608 - names and numbers of ours
        f"FROM usage_minutes WHERE period_us >= {quarters[0]} "
        f"AND period_us < {quarters[-1] + QUARTER_US} AND {quarter} {wanted} AND {_COUNTED} GROUP BY ALL"
    )


def forget(session: Any, now_us: int) -> None:
    """Drop what no forecast looks at any more."""
    session.execute("DELETE FROM demand_quarters WHERE period_us < $1", [now_us - KEPT_US])


class Ledger:
    """`ports.DemandLedger` over the rollups of a state folder.

    Args:
        state_dir: Forebay's state folder.
        cluster: whose demand.
    """

    def __init__(self, state_dir: Path, cluster: str) -> None:
        self._path = rollup.path_of(state_dir)
        self._cluster = cluster

    def quarters(self, first_us: int, last_us: int) -> Mapping[str, Mapping[int, ports.Arrived]]:
        """Return model → begin of a quarter of an hour → what arrived in it. Blocks.

        Raises:
            OSError: the rollups are held by somebody, or damaged.
        """
        try:
            with rollup.opened(self._path) as session:
                rows = session.execute(
                    _READ, {"cluster": self._cluster, "first": first_us, "last": last_us}
                ).fetchall()
        except FileNotFoundError:
            return {}  # nothing was rolled up yet
        except duckdb.CatalogException:
            return {}  # of an earlier release: the next pass makes the table
        except (rollup.Busy, duckdb.Error) as error:
            raise OSError(str(error).partition("\n")[0]) from error
        found: dict[str, dict[int, ports.Arrived]] = {}
        for model, at_us, requests, held_us, held_n in rows:
            held_s = held_us / held_n / 1_000_000 if held_n else 0.0
            found.setdefault(model, {})[at_us] = ports.Arrived(float(requests), held_s)
        return found


_HOUR = f"period_us // {rollup.HOUR_US} * {rollup.HOUR_US}"
_READ = f"""
WITH quarters AS (
  SELECT * FROM demand_quarters
  WHERE cluster = $cluster AND period_us >= $first AND period_us < $last
), hours AS (
  SELECT period_us, model, {_SUMS} FROM usage_hours
  WHERE cluster = $cluster AND {_COUNTED}
    AND period_us >= $first AND period_us + {rollup.HOUR_US} <= $last
    AND period_us NOT IN (
      SELECT {_HOUR} FROM demand_quarters WHERE period_us >= $first AND period_us < $last
    )
  GROUP BY ALL
)
SELECT model, period_us, requests, held_us, held_n FROM quarters
UNION ALL
SELECT model, period_us + part * {QUARTER_US}, requests / 4, held_us, held_n
FROM hours, range(4) AS parts(part)
"""  # noqa: S608 - names and numbers of ours; what callers give is bound

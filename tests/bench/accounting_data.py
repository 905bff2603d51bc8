"""Synthetic usage for `make bench-accounting`: what a month of one site looks like, made by SQL.

Skewed as real use is: a few teams make most of the requests, each team uses four of the models, each of its
ten users one of these but for one request in sixteen, three quarters of the prompts have a cached part, one
attempt in fifty does not end well, one in a hundred is a second attempt. Every value follows from the row's
number, but for the random bits of ids.
"""

import dataclasses
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb

from accounting import manifest, pieces, rollup, schema

FIRST_DAY = datetime.date(2026, 11, 1)
DAYS = 30
TEAMS = 200
MODELS = 60
DAY_US = 86_400_000_000
PIECE = 500_000


@dataclasses.dataclass(frozen=True, slots=True)
class Day:
    """One day's part of the whole: rows ``[first, first + rows)`` of all."""

    number: int
    first: int
    rows: int

    @property
    def name(self) -> str:
        """The UTC day."""
        return (FIRST_DAY + datetime.timedelta(days=self.number)).isoformat()

    @property
    def start_us(self) -> int:
        """Its begin, UTC µs."""
        days = (FIRST_DAY - datetime.date(1970, 1, 1)).days + self.number
        return days * DAY_US


def month_us() -> tuple[int, int]:
    """Return the borders of the month."""
    return Day(0, 0, 0).start_us, Day(DAYS, 0, 0).start_us


def days(rows: int) -> list[Day]:
    """Part ``rows`` among the days; the parts add up."""
    cuts = [rows * number // DAYS for number in range(DAYS + 1)]
    return [Day(n, cuts[n], cuts[n + 1] - cuts[n]) for n in range(DAYS)]


def attempts(day: Day, first: int, last: int) -> str:
    """Return the statement that makes merged rows number ``first`` to ``last`` of a day, in order."""
    step = DAY_US / max(day.rows, 1)
    return f"""
WITH numbered AS (
  SELECT i, hash(i + {day.first}) AS h, hash(i + {day.first} + 7777777777) AS g, uuid()::VARCHAR AS r,
    {day.start_us} + ((i + (hash(i) % 1000) / 1000.0) * {step})::BIGINT AS arrived_us
  FROM range({first}, {last}) t(i)
), shaped AS (
  SELECT *, (200 * pow((h % 100003) / 100003.0, 2.5))::BIGINT % {TEAMS} AS t,
    CASE WHEN g % 16 = 0 THEN (g >> 8) % 4 ELSE (h >> 12) % 10 % 4 END AS m,
    h % 1000 AS luck, lpad(hex((arrived_us // 1000)::UBIGINT), 12, '0').lower() AS ms,
    (40 + 4000 * pow((g % 99991) / 99991.0, 4))::BIGINT AS prompt, (h >> 20) % 1000 AS share
  FROM numbered
), told AS (
  SELECT *, CASE WHEN luck < 980 THEN 'ok' WHEN luck < 990 THEN 'client_gone'
      WHEN luck < 994 THEN 'refused' WHEN luck < 998 THEN 'preempted' ELSE 'error' END AS outcome,
    CASE WHEN share < 250 THEN 0 ELSE prompt * (share - 250) // 1000 // 16 * 16 END AS cached,
    (10 + 700 * pow((g >> 24) % 99989 / 99989.0, 2))::BIGINT AS sampled
  FROM shaped
)
SELECT substr(ms, 1, 8) || '-' || substr(ms, 9, 4) || '-7' || substr(r, 16) AS request_id,
  CASE WHEN (h >> 40) % 100 = 0 THEN 2 ELSE 1 END::BIGINT AS attempt,
  'site' AS cluster, 'team' || t AS team, 'user' || (t * 10 + (h >> 12) % 10) AS "user",
  'fb_' || (t * 20 + (h >> 12) % 20) AS key_id, 'model-' || ((t * 7 + m * (1 + t % 5)) % {MODELS}) AS model,
  '2026-10' AS version, CASE WHEN t % 10 = 0 THEN 'lora-' || t ELSE '' END AS adapter,
  CASE (t + m) % 4 WHEN 0 THEN '/v1/completions' WHEN 1 THEN '/v1/embeddings'
    ELSE '/v1/chat/completions' END AS endpoint,
  CASE WHEN t % 3 = 0 AND g % 10 < 6 THEN 'batch' WHEN g % 10 < 8 THEN 'interactive'
    ELSE 'standard' END AS tier,
  'r-' || lpad(((h >> 30) % 300)::VARCHAR, 12, '0') AS replica_id,
  'l-' || lpad(((h >> 30) % 150)::VARCHAR, 12, '0') AS lease_id,
  (700000 + (h >> 30) % 150)::VARCHAR AS slurm_job_id,
  arrived_us, arrived_us + (h % 20000)::BIGINT AS started_us, 0::BIGINT AS batch_job_id,
  '' AS custom_id, '' AS caller_request_id, 'close' AS kind, outcome,
  CASE WHEN outcome = 'refused' THEN 0 ELSE prompt - cached END AS uncached_prompt_tokens,
  CASE WHEN outcome = 'refused' THEN 0 ELSE cached END AS cached_prompt_tokens,
  CASE WHEN outcome = 'refused' THEN 0 ELSE sampled END AS output_tokens,
  CASE WHEN outcome = 'refused' THEN 0 ELSE arrived_us + 20000 + prompt * 90 END::BIGINT AS first_token_us,
  arrived_us + 20000 + prompt * 90 + sampled * 18000 + (g % 10000)::BIGINT AS ended_us,
  CASE WHEN outcome IN ('preempted', 'error') THEN 'platform' ELSE 'team' END AS payer,
  CASE outcome WHEN 'ok' THEN '' ELSE 'it was ' || outcome END AS reason,
  CASE WHEN luck = 979 THEN prompt ELSE 0 END AS waste_tokens
FROM told"""


def compacted(folder: Path, day: Day) -> manifest.File:
    """Write one day as a compaction leaves it, and return its entry."""
    with duckdb.connect(config={"threads": 1, "memory_limit": "700MB"}) as session:

        def made() -> Iterator[Any]:
            for first in range(0, day.rows, PIECE):
                last = min(first + PIECE, day.rows)
                text = attempts(day, first, last)
                order = rollup.quoted(pieces.ORDER)
                yield session.sql(f"SELECT * FROM ({text}) ORDER BY {order}")

        entry = pieces.write(folder, schema.USAGE, day.name, made())
    return dataclasses.replace(
        entry,
        first_us=day.start_us,
        last_us=day.start_us + DAY_US + 3_600_000_000,
        since=day.number + 1,
        merged=True,
    )


def as_written(text: str) -> str:
    """Return the statement that makes OPEN, CLOSE and REPLICA rows of merged ones."""
    blank = """* REPLACE ('open' AS kind, 'open' AS outcome, 0::BIGINT AS uncached_prompt_tokens,
  0::BIGINT AS cached_prompt_tokens, 0::BIGINT AS output_tokens, 0::BIGINT AS first_token_us,
  0::BIGINT AS ended_us, 'team' AS payer, '' AS reason, 0::BIGINT AS waste_tokens)"""
    return f"""
WITH ends AS MATERIALIZED ({text})
SELECT {blank} FROM ends UNION ALL SELECT * FROM ends
UNION ALL SELECT * REPLACE ('replica' AS kind) FROM ends"""

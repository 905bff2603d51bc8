"""What facct asks: requests, batch jobs, leases, and what share of the GPU time they had.

Every value that comes from a caller is bound as a parameter. Who may see what is a `Scope` made by the
routes from the credential; nothing here trusts a filter to hide rows.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from accounting import books, gpu_sums, gpu_time, money, rates, stepcost
from scheduler.contracts import usage

LONGEST_REQUEST_US = 6 * 3_600_000_000  # a reading for GPU time begins this much earlier
OWNER = ("cluster", "team", "user", "model", "tier", "endpoint")  # whom GPU time is attributed to


@dataclasses.dataclass(frozen=True, slots=True)
class Scope:
    """What a caller may see: everything (None), one team, or one user of a team."""

    team: str | None = None
    user: str | None = None

    def sees(self, team: str, user: str | None = None) -> bool:
        """Return whether rows of this team and user are theirs to see (`user` None: of the whole team)."""
        return self.team in {None, team} and self.user in {None, user}


@dataclasses.dataclass(frozen=True, slots=True)
class Filter:
    """What was asked for; an empty tuple asks for all.

    Attributes:
        jobs: batch job ids as text, or request ids; either may match.
        lines: whether requests that are lines of batch jobs are listed.
    """

    teams: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    tiers: tuple[str, ...] = ()
    clusters: tuple[str, ...] = ()
    outcomes: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    lines: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    """What a token weighs when GPU time is shared out: uncached prompt tokens, and output tokens."""

    prefill: int = 1
    decode: int = 4


SEEN = """
  ($own_team::VARCHAR IS NULL OR team = $own_team)
  AND ($own_user::VARCHAR IS NULL OR "user" = $own_user)
  AND (len($teams::VARCHAR[]) = 0 OR list_contains($teams::VARCHAR[], team))
  AND (len($users::VARCHAR[]) = 0 OR list_contains($users::VARCHAR[], "user"))
  AND (len($models::VARCHAR[]) = 0 OR list_contains($models::VARCHAR[], model))
  AND (len($clusters::VARCHAR[]) = 0 OR list_contains($clusters::VARCHAR[], cluster))
  AND (len($tiers::VARCHAR[]) = 0 OR list_contains($tiers::VARCHAR[], tier))
"""
_NAMED = """
  AND (len($jobs::VARCHAR[]) = 0 OR list_contains($jobs::VARCHAR[], request_id)
    OR (batch_job_id > 0 AND list_contains($jobs::VARCHAR[], batch_job_id::VARCHAR)))
"""

# Tokens at their prices, in micro-units for 1,000 tokens: exact, and rounded once by who prints it.
_PRICED = """coalesce(uncached_prompt_tokens::HUGEINT * price_uncached_prompt
      + cached_prompt_tokens::HUGEINT * price_cached_prompt + output_tokens::HUGEINT * price_output, 0)"""

# A batch line that is sent again is a new request, whose attempts begin at 1 as every request's do: a line's
# attempts are found by its own name, and numbered anew in the order in which they came.
_ATTEMPTS = f"""
WITH seen AS (
  SELECT usage.*, CASE WHEN batch_job_id > 0 THEN custom_id ELSE '' END AS line,
    CASE WHEN batch_job_id > 0 THEN '' ELSE request_id END AS single,
    waste_tokens + CASE WHEN payer = 'platform'
      THEN uncached_prompt_tokens + cached_prompt_tokens + output_tokens ELSE 0 END AS platform_tokens,
    CASE WHEN payer = 'team' THEN {_PRICED} ELSE 0 END AS priced
  FROM usage LEFT JOIN price_spans ON price_model = model AND price_tier = tier
    AND arrived_us >= price_start AND arrived_us < price_end
  WHERE {SEEN} {_NAMED} AND ($lines OR batch_job_id = 0)
)
"""  # noqa: S608 - constants of this module only

_EACH = f"""{_ATTEMPTS}, numbered AS (
  SELECT * REPLACE (CASE WHEN batch_job_id > 0 THEN row_number() OVER (
      PARTITION BY batch_job_id, line, single ORDER BY arrived_us, request_id, attempt
    ) ELSE attempt END AS attempt)
  FROM seen
)
SELECT * EXCLUDE (line, single), 1 AS attempts FROM numbered
WHERE len($outcomes::VARCHAR[]) = 0 OR list_contains($outcomes::VARCHAR[], outcome)
ORDER BY arrived_us, request_id, attempt LIMIT $limit
"""  # noqa: S608 - as above

_LAST = f"""{_ATTEMPTS}, placed AS (
  SELECT *,
    row_number() OVER (
      PARTITION BY batch_job_id, line, single ORDER BY started_us DESC, attempt DESC, request_id DESC
    ) AS place,
    count(*) OVER every AS all_attempts,
    sum(uncached_prompt_tokens) OVER every AS all_uncached,
    sum(cached_prompt_tokens) OVER every AS all_cached,
    sum(output_tokens) OVER every AS all_output,
    sum(platform_tokens) OVER every AS all_platform,
    sum(priced) OVER every AS all_priced,
    min(arrived_us) OVER every AS first_arrived,
    min(nullif(started_us, 0)) OVER every AS first_started,
    min(nullif(first_token_us, 0)) OVER every AS first_first_token
  FROM seen WINDOW every AS (PARTITION BY batch_job_id, line, single)
)
SELECT * EXCLUDE (line, single, place, all_attempts, all_uncached, all_cached, all_output, all_platform,
    all_priced, first_arrived, first_started, first_first_token)
  REPLACE (all_uncached AS uncached_prompt_tokens, all_cached AS cached_prompt_tokens,
    all_output AS output_tokens, all_platform AS platform_tokens, all_priced AS priced,
    CASE WHEN batch_job_id > 0 THEN all_attempts ELSE attempt END AS attempt,
    first_arrived AS arrived_us,
    coalesce(first_started, 0) AS started_us, coalesce(first_first_token, 0) AS first_token_us),
  all_attempts AS attempts
FROM placed WHERE place = 1
  AND (len($outcomes::VARCHAR[]) = 0 OR list_contains($outcomes::VARCHAR[], outcome))
ORDER BY arrived_us, request_id LIMIT $limit
"""  # noqa: S608 - as above

_JOBS = f"""{_ATTEMPTS}, lines AS (
  SELECT *, row_number() OVER (
      PARTITION BY batch_job_id, line ORDER BY started_us DESC, attempt DESC, request_id DESC
    ) AS place
  FROM seen WHERE batch_job_id > 0
)
SELECT cluster, batch_job_id, team, "user", min(model) AS model, min(tier) AS tier,
  count(DISTINCT line) AS lines,
  count(*) FILTER (WHERE place = 1 AND outcome = 'ok') AS ok,
  count(*) FILTER (WHERE place = 1 AND outcome = 'open') AS open,
  count(*) FILTER (WHERE outcome = 'preempted') AS preempted,
  count(*) AS attempts,
  sum(uncached_prompt_tokens) AS uncached_prompt_tokens,
  sum(cached_prompt_tokens) AS cached_prompt_tokens,
  sum(output_tokens) AS output_tokens,
  sum(platform_tokens) AS platform_tokens, sum(priced) AS priced,
  min(arrived_us) AS arrived_us, coalesce(min(nullif(started_us, 0)), 0) AS started_us,
  max(ended_us) AS ended_us
FROM lines GROUP BY cluster, batch_job_id, team, "user"
ORDER BY batch_job_id, cluster, team, "user" LIMIT $limit
"""  # noqa: S608 - as above


def requests(
    reading: books.Reading,
    scope: Scope,
    asked: Filter,
    known: rates.Rates,
    *,
    each_attempt: bool,
    limit: int,
) -> list[dict[str, Any]]:
    """List requests in the order of arrival, one row each with its attempts summed, or every attempt.

    A row that sums has the outcome, replica and end of the last attempt, and the first arrival;
    `cost_micro` is what its team pays for tokens.
    """
    statement = _EACH if each_attempt else _LAST
    _register_prices(reading, known)
    return _with_cost(reading.query(statement, {**bound(scope, asked), "limit": limit}))


def jobs(
    reading: books.Reading, scope: Scope, asked: Filter, known: rates.Rates, *, limit: int
) -> list[dict[str, Any]]:
    """List batch jobs by what their dispatched lines used; lines not dispatched yet are not known here."""
    values = {**bound(scope, asked), "limit": limit, "lines": True}
    del values["outcomes"]
    _register_prices(reading, known)
    return _with_cost(reading.query(_JOBS, values))


def _register_prices(reading: books.Reading, known: rates.Rates) -> None:
    """Make the table ``price_spans``: the prices of every model and tier here, over all time."""
    pairs = reading.query("SELECT DISTINCT model, tier FROM usage_rows") if known.all else []
    rows = known.spans((pair["model"], pair["tier"]) for pair in pairs)
    texts, numbers = ("model", "tier"), ("start_us", "end_us", *(use.value for use in rates.TOKENS))
    table = {
        f"price_{name.removesuffix('_us')}": pa.array(
            [row[name] for row in rows], pa.string() if name in texts else pa.int64()
        )
        for name in (*texts, *numbers)
    }
    reading.session.register("price_spans", pa.table(table))


def _with_cost(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for row in rows:
        row["cost_micro"] = money.divide(int(row.pop("priced")), rates.Use.OUTPUT.per)
    return rows


def lease_times(
    reading: books.Reading, scope: Scope, asked: Filter, window: tuple[int, int] | None = None
) -> list[gpu_time.LeaseTime]:
    """List leases with their GPU time, of whole lives or clipped to a window."""
    found = [
        lease_row
        for lease_row in _gpu_rows(reading, asked.jobs)
        if scope.sees(lease_row.team)
        and (not asked.teams or lease_row.team in asked.teams)
        and (not asked.clusters or lease_row.cluster in asked.clusters)
    ]
    if window is not None:
        found = [_clipped(each, window) for each in found]
    return gpu_time.by_lease(found)


def _clipped(row: usage.GpuRow, window: tuple[int, int]) -> usage.GpuRow:
    start = min(max(row.start_us, window[0]), window[1])
    return dataclasses.replace(row, start_us=start, end_us=max(start, min(row.end_us, window[1])))


def gpu_shares(
    reading: books.Reading,
    cuts: Sequence[int],
    weights: Weights,
    names: Sequence[str] = OWNER,
) -> tuple[list[gpu_sums.Share], tuple[str, ...]]:
    """Share out the GPU time of all leases, by period; keys are the values of ``names`` in usage rows.

    By `OWNER` it is read from the table of GPU minutes where that is complete, and idle and start-up time
    of a team's own floor are the team's (user, tier and endpoint "").

    Returns:
        One share for each period, and what could not be read of records that the reading has not.
    """
    otherwise = stepcost.Cost(weights.prefill, weights.decode)
    if tuple(names) != gpu_sums.KEYS:
        return gpu_sums.by_names(reading, cuts, otherwise, names), ()
    shares, problems = gpu_sums.by_owner(reading.records, cuts, otherwise)
    for share in shares:
        for owner, amount in share.dedicated.items():
            share.attributed[owner] = share.attributed.get(owner, 0) + amount
        share.dedicated.clear()
    return shares, problems


def _gpu_rows(reading: books.Reading, jobs: Sequence[str]) -> list[usage.GpuRow]:
    """Return the rows of leases with these ids or Slurm job ids, of all if there are none."""
    rows = reading.query(
        "SELECT * FROM gpu_rows WHERE len($jobs::VARCHAR[]) = 0 "
        "OR list_contains($jobs::VARCHAR[], lease_id) OR list_contains($jobs::VARCHAR[], slurm_job_id)",
        {"jobs": list(jobs)},
    )
    return gpu_time.tiled(usage.GpuRow(**row) for row in rows)


def add_gpu(
    reading: books.Reading,
    rows: Sequence[dict[str, Any]],
    window: tuple[int, int],
    weights: Weights,
    *,
    each_attempt: bool,
) -> tuple[str, ...]:
    """Add to each request, attempt or batch job its share of the GPU time, ``gpu_us``.

    Returns one line for each thing that could not be read.

    Args:
        reading: from `LONGEST_REQUEST_US` before the window on: others ran beside these requests.
        rows: from `requests` or `jobs`.
        window: of the rows' arrivals; time up to `LONGEST_REQUEST_US` after it counts too.
        weights: how GPU time is shared out.
        each_attempt: whether rows are attempts.
    """
    names = ("batch_job_id", "custom_id", "request_id", "attempt")
    cuts = [
        max(0, window[0] - LONGEST_REQUEST_US),
        min(window[1] + LONGEST_REQUEST_US, books.MAX_US),
    ]
    (share,), problems = gpu_shares(reading, cuts, weights, names)
    sums: dict[tuple[Any, ...], int] = {}
    for (job, line, request, attempt), amount in share.attributed.items():
        for key in ((job,), (job, line) if job else (request,), (request, attempt)):
            sums[key] = sums.get(key, 0) + amount
    for row in rows:
        if "request_id" not in row:
            key = (row["batch_job_id"],)
        elif each_attempt:
            key = row["request_id"], row["attempt"]
        elif row["batch_job_id"]:
            key = row["batch_job_id"], row["custom_id"]
        else:
            key = (row["request_id"],)
        row["gpu_us"] = sums.get(key, 0)
    return problems


def bound(scope: Scope, asked: Filter) -> dict[str, Any]:
    """Return the parameters of `SEEN` and the statements here."""
    return {
        "own_team": scope.team,
        "own_user": scope.user,
        "teams": list(asked.teams),
        "users": list(asked.users),
        "models": list(asked.models),
        "tiers": list(asked.tiers),
        "clusters": list(asked.clusters),
        "outcomes": list(asked.outcomes),
        "jobs": list(asked.jobs),
        "lines": asked.lines,
    }

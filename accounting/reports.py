"""What facct and freport ask: requests, batch jobs, leases, rollups. DuckDB sums, Python shares out GPU time.

Every value that comes from a caller is bound as a parameter. Who may see what is a `Scope` made by the
routes from the credential; nothing here trusts a filter to hide rows.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from accounting import attribution, books, gpu_time
from scheduler.contracts import usage

LONGEST_REQUEST_US = 6 * 3_600_000_000  # a reading for GPU time begins this much earlier
GROUPS: dict[str, tuple[str, ...]] = {
    "cluster": ("cluster",),
    "team": ("team",),
    "user": ("team", "user"),
    "model": ("model",),
    "tier": ("tier",),
}
OWNER = ("cluster", "team", "user", "model", "tier", "endpoint")  # whom GPU time is attributed to
_SUMS = (
    "requests",
    "attempts",
    "ok",
    "refused",
    "uncached_prompt_tokens",
    "cached_prompt_tokens",
    "output_tokens",
    "platform_tokens",
)


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
    outcomes: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    lines: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    """What a token weighs when GPU time is shared out: uncached prompt tokens, and output tokens."""

    prefill: int = 1
    decode: int = 4


_SEEN = """
  ($own_team::VARCHAR IS NULL OR team = $own_team)
  AND ($own_user::VARCHAR IS NULL OR "user" = $own_user)
  AND (len($teams::VARCHAR[]) = 0 OR list_contains($teams::VARCHAR[], team))
  AND (len($users::VARCHAR[]) = 0 OR list_contains($users::VARCHAR[], "user"))
  AND (len($models::VARCHAR[]) = 0 OR list_contains($models::VARCHAR[], model))
  AND (len($tiers::VARCHAR[]) = 0 OR list_contains($tiers::VARCHAR[], tier))
"""
_NAMED = """
  AND (len($jobs::VARCHAR[]) = 0 OR list_contains($jobs::VARCHAR[], request_id)
    OR (batch_job_id > 0 AND list_contains($jobs::VARCHAR[], batch_job_id::VARCHAR)))
"""

# A batch line that is sent again is a new request: its attempts are found by the line's own name.
_ATTEMPTS = f"""
WITH seen AS (
  SELECT *, CASE WHEN batch_job_id > 0 THEN custom_id ELSE '' END AS line,
    CASE WHEN batch_job_id > 0 THEN '' ELSE request_id END AS single,
    CASE WHEN payer = 'platform'
      THEN uncached_prompt_tokens + cached_prompt_tokens + output_tokens ELSE 0 END AS platform_tokens
  FROM usage WHERE {_SEEN} {_NAMED} AND ($lines OR batch_job_id = 0)
)
"""  # noqa: S608 - constants of this module only

_EACH = f"""{_ATTEMPTS}
SELECT * EXCLUDE (line, single), 1 AS attempts FROM seen
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
    min(arrived_us) OVER every AS first_arrived,
    min(nullif(started_us, 0)) OVER every AS first_started,
    min(nullif(first_token_us, 0)) OVER every AS first_first_token
  FROM seen WINDOW every AS (PARTITION BY batch_job_id, line, single)
)
SELECT * EXCLUDE (line, single, place, all_attempts, all_uncached, all_cached, all_output, all_platform,
    first_arrived, first_started, first_first_token)
  REPLACE (all_uncached AS uncached_prompt_tokens, all_cached AS cached_prompt_tokens,
    all_output AS output_tokens, all_platform AS platform_tokens, first_arrived AS arrived_us,
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
  sum(platform_tokens) AS platform_tokens,
  min(arrived_us) AS arrived_us, coalesce(min(nullif(started_us, 0)), 0) AS started_us,
  max(ended_us) AS ended_us
FROM lines GROUP BY cluster, batch_job_id, team, "user"
ORDER BY batch_job_id LIMIT $limit
"""  # noqa: S608 - as above


_WORK = """
SELECT cluster, lease_id, replica_id, team, "user", model, tier, payer, started_us, ended_us,
  uncached_prompt_tokens, output_tokens
FROM usage WHERE started_us > 0 AND ended_us > started_us
"""


def requests(
    reading: books.Reading, scope: Scope, asked: Filter, *, each_attempt: bool, limit: int
) -> list[dict[str, Any]]:
    """List requests in the order of arrival, one row each with its attempts summed, or every attempt.

    A row that sums has the outcome, replica and end of the last attempt, and the first arrival.
    """
    statement = _EACH if each_attempt else _LAST
    return reading.query(statement, {**_bound(scope, asked), "limit": limit})


def jobs(
    reading: books.Reading, scope: Scope, asked: Filter, *, limit: int
) -> list[dict[str, Any]]:
    """List batch jobs by what their dispatched lines used; lines not dispatched yet are not known here."""
    bound = {**_bound(scope, asked), "limit": limit, "lines": True}
    del bound["outcomes"]
    return reading.query(_JOBS, bound)


def lease_times(
    reading: books.Reading, scope: Scope, asked: Filter, window: tuple[int, int] | None = None
) -> list[gpu_time.LeaseTime]:
    """List leases with their GPU time, of whole lives or clipped to a window."""
    found = [
        lease_row
        for lease_row in _gpu_rows(reading)
        if scope.sees(lease_row.team)
        and (not asked.teams or lease_row.team in asked.teams)
        and (not asked.jobs or {lease_row.lease_id, lease_row.slurm_job_id} & set(asked.jobs))
    ]
    if window is not None:
        found = [_clipped(each, window) for each in found]
    return gpu_time.by_lease(found)


def _clipped(row: usage.GpuRow, window: tuple[int, int]) -> usage.GpuRow:
    start = min(max(row.start_us, window[0]), window[1])
    return dataclasses.replace(row, start_us=start, end_us=max(start, min(row.end_us, window[1])))


def rollup(
    reading: books.Reading,
    scope: Scope,
    asked: Filter,
    *,
    by: str,
    cuts: Sequence[int],
    weights: Weights,
) -> list[dict[str, Any]]:
    """Sum tokens and GPU-µs by period and group.

    The tokens are those that the team pays for; `platform_tokens` are not billed. For a scope that
    sees everything, rows whose group is ``""`` and whose `what` is idle, starting or waste hold the GPU
    time that is nobody's, so that the column adds up to what was allocated.

    Args:
        reading: from `LONGEST_REQUEST_US` before the first border on, so that what began earlier counts.
        scope: what the caller may see.
        asked: filters; `jobs` and `outcomes` are not used.
        by: a key of `GROUPS`.
        cuts: borders of the periods, ascending.
        weights: how GPU time is shared out.
    """
    names = GROUPS[by]
    rows: dict[tuple[int, str, tuple[str, ...]], dict[str, Any]] = {}
    for found in _tokens(reading, scope, asked, names, cuts):
        key = found["period"], "", tuple(found[name] for name in names)
        rows[key] = {**{name: found[name] for name in (*names, *_SUMS)}, "gpu_us": 0}
    for period, share in enumerate(gpu_shares(reading, cuts, weights)):
        for owner, amount in share.attributed.items():
            who = dict(zip(OWNER, owner, strict=True))
            if scope.sees(who["team"], who["user"]) and _matches(asked, who):
                group = period, "", tuple(who[name] for name in names)
                rows.setdefault(group, _empty(names, group[2]))["gpu_us"] += amount
        if scope == Scope() and asked == Filter():
            for what in ("idle", "starting", "waste"):
                amount = getattr(share, what)
                if amount:
                    blank = tuple("" for _ in names)
                    rows[period, what, blank] = {**_empty(names, blank), "gpu_us": amount}
    return [
        {"start_us": cuts[period], "end_us": cuts[period + 1], "what": what or "used", **row}
        for (period, what, _), row in sorted(rows.items(), key=lambda item: item[0])
    ]


def gpu_shares(
    reading: books.Reading, cuts: Sequence[int], weights: Weights
) -> list[attribution.Share]:
    """Share out the GPU time of all leases, by period; keys are (cluster, team, user, model, tier)."""
    leased: dict[tuple[str, str], list[attribution.Held]] = {}
    held: dict[tuple[str, str], list[attribution.Held]] = {}
    work: dict[tuple[str, str], list[attribution.Work]] = {}
    for row in _gpu_rows(reading):
        span = attribution.Held(row.gpus, row.start_us, row.end_us)
        leased.setdefault((row.cluster, row.lease_id), []).append(span)
    for found in reading.query("SELECT * FROM replica_rows"):
        span = attribution.Held(
            found["gpus"], found["start_us"], found["end_us"], found["replica_id"], found["state"]
        )
        held.setdefault((found["cluster"], found["lease_id"]), []).append(span)
    for found in reading.query(
        "SELECT * FROM usage WHERE started_us > 0 AND ended_us > started_us"
    ):
        tokens = found["uncached_prompt_tokens"], found["output_tokens"]
        one = attribution.Work(
            key=None if found["payer"] == "platform" else tuple(found[name] for name in OWNER),
            replica_id=found["replica_id"],
            start_us=found["started_us"],
            end_us=found["ended_us"],
            weight=weights.prefill * tokens[0] + weights.decode * tokens[1],
        )
        work.setdefault((found["cluster"], found["lease_id"]), []).append(one)
    total = [attribution.Share() for _ in cuts[1:]]
    for lease, spans in leased.items():
        shares = attribution.attribute(spans, held.get(lease, []), work.get(lease, []), cuts)
        for share, part in zip(total, shares, strict=True):
            share.add(part)
    return total


def _tokens(
    reading: books.Reading, scope: Scope, asked: Filter, names: Sequence[str], cuts: Sequence[int]
) -> list[dict[str, Any]]:
    periods = pa.table(
        {
            "period": pa.array(range(len(cuts) - 1), pa.int64()),
            "period_start": pa.array(cuts[:-1], pa.int64()),
            "period_end": pa.array(cuts[1:], pa.int64()),
        }
    )
    reading.session.register("periods", periods)
    columns = ", ".join(f'"{name}"' for name in names)  # ours, from `GROUPS`
    bound = _bound(scope, asked)
    del bound["outcomes"], bound["jobs"], bound["lines"]
    return reading.query(
        f"""
SELECT period, {columns},
  count(DISTINCT request_id) AS requests, count(*) AS attempts,
  count(*) FILTER (WHERE outcome = 'ok') AS ok, count(*) FILTER (WHERE outcome = 'refused') AS refused,
  coalesce(sum(uncached_prompt_tokens) FILTER (WHERE payer = 'team'), 0) AS uncached_prompt_tokens,
  coalesce(sum(cached_prompt_tokens) FILTER (WHERE payer = 'team'), 0) AS cached_prompt_tokens,
  coalesce(sum(output_tokens) FILTER (WHERE payer = 'team'), 0) AS output_tokens,
  coalesce(sum(uncached_prompt_tokens + cached_prompt_tokens + output_tokens)
    FILTER (WHERE payer = 'platform'), 0) AS platform_tokens
FROM usage JOIN periods ON arrived_us >= period_start AND arrived_us < period_end
WHERE {_SEEN} GROUP BY period, {columns}
""",  # noqa: S608 - column names of ours; every value is bound
        bound,
    )


def _gpu_rows(reading: books.Reading) -> list[usage.GpuRow]:
    return gpu_time.tiled(usage.GpuRow(**row) for row in reading.query("SELECT * FROM gpu_rows"))


def _bound(scope: Scope, asked: Filter) -> dict[str, Any]:
    return {
        "own_team": scope.team,
        "own_user": scope.user,
        "teams": list(asked.teams),
        "users": list(asked.users),
        "models": list(asked.models),
        "tiers": list(asked.tiers),
        "outcomes": list(asked.outcomes),
        "jobs": list(asked.jobs),
        "lines": asked.lines,
    }


def _matches(asked: Filter, who: dict[str, str]) -> bool:
    wanted = {"team": asked.teams, "user": asked.users, "model": asked.models, "tier": asked.tiers}
    return all(not values or who[name] in values for name, values in wanted.items())


def _empty(names: Sequence[str], values: Sequence[str]) -> dict[str, Any]:
    return {**dict(zip(names, values, strict=True)), **dict.fromkeys(_SUMS, 0), "gpu_us": 0}

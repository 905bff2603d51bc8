"""What freport asks: tokens, GPU time and cost by period and group."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from accounting import books, quantities, rates, reports

GROUPS: dict[str, tuple[str, ...]] = {
    "cluster": ("cluster",),
    "team": ("team",),
    "user": ("team", "user"),
    "model": ("model",),
    "tier": ("tier",),
    "endpoint": ("endpoint",),
}
_COUNTS = ("requests", "attempts", "ok", "refused", "platform_tokens")
_TOKENS = ("uncached_prompt_tokens", "cached_prompt_tokens", "output_tokens")
_GROUP_OF = {name: place for place, name in enumerate(reports.OWNER)}

_Key = tuple[int, str, tuple[str, ...]]


def summary(
    reading: books.Reading,
    scope: reports.Scope,
    asked: reports.Filter,
    *,
    by: str,
    cuts: Sequence[int],
    taken: quantities.Taken,
) -> list[dict[str, Any]]:
    """Sum tokens, GPU-µs and micro-units by period and group.

    The tokens are those that the team pays for; `platform_tokens` are not billed. `requests` counts a
    batch line once however often it was sent in the period, `attempts` every dispatch. `cost_micro` is
    rounded once for each price in the row. For a scope that sees everything, rows whose group is ``""``
    and whose `what` is idle, starting or waste hold the GPU time that is nobody's, so that the column
    adds up to what was allocated.

    Args:
        reading: the one that ``taken`` is of.
        scope: what the caller may see.
        asked: filters; `jobs` and `outcomes` are not used.
        by: a key of `GROUPS`.
        cuts: borders of the periods, ascending.
        taken: what was used in these periods, at which price.
    """
    names = GROUPS[by]
    rows: dict[_Key, dict[str, Any]] = {}
    for found in _counts(reading, scope, asked, names, cuts):
        key = found["period"], "", tuple(found[name] for name in names)
        rows[key] = {**_empty(names, key[2]), **{name: found[name] for name in _COUNTS}}
    prices: dict[tuple[_Key, rates.Use, int], int] = {}
    for each in taken.amounts:
        who = dict(zip(reports.OWNER, each.owner, strict=True))
        if not (scope.sees(who["team"], who["user"]) and _matches(asked, who)):
            continue
        key = each.period, "", tuple(each.owner[_GROUP_OF[name]] for name in names)
        row = rows.setdefault(key, _empty(names, key[2]))
        row["gpu_us" if each.use is rates.Use.GPU else f"{each.use.value}_tokens"] += each.amount
        price = key, each.use, each.micro
        prices[price] = prices.get(price, 0) + each.amount
    for (key, use, micro), amount in prices.items():
        rows[key]["cost_micro"] += rates.cost(amount, use, micro)
    if holds_nobodys(scope, asked):
        for (period, what), amount in taken.nobodys.items():
            blank = tuple("" for _ in names)
            rows[period, what, blank] = {**_empty(names, blank), "gpu_us": amount}
    return [
        {"start_us": cuts[period], "end_us": cuts[period + 1], "what": what or "used", **row}
        for (period, what, _), row in sorted(rows.items(), key=lambda item: item[0])
    ]


def holds_nobodys(scope: reports.Scope, asked: reports.Filter) -> bool:
    """Return whether a summary has the GPU time that is nobody's, and so adds up to what was allocated."""
    return scope == reports.Scope() and asked == reports.Filter()


def _counts(
    reading: books.Reading,
    scope: reports.Scope,
    asked: reports.Filter,
    names: Sequence[str],
    cuts: Sequence[int],
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
    bound = reports.bound(scope, asked)
    del bound["outcomes"], bound["jobs"], bound["lines"]
    return reading.query(
        f"""
SELECT period, {columns},
  count(DISTINCT CASE WHEN batch_job_id > 0 THEN {{'job': batch_job_id, 'name': custom_id}}
    ELSE {{'job': 0::BIGINT, 'name': request_id}} END) AS requests,
  count(*) AS attempts,
  count(*) FILTER (WHERE outcome = 'ok') AS ok, count(*) FILTER (WHERE outcome = 'refused') AS refused,
  coalesce(sum(waste_tokens + CASE WHEN payer = 'platform'
    THEN uncached_prompt_tokens + cached_prompt_tokens + output_tokens ELSE 0 END), 0)::BIGINT
    AS platform_tokens
FROM usage JOIN periods ON arrived_us >= period_start AND arrived_us < period_end
WHERE {reports.SEEN} GROUP BY period, {columns}
""",  # noqa: S608 - column names of ours; every value is bound
        bound,
    )


def _matches(asked: reports.Filter, who: dict[str, str]) -> bool:
    wanted = {
        "team": asked.teams,
        "user": asked.users,
        "model": asked.models,
        "tier": asked.tiers,
        "cluster": asked.clusters,
    }
    return all(not values or who[name] in values for name, values in wanted.items())


def _empty(names: Sequence[str], values: Sequence[str]) -> dict[str, Any]:
    sums = (*_COUNTS, *_TOKENS, "gpu_us", "cost_micro")
    return {**dict(zip(names, values, strict=True)), **dict.fromkeys(sums, 0)}

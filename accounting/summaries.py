"""What freport asks: tokens, GPU time and cost by period and group."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from accounting import books, quantities, rates, reports, rollup

GROUPS: dict[str, tuple[str, ...]] = {
    "cluster": ("cluster",),
    "team": ("team",),
    "user": ("team", "user"),
    "model": ("model",),
    "tier": ("tier",),
    "endpoint": ("endpoint",),
}
_COUNTS = ("requests", "attempts", "ok", "refused", "platform_tokens")  # in the statements' order
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
    rolled_us: int = 0,
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
        taken: what was used in these periods, at which price; told apart by `told` at least.
        rolled_us: up to when counts are taken from the rollups where the borders allow it; 0: nowhere.

    Raises:
        rollup.Busy, duckdb.Error: the rollups can't be read (only with ``rolled_us``).
    """
    names = GROUPS[by]
    rows: dict[_Key, dict[str, Any]] = {}
    bound = reports.bound(scope, asked)
    del bound["outcomes"], bound["jobs"], bound["lines"]
    for (period, values), counts in _counts(reading, bound, names, cuts, rolled_us):
        key = period, "", values
        row = rows.setdefault(key, _empty(names, values))
        for name, count in counts.items():
            row[name] += count
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


def told(by: str, scope: reports.Scope, asked: reports.Filter) -> tuple[str, ...]:
    """Return the names of an owner that a summary looks at: its groups, and what it leaves out by."""
    asking = {
        "team": scope.team is not None or asked.teams,
        "user": scope.user is not None or asked.users,
        "model": asked.models,
        "tier": asked.tiers,
        "cluster": asked.clusters,
    }
    return (*GROUPS[by], *(name for name, needed in asking.items() if needed))


def holds_nobodys(scope: reports.Scope, asked: reports.Filter) -> bool:
    """Return whether a summary has the GPU time that is nobody's, and so adds up to what was allocated."""
    return scope == reports.Scope() and asked == reports.Filter()


_PLATFORM = """waste_tokens + CASE WHEN payer = 'platform'
  THEN uncached_prompt_tokens + cached_prompt_tokens + output_tokens ELSE 0 END"""
_IN_PIECES = "usage JOIN pieces ON arrived_us >= piece_start AND arrived_us < piece_end"
_ROLLED = "SELECT * FROM usage_sums"
_ROWS = (
    "SELECT *, (attempt = 1)::BIGINT AS requests, 1 AS attempts, (outcome = 'ok')::BIGINT AS ok, "  # noqa: S608
    f"(outcome = 'refused')::BIGINT AS refused FROM {_IN_PIECES}"
)
_COUNTED = f"""
SELECT piece, {{columns}}, sum(requests)::BIGINT AS requests, sum(attempts)::BIGINT AS attempts,
  sum(ok)::BIGINT AS ok, sum(refused)::BIGINT AS refused, sum({_PLATFORM})::BIGINT AS platform_tokens
FROM ({{source}}) WHERE {reports.SEEN} GROUP BY piece, {{columns}}"""  # noqa: S608 - ours, here and below
# A batch line that is sent again is a new request, and one and the same for who reads a report.
_LINES = f"""
SELECT piece, {{columns}}, count(DISTINCT {{{{'job': batch_job_id, 'name': custom_id}}}})
  - count(*) FILTER (attempt = 1) AS requests, 0 AS attempts, 0 AS ok, 0 AS refused, 0 AS platform_tokens
FROM {_IN_PIECES} WHERE batch_job_id > 0 AND {reports.SEEN} GROUP BY piece, {{columns}}"""  # noqa: S608


def _counts(
    reading: books.Reading,
    bound: dict[str, Any],
    names: Sequence[str],
    cuts: Sequence[int],
    rolled_us: int,
) -> Iterator[tuple[tuple[int, tuple[str, ...]], Mapping[str, int]]]:
    """Yield counts by period and group; those of one group come in parts that add up."""
    columns = ", ".join(f'"{name}"' for name in names)  # ours, from `GROUPS`
    whole = [(period, *span) for period, span in enumerate(itertools.pairwise(cuts))]
    rolled, rest = quantities.parted(cuts, rolled_us)

    def ask(session: Any, text: str, pieces: Sequence[quantities.Stretch]) -> Iterator[Any]:
        for row in session.execute(text, bound).fetchall():
            key = pieces[row[0]][0], row[1 : 1 + len(names)]
            yield key, dict(zip(_COUNTS, row[1 + len(names) :], strict=True))

    if rolled:
        spans = [(begin, end) for _, begin, end in rolled]
        with rollup.sums(reading.records.state_dir, spans) as session:
            yield from ask(session, _COUNTED.format(columns=columns, source=_ROLLED), rolled)
    if rest:
        reading.session.register("pieces", _table(rest))
        yield from ask(reading.session, _COUNTED.format(columns=columns, source=_ROWS), rest)
    reading.session.register("pieces", _table(whole))
    yield from ask(reading.session, _LINES.format(columns=columns), whole)


def _table(pieces: Sequence[quantities.Stretch]) -> Any:
    _, starts, ends = zip(*pieces, strict=True)
    found = {"piece": range(len(pieces)), "piece_start": starts, "piece_end": ends}
    return pa.table({name: pa.array(column, pa.int64()) for name, column in found.items()})


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

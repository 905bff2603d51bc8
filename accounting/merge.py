"""One row for each attempt: what counts when the gateway and the replica both wrote one.

The key is (request id, attempt). Rules, the same in `merge` and in `statement`:

- Of several rows of one kind (a segment written twice after a take-over) the one with the latest end and
  the largest counts is taken.
- CLOSE over REPLICA over OPEN: the first of these that is there gives the identity, the outcome, the
  end, the payer and the reason.
- Token counts come from the same row, with one exception. If CLOSE did not end ``ok``, the gateway may
  have seen less than was computed (or the replica may have died before it could write all): then the
  counts of the CLOSE or REPLICA row that is further on are taken, whole: more output tokens, else more
  prompt tokens. All count one and the same sequence, so further on means known later. An earlier CLOSE
  speaks too: it may have been merged with a REPLICA row before it was amended.
- The time of the first token is CLOSE's, or an earlier CLOSE's, or the replica's.
- OPEN alone: outcome ``open``, no counts. Somebody was promised an answer and neither side has said more.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from accounting import records, schema
from scheduler.contracts import usage

_KEY = ("request_id", "attempt", "kind")
_PRECEDENCE = (usage.RowKind.CLOSE, usage.RowKind.REPLICA, usage.RowKind.OPEN)
_COUNTS = ("uncached_prompt_tokens", "cached_prompt_tokens", "output_tokens", "waste_tokens")
# A total order, so that Python and SQL choose the same of two rows of one kind.
_ORDER = (
    "ended_us",
    "output_tokens",
    "uncached_prompt_tokens",
    "cached_prompt_tokens",
    "first_token_us",
    "waste_tokens",
    "outcome",
    "payer",
    "reason",
    *[name for name in records.IDENTITY if name not in {"request_id", "attempt"}],
)


def merge(rows: Iterable[usage.UsageRow]) -> list[usage.UsageRow]:
    """Return one row for each (request id, attempt); its `kind` says which side had the last word."""
    groups: dict[tuple[str, int], list[usage.UsageRow]] = {}
    for row in rows:
        groups.setdefault((row.identity.request_id, row.identity.attempt), []).append(row)
    return [_one(group) for _, group in sorted(groups.items())]


def _one(group: list[usage.UsageRow]) -> usage.UsageRow:
    best: dict[usage.RowKind, usage.UsageRow] = {}
    for row in group:
        other = best.get(row.kind)
        if other is None or _order(row) > _order(other):
            best[row.kind] = row
    top = next(best[kind] for kind in _PRECEDENCE if kind in best)
    if top.kind is not usage.RowKind.CLOSE:
        return top
    replica = best.get(usage.RowKind.REPLICA)
    closes = [row for row in group if row.kind is usage.RowKind.CLOSE]
    furthest = max(closes, key=_counted)
    first_token_us = top.first_token_us or max(row.first_token_us for row in closes)
    counts = top
    if top.outcome is not usage.Outcome.OK:
        if _progress(furthest) > _progress(counts):
            counts = furthest
        if replica is not None and _progress(replica) > _progress(counts):
            counts = replica
    if not first_token_us and replica is not None:
        first_token_us = replica.first_token_us
    return dataclasses.replace(
        top,
        first_token_us=first_token_us,
        **{name: getattr(counts, name) for name in _COUNTS},
    )


def _order(row: usage.UsageRow) -> tuple[Any, ...]:
    flat = row.flat()
    return tuple(flat[name] for name in _ORDER)


def _progress(row: usage.UsageRow) -> tuple[int, int]:
    return row.output_tokens, row.uncached_prompt_tokens + row.cached_prompt_tokens


def _counted(row: usage.UsageRow) -> tuple[int, ...]:
    """Order rows by how far on they are, and of those by all that they count."""
    return *_progress(row), row.uncached_prompt_tokens, row.waste_tokens


def statement(source: str) -> str:
    """Return the statement that merges the rows of a table, with the usage table's own columns.

    Joins between the kinds, since nearly every attempt has one row of each at most; only the few that have
    one written twice are packed, and the greatest pack taken. (Windows over all rows took thirty times as
    long.) No value of anybody's is in the text.
    """
    names = schema.columns(schema.USAGE)
    pack = "{" + ", ".join(f"'{name}': \"{name}\"" for name in _ORDER) + "}"
    counted = (
        "{'output_tokens': output_tokens, 'prompt': uncached_prompt_tokens::HUGEINT + cached_prompt_tokens, "
        "'uncached_prompt_tokens': uncached_prompt_tokens, 'waste_tokens': waste_tokens, "
        "'cached_prompt_tokens': cached_prompt_tokens}"
    )
    unpacked = ", ".join(f'{_unpacked(name)} AS "{name}"' for name in names)
    every = ", ".join(f'"{name}"' for name in names)
    further = f"c.outcome <> 'ok' AND r.request_id IS NOT NULL AND {_further('r', 'c')}"
    chosen = []
    for name in names:
        if name in _COUNTS:
            chosen.append(f"CASE WHEN {further} THEN r.{name} ELSE c.{name} END AS {name}")
        elif name == "first_token_us":
            chosen.append(
                "coalesce(nullif(c.first_token_us, 0), r.first_token_us, 0) AS first_token_us"
            )
        else:
            chosen.append(f'c."{name}"')
    return f"""
WITH twice AS MATERIALIZED (
  SELECT request_id, attempt FROM {source} GROUP BY request_id, attempt, kind HAVING count(*) > 1
), once AS NOT MATERIALIZED (
  SELECT {every} FROM {source} ANTI JOIN twice USING (request_id, attempt)
  UNION ALL
  SELECT {unpacked} FROM (
    SELECT request_id, attempt, kind, max({pack}) AS best, max({counted}) AS most,
      max(first_token_us) AS first_us
    FROM {source} SEMI JOIN twice USING (request_id, attempt) GROUP BY request_id, attempt, kind
  )
)
SELECT {", ".join(chosen)}
FROM (SELECT * FROM once WHERE kind = 'close') c
LEFT JOIN (
  SELECT request_id, attempt, {", ".join(_COUNTS)}, first_token_us FROM once WHERE kind = 'replica'
) r ON r.request_id = c.request_id AND r.attempt = c.attempt
UNION ALL
SELECT {every} FROM once
ANTI JOIN (SELECT request_id, attempt FROM {source} WHERE kind = 'close') USING (request_id, attempt)
WHERE kind = 'replica'
UNION ALL
SELECT {every} FROM once
ANTI JOIN (SELECT request_id, attempt FROM {source} WHERE kind <> 'open') USING (request_id, attempt)
WHERE kind = 'open'
"""  # noqa: S608 - column names of our own schema only


def _unpacked(name: str) -> str:
    """Return what a column of the one row is of several of one kind; see `_one`."""
    best = f'best."{name}"'
    if name in _KEY:
        return f'"{name}"'
    if name in _COUNTS:
        told = f"kind = 'close' AND best.outcome <> 'ok' AND {_further('most', 'best')}"
        return f"CASE WHEN {told} THEN most.{name} ELSE {best} END"
    if name == "first_token_us":
        return f"CASE WHEN kind = 'close' AND {best} = 0 THEN first_us ELSE {best} END"
    return best


def _further(one: str, other: str) -> str:
    """Return whether ``one`` is further on than ``other``, as `_progress` has it."""
    prompts = [
        f"({row}.uncached_prompt_tokens::HUGEINT + {row}.cached_prompt_tokens)"
        for row in (one, other)
    ]
    return (
        f"({one}.output_tokens > {other}.output_tokens OR ({one}.output_tokens = {other}.output_tokens "
        f"AND {prompts[0]} > {prompts[1]}))"
    )


def views(settled: str, compacted: str, fresh: str) -> list[str]:
    """Return the statements that make ``usage_rows`` (as stored) and ``usage`` (merged).

    A view that is "" has no rows: DuckDB would plan the merge of nothing with something all the same, which
    takes most of the time that a question about a few days does.

    Args:
        settled: view of merged rows of days that nothing else belongs to.
        compacted: view of merged rows of days that have fresh rows as well.
        fresh: view of rows as they were written; without them nothing has to be merged, and `settled` is all.
    """
    every = ", ".join(f'"{name}"' for name in schema.columns(schema.USAGE))
    stored = [f"SELECT {every} FROM {view}" for view in (settled, compacted, fresh) if view]  # noqa: S608 - our own names
    if not fresh:
        return [f"CREATE VIEW {name} AS {stored[0]}" for name in ("usage_rows", "usage")]
    touched = f"(SELECT DISTINCT request_id, attempt FROM {fresh}) USING (request_id, attempt)"  # noqa: S608 - our own names
    unmerged = [f"SELECT {every} FROM {fresh}"]  # noqa: S608 - our own names
    merged = [f"({statement('usage_unmerged')})"]
    if compacted:
        unmerged.append(f"SELECT {every} FROM {compacted} SEMI JOIN {touched}")  # noqa: S608 - our own names
        merged.append(f"SELECT {every} FROM {compacted} ANTI JOIN {touched}")  # noqa: S608 - our own names
    if settled:
        merged.append(f"SELECT {every} FROM {settled}")  # noqa: S608 - our own names
    made = {"usage_rows": stored, "usage_unmerged": unmerged, "usage": merged}
    return [f"CREATE VIEW {name} AS {' UNION ALL '.join(parts)}" for name, parts in made.items()]

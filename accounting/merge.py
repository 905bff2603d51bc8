"""One row for each attempt: what counts when the gateway and the replica both wrote one.

The key is (request id, attempt). Rules, the same in `merge` and in `statement`:

- Of several rows of one kind (a segment written twice after a take-over) the one with the latest end and
  the largest counts is taken.
- CLOSE over REPLICA over OPEN: the first of these that is there gives the identity, the outcome, the
  end, the payer and the reason.
- Token counts come from the same row, with one exception. If CLOSE did not end ``ok``, the gateway may
  have seen less than was computed (or the replica may have died before it could write all): then the
  counts of CLOSE and REPLICA that are further on are taken, whole: more output tokens, else more prompt
  tokens. Both count one and the same sequence, so further on means known later.
- The time of the first token is CLOSE's, or the replica's if CLOSE has none.
- OPEN alone: outcome ``open``, no counts. Somebody was promised an answer and neither side has said more.
"""

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
    replica = best.get(usage.RowKind.REPLICA)
    if top.kind is not usage.RowKind.CLOSE or replica is None:
        return top
    counts = top
    if top.outcome is not usage.Outcome.OK and _progress(replica) > _progress(top):
        counts = replica
    return usage.UsageRow(
        kind=top.kind,
        identity=top.identity,
        outcome=top.outcome,
        uncached_prompt_tokens=counts.uncached_prompt_tokens,
        cached_prompt_tokens=counts.cached_prompt_tokens,
        output_tokens=counts.output_tokens,
        first_token_us=top.first_token_us or replica.first_token_us,
        ended_us=top.ended_us,
        payer=top.payer,
        reason=top.reason,
        waste_tokens=counts.waste_tokens,
    )


def _order(row: usage.UsageRow) -> tuple[Any, ...]:
    flat = row.flat()
    return tuple(flat[name] for name in _ORDER)


def _progress(row: usage.UsageRow) -> tuple[int, int]:
    return row.output_tokens, row.uncached_prompt_tokens + row.cached_prompt_tokens


def statement(source: str) -> str:
    """Return the statement that merges the rows of a table, with the usage table's own columns.

    Joins between the kinds, since nearly every attempt has one row of each at most; only the few that have
    one written twice are packed, and the greatest pack taken. (Windows over all rows took thirty times as
    long.) No value of anybody's is in the text.
    """
    names = schema.columns(schema.USAGE)
    pack = "{" + ", ".join(f"'{name}': \"{name}\"" for name in _ORDER) + "}"
    unpacked = ", ".join(
        f'"{name}"' if name in _KEY else f'best."{name}" AS "{name}"' for name in names
    )
    every = ", ".join(f'"{name}"' for name in names)
    prompt = "{0}.uncached_prompt_tokens::HUGEINT + {0}.cached_prompt_tokens"
    further = (
        "c.outcome <> 'ok' AND r.request_id IS NOT NULL AND (r.output_tokens > c.output_tokens OR "
        f"(r.output_tokens = c.output_tokens AND {prompt.format('r')} > {prompt.format('c')}))"
    )
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
    SELECT request_id, attempt, kind, max({pack}) AS best
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


def views(settled: str, compacted: str, fresh: str) -> list[str]:
    """Return the statements that make ``usage_rows`` (as stored) and ``usage`` (merged).

    Args:
        settled: view of merged rows of days that nothing else belongs to.
        compacted: view of merged rows of days that have fresh rows as well.
        fresh: view of rows as they were written, "" if there are none: then nothing has to be merged.
    """
    every = ", ".join(f'"{name}"' for name in schema.columns(schema.USAGE))
    touched = f"SELECT DISTINCT request_id, attempt FROM {fresh}"  # noqa: S608 - names of ours only
    unmerged = [
        f"SELECT {every} FROM {fresh}",  # noqa: S608 - as above, and below
        f"SELECT {every} FROM {compacted} SEMI JOIN ({touched}) USING (request_id, attempt)",  # noqa: S608
    ]
    merged = [
        f"SELECT {every} FROM {settled}",  # noqa: S608
        f"SELECT {every} FROM {compacted} ANTI JOIN ({touched}) USING (request_id, attempt)",  # noqa: S608
        f"({statement('usage_unmerged')})",
    ]
    stored = [f"SELECT {every} FROM {view}" for view in (settled, compacted, fresh)]  # noqa: S608
    views = {"usage_rows": stored, "usage_unmerged": unmerged, "usage": merged}
    if not fresh:
        views = {"usage_rows": merged[:1], "usage": merged[:1]}
    return [f"CREATE VIEW {name} AS {' UNION ALL '.join(parts)}" for name, parts in views.items()]

"""One row for each attempt: what counts when the gateway and the replica both wrote one.

The key is (request id, attempt). Rules, the same in `merge` and in the view that `VIEW` makes:

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

from accounting import schema, segment
from scheduler.contracts import usage

_PRECEDENCE = (usage.RowKind.CLOSE, usage.RowKind.REPLICA, usage.RowKind.OPEN)
_COUNTS = ("uncached_prompt_tokens", "cached_prompt_tokens", "output_tokens")
# A total order, so that Python and SQL choose the same of two rows of one kind.
_ORDER = (
    "ended_us",
    "output_tokens",
    "uncached_prompt_tokens",
    "cached_prompt_tokens",
    "first_token_us",
    "outcome",
    "payer",
    "reason",
    *[name for name in segment.IDENTITY if name not in {"request_id", "attempt"}],
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
    )


def _order(row: usage.UsageRow) -> tuple[Any, ...]:
    flat = row.flat()
    return tuple(flat[name] for name in _ORDER)


def _progress(row: usage.UsageRow) -> tuple[int, int]:
    return row.output_tokens, row.uncached_prompt_tokens + row.cached_prompt_tokens


def _view() -> str:
    """Build the view's text from the schema's own column names; no value of anybody's is in it."""
    newest = ", ".join(f"{name} DESC" for name in _ORDER)
    later = (
        "t.outcome <> 'ok' AND r.request_id IS NOT NULL AND (r.output_tokens > t.output_tokens OR "
        "(r.output_tokens = t.output_tokens AND r.uncached_prompt_tokens + r.cached_prompt_tokens > "
        "t.uncached_prompt_tokens + t.cached_prompt_tokens))"
    )
    chosen = []
    for name in schema.columns(schema.USAGE):
        if name in _COUNTS:
            chosen.append(f"CASE WHEN {later} THEN r.{name} ELSE t.{name} END AS {name}")
        elif name == "first_token_us":
            chosen.append(
                "CASE WHEN t.first_token_us = 0 THEN coalesce(r.first_token_us, 0) "
                "ELSE t.first_token_us END AS first_token_us"
            )
        else:
            chosen.append(f"t.{name}")
    return f"""
CREATE VIEW usage AS
WITH best AS (
  SELECT * FROM usage_rows
  QUALIFY row_number() OVER (PARTITION BY request_id, attempt, kind ORDER BY {newest}) = 1
), top AS (
  SELECT * FROM best
  QUALIFY row_number() OVER (
    PARTITION BY request_id, attempt
    ORDER BY CASE kind WHEN 'close' THEN 0 WHEN 'replica' THEN 1 ELSE 2 END
  ) = 1
)
SELECT {", ".join(chosen)}
FROM top t LEFT JOIN best r
  ON t.kind = 'close' AND r.kind = 'replica'
  AND r.request_id = t.request_id AND r.attempt = t.attempt
"""  # noqa: S608 - column names of our own schema only


VIEW = _view()

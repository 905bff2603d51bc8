"""GPU time by replica, period and owner, from the rows of a reading: loads arrays, decides nothing.

`accounting.apportion` decides. Here rows become numbers (leases, replicas and owners are numbered in the
order of their names, so that equal rows give equal lines) and lines become a table again.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from accounting import apportion, books, shares, stepcost, tiling
from accounting.shares import Ints

MINUTE_US = 60_000_000
OWNER = ("team", "user", "model", "tier", "endpoint")  # beside the cluster, which is the lease's
WORDS: Mapping[int, tuple[str, str]] = {  # kind and why, as the tables have them
    apportion.Kind.ATTRIBUTED: ("attributed", ""),
    apportion.Kind.IDLE: ("idle", ""),
    apportion.Kind.ASLEEP: ("idle", "asleep"),
    apportion.Kind.UNASSIGNED: ("idle", "unassigned"),
    apportion.Kind.START_UP: ("start-up", ""),
    apportion.Kind.RECOMPUTED: ("waste", "recomputed"),
    apportion.Kind.UNCLAIMED: ("waste", "unclaimed"),
    apportion.Kind.LOST: ("waste", "lost"),
}
_NS = 1_000  # costs are counted in ns of busy time
_STATES = "CASE state WHEN 'starting' THEN 0 WHEN 'asleep' THEN 2 ELSE 1 END"

_LOAD = """
CREATE OR REPLACE TEMP TABLE gpu_leased AS
  SELECT dense_rank() OVER (ORDER BY cluster, lease_id) - 1 AS lease,
    dense_rank() OVER (ORDER BY cluster, lease_id, run) - 1 AS run,
    cluster, lease_id, gpus, greatest(coalesce(parts, 1), 1) AS parts, lost, start_us, end_us
  FROM gpu_rows WHERE end_us > {first} AND start_us < {last};
CREATE OR REPLACE TEMP TABLE gpu_leases AS
  SELECT DISTINCT lease, cluster, lease_id FROM gpu_leased ORDER BY lease;
CREATE OR REPLACE TEMP TABLE gpu_held AS
  SELECT dense_rank() OVER (ORDER BY lease, lost, replica_id) - 1 AS replica, * EXCLUDE (lost) FROM (
  SELECT lease, replica_id, 0 AS lost,
    model, version, coalesce(dedicated, '') AS dedicated, gpus, start_us, end_us, {states} AS state,
    coalesce(busy_us, 0) AS busy_us, coalesce(prefill_tokens, 0) AS prefill_tokens,
    coalesce(decode_tokens, 0) AS decode_tokens, coalesce(steps, 0) AS steps,
    coalesce(measured, 0) AS measured
  FROM replica_rows JOIN gpu_leases USING (cluster, lease_id)
  WHERE end_us > {first} AND start_us < {last}
  UNION ALL
  SELECT lease, '', 1, '', '', '', gpus, start_us, end_us, 3, 0, 0, 0, 0, 1 FROM gpu_leased
  WHERE lost = 1 AND end_us > start_us);
CREATE OR REPLACE TEMP TABLE gpu_replicas AS
  SELECT replica, min(lease) AS lease, min(replica_id) AS replica_id,
    max(model) AS model, max(version) AS version, max(dedicated) AS dedicated
  FROM gpu_held GROUP BY replica ORDER BY replica;
CREATE OR REPLACE TEMP TABLE gpu_work AS
  SELECT replica, r.model AS served, u.* FROM usage u
  JOIN gpu_leases USING (cluster, lease_id) JOIN gpu_replicas r USING (lease, replica_id)
  WHERE started_us > 0 AND ended_us > started_us AND ended_us > {first} AND started_us < {last};
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """Lines with what their numbers stand for.

    Attributes:
        lines: `item` is an index of `owners`, or `apportion.NOBODY`.
        borders: of the periods.
        owners: values of the names that were asked for.
        leases: columns ``cluster lease_id``; row n is lease n.
        replicas: columns ``replica_id model version dedicated``; row n is replica n.
        sums: what the step costs of each model can be fitted from, of this reading alone.
        costs: what a token was taken to cost, by model.
    """

    lines: apportion.Lines
    borders: Ints
    owners: Sequence[tuple[Any, ...]]
    leases: Any
    replicas: Any
    sums: Mapping[str, stepcost.Sums]
    costs: Mapping[str, stepcost.Cost]


def extent(reading: books.Reading, first_us: int, last_us: int) -> tuple[int, int] | None:
    """Return from when to when leases held anything within a window; None: never."""
    (found,) = reading.query(
        "SELECT min(start_us) AS first, max(end_us) AS last FROM gpu_rows "
        "WHERE end_us > $first AND start_us < $last AND end_us > start_us",
        {"first": first_us, "last": last_us},
    )
    if found["first"] is None:
        return None
    return max(first_us, found["first"]), min(last_us, found["last"])


def minutes(first_us: int, last_us: int, cuts: Sequence[int] = ()) -> Ints:
    """Return the borders of the UTC minutes in a window, its own and ``cuts`` within it included."""
    grid = np.arange(-(-first_us // MINUTE_US), -(-last_us // MINUTE_US)) * MINUTE_US
    inner = [cut for cut in cuts if first_us < cut < last_us]
    return np.unique(np.concatenate([grid, shares.ints([first_us, last_us, *inner])]))


def find(
    reading: books.Reading,
    borders: Ints,
    otherwise: stepcost.Cost,
    *,
    names: Sequence[str] = OWNER,
    before: Mapping[str, stepcost.Sums] | None = None,
) -> Found:
    """Share out the GPU time of a reading.

    Args:
        reading: from the longest request's duration before the first border on.
        borders: from `minutes`.
        otherwise: a token's cost for models of which too little is known.
        names: columns of the usage rows that say whose time it is.
        before: sums of earlier intervals, for the fit.
    """
    session = reading.session
    session.execute(_LOAD.format(first=int(borders[0]), last=int(borders[-1]), states=_STATES))
    sums = _sums(reading)
    known = dict(before or {})
    costs = {
        model: stepcost.fit(
            sums.get(model, stepcost.Sums()) + known.get(model, stepcost.Sums()), otherwise
        )
        for model in {*sums, *known}
    }
    columns = ", ".join(f'"{name}"' for name in names)  # ours, never a caller's words
    session.execute(
        "CREATE OR REPLACE TEMP TABLE gpu_owners AS "  # noqa: S608 - as above
        f"SELECT row_number() OVER (ORDER BY {columns}) - 1 AS owner, {columns} FROM "
        f"(SELECT DISTINCT {columns} FROM gpu_work WHERE payer <> 'platform')"
    )
    replicas = session.sql("SELECT * FROM gpu_replicas ORDER BY replica").to_arrow_table()
    leased = _arrays(session, "SELECT lease, run, gpus, parts, start_us, end_us FROM gpu_leased")
    work = _work(session, columns, costs, otherwise)
    lines = apportion.attribute(tiling.Leased(**leased), *_held(session), work, borders)
    # NOBODY is the last place: also where there was no attempt at all, and so no owner to look up.
    who = np.append(work.owner, apportion.NOBODY)[np.maximum(lines.item, -1)]
    return Found(
        lines=apportion.summed(dataclasses.replace(lines, item=who)),
        borders=borders,
        owners=session.execute(
            f"SELECT {columns} FROM gpu_owners ORDER BY owner"  # noqa: S608 - as above
        ).fetchall(),
        leases=session.sql("SELECT * FROM gpu_leases ORDER BY lease").to_arrow_table(),
        replicas=replicas,
        sums=sums,
        costs=costs,
    )


def _sums(reading: books.Reading) -> dict[str, stepcost.Sums]:
    # Whole numbers, so that the sums do not depend on the order of the rows.
    products = ", ".join(
        f"sum({a} * {b}) AS {a}{b}" for a, b in ("pp", "pd", "dd", "py", "dy", "yy")
    )
    rows = reading.query(
        f"SELECT model, count(*) AS n, {products} FROM (SELECT model, prefill_tokens::HUGEINT AS p, "  # noqa: S608
        "decode_tokens::HUGEINT AS d, busy_us::HUGEINT AS y FROM gpu_held "
        "WHERE measured = 1 AND state = 1 AND steps > 0) GROUP BY model ORDER BY model"
    )
    return {
        row["model"]: stepcost.Sums(
            int(row["n"]), *(float(row[name]) for name in ("pp", "pd", "dd", "py", "dy", "yy"))
        )
        for row in rows
    }


def _arrays(session: Any, statement: str) -> dict[str, Any]:
    table = session.sql(statement).to_arrow_table()
    return {
        name.removesuffix("_us"): shares.ints(table[name].to_numpy()) for name in table.column_names
    }


def _held(session: Any) -> tuple[tiling.Held, apportion.Activity]:
    found = _arrays(
        session,
        "SELECT lease, replica, gpus, start_us, end_us, state, busy_us, measured FROM gpu_held "
        "ORDER BY replica, start_us, end_us",
    )
    activity = apportion.Activity(
        state=found.pop("state"), busy_us=found.pop("busy"), measured=found.pop("measured") == 1
    )
    return tiling.Held(**found), activity


def _work(
    session: Any, columns: str, costs: Mapping[str, stepcost.Cost], otherwise: stepcost.Cost
) -> apportion.Work:
    """Load the attempts; of one that computed tokens again, that part is an item of the platform's."""
    prices = pa.table(
        {
            "served": pa.array(list(costs), pa.string()),
            "a": pa.array([cost.prefill_us for cost in costs.values()], pa.float64()),
            "b": pa.array([cost.decode_us for cost in costs.values()], pa.float64()),
        }
    )
    session.register("gpu_costs", prices)
    prefill = f"round(coalesce(a, {otherwise.prefill_us}) * {_NS} * {{}})::BIGINT AS prefill"
    decode = f"round(coalesce(b, {otherwise.decode_us}) * {_NS} * output_tokens)::BIGINT AS decode"
    times = "replica, started_us AS start_us, first_token_us AS first_us, ended_us AS end_us"
    found = _arrays(
        session,
        f"""
SELECT {times}, CASE WHEN payer = 'platform' THEN -1 ELSE owner END AS owner,
  {prefill.format("uncached_prompt_tokens")}, {decode}
FROM gpu_work LEFT JOIN gpu_owners USING ({columns}) LEFT JOIN gpu_costs USING (served)
UNION ALL
SELECT {times}, -1 AS owner, {prefill.format("waste_tokens")}, 0 AS decode
FROM gpu_work LEFT JOIN gpu_costs USING (served) WHERE coalesce(waste_tokens, 0) > 0
ORDER BY ALL""",  # noqa: S608 - names and numbers of ours
    )
    return apportion.Work(**found)


def to_arrow(found: Found) -> Any:
    """Return the lines as the table ``gpu_minutes`` has them; ``minute_us`` is where a period begins."""
    lines = found.lines
    owned, mine = lines.item >= 0, lines.replica >= 0
    owners = pa.table(
        {
            name: pa.array([owner[place] for owner in found.owners], pa.string())
            for place, name in enumerate(OWNER)
        }
    )
    who = {name: _texts(owners[name], lines.item, owned) for name in OWNER}
    what = {
        name: _texts(found.replicas[name], lines.replica, mine)
        for name in ("replica_id", "model", "version", "dedicated")
    }
    # Time that is nobody's is of the replica's model, and a dedicated floor's is its team's.
    who["model"] = pc.if_else(pa.array(owned), who["model"], what["model"])
    who["team"] = pc.if_else(pa.array(owned), who["team"], what["dedicated"])
    own = np.isin(lines.kind, [kind for kind, (word, _) in WORDS.items() if word == "waste"])
    who["team"] = pc.if_else(pa.array(own), pa.scalar(""), who["team"])
    kinds = [pa.array([WORDS[kind][place] for kind in apportion.Kind]) for place in (0, 1)]
    return pa.table(
        {
            "minute_us": pa.array(found.borders[lines.period], pa.int64()),
            "cluster": _texts(found.leases["cluster"], lines.lease, lines.lease >= 0),
            "lease_id": _texts(found.leases["lease_id"], lines.lease, lines.lease >= 0),
            "replica_id": what["replica_id"],
            "version": what["version"],
            **who,
            "kind": kinds[0].take(pa.array(lines.kind)),
            "why": kinds[1].take(pa.array(lines.kind)),
            "gpu_us": pa.array(lines.gpu_us, pa.int64()),
        }
    )


def _texts(column: Any, index: Ints, known: Any) -> Any:
    """Return ``column[index]``, "" where it is not known."""
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    found = whole.take(pa.array(index, mask=~known))
    return pc.fill_null(found, "")

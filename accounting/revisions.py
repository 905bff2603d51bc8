"""How the rollups' file takes new sums: a day's periods are replaced in one transaction, revisions noted.

A period's sums are never added to: what is applied twice, or by two passes at once, is there once. What is
summed, and when, is the pass's matter (`accounting.rolling`).
"""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from accounting import demand, rollup

LATE_US = 15 * rollup.MINUTE_US  # shipping takes a minute or two; what comes after this was late


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """The new sums of one manifest day.

    Attributes:
        before: the generation that was applied of it when it was summed; `newest`: the one summed.
        minutes: minutes summed anew; `hours`: hours summed from rows since their minutes are gone.
        sums: DuckDB file with ``usage_minutes``, ``usage_hours``, ``latency_minutes`` and so on: a day's
            minutes may be more than memory should hold. Whoever asked for the part removes it.
    """

    day: str
    before: int
    newest: int
    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    sums: Path


def apply(target: Path, part: Part, now_us: int) -> bool:
    """Replace the part's periods in one transaction; False if another pass was there first."""
    hours = sorted({hour_of(us) for us in part.minutes} | set(part.hours))
    days = sorted({us // rollup.DAY_US * rollup.DAY_US for us in hours})
    with rollup.opened(target, write=True) as session:
        session.execute(f"ATTACH {literal(part.sums)} AS fresh (READ_ONLY)")
        session.execute("BEGIN")
        known = number(session, "SELECT generation FROM applied WHERE day = $1", -1, part.day)
        floor_us = number(session, "SELECT value FROM facts WHERE name = 'minutes_from'", 0)
        forgotten = bool(part.minutes) and part.minutes[0] < floor_us
        if known != part.before or forgotten:
            session.execute("ROLLBACK")
            return False
        for family in ("usage", "latency"):
            _replace(session, family, part, hours, days)
        demand.replace(session, part.minutes)
        for level, periods in (("minutes", part.minutes), ("hours", hours), ("days", days)):
            _note(session, level, periods, now_us)
        session.execute("INSERT OR REPLACE INTO applied VALUES ($1, $2)", [part.day, part.newest])
        session.execute("COMMIT")
    return True


def _replace(
    session: Any, family: str, part: Part, hours: Sequence[int], days: Sequence[int]
) -> None:
    for level, periods in (("minutes", part.minutes), ("hours", hours), ("days", days)):
        if not periods:
            continue
        _periods(session, "gone", periods)
        session.execute(
            f"DELETE FROM {family}_{level} WHERE period_us IN (SELECT period_us FROM gone) "  # noqa: S608 - our own names
            f"AND {_between(periods[0], periods[-1] + 1)}"
        )
    for level, periods in (("minutes", part.minutes), ("hours", part.hours)):
        if periods:
            name = f"{family}_{level}"
            session.execute(f"INSERT INTO {name} BY NAME SELECT * FROM fresh.{name}")  # noqa: S608 - ours
    _add_up(session, family, "minutes", "hours", sorted(set(hours) - set(part.hours)))
    _add_up(session, family, "hours", "days", days)


def _periods(session: Any, name: str, periods: Iterable[int]) -> None:
    session.register(name, pa.table({"period_us": pa.array(list(periods), pa.int64())}))


def _between(first_us: int, end_us: int) -> str:
    """Return what lets DuckDB pass over the years that are not touched, by its own zone maps."""
    return f"period_us >= {first_us} AND period_us < {end_us}"


def _add_up(session: Any, family: str, fine: str, coarse: str, periods: Sequence[int]) -> None:
    """Sum coarse periods, ascending, from the fine ones in them."""
    if not periods:
        return
    keys, values = (
        (rollup.KEYS, rollup.SUMS)
        if family == "usage"
        else (rollup.LATENCY_KEYS, rollup.LATENCY_SUMS)
    )
    length = rollup.LEVELS[coarse]
    sums = ", ".join(f"sum({name})::HUGEINT AS {name}" for name in values)
    _periods(session, "wanted", periods)
    session.execute(
        f"INSERT INTO {family}_{coarse} BY NAME "  # noqa: S608 - names and numbers of ours
        f"SELECT period_us // {length} * {length} AS period_us, {rollup.quoted(keys)}, {sums} "
        f"FROM {family}_{fine} WHERE period_us // {length} * {length} IN "
        f"(SELECT period_us FROM wanted) AND {_between(periods[0], periods[-1] + length)} GROUP BY ALL"
    )


def _note(session: Any, level: str, periods: Sequence[int], now_us: int) -> None:
    """Count the revisions of periods."""
    session.register(
        "noted",
        pa.table(
            {
                "period_us": pa.array(periods, pa.int64()),
                "late": pa.array(
                    [int(now_us > us + rollup.LEVELS[level] + LATE_US) for us in periods],
                    pa.int64(),
                ),
            }
        ),
    )
    session.execute(
        "INSERT INTO periods SELECT $1, period_us, 0, 0, $2 FROM noted ON CONFLICT (level, period_us) "
        "DO UPDATE SET revision = revision + 1, at_us = excluded.at_us",
        [level, now_us],
    )
    session.execute(
        "UPDATE periods SET late_revisions = late_revisions + late FROM noted "
        "WHERE level = $1 AND periods.period_us = noted.period_us AND revision > 0",
        [level],
    )


def forget(target: Path, floor_us: int, now_us: int) -> None:
    """Drop minutes that are no longer kept."""
    with rollup.opened(target, write=True) as session:
        session.execute("BEGIN")
        for table in ("usage_minutes", "latency_minutes"):
            session.execute(f"DELETE FROM {table} WHERE period_us < $1", [floor_us])  # noqa: S608
        session.execute(
            "DELETE FROM periods WHERE level = 'minutes' AND period_us < $1", [floor_us]
        )
        demand.forget(session, now_us)
        session.execute("INSERT OR REPLACE INTO facts VALUES ('minutes_from', $1)", [floor_us])
        session.execute("COMMIT")


def hour_of(us: int) -> int:
    """Return the begin of the hour in which a moment is, UTC µs."""
    return us // rollup.HOUR_US * rollup.HOUR_US


def literal(path: Path) -> str:
    """Return a path as a text of SQL."""
    return "'{}'".format(str(path).replace("'", "''"))


def number(session: Any, text: str, otherwise: int, *given: Any) -> int:
    """Return the one number of an answer, ``otherwise`` if it has no row."""
    rows = session.execute(text, list(given)).fetchall()
    return int(rows[0][0]) if rows else otherwise

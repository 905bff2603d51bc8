"""The tables of `make bench-accounting`, and where in the report they go."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_BEGIN, _END = "<!-- figures -->", "<!-- end of figures -->"
_MISSING = "not measured"
_GOALS = (  # what, of which part, how it is shown, the goal
    (
        "durable ingest, one writer to Parquet",
        "ingest",
        "{ingest_rows_per_s:,} rows/s",
        "≥ 100,000",
    ),
    ("month's bill from rollups, cold", "rollup", "{cold_s} s", "< 1 s"),
    ("month's bill from compacted segments, cold", "segments", "{cold_s} s", "< 30 s"),
    ("most memory of any process", "all", "{rss_mb:,} MB", "< 1,000"),
    ("billing columns", "sizes", "{bytes_per_row} bytes a row", "≤ 30"),
    ("CPU on the request path", "path", "{spool_us_per_request} µs a request", "≤ 20"),
    ("PostgreSQL's time over that from segments", "peers", "{postgres_over_segments} ×", "≥ 20 ×"),
)
_MORE = (
    (
        "the writer of it: append, each 1,000 rows waited for",
        "ingest",
        "{writer_rows_per_s:,} rows/s",
    ),
    ("shipper while it had work: spool to Parquet", "ingest", "{ship_rows_per_s:,} rows/s"),
    ("compaction of rows as written", "compaction", "{compact_rows_per_s:,} rows/s"),
    ("sync, for 32 requests: p50, p99", "path", "{sync_ms_p50} ms, {sync_ms_p99} ms"),
    ("CPU of the sync, a request", "path", "{sync_cpu_us_per_request} µs"),
    ("rollups made from nothing", "rebuild", "{rebuild_s} s"),
    ("rollups on disk", "rebuild", "{rollup_mb} MB"),
    ("whole files", "sizes", "{bytes_per_row_all} bytes a row"),
    ("which rows are whose, of it", "sizes", "{bytes_per_row_owners} bytes a row"),
)
_BILLS = {
    "rollup": "month by team, model, tier, from rollups",
    "segments": "the same from compacted segments",
    "sql": "the same from compacted segments, by SQL over the view `usage`",
    "day": "one team's day, by SQL over the same",
    "report": "`freport team --month`: tokens and counts by team and day",
}


def text(found: Mapping[str, Any]) -> str:
    """Return the figures as Markdown; what has none is said to have none, and why."""
    machine, parts = found["machine"], {**found["stages"]}
    if found["rss_mb"] is not None:
        parts["all"] = {"rss_mb": found["rss_mb"]}
    lines = [
        f"{found['rows']:,} rows, {machine['date']}, {machine['cpus']} CPUs, kernel "
        f"{machine['kernel']}, Python {machine['python']}, load before {machine['load_before']:.1f}, "
        f"{machine['minutes']} minutes.",
        *(f"- {name} broke: {why}" for name, why in found["broken"].items()),
        "",
        *_table(
            ("", "measured", "goal"),
            [(what, _shown(parts, part, how), goal) for what, part, how, goal in _GOALS],
        ),
        "",
        *_table(("", "measured"), [(what, _shown(parts, part, how)) for what, part, how in _MORE]),
        "",
        *_table(("bill", "cold", "warm, median (least – most)", "memory"), _bills(parts)),
        "",
    ]
    if "peers" in parts:
        for name, what in (("bill", "The same bill"), ("day", "One team's day")):
            lines += [
                f"{what} at {parts['peers']['rows_5m']:,} rows, warm, in turn:",
                "",
                *_table(("by", "median", "least – most"), _peers(parts["peers"], name)),
                "",
            ]
    return "\n".join(lines)


def _shown(parts: Mapping[str, Any], part: str, how: str) -> str:
    return how.format(**parts[part]) if part in parts else _MISSING


def _bills(parts: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            title,
            f"{parts[way]['cold_s']} s" + ("" if parts[way]["cache_dropped"] else " (cache kept)"),
            f"{parts[way]['warm_s']} s ({parts[way]['warm_spread_s'][0]} – "
            f"{parts[way]['warm_spread_s'][1]})",
            f"{parts[way]['rss_mb']} MB",
        )
        if way in parts
        else (title, _MISSING, _MISSING, _MISSING)
        for way, title in _BILLS.items()
    ]


def _peers(peers: Mapping[str, Any], question: str) -> list[tuple[str, ...]]:
    versions = peers["versions"]
    names = {
        "segments": "Forebay, compacted segments",
        "segments_sql": "Forebay, the same by SQL over the view `usage`",
        "postgres": f"PostgreSQL {versions['postgres']}",
        "sqlite": f"SQLite {versions['sqlite']}",
        "duckdb_plain": f"plain DuckDB {versions['duckdb']} over undeduplicated files",
    }
    return [
        (
            title,
            f"{peers[f'{question}_5m_s'][name]} s",
            "{} – {} s".format(*peers[f"{question}_5m_spread_s"][name]),
        )
        for name, title in names.items()
    ]


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    lines = [head, tuple("---" for _ in head), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def write(path: Path, figures: str) -> None:
    """Put the figures between the report's marks.

    Raises:
        ValueError: the report has no marks.
    """
    before, begin, rest = path.read_text().partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{path} has no {_BEGIN} and {_END}")
    path.write_text(f"{before}{_BEGIN}\n{figures}{_END}{after}")

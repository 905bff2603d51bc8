"""The tables of `make bench-accounting`, and where in the report they go."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_BEGIN, _END = "<!-- figures -->", "<!-- end of figures -->"


def text(found: Mapping[str, Any]) -> str:
    """Return the figures as Markdown."""
    stages, machine = found["stages"], found["machine"]
    path, ingest = stages["path"], stages["ingest"]
    goals = [
        (
            "durable ingest, one writer to Parquet",
            f"{ingest['ingest_rows_per_s']:,} rows/s",
            "≥ 100,000",
        ),
        ("month's bill from rollups, cold", f"{found['bill_s']['rollup']} s", "< 1 s"),
        (
            "month's bill from compacted segments, cold",
            f"{found['bill_s']['segments']} s",
            "< 30 s",
        ),
        ("most memory of any process", f"{found['rss_mb']:,} MB", "< 1,000"),
        ("billing columns", f"{found['bytes_per_row']} bytes a row", "≤ 30"),
        ("CPU on the request path", f"{found['spool_us_per_request']} µs a request", "≤ 20"),
        (
            "PostgreSQL's time over that from segments",
            f"{stages['peers']['postgres_over_segments']} ×",
            "≥ 20 ×",
        ),
    ]
    more = [
        (
            "the writer of it: append, each 1,000 rows waited for",
            f"{ingest['writer_rows_per_s']:,} rows/s",
        ),
        ("shipper while it had work: spool to Parquet", f"{ingest['ship_rows_per_s']:,} rows/s"),
        ("compaction of rows as written", f"{found['compact_rows_per_s']:,} rows/s"),
        ("sync, for 32 requests: p50, p99", f"{path['sync_ms_p50']} ms, {path['sync_ms_p99']} ms"),
        ("CPU of the sync, a request", f"{path['sync_cpu_us_per_request']} µs"),
        ("rollups made from nothing", f"{stages['rebuild']['rebuild_s']} s"),
        ("rollups on disk", f"{stages['rebuild']['rollup_mb']} MB"),
        ("all columns", f"{stages['sizes']['bytes_per_row_all']} bytes a row"),
    ]
    return "\n".join(
        [
            f"{found['rows']:,} rows, {machine['date']}, {machine['cpus']} CPUs, kernel "
            f"{machine['kernel']}, Python {machine['python']}, load before {machine['load_before']:.1f}, "
            f"{machine['minutes']} minutes.",
            "",
            *_table(("", "measured", "goal"), goals),
            "",
            *_table(("", "measured"), more),
            "",
            *_table(("bill", "cold", "warm, median (least – most)", "memory"), _bills(stages)),
            "",
            f"The same bill at {stages['peers']['rows_5m']:,} rows, warm, in turn:",
            "",
            *_table(("by", "median", "least – most"), _peers(stages["peers"])),
            "",
        ]
    )


def _bills(stages: Mapping[str, Any]) -> list[tuple[str, ...]]:
    names = {
        "rollup": "month by team, model, tier, from rollups",
        "segments": "the same from compacted segments",
        "day": "one team's day, from compacted segments",
    }
    return [
        (
            title,
            f"{stages[way]['cold_s']} s"
            + ("" if stages[way]["cache_dropped"] else " (cache kept)"),
            f"{stages[way]['warm_s']} s ({stages[way]['warm_spread_s'][0]} – "
            f"{stages[way]['warm_spread_s'][1]})",
            f"{stages[way]['rss_mb']} MB",
        )
        for way, title in names.items()
    ]


def _peers(peers: Mapping[str, Any]) -> list[tuple[str, ...]]:
    versions = peers["versions"]
    names = {
        "segments": "Forebay, compacted segments",
        "postgres": f"PostgreSQL {versions['postgres']}",
        "sqlite": f"SQLite {versions['sqlite']}",
        "duckdb_plain": f"plain DuckDB {versions['duckdb']} over undeduplicated files",
    }
    return [
        (
            title,
            f"{peers['bill_5m_s'][name]} s",
            "{} – {} s".format(*peers["bill_5m_spread_s"][name]),
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

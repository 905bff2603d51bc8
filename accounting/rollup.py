"""Sums by minute, hour and UTC day, in ``accounting.duckdb``: what a bill reads instead of a month of rows.

Everything in that file can be made again from Parquet (``fctl rebuild``). One process writes it, the
leading broker (`accounting.rolling`); anybody may read it.

Tables ``usage_minutes``, ``usage_hours``, ``usage_days``: one row for each period and value of `KEYS`.

| column | meaning |
| --- | --- |
| ``period_us`` | begin of the period, UTC µs; a row belongs to the period in which its request arrived |
| `KEYS` | texts as in the usage record; ``payer`` is ``team`` or ``platform`` |
| ``requests`` | first attempts, so that a resumed request counts once |
| ``attempts`` | all attempts; and of these, by outcome, ``ok`` … ``open`` |
| ``uncached_prompt_tokens cached_prompt_tokens output_tokens`` | paid by ``payer`` |
| ``waste_tokens`` | paid by the platform whoever pays the row |
| ``ttft_us``, ``ttft_n`` | sum over first attempts of first token minus arrival, and how many had one |
| ``decode_us``, ``decode_tokens`` | time after the first token, and the tokens in it |

Tables ``latency_minutes``, ``latency_hours``, ``latency_days``: counts ``n`` by `LATENCY_KEYS`; ``what`` is
``ttft`` (from arrival) or ``tpot`` (µs between output tokens), ``bucket`` is ``floor(8·log2(µs))``, so that a
quantile read from it (`quantile_us`) is off by 4.5 % at most.

Minutes are kept for some days only, hours and days for ever. ``periods`` says how often each period was
written: ``revision`` 0, 1, 2 …, and ``late_revisions`` of them after the period had long ended, so that who
closed a month can tell that something came later.

`sums` gives one view, ``usage_sums``, over spans of time: days inside them and hours at their borders. A view
of that name over rows, rolled up or not, is in every `books.Reading`.
"""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

NAME = "accounting.duckdb"
VERSION = 1
MINUTE_US = 60_000_000
HOUR_US = 3_600_000_000
DAY_US = 86_400_000_000
LEVELS: Mapping[str, int] = {"minutes": MINUTE_US, "hours": HOUR_US, "days": DAY_US}

KEYS = ("cluster", "team", "user", "model", "version", "adapter", "tier", "endpoint", "payer")
LATENCY_KEYS = ("cluster", "team", "model", "tier", "what", "bucket")
_OUTCOMES = (
    "ok",
    "client_gone",
    "cancelled",
    "expired",
    "preempted",
    "replica_lost",
    "refused",
    "error",
    "open",
)
_DECODED = "output_tokens > 1 AND first_token_us > 0 AND ended_us > first_token_us"
SUMS: Mapping[str, str] = {  # what each sum is of the rows of view `usage`
    "requests": "count(*) FILTER (attempt = 1)",
    "attempts": "count(*)",
    **{name: f"count(*) FILTER (outcome = '{name}')" for name in _OUTCOMES},
    "uncached_prompt_tokens": "sum(uncached_prompt_tokens)",
    "cached_prompt_tokens": "sum(cached_prompt_tokens)",
    "output_tokens": "sum(output_tokens)",
    "waste_tokens": "sum(waste_tokens)",
    "ttft_us": "sum(greatest(first_token_us - arrived_us, 0)) FILTER (attempt = 1 AND first_token_us > 0)",
    "ttft_n": "count(*) FILTER (attempt = 1 AND first_token_us > 0)",
    "decode_us": f"sum(ended_us - first_token_us) FILTER ({_DECODED})",
    "decode_tokens": f"sum(output_tokens - 1) FILTER ({_DECODED})",
}
LATENCY_SUMS: Mapping[str, str] = {"n": "count(*)"}
_BUCKETS_AN_OCTAVE = 8

WAIT_S = 5.0  # a writer holds the file for a fraction of a second
_POLL_S = 0.02
_MEMORY_MB = (
    384  # DuckDB's own default is most of the machine, and a month's file is larger than this
)


class Busy(Exception):
    """Another process holds ``accounting.duckdb`` for writing: ask again, or read the segments."""


def quoted(names: tuple[str, ...]) -> str:
    """Return column names of ours as a list for SQL (`user` is a word of SQL's own)."""
    return ", ".join(f'"{name}"' for name in names)


def usage_of(source: str, length_us: int) -> str:
    """Return the statement that sums merged rows of ``source`` by periods of ``length_us``."""
    sums = ", ".join(f"coalesce({text}, 0)::HUGEINT AS {name}" for name, text in SUMS.items())
    return (
        f"SELECT arrived_us // {length_us} * {length_us} AS period_us, {quoted(KEYS)}, {sums} "  # noqa: S608
        f"FROM {source} GROUP BY ALL"
    )


def latency_of(source: str, length_us: int) -> str:
    """Return the statement that counts latencies of ``source`` by bucket."""
    period = f"arrived_us // {length_us} * {length_us} AS period_us"
    bucket = f"floor({_BUCKETS_AN_OCTAVE} * log2(greatest(us, 1)))::BIGINT AS bucket"
    return f"""
SELECT period_us, cluster, team, model, tier, what, {bucket}, count(*)::BIGINT AS n FROM (
  SELECT {period}, cluster, team, model, tier, 'ttft' AS what, first_token_us - arrived_us AS us
  FROM {source} WHERE attempt = 1 AND first_token_us > 0
  UNION ALL
  SELECT {period}, cluster, team, model, tier, 'tpot' AS what,
    (ended_us - first_token_us) // (output_tokens - 1) AS us
  FROM {source} WHERE {_DECODED}
) GROUP BY ALL"""  # noqa: S608 - names and numbers of ours


def quantile_us(counts: Mapping[int, int], share: float) -> int | None:
    """Return a quantile in µs from counts by bucket; None if there are none."""
    wanted = math.ceil(share * sum(counts.values()))
    seen = 0
    for bucket, n in sorted(counts.items()):
        seen += n
        if seen >= wanted and n:
            return round(2 ** ((bucket + 0.5) / _BUCKETS_AN_OCTAVE))
    return None


def path_of(state_dir: Path) -> Path:
    """Return where the rollups of a state folder are."""
    return state_dir / NAME


@contextlib.contextmanager
def opened(path: Path, *, write: bool = False, wait_s: float | None = None) -> Iterator[Any]:
    """Open the rollups; many may read at a time, or one may write.

    Raises:
        FileNotFoundError: nothing was rolled up yet (only when reading).
        Busy: somebody holds it.
        duckdb.Error: it is damaged.
    """
    if not write and not path.exists():
        raise FileNotFoundError(path)
    until = time.monotonic() + (WAIT_S if wait_s is None else wait_s)
    options: dict[str, Any] = {
        "memory_limit": f"{_MEMORY_MB}MB",
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
    }
    while True:
        try:
            session = duckdb.connect(str(path), read_only=not write, config=options)
            break
        except (duckdb.IOException, duckdb.ConnectionException) as error:
            held = "lock" in str(error) or "different configuration" in str(error)
            if not held:
                raise
            if time.monotonic() >= until:
                raise Busy(
                    f"{path}: another process holds it open: close it there (rollups wait)"
                ) from error
            time.sleep(_POLL_S)
    try:
        if write:
            path.chmod(0o640)  # whatever the umask
        session.execute("SET TimeZone = 'UTC'")
        yield session
    finally:
        session.close()


def create(session: Any) -> None:
    """Make the tables that are not there."""
    keys = ", ".join(f'"{name}" VARCHAR NOT NULL' for name in KEYS)
    sums = ", ".join(f"{name} HUGEINT NOT NULL" for name in SUMS)
    for level in LEVELS:
        session.execute(
            f"CREATE TABLE IF NOT EXISTS usage_{level} (period_us BIGINT NOT NULL, {keys}, {sums})"
        )
        session.execute(
            f"CREATE TABLE IF NOT EXISTS latency_{level} (period_us BIGINT NOT NULL, "
            "cluster VARCHAR NOT NULL, team VARCHAR NOT NULL, model VARCHAR NOT NULL, "
            "tier VARCHAR NOT NULL, what VARCHAR NOT NULL, bucket BIGINT NOT NULL, n BIGINT NOT NULL)"
        )
    session.execute(
        "CREATE TABLE IF NOT EXISTS periods (level VARCHAR, period_us BIGINT, revision BIGINT, "
        "late_revisions BIGINT, at_us BIGINT, PRIMARY KEY (level, period_us))"
    )
    session.execute(
        "CREATE TABLE IF NOT EXISTS applied (day VARCHAR PRIMARY KEY, generation BIGINT)"
    )
    session.execute("CREATE TABLE IF NOT EXISTS facts (name VARCHAR PRIMARY KEY, value BIGINT)")
    session.execute("INSERT OR IGNORE INTO facts VALUES ('version', $1)", [VERSION])
    _widen(session)


def _widen(session: Any) -> None:
    """Give sums that an earlier release kept in 64 bits their 128."""
    narrow = session.execute(
        "SELECT table_name, column_name FROM information_schema.columns "
        "WHERE table_name LIKE 'usage\\_%' ESCAPE '\\' AND data_type = 'BIGINT'"
    ).fetchall()
    for table, column in narrow:
        if column in SUMS:
            session.execute(f"ALTER TABLE {table} ALTER {column} TYPE HUGEINT")


@contextlib.contextmanager
def sums(state_dir: Path, spans: Sequence[tuple[int, int]]) -> Iterator[Any]:
    """Open a session with the view ``usage_sums`` over disjoint spans; its ``piece`` is a span's number.

    The borders must be whole UTC hours. What is newer than the last pass (a minute or two) is not in it.

    Raises:
        FileNotFoundError: nothing was rolled up yet.
        Busy: somebody writes for longer than a few seconds.
        ValueError: a border is within an hour: sum the rows themselves (`books.Reading`).
    """
    if any(us % HOUR_US for span in spans for us in span):
        raise ValueError("rollups end at whole UTC hours: sum the rows for other borders")
    with opened(path_of(state_dir)) as session:
        parts = []
        for level, periods in _periods(spans).items():
            begins, pieces = [us for us, _ in periods], [piece for _, piece in periods]
            table = pa.table(
                {"period_us": pa.array(begins, pa.int64()), "piece": pa.array(pieces, pa.int64())}
            )
            session.register(f"{level}_asked", table)
            parts.append(
                f"SELECT * FROM usage_{level} JOIN {level}_asked USING (period_us) "  # noqa: S608
                f"WHERE period_us BETWEEN {min(begins, default=0)} AND {max(begins, default=-1)}"
            )
        session.execute(f"CREATE TEMP VIEW usage_sums AS {' UNION ALL '.join(parts)}")
        yield session


def _periods(spans: Sequence[tuple[int, int]]) -> dict[str, list[tuple[int, int]]]:
    """Return the days inside spans and the hours at their borders: begins, each with its span's number."""
    days: list[tuple[int, int]] = []
    hours: list[tuple[int, int]] = []
    for piece, (begin, end) in enumerate(spans):
        first, last = -(-begin // DAY_US) * DAY_US, end // DAY_US * DAY_US
        if first >= last:
            first = last = end
        days += [(us, piece) for us in range(first, last, DAY_US)]
        edges = (*range(begin, first, HOUR_US), *range(last, end, HOUR_US))
        hours += [(us, piece) for us in edges]
    return {"days": days, "hours": hours}

"""One consistent reading of everything recorded: Parquet files of the manifest, and the live spools.

The order makes it consistent: segments are read first and the manifest second. A segment that was
shipped in between is in both, and its name in the manifest says so; one that was shipped before is in
the manifest only. A file whose SHA-256 is wrong is moved to ``quarantine/``, named in `problems` of
every reading that needs it, and never summed.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb

from accounting import columns, footers, merge, schema, segment, ship
from accounting import manifest as manifests

_ATTEMPTS = 5
MAX_US = 2**63 - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """A DuckDB session with the views ``usage``, ``usage_rows``, ``gpu_rows`` and ``replica_rows``.

    ``usage`` has one row for each attempt; ``gpu_rows`` and ``replica_rows`` have each key once.

    Attributes:
        problems: one line for each thing that could not be read; what it held is not in the views.
        records: where it is from, for who needs another window.
    """

    session: Any
    problems: tuple[str, ...]
    records: "Books"

    def query(self, text: str, parameters: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Run one statement with bound parameters; rows as mappings."""
        answer = self.session.execute(text, dict(parameters or {}))
        names = [column[0] for column in answer.description]
        return [dict(zip(names, row, strict=True)) for row in answer.fetchall()]


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """Where every row is at one moment: once, either in `live` or in `files`.

    Attributes:
        live: rows that are only in spools, as Arrow tables by table.
        files: verified Parquet files by table.
    """

    live: Mapping[str, Any]
    files: Mapping[str, Sequence[manifests.File]]
    problems: tuple[str, ...]


class Moved(Exception):
    """A file went away between the manifest and its opening: the manifest has moved on, read again."""


class Books:
    """Opens readings of one state folder; keeps which files it has verified, and what they say of themselves.

    Args:
        state_dir: Forebay's state folder.
        memory_mb: DuckDB's memory limit for one reading.
        at_most_s: how long a reading may be open before what it runs is interrupted; 0: for ever.

    Attributes:
        footers: of files that were summed without SQL.
    """

    def __init__(self, state_dir: Path, *, memory_mb: int = 512, at_most_s: float = 0) -> None:
        self.state_dir = state_dir
        self._folder = state_dir / "parquet"
        self._memory_mb = memory_mb
        self._at_most_s = at_most_s
        self._verified: dict[str, tuple[int, int, int]] = {}
        self.footers = footers.Footers()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def reading(self, first_us: int = 0, last_us: int = MAX_US) -> Iterator[Reading]:
        """Open a reading of the rows that touch a window.

        Usage rows are those of requests that arrived in ``[first_us, last_us)``; other rows are those
        that overlap it. Blocks: call it in a thread.

        Raises:
            manifests.ManifestDamaged: nothing can be said.
        """
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(Moved):
                found = self._take(first_us, last_us)
                session = self._session(found, first_us, last_us)
                break
        else:
            raise self._lost()
        try:
            with self._ending(session):
                yield Reading(session, found.problems, self)
        finally:
            session.close()

    def snapshot(self, first_us: int = 0, last_us: int = MAX_US) -> Snapshot:
        """Find the rows without opening a session; arguments and errors as of `reading`."""
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(Moved):
                return self._take(first_us, last_us)
        raise self._lost()

    @contextlib.contextmanager
    def over(self, files: Sequence[manifests.File]) -> Iterator[Any]:
        """Open a session with the usage views over these files of the manifest alone.

        Raises:
            Moved: one is gone.
        """
        live = {table: schema.held(table).empty_table() for table in schema.TABLES}
        found = {table: [each for each in files if each.table == table] for table in schema.TABLES}
        with self.opened(Snapshot(live, found, ()), 0, MAX_US) as session:
            yield session

    @contextlib.contextmanager
    def opened(self, found: Snapshot, first_us: int, last_us: int) -> Iterator[Any]:
        """Open a session with the views of a reading over a snapshot.

        Raises:
            Moved: a file of it is gone.
        """
        session = self._session(found, first_us, last_us)
        try:
            with self._ending(session):
                yield session
        finally:
            session.close()

    @contextlib.contextmanager
    def _ending(self, session: Any) -> Iterator[None]:
        """Interrupt what a session runs after the longest time that it may take."""
        end = threading.Timer(self._at_most_s, session.interrupt) if self._at_most_s else None
        try:
            if end is not None:
                end.daemon = True
                end.start()
            yield
        finally:
            if end is not None:
                end.cancel()
                end.join()  # an interrupt must not meet a closed session

    def _lost(self) -> manifests.ManifestDamaged:
        return manifests.ManifestDamaged(
            f"{self._folder}: files that the manifest names are missing: restore them from a backup"
        )

    def _take(self, first_us: int, last_us: int) -> Snapshot:
        unread: list[str] = []
        live = dict(self._segments(unread))
        current = manifests.load(self._folder) or manifests.Manifest()
        fresh = {name: found for name, found in live.items() if name not in current.segments}
        parts = {name: columns.read(found) for name, found in fresh.items()}
        problems = [parts[name].problem for name, found in fresh.items() if found.sealed]
        problems += unread
        files: dict[str, list[manifests.File]] = {table: [] for table in schema.TABLES}
        for entry in current.files:
            if entry.first_us < last_us and entry.last_us >= first_us and entry.table in files:
                fault = self.fault(entry)
                if fault:
                    problems.append(fault)
                else:
                    files[entry.table].append(entry)
        rows = {
            table: columns.joined(
                table, [part.tables[table] for part in parts.values() if table in part.tables]
            )
            for table in schema.TABLES
        }
        return Snapshot(rows, files, tuple(filter(None, problems)))

    def _segments(self, unread: list[str]) -> Iterator[tuple[str, segment.Scan]]:
        for path in ship.segments(self.state_dir):
            try:
                yield path.name, segment.scan_segment(path)
            except FileNotFoundError:
                continue  # shipped since the listing: the manifest, read later, has it
            except OSError as error:
                unread.append(ship.unreadable(path, error))

    def fault(self, entry: manifests.File) -> str:
        """Return "" if a file is as it was written, else one line; a wrong one is set aside.

        Raises:
            Moved: it is gone and the manifest no longer names it.
        """
        path = self._folder / entry.path
        aside = self._folder / "quarantine" / f"{path.name}.damaged"
        try:
            state = path.stat()
            stamp = (state.st_size, state.st_mtime_ns, state.st_ino)
            if self._verified.get(entry.path) == stamp:
                return ""
            if state.st_size == entry.bytes and manifests.digest(path) == entry.sha256:
                with self._lock:
                    self._verified[entry.path] = stamp
                return ""
            aside.parent.mkdir(exist_ok=True)
            path.rename(aside)
        except FileNotFoundError:
            now = manifests.load(self._folder)
            if now is None or entry not in now.files:
                raise Moved from None
        where = f"set aside as {aside}" if aside.exists() else "missing"
        return (
            f"{path}: damaged or gone, {where}: {entry.rows} {entry.table} rows of {entry.day} "
            "are not counted; restore the file from a backup"
        )

    def _session(self, found: Snapshot, first_us: int, last_us: int) -> Any:
        session = duckdb.connect(
            ":memory:",
            config={
                "memory_limit": f"{self._memory_mb}MB",
                "threads": 2,
                "temp_directory": str(self.state_dir / "scratch"),
                "autoinstall_known_extensions": False,
                "autoload_known_extensions": False,
            },
        )
        try:
            session.execute("SET TimeZone = 'UTC'")
            session.execute("SET parquet_metadata_cache = true")  # each view asks every footer
            session.execute("SET VARIABLE first_us = ?", [first_us])
            session.execute("SET VARIABLE last_us = ?", [last_us])
            for table in schema.TABLES:
                session.register(f"{table}_live", found.live[table])
            self.views(session, found, (first_us, last_us))
        except duckdb.IOException as error:
            session.close()
            raise Moved from error
        except BaseException:
            session.close()
            raise
        return session

    def path(self, file: manifests.File) -> Path:
        """Return where a file of the manifest is."""
        return self._folder / file.path

    def paths(self, files: Sequence[manifests.File]) -> list[str]:
        """Return where files of the manifest are."""
        return [str(self.path(each)) for each in files]

    def views(self, session: Any, found: Snapshot, window_us: tuple[int, int]) -> None:
        """Make the views over files and the registered live rows, for requests that arrived in a window."""
        for table in (schema.GPU, schema.REPLICA_TIME):
            paths = self.paths(found.files[table])
            source = stored(session, table, f"{table}_files", paths, live=f"{table}_live")
            session.execute(f"CREATE VIEW {table}_all AS {source}")
            session.execute(_ROWS[table])
        live = found.live[schema.USAGE]
        settled, others = parted(found.files[schema.USAGE], live)
        tail = bool(others or live.num_rows)
        compacted = [each for each in others if each.merged]
        loose = [each for each in others if not each.merged]
        names = []
        for name, some, there in (
            ("settled", settled, settled or not tail),
            ("compacted", compacted, compacted),
            ("fresh", loose, tail),
        ):
            names.append(f"usage_{name}" if there else "")
            if there:
                self._usage(session, name, some, window_us)
        for statement in merge.views(*names):
            session.execute(statement)

    def _usage(
        self, session: Any, name: str, files: Sequence[manifests.File], window_us: tuple[int, int]
    ) -> None:
        """Make the view ``usage_NAME``; files of days that lie within the window need no filter."""
        inside = [each for each in files if schema.lies_within(each.day, *window_us)]
        border = [each for each in files if each not in inside]
        live = "usage_live" if name == "fresh" else ""
        sources = []
        if inside:
            paths = self.paths(inside)
            sources.append(stored(session, schema.USAGE, f"{name}_inside", paths))
        if border or live or not inside:
            paths = self.paths(border)
            text = stored(session, schema.USAGE, f"{name}_border", paths, live=live)
            sources.append(f"{text} WHERE {_ARRIVED}")
        session.execute(f"CREATE VIEW usage_{name} AS {' UNION ALL '.join(sources)}")


def parted(
    files: Sequence[manifests.File], live: Any
) -> tuple[list[manifests.File], list[manifests.File]]:
    """Part usage files into those of days that nothing has to be merged with, and the others.

    Args:
        files: of a snapshot.
        live: its live usage rows.
    """
    tail = {each.day for each in files if not each.merged}
    tail.update(columns.days(schema.USAGE, live))
    settled = [each for each in files if each.day not in tail]
    return settled, [each for each in files if each.day in tail]


def stored(session: Any, table: str, view: str, paths: Sequence[str], *, live: str = "") -> str:
    """Return the statement that reads files (as ``view``) and rows registered as ``live``.

    It has today's columns: one that a file's release did not know has its default, and one of a later
    release is left out.
    """
    name = f"{table}_blank"
    session.register(name, schema.held(table).empty_table())
    source = f"SELECT * FROM {live or name}"  # noqa: S608 - a table name of ours, here and below
    if paths:
        session.read_parquet(list(paths), union_by_name=True, hive_partitioning=False).create_view(
            view
        )
        source = f"SELECT * FROM {view} UNION ALL BY NAME {source}"  # noqa: S608
    chosen = []
    for column in schema.columns(table):
        known = schema.default(table, column)
        if column in schema.FIRST_RELEASE:
            chosen.append(f'"{column}"')
        else:
            blank = "''" if known == "" else str(int(known))
            chosen.append(f'coalesce("{column}", {blank}) AS "{column}"')
    return f"SELECT {', '.join(chosen)} FROM ({source})"  # noqa: S608


_ARRIVED = "arrived_us >= getvariable('first_us') AND arrived_us < getvariable('last_us')"
_OVERLAP = "end_us >= getvariable('first_us') AND start_us < getvariable('last_us')"
_ROWS = {
    schema.GPU: (
        # What the broker wrote of a lost lease begins where the agent's own rows of the run end.
        "CREATE VIEW gpu_rows AS SELECT * REPLACE ("  # noqa: S608 - column names of ours
        "CASE WHEN lost = 0 THEN start_us ELSE "
        "least(end_us, greatest(start_us, coalesce(max(CASE WHEN lost = 0 THEN end_us END) "
        "OVER (PARTITION BY cluster, lease_id, run), start_us))) END AS start_us) "
        f"FROM (SELECT * FROM gpu_all WHERE {_OVERLAP} "
        "QUALIFY row_number() OVER (PARTITION BY cluster, lease_id, run, seq "
        "ORDER BY end_us DESC, start_us, gpus DESC, team, kind, node, slurm_job_id) = 1)"
    ),
    schema.REPLICA_TIME: (
        f"CREATE VIEW replica_rows AS SELECT * FROM replica_time_all WHERE {_OVERLAP} "  # noqa: S608
        "QUALIFY row_number() OVER (PARTITION BY cluster, lease_id, replica_id, seq "
        "ORDER BY end_us DESC, start_us, state, gpus DESC, model, version, dedicated, measured DESC, "
        "busy_us DESC, prefill_tokens DESC, decode_tokens DESC, steps DESC, slurm_job_id) = 1"
    ),
}

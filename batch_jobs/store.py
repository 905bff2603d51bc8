"""Batch jobs in the registry: what every process may know and change of a job.

Several processes write: gateways submit, cancel, hold; the runner moves states and counts. Each call is one
short transaction, begun as a write where it will write, so that SQLite waits for its turn instead of
failing in the middle. States change only from the state that the writer saw.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import alembic.command
import alembic.config
import sqlalchemy as sa

from batch_jobs import foretold, model
from batch_jobs.tables import JOBS
from scheduler.runtime.registry import database

_MIGRATION_LOCK = 0x464F5242  # any number that is only ours, for pg_advisory_xact_lock
_COUNTS = tuple(field.name for field in dataclasses.fields(model.Counts))
_USED = tuple(field.name for field in dataclasses.fields(model.Used))
_FIELDS = [column for column in JOBS.c if column is not JOBS.c.revision]
_ACTIVE = JOBS.c.state.in_([str(each) for each in model.ACTIVE])


class Stale(Exception):
    """The job is no longer in the state that the writer saw; look again."""


@dataclasses.dataclass(frozen=True, slots=True)
class Filter:
    """Which jobs to list; an empty field means any."""

    ids: tuple[int, ...] = ()
    teams: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    states: tuple[model.State, ...] = ()
    kept: bool = False  # only those whose files are there
    before: int = 0  # only ids below; 0: any


class Had(NamedTuple):
    """What a job took.

    Attributes:
        tokens: computed for it, those from the prefix cache left out.
        started_us: UTC µs.
        ended_us: UTC µs, 0: not yet.
        expected: the tokens that were estimated for it, where it has run whole; else 0.
    """

    team: str
    tokens: int
    started_us: int
    ended_us: int
    expected: int


class Mark(NamedTuple):
    """What is another one after any change among the jobs that have not ended, new ones included.

    No id is used twice and each is larger than those before, so as many others have a larger sum; of the
    same ones each change adds to their revisions.
    """

    jobs: int
    ids: int
    revisions: int


class Kept(NamedTuple):
    """A job whose files are there.

    Attributes:
        ended_us: UTC µs; 0: not yet.
        output_keep_s: as `model.BatchJob.output_keep_s`.
    """

    job_id: int
    ended_us: int
    output_keep_s: int


class Store:
    """The table of batch jobs. Calls block: an event loop runs them in a thread."""

    def __init__(self, registry: database.Database) -> None:
        self._database = registry

    @contextlib.contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """Open a transaction that reads."""
        with self._database.read() as session:
            yield session.connection()

    @contextlib.contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """Open a transaction that writes, and commits at the end."""
        with self._database.write() as session:
            yield session.connection()

    def migrate(self) -> None:
        """Bring the table up to date; processes that start together take turns."""
        config = alembic.config.Config()
        config.set_main_option("script_location", "batch_jobs:migrations")
        with self.writing() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
            config.attributes["connection"] = connection
            alembic.command.upgrade(config, "head")

    def close(self) -> None:
        """Close the connections."""
        self._database.close()

    def add(self, job: model.BatchJob, place: Callable[[int], None]) -> model.BatchJob:
        """Store a new job and return it with its id.

        Args:
            job: the job; its `job_id` is not used.
            place: called with the id before the job can be seen: puts the job's files in their
                place. What it raises undoes the insert.
        """
        row = _row(job)
        del row["job_id"]
        with self.writing() as connection:
            result = connection.execute(sa.insert(JOBS).values(row))
            key = result.inserted_primary_key
            if key is None:
                raise RuntimeError("the registry gave the new job no id")
            job_id = int(key[0])
            if job.array_task >= 0 and not job.array_id:  # the first task: the array bears its id
                job = dataclasses.replace(job, array_id=job_id)
                mine = sa.update(JOBS).where(JOBS.c.job_id == job_id)
                connection.execute(mine.values(array_id=job_id))
            place(job_id)
        return dataclasses.replace(job, job_id=job_id)

    def get(self, job_id: int) -> model.BatchJob | None:
        """Return a job, or None."""
        with self.reading() as connection:
            row = (
                connection.execute(sa.select(*_FIELDS).where(JOBS.c.job_id == job_id))
                .mappings()
                .first()
            )
        return None if row is None else _job(row)

    def list(
        self, wanted: Filter | None = None, limit: int = 0, *, newest: bool = False
    ) -> list[model.BatchJob]:
        """Return jobs by id, those that all fields of ``wanted`` allow; ``limit`` 0: no limit."""
        wanted = wanted or Filter()
        query = sa.select(*_FIELDS).order_by(JOBS.c.job_id.desc() if newest else JOBS.c.job_id)
        if wanted.kept:
            query = query.where(JOBS.c.purged_us == 0)
        if wanted.ids:  # an array's id means all of its tasks
            array = sa.and_(JOBS.c.array_id > 0, JOBS.c.array_id.in_(wanted.ids))
            query = query.where(sa.or_(JOBS.c.job_id.in_(wanted.ids), array))
        if wanted.before:
            query = query.where(JOBS.c.job_id < wanted.before)
        for column, values in (
            (JOBS.c.team, wanted.teams),
            (JOBS.c.user, wanted.users),
            (JOBS.c.name, wanted.names),
            (JOBS.c.state, tuple(str(state) for state in wanted.states)),
        ):
            if values:
                query = query.where(column.in_(values))
        if limit:
            query = query.limit(limit)
        with self.reading() as connection:
            return [_job(row) for row in connection.execute(query).mappings()]

    def mark(self) -> Mark:
        """Return a mark of the jobs that are not in a final state."""
        sums = [sa.func.coalesce(sa.func.sum(each), 0) for each in (JOBS.c.job_id, JOBS.c.revision)]
        query = sa.select(sa.func.count(), *sums).where(_ACTIVE)
        with self.reading() as connection:
            return Mark(*map(int, connection.execute(query).one()))

    def revisions(self) -> dict[int, int]:
        """Return how often each job that is not in a final state was changed."""
        query = sa.select(JOBS.c.job_id, JOBS.c.revision).where(_ACTIVE)
        with self.reading() as connection:
            return {int(row[0]): int(row[1]) for row in connection.execute(query)}

    def these(self, ids: Sequence[int]) -> Sequence[model.BatchJob]:
        """Return those of some hundred jobs that are not in a final state."""
        query = sa.select(*_FIELDS).where(JOBS.c.job_id.in_(ids), _ACTIVE)
        with self.reading() as connection:
            return [_job(row) for row in connection.execute(query).mappings()]

    def active(self) -> Sequence[model.BatchJob]:
        """Return every job that is not in a final state, by id."""
        return self.list(Filter(states=tuple(model.ACTIVE)))

    def move(self, job: model.BatchJob, event: model.Event, **changes: Any) -> model.BatchJob:
        """Take a job to the state that ``event`` leads to, and set other fields with it.

        Raises:
            model.WrongEvent: the event is not listed for the job's state.
            Stale: the job is in another state by now.
        """
        state = model.after(job.state, event)
        moved = dataclasses.replace(job, state=state, **changes)
        values = {**_row(moved)}
        kept = {
            "state",
            *changes,
            *(_COUNTS if "counts" in changes else ()),
            *(_USED if "used" in changes else ()),
        }
        values = {name: value for name, value in values.items() if name in kept}
        query = (
            _changed()
            .where(JOBS.c.job_id == job.job_id, JOBS.c.state == str(job.state))
            .values(values)
        )
        with self.writing() as connection:
            if connection.execute(query).rowcount != 1:
                raise Stale(f"job {job.job_id} is not {job.state} any more")
        return moved

    def tell(
        self,
        job_id: int,
        *,
        counts: model.Counts | None = None,
        reason: str | None = None,
        used: model.Used | None = None,
    ) -> None:
        """Set counts or reason of an active job; one that has ended keeps what it has."""
        values: dict[str, Any] = {} if counts is None else dataclasses.asdict(counts)
        if used is not None:
            values.update(dataclasses.asdict(used))
        if reason is not None:
            values["reason"] = str(reason)
        with self.writing() as connection:
            connection.execute(_changed().where(JOBS.c.job_id == job_id, _ACTIVE).values(values))

    def update(self, job_id: int, values: dict[str, Any], *, pending: bool = False) -> bool:
        """Set fields of an active job, or of a pending one only; False: it is none any more."""
        states = (model.State.PENDING,) if pending else tuple(model.ACTIVE)
        with self.writing() as connection:
            done = connection.execute(
                _changed()
                .where(JOBS.c.job_id == job_id, JOBS.c.state.in_([str(each) for each in states]))
                .values(values)
            )
        return done.rowcount == 1

    def expect(self, starts: Mapping[int, int]) -> None:
        """Keep when pending jobs that nobody holds are expected to start; the first word stays beside it.

        Args:
            starts: job id to UTC µs.
        """
        pending = str(model.State.PENDING)
        at: sa.BindParameter[int] = sa.bindparam("at")
        text = (
            _changed()
            .where(JOBS.c.job_id == sa.bindparam("job"), JOBS.c.state == pending, JOBS.c.held == "")
            .values(
                expected_us=at,
                estimated_us=sa.case((JOBS.c.estimated_us == 0, at), else_=JOBS.c.estimated_us),
            )
        )
        if starts:
            with self.writing() as connection:
                connection.execute(text, [{"job": job, "at": us} for job, us in starts.items()])

    def had(self, since_us: int) -> Sequence[Had]:
        """Return what jobs that ran since a moment took."""
        tokens = JOBS.c.prompt_tokens - JOBS.c.cached_tokens + JOBS.c.output_tokens
        whole = sa.case((JOBS.c.state == str(model.State.COMPLETED), JOBS.c.queued_tokens), else_=0)
        query = sa.select(JOBS.c.team, tokens, JOBS.c.started_us, JOBS.c.ended_us, whole).where(
            JOBS.c.started_us > 0, sa.or_(JOBS.c.ended_us == 0, JOBS.c.ended_us >= since_us)
        )
        with self.reading() as connection:
            return [Had(str(row[0]), *map(int, row[1:])) for row in connection.execute(query)]

    def foretold(self, most: int) -> Sequence[foretold.Start]:
        """Return the newest jobs that have started after an estimate."""
        query = (
            sa.select(JOBS.c.submitted_us, JOBS.c.estimated_us, JOBS.c.started_us)
            .where(JOBS.c.estimated_us > 0, JOBS.c.started_us > 0)
            .order_by(JOBS.c.job_id.desc())
            .limit(most)
        )
        with self.reading() as connection:
            return [foretold.Start(*map(int, row)) for row in connection.execute(query)]

    def fates(self, ids: Sequence[int]) -> Sequence[model.BatchJob]:
        """Return jobs, and all tasks of arrays, with these ids."""
        query = sa.select(*_FIELDS).where(sa.or_(JOBS.c.job_id.in_(ids), JOBS.c.array_id.in_(ids)))
        with self.reading() as connection:
            return [_job(row) for row in connection.execute(query).mappings()]

    def queued_tokens(self, team: str) -> int:
        """Return the estimated tokens of a team's jobs that have not ended."""
        query = sa.select(sa.func.coalesce(sa.func.sum(JOBS.c.queued_tokens), 0)).where(
            JOBS.c.team == team, _ACTIVE
        )
        with self.reading() as connection:
            return int(connection.scalar(query) or 0)

    def stored(self, job_id: int, size: int) -> None:
        """Note what the files of a job that has ended take by now."""
        with self.writing() as connection:
            connection.execute(
                sa.update(JOBS).where(JOBS.c.job_id == job_id).values(stored_bytes=size)
            )

    def kept(self) -> Sequence[Kept]:
        """Return every job whose files are there; there may be a hundred thousand."""
        query = sa.select(JOBS.c.job_id, JOBS.c.ended_us, JOBS.c.output_keep_s)
        with self.reading() as connection:
            found = connection.execute(query.where(JOBS.c.purged_us == 0))
            return [Kept(*map(int, row)) for row in found]

    def purged(self, job_id: int, now_us: int) -> None:
        """Note that a job's files are gone."""
        with self.writing() as connection:
            connection.execute(
                sa.update(JOBS)
                .where(JOBS.c.job_id == job_id)
                .values(purged_us=now_us, stored_bytes=0)
            )

    def cancel(self, job_id: int, now_us: int) -> bool:
        """Ask for a job's end; return False if it had ended. Asking twice is one request."""
        return self._ask(job_id, {"cancel_us": now_us}, JOBS.c.cancel_us == 0)

    def hold(self, job_id: int, by: str, *, admin: bool = False) -> bool:
        """Hold a pending job, ``by`` user or admin, or release it (""); False if it is not pending.

        What an admin holds stays so for all others: they hear False.
        """
        values = {"held": by, "estimated_us": 0}  # what was said of its start no longer holds
        theirs = JOBS.c.held == "admin"
        pending = JOBS.c.state == str(model.State.PENDING)
        return self._ask(job_id, values, pending if admin else sa.and_(pending, sa.not_(theirs)))

    def _ask(self, job_id: int, values: dict[str, Any], only: sa.ColumnElement[bool]) -> bool:
        with self.writing() as connection:
            state = connection.scalar(sa.select(JOBS.c.state).where(JOBS.c.job_id == job_id))
            if state is None or model.State(state).final:
                return False
            done = connection.execute(
                _changed().where(JOBS.c.job_id == job_id, only).values(values)
            )
            return done.rowcount == 1 or "cancel_us" in values


def _changed() -> sa.Update:
    """Begin a change of jobs that runners shall see."""
    return sa.update(JOBS).values(revision=JOBS.c.revision + 1)


def _row(job: model.BatchJob) -> dict[str, Any]:
    row = dataclasses.asdict(job)
    row.update(row.pop("counts"))
    row.update(row.pop("used"))
    row["door"] = str(job.door)
    return {**row, "state": str(job.state), "order": str(job.order), "reason": str(job.reason)}


def _job(row: sa.RowMapping) -> model.BatchJob:
    fields = dict(row)
    counts = model.Counts(**{name: fields.pop(name) for name in _COUNTS})
    used = model.Used(**{name: fields.pop(name) for name in _USED})
    fields["door"] = model.Door(fields["door"])
    fields["state"] = model.State(fields["state"])
    fields["order"] = model.Order(fields["order"])
    return model.BatchJob(**fields, counts=counts, used=used)


def open_store(url: str) -> Store:
    """Open the registry at ``url`` (``sqlite:////…/registry.sqlite``, ``postgresql+psycopg://…``).

    The table of batch jobs is brought up to date first.
    """
    store = Store(database.Database(url))
    store.migrate()
    return store

"""The registry's tables. Times are UTC µs; JSON columns hold what is read and written whole."""

from typing import Any

import sqlalchemy as sa
from sqlalchemy import orm


class Text(sa.TypeDecorator[str]):
    """Text that every database takes: PostgreSQL has no NUL, and reasons hold the last lines of any log."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        """Write a NUL as people see it."""
        del dialect
        return None if value is None else value.replace("\0", "\\x00")


class Base(orm.DeclarativeBase):
    """The registry's metadata; constraint names are fixed so that migrations can name them."""

    metadata = sa.MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_name)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it from the class
        int: sa.BigInteger(),
        str: Text(),
        dict[str, Any]: sa.JSON(),
        list[str]: sa.JSON(),
        list[Any]: sa.JSON(),
    }


class Model(Base):
    """A served name."""

    __tablename__ = "models"

    name: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    max_context: orm.Mapped[int]
    tiers: orm.Mapped[list[str]]
    created_us: orm.Mapped[int]


class Version(Base):
    """A version of a model: how to start a replica of it."""

    __tablename__ = "versions"

    model: orm.Mapped[str] = orm.mapped_column(sa.ForeignKey("models.name"), primary_key=True)
    version: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    spec: orm.Mapped[dict[str, Any]]
    created_us: orm.Mapped[int]


class Route(Base):
    """Model to versions by weight in percent; `rules`: callers, shadow, whose adapters are."""

    __tablename__ = "routes"

    model: orm.Mapped[str] = orm.mapped_column(sa.ForeignKey("models.name"), primary_key=True)
    weights: orm.Mapped[dict[str, Any]]
    rules: orm.Mapped[dict[str, Any]] = orm.mapped_column(server_default="{}")


class Deployment(Base):
    """How much of a version is kept warm.

    `configured` is forebay.toml's number, `scaled` an admin's, which goes before it.
    """

    __tablename__ = "deployments"

    model: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    version: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    configured: orm.Mapped[int]
    scaled: orm.Mapped[int | None]
    role: orm.Mapped[str]
    scaling: orm.Mapped[dict[str, Any]] = orm.mapped_column(server_default="{}")
    gpus: orm.Mapped[int]
    hold_batch: orm.Mapped[bool]
    quarantined_until_us: orm.Mapped[int]
    quarantine_reason: orm.Mapped[str]

    __table_args__ = (
        sa.ForeignKeyConstraint(
            ["model", "version"],
            ["versions.model", "versions.version"],
            name="fk_deployments_version",
        ),
    )


class Lease(Base):
    """A Slurm job that Forebay holds or held; `revision` counts its desired states."""

    __tablename__ = "leases"

    lease_id: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    cluster: orm.Mapped[str]
    kind: orm.Mapped[str]
    team: orm.Mapped[str]
    state: orm.Mapped[str] = orm.mapped_column(index=True)
    gpus: orm.Mapped[int]
    gres_type: orm.Mapped[str]
    partition: orm.Mapped[str]
    slurm_job_id: orm.Mapped[str]
    nodes: orm.Mapped[list[str]]
    walltime_s: orm.Mapped[int]
    requested_us: orm.Mapped[int]
    started_us: orm.Mapped[int]
    ended_us: orm.Mapped[int]
    reason: orm.Mapped[str]
    revision: orm.Mapped[int]
    whole_nodes: orm.Mapped[int] = orm.mapped_column(server_default="0")
    time_min_s: orm.Mapped[int] = orm.mapped_column(server_default="0")
    exclude: orm.Mapped[list[str]] = orm.mapped_column(server_default="[]")
    hardware: orm.Mapped[dict[str, Any]] = orm.mapped_column(server_default="{}")


class Slot(Base):
    """A job step of a lease; `close` is the wish, `state` what was reported last."""

    __tablename__ = "slots"

    slot_id: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    lease_id: orm.Mapped[str] = orm.mapped_column(sa.ForeignKey("leases.lease_id"), index=True)
    gpus: orm.Mapped[int]
    cpus: orm.Mapped[int]
    close: orm.Mapped[bool]
    state: orm.Mapped[str]


class Replica(Base):
    """A replica: what is wanted of it (`run`, `role`, `drain_s`, `asleep`) and its last known state."""

    __tablename__ = "replicas"

    replica_id: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    lease_id: orm.Mapped[str] = orm.mapped_column(sa.ForeignKey("leases.lease_id"), index=True)
    slot_id: orm.Mapped[str]
    model: orm.Mapped[str]
    version: orm.Mapped[str]
    spec: orm.Mapped[dict[str, Any]]
    run: orm.Mapped[bool]
    role: orm.Mapped[str]
    drain_s: orm.Mapped[float]
    drain_asked: orm.Mapped[bool]
    asleep: orm.Mapped[bool] = orm.mapped_column(server_default=sa.false())
    state: orm.Mapped[str] = orm.mapped_column(index=True)
    reason: orm.Mapped[str]
    created_us: orm.Mapped[int]
    ended_us: orm.Mapped[int]
    phases: orm.Mapped[dict[str, Any]] = orm.mapped_column(server_default="{}")


class Schedule(Base):
    """A floor that comes again and again; see `scheduler.runtime.schedules`."""

    __tablename__ = "schedules"

    name: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    model: orm.Mapped[str]
    floor: orm.Mapped[int]
    cron: orm.Mapped[str]
    until: orm.Mapped[str]
    zone: orm.Mapped[str]
    paused: orm.Mapped[bool]
    author: orm.Mapped[str]
    reason: orm.Mapped[str]
    created_us: orm.Mapped[int]
    since_us: orm.Mapped[int] = orm.mapped_column(server_default="0")


class Firing(Base):
    """One beginning of a schedule; see `scheduler.runtime.firings`."""

    __tablename__ = "firings"

    schedule: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    begins_us: orm.Mapped[int] = orm.mapped_column(primary_key=True, autoincrement=False)
    ends_us: orm.Mapped[int]
    model: orm.Mapped[str]
    floor: orm.Mapped[int]
    noted_us: orm.Mapped[int]
    serving: orm.Mapped[int]


class Team(Base):
    """Who pays."""

    __tablename__ = "teams"

    name: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    created_us: orm.Mapped[int]


class ApiKey(Base):
    """An API key: its public id and the SHA-256 of its secret, never the secret."""

    __tablename__ = "api_keys"

    key_id: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    secret_sha256: orm.Mapped[str]
    team: orm.Mapped[str] = orm.mapped_column(sa.ForeignKey("teams.name"), index=True)
    user: orm.Mapped[str]
    comment: orm.Mapped[str]
    tiers: orm.Mapped[list[str]]
    models: orm.Mapped[list[str]]
    admin: orm.Mapped[bool]
    coordinator: orm.Mapped[bool]
    service: orm.Mapped[bool]
    created_us: orm.Mapped[int]
    expires_us: orm.Mapped[int]  # 0: never
    revoked_us: orm.Mapped[int]  # 0: not


class Leadership(Base):
    """Who leads; every write of a leader is fenced by `epoch`."""

    __tablename__ = "leadership"

    name: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    holder: orm.Mapped[str]
    epoch: orm.Mapped[int]
    expires_us: orm.Mapped[int]


class Event(Base):
    """Something that happened, for people to read."""

    __tablename__ = "events"

    event_id: orm.Mapped[int] = orm.mapped_column(
        sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True, autoincrement=True
    )
    at_us: orm.Mapped[int] = orm.mapped_column(index=True)
    subject: orm.Mapped[str]
    text: orm.Mapped[str]


class Plan(Base):
    """A plan that had actions: what, why, and what became of it."""

    __tablename__ = "plans"

    plan_id: orm.Mapped[int] = orm.mapped_column(
        sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True, autoincrement=True
    )
    at_us: orm.Mapped[int]
    epoch: orm.Mapped[int]
    body: orm.Mapped[dict[str, Any]]


class Fact(Base):
    """The newest word of the leader on something (`nodes`, `queue`, `notes`), for other processes."""

    __tablename__ = "facts"

    name: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    at_us: orm.Mapped[int]
    body: orm.Mapped[dict[str, Any]]


class Period(Base):
    """A periodic job: the newest period that was begun, and the newest that was done."""

    __tablename__ = "periods"

    name: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    begun_us: orm.Mapped[int]
    done_us: orm.Mapped[int]


class QuotaLimit(Base):
    """A limit in force; `quota_changes` has what was before."""

    __tablename__ = "quota_limits"

    scope: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    team: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    name: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    model: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    tier: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    kind: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    amount: orm.Mapped[int]
    hard: orm.Mapped[bool]
    author: orm.Mapped[str]
    reason: orm.Mapped[str]
    created_us: orm.Mapped[int]


class QuotaChange(Base):
    """A limit that was set, or removed (`amount` None); never deleted."""

    __tablename__ = "quota_changes"

    change_id: orm.Mapped[int] = orm.mapped_column(
        sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True, autoincrement=True
    )
    at_us: orm.Mapped[int]
    scope: orm.Mapped[str]
    team: orm.Mapped[str] = orm.mapped_column(index=True)
    name: orm.Mapped[str]
    model: orm.Mapped[str]
    tier: orm.Mapped[str]
    kind: orm.Mapped[str]
    amount: orm.Mapped[int | None]
    hard: orm.Mapped[bool]
    author: orm.Mapped[str]
    reason: orm.Mapped[str]


class QuotaCounter(Base):
    """What is settled in a day or month; owners and the hourly check add differences to `amount`.

    `drift` is what the last check that found any had to add, at `checked_us`.
    """

    __tablename__ = "quota_counters"

    scope: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    team: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    name: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    model: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    tier: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    kind: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    window_us: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    amount: orm.Mapped[int]
    revision: orm.Mapped[int] = orm.mapped_column(index=True)
    drift: orm.Mapped[int]
    checked_us: orm.Mapped[int]


class QuotaOwner(Base):
    """A process that reserves: the newest batch of differences it has added, and what runs there now."""

    __tablename__ = "quota_owners"

    owner: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    batch: orm.Mapped[int]
    at_us: orm.Mapped[int]
    running: orm.Mapped[list[Any]]


class QuotaRevision(Base):
    """Counts changes of `limits`, of `counters`, and wishes for a `check`; also their lock."""

    __tablename__ = "quota_revisions"

    name: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    revision: orm.Mapped[int]


class Declared(Base):
    """An entry of the declared catalog; `models.document` says what is in which kind.

    Models, versions, routes and deployments above are what is made of them.
    """

    __tablename__ = "declared"

    kind: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    model: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    name: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    body: orm.Mapped[dict[str, Any]]
    revision: orm.Mapped[int]


class DeclaredChange(Base):
    """A revision of the declared catalog: who, why, and every entry before and after."""

    __tablename__ = "declared_changes"

    revision: orm.Mapped[int] = orm.mapped_column(primary_key=True, autoincrement=False)
    at_us: orm.Mapped[int]
    author: orm.Mapped[str]
    reason: orm.Mapped[str]
    changes: orm.Mapped[list[Any]]


class DeclaredState(Base):
    """One row: the newest revision, a serial that every wish moves, and forebay.toml as last imported."""

    __tablename__ = "declared_state"

    name: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    revision: orm.Mapped[int]
    serial: orm.Mapped[int]
    imported: orm.Mapped[dict[str, Any]]


class Rollout(Base):
    """A model's newest rollout; see `models.rollout`."""

    __tablename__ = "rollouts"

    model: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    state: orm.Mapped[str]
    body: orm.Mapped[dict[str, Any]]

"""The registry's table of batch jobs, by SQLAlchemy's names; migrations/ makes it."""

import sqlalchemy as sa

METADATA = sa.MetaData()

JOBS = sa.Table(
    "batch_jobs",
    METADATA,
    sa.Column("job_id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("team", sa.String(256), nullable=False),
    sa.Column("user", sa.String(256), nullable=False),
    sa.Column("uid", sa.BigInteger),
    sa.Column("gid", sa.BigInteger),
    sa.Column("umask", sa.Integer, nullable=False),
    sa.Column("name", sa.String(256), nullable=False),
    sa.Column("comment", sa.Text, nullable=False),
    sa.Column("model", sa.String(256), nullable=False),
    sa.Column("endpoint", sa.String(64), nullable=False),
    sa.Column("order", sa.String(16), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("reason", sa.String(64), nullable=False),
    sa.Column("detail", sa.Text, nullable=False),
    sa.Column("total", sa.BigInteger, nullable=False),
    sa.Column("ok", sa.BigInteger, nullable=False),
    sa.Column("failed", sa.BigInteger, nullable=False),
    sa.Column("preempted", sa.BigInteger, nullable=False),
    sa.Column("retried", sa.BigInteger, nullable=False),
    sa.Column("last_line", sa.BigInteger, nullable=False),
    sa.Column("submitted_us", sa.BigInteger, nullable=False),
    sa.Column("started_us", sa.BigInteger, nullable=False),
    sa.Column("ended_us", sa.BigInteger, nullable=False),
    sa.Column("begin_us", sa.BigInteger, nullable=False),
    sa.Column("deadline_us", sa.BigInteger, nullable=False),
    sa.Column("time_limit_s", sa.BigInteger, nullable=False),
    sa.Column("held", sa.String(16), nullable=False),
    sa.Column("cancel_us", sa.BigInteger, nullable=False),
    sa.Column("output_path", sa.Text, nullable=False),
    sa.Column("error_path", sa.Text, nullable=False),
    sa.Column("source", sa.Text, nullable=False),
    sa.Column("input_sha256", sa.String(64), nullable=False),
    sa.Index("batch_jobs_state", "state"),
    sa.Index("batch_jobs_team_user", "team", "user"),
    sqlite_autoincrement=True,  # an id is never used twice, also after its job was removed
)

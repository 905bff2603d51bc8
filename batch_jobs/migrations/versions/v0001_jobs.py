"""The table of batch jobs."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the table and its indices."""
    op.create_table(
        "batch_jobs",
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
        sqlite_autoincrement=True,
    )
    op.create_index("batch_jobs_state", "batch_jobs", ["state"])
    op.create_index("batch_jobs_team_user", "batch_jobs", ["team", "user"])


def downgrade() -> None:
    """Remove the table."""
    op.drop_table("batch_jobs")

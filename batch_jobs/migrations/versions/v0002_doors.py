"""What the OpenAI door, the queue's order and the files need beside the first table."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_ADDED = (
    sa.Column("door", sa.String(16), nullable=False, server_default="fbatch"),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("cached_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("output_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("input_file", sa.String(64), nullable=False, server_default=""),
    sa.Column("window", sa.String(16), nullable=False, server_default=""),
    sa.Column("metadata", sa.Text, nullable=False, server_default="{}"),
    sa.Column("finalizing_us", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("output_keep_s", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("stored_bytes", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("purged_us", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("priority", sa.Integer, nullable=False, server_default="0"),
    sa.Column("qos", sa.String(64), nullable=False, server_default=""),
    sa.Column("dependency", sa.Text, nullable=False, server_default=""),
    sa.Column("array_id", sa.Integer, nullable=False, server_default="0"),
    sa.Column("array_task", sa.Integer, nullable=False, server_default="-1"),
    sa.Column("array_limit", sa.Integer, nullable=False, server_default="0"),
    sa.Column("requeue", sa.Boolean, nullable=False, server_default=sa.true()),
    sa.Column("requeues", sa.Integer, nullable=False, server_default="0"),
    sa.Column("top_us", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("estimated_us", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("format", sa.String(16), nullable=False, server_default="jsonl"),
    sa.Column("queued_tokens", sa.BigInteger, nullable=False, server_default="0"),
)


def upgrade() -> None:
    """Add the columns and the table of files."""
    for column in _ADDED:
        op.add_column("batch_jobs", column._copy())
    op.create_index("batch_jobs_array", "batch_jobs", ["array_id"])
    op.create_table(
        "batch_files",
        sa.Column("file_id", sa.String(64), primary_key=True),
        sa.Column("team", sa.String(256), nullable=False),
        sa.Column("user", sa.String(256), nullable=False),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("name", sa.String(512), nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.Column("expires_us", sa.BigInteger, nullable=False),
    )
    op.create_index("batch_files_team", "batch_files", ["team", "user"])


def downgrade() -> None:
    """Remove them."""
    op.drop_table("batch_files")
    op.drop_index("batch_jobs_array", "batch_jobs")
    for column in reversed(_ADDED):
        op.drop_column("batch_jobs", column.name)

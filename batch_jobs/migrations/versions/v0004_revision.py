"""How often a job was changed, so that a runner reads those alone that were."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column(
        "batch_jobs", sa.Column("revision", sa.BigInteger, nullable=False, server_default="0")
    )


def downgrade() -> None:
    """Remove it."""
    op.drop_column("batch_jobs", "revision")

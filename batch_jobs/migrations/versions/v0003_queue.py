"""What putting a job back into the queue and estimating its start need."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_ADDED = (
    sa.Column("requeue_us", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("expected_us", sa.BigInteger, nullable=False, server_default="0"),
)


def upgrade() -> None:
    """Add the columns."""
    for column in _ADDED:
        op.add_column("batch_jobs", column._copy())


def downgrade() -> None:
    """Remove them."""
    for column in reversed(_ADDED):
        op.drop_column("batch_jobs", column.name)

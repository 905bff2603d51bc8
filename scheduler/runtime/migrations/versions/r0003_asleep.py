"""Replicas: whether they should be parked.

Revision ID: 0003
Revises: 0002
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the wish; replicas so far are awake."""
    op.add_column(
        "replicas", sa.Column("asleep", sa.Boolean(), server_default=sa.false(), nullable=False)
    )


def downgrade() -> None:
    """Forget it."""
    with op.batch_alter_table("replicas") as replicas:
        replicas.drop_column("asleep")

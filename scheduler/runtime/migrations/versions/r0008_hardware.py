"""Leases: the hardware that they were asked for.

Revision ID: 0008
Revises: 0007
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; leases so far were asked for by the site's settings."""
    op.add_column("leases", sa.Column("hardware", sa.JSON(), server_default="{}", nullable=False))


def downgrade() -> None:
    """Forget it."""
    with op.batch_alter_table("leases") as leases:
        leases.drop_column("hardware")

"""Replicas: the phases of their start, which another leader can show too.

Revision ID: 0009
Revises: 0008
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; of replicas so far no phases are known."""
    op.add_column("replicas", sa.Column("phases", sa.JSON(), server_default="{}", nullable=False))


def downgrade() -> None:
    """Forget them."""
    with op.batch_alter_table("replicas") as replicas:
        replicas.drop_column("phases")

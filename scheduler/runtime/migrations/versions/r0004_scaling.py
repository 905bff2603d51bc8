"""Deployments: the bounds of the autoscaler.

Revision ID: 0004
Revises: 0003
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the bounds; deployments so far have a fixed number."""
    op.add_column(
        "deployments", sa.Column("scaling", sa.JSON(), server_default="{}", nullable=False)
    )


def downgrade() -> None:
    """Forget them."""
    with op.batch_alter_table("deployments") as deployments:
        deployments.drop_column("scaling")

"""Leases: what was asked of Slurm beside GPUs, for a lease that still waits when the leader changes.

Revision ID: 0007
Revises: 0006
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns; of leases so far nothing is known."""
    for name in ("whole_nodes", "time_min_s"):
        op.add_column(
            "leases", sa.Column(name, sa.BigInteger(), server_default="0", nullable=False)
        )
    op.add_column("leases", sa.Column("exclude", sa.JSON(), server_default="[]", nullable=False))


def downgrade() -> None:
    """Forget them."""
    with op.batch_alter_table("leases") as leases:
        for name in ("whole_nodes", "time_min_s", "exclude"):
            leases.drop_column(name)

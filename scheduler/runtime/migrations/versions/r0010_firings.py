"""Schedules: what began, and up to when each has been looked at.

Revision ID: 0010
Revises: 0009
"""

import time

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add both; what began before nobody has noted, and nobody shall call it missed."""
    op.add_column(
        "schedules", sa.Column("since_us", sa.BigInteger(), server_default="0", nullable=False)
    )
    schedules = sa.table("schedules", sa.column("since_us", sa.BigInteger()))
    op.execute(schedules.update().values(since_us=time.time_ns() // 1000))
    op.create_table(
        "firings",
        sa.Column("schedule", sa.Text(), nullable=False),
        sa.Column("begins_us", sa.BigInteger(), nullable=False),
        sa.Column("ends_us", sa.BigInteger(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("floor", sa.BigInteger(), nullable=False),
        sa.Column("noted_us", sa.BigInteger(), nullable=False),
        sa.Column("serving", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("schedule", "begins_us", name=op.f("pk_firings")),
    )


def downgrade() -> None:
    """Forget them."""
    op.drop_table("firings")
    with op.batch_alter_table("schedules") as schedules:
        schedules.drop_column("since_us")

"""Quotas: limits and their history, counters, and how far their owners have told them.

Revision ID: 0002
Revises: 0001
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_NAMES = ("scope", "team", "name", "model", "tier", "kind")


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "quota_limits",
        *_names(),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("hard", sa.Boolean(), nullable=False),
        sa.Column("author", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(*_NAMES, name=op.f("pk_quota_limits")),
    )
    op.create_table(
        "quota_changes",
        sa.Column(
            "change_id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        *_names(),
        sa.Column("amount", sa.BigInteger(), nullable=True),
        sa.Column("hard", sa.Boolean(), nullable=False),
        sa.Column("author", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("change_id", name=op.f("pk_quota_changes")),
    )
    op.create_index(op.f("ix_quota_changes_team"), "quota_changes", ["team"], unique=False)
    op.create_table(
        "quota_counters",
        *_names(),
        sa.Column("window_us", sa.BigInteger(), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("drift", sa.BigInteger(), nullable=False),
        sa.Column("checked_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(*_NAMES, "window_us", name=op.f("pk_quota_counters")),
    )
    op.create_index(
        op.f("ix_quota_counters_revision"), "quota_counters", ["revision"], unique=False
    )
    op.create_table(
        "quota_owners",
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("batch", sa.BigInteger(), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.Column("running", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("owner", name=op.f("pk_quota_owners")),
    )
    op.create_table(
        "quota_revisions",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_quota_revisions")),
    )
    for name in ("limits", "counters", "check"):
        op.execute(sa.text("INSERT INTO quota_revisions VALUES (:n, 0)").bindparams(n=name))


def downgrade() -> None:
    """Drop them."""
    op.drop_table("quota_revisions")
    op.drop_table("quota_owners")
    op.drop_index(op.f("ix_quota_counters_revision"), table_name="quota_counters")
    op.drop_table("quota_counters")
    op.drop_index(op.f("ix_quota_changes_team"), table_name="quota_changes")
    op.drop_table("quota_changes")
    op.drop_table("quota_limits")


def _names() -> tuple[sa.Column[str], ...]:
    return tuple(sa.Column(name, sa.Text(), nullable=False) for name in _NAMES)

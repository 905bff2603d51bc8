"""What is declared of models: entries, their history, rollouts.

Revision ID: 0006
Revises: 0005
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the tables; what forebay.toml declared is imported when a broker next leads."""
    op.create_table(
        "declared",
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("kind", "model", "name", name=op.f("pk_declared")),
    )
    op.create_table(
        "declared_changes",
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.Column("author", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("changes", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("revision", name=op.f("pk_declared_changes")),
    )
    op.create_table(
        "declared_state",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("serial", sa.BigInteger(), nullable=False),
        sa.Column("imported", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_declared_state")),
    )
    op.bulk_insert(
        sa.table(
            "declared_state",
            sa.column("name", sa.Text()),
            sa.column("revision", sa.BigInteger()),
            sa.column("serial", sa.BigInteger()),
            sa.column("imported", sa.JSON()),
        ),
        [{"name": "catalog", "revision": 0, "serial": 0, "imported": {}}],
    )
    op.create_table(
        "rollouts",
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("model", name=op.f("pk_rollouts")),
    )
    op.add_column("routes", sa.Column("rules", sa.JSON(), server_default="{}", nullable=False))


def downgrade() -> None:
    """Drop them."""
    with op.batch_alter_table("routes") as routes:
        routes.drop_column("rules")
    for name in ("rollouts", "declared_state", "declared_changes", "declared"):
        op.drop_table(name)

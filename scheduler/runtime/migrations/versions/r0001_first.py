"""The first schema.

Revision ID: 0001
Revises: none
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make every table."""
    _make_journal()
    _make_catalog()
    _make_holdings()
    _make_keys()


def downgrade() -> None:
    """Drop them, referring ones first."""
    op.drop_table("deployments")
    op.drop_table("versions")
    op.drop_index(op.f("ix_slots_lease_id"), table_name="slots")
    op.drop_table("slots")
    op.drop_table("routes")
    op.drop_index(op.f("ix_replicas_state"), table_name="replicas")
    op.drop_index(op.f("ix_replicas_lease_id"), table_name="replicas")
    op.drop_table("replicas")
    op.drop_index(op.f("ix_api_keys_team"), table_name="api_keys")
    op.drop_table("api_keys")
    op.drop_table("teams")
    op.drop_table("plans")
    op.drop_table("periods")
    op.drop_table("models")
    op.drop_index(op.f("ix_leases_state"), table_name="leases")
    op.drop_table("leases")
    op.drop_table("leadership")
    op.drop_table("facts")
    op.drop_index(op.f("ix_events_at_us"), table_name="events")
    op.drop_table("events")


def _make_journal() -> None:
    op.create_table(
        "events",
        sa.Column(
            "event_id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("event_id", name=op.f("pk_events")),
    )
    op.create_index(op.f("ix_events_at_us"), "events", ["at_us"], unique=False)
    op.create_table(
        "facts",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_facts")),
    )
    op.create_table(
        "leadership",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("expires_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_leadership")),
    )
    op.create_table(
        "periods",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("begun_us", sa.BigInteger(), nullable=False),
        sa.Column("done_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_periods")),
    )
    op.create_table(
        "plans",
        sa.Column(
            "plan_id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("plan_id", name=op.f("pk_plans")),
    )


def _make_catalog() -> None:
    op.create_table(
        "models",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("max_context", sa.BigInteger(), nullable=False),
        sa.Column("tiers", sa.JSON(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_models")),
    )
    op.create_table(
        "routes",
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("weights", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["model"], ["models.name"], name=op.f("fk_routes_model")),
        sa.PrimaryKeyConstraint("model", name=op.f("pk_routes")),
    )
    op.create_table(
        "versions",
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["model"], ["models.name"], name=op.f("fk_versions_model")),
        sa.PrimaryKeyConstraint("model", "version", name=op.f("pk_versions")),
    )
    op.create_table(
        "deployments",
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("configured", sa.BigInteger(), nullable=False),
        sa.Column("scaled", sa.BigInteger(), nullable=True),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("gpus", sa.BigInteger(), nullable=False),
        sa.Column("hold_batch", sa.Boolean(), nullable=False),
        sa.Column("quarantined_until_us", sa.BigInteger(), nullable=False),
        sa.Column("quarantine_reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["model", "version"],
            ["versions.model", "versions.version"],
            name="fk_deployments_version",
        ),
        sa.PrimaryKeyConstraint("model", "version", name=op.f("pk_deployments")),
    )


def _make_holdings() -> None:
    op.create_table(
        "leases",
        sa.Column("lease_id", sa.Text(), nullable=False),
        sa.Column("cluster", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("team", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("gpus", sa.BigInteger(), nullable=False),
        sa.Column("gres_type", sa.Text(), nullable=False),
        sa.Column("partition", sa.Text(), nullable=False),
        sa.Column("slurm_job_id", sa.Text(), nullable=False),
        sa.Column("nodes", sa.JSON(), nullable=False),
        sa.Column("walltime_s", sa.BigInteger(), nullable=False),
        sa.Column("requested_us", sa.BigInteger(), nullable=False),
        sa.Column("started_us", sa.BigInteger(), nullable=False),
        sa.Column("ended_us", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("lease_id", name=op.f("pk_leases")),
    )
    op.create_index(op.f("ix_leases_state"), "leases", ["state"], unique=False)
    op.create_table(
        "replicas",
        sa.Column("replica_id", sa.Text(), nullable=False),
        sa.Column("lease_id", sa.Text(), nullable=False),
        sa.Column("slot_id", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("run", sa.Boolean(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("drain_s", sa.Double(), nullable=False),
        sa.Column("drain_asked", sa.Boolean(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("ended_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["lease_id"], ["leases.lease_id"], name=op.f("fk_replicas_lease_id")
        ),
        sa.PrimaryKeyConstraint("replica_id", name=op.f("pk_replicas")),
    )
    op.create_index(op.f("ix_replicas_lease_id"), "replicas", ["lease_id"], unique=False)
    op.create_index(op.f("ix_replicas_state"), "replicas", ["state"], unique=False)
    op.create_table(
        "slots",
        sa.Column("slot_id", sa.Text(), nullable=False),
        sa.Column("lease_id", sa.Text(), nullable=False),
        sa.Column("gpus", sa.BigInteger(), nullable=False),
        sa.Column("cpus", sa.BigInteger(), nullable=False),
        sa.Column("close", sa.Boolean(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["lease_id"], ["leases.lease_id"], name=op.f("fk_slots_lease_id")),
        sa.PrimaryKeyConstraint("slot_id", name=op.f("pk_slots")),
    )
    op.create_index(op.f("ix_slots_lease_id"), "slots", ["lease_id"], unique=False)


def _make_keys() -> None:
    op.create_table(
        "teams",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_teams")),
    )
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("secret_sha256", sa.Text(), nullable=False),
        sa.Column("team", sa.Text(), nullable=False),
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("comment", sa.Text(), nullable=False),
        sa.Column("tiers", sa.JSON(), nullable=False),
        sa.Column("models", sa.JSON(), nullable=False),
        sa.Column("admin", sa.Boolean(), nullable=False),
        sa.Column("coordinator", sa.Boolean(), nullable=False),
        sa.Column("service", sa.Boolean(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("expires_us", sa.BigInteger(), nullable=False),
        sa.Column("revoked_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["team"], ["teams.name"], name=op.f("fk_api_keys_team")),
        sa.PrimaryKeyConstraint("key_id", name=op.f("pk_api_keys")),
    )
    op.create_index(op.f("ix_api_keys_team"), "api_keys", ["team"], unique=False)

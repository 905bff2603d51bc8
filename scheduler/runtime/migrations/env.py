"""Alembic's entry: runs inside the transaction that `registry.database` has opened."""

from alembic import context

from scheduler.runtime.registry import database, tables

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=tables.Base.metadata,
    version_table=database.VERSION_TABLE,
    include_object=database.ours,
    compare_type=True,
)
with context.begin_transaction():
    context.run_migrations()

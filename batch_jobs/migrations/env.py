"""Alembic's entry: migrates the connection that `batch_jobs.store` hands it, in its transaction."""

from alembic import context

from batch_jobs import tables

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=tables.METADATA,
    version_table="batch_jobs_version",
    transactional_ddl=False,  # the caller's transaction spans all steps
)
context.run_migrations()

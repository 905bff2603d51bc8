"""Alembic's migrations of the batch jobs' table, with a version table of their own."""

"""Accounting: every attempt once, every GPU-second somewhere.

`accounting.spool` and what it imports load with the standard library alone, so that a replica can
write its rows inside its engine's own environment; everything else needs pyarrow and DuckDB.
"""

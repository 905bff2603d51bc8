"""Which tests of the books ask DuckDB for many columns of small files: planning takes 0.1 s each time."""

from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_ASKING = {
    f"test_{name}"
    for name in (
        "bad_days", "bill", "billing_commands", "closing", "compact", "demand", "desk", "dst", "facct",
        "facct_names", "freport", "gpu_minutes", "lists", "public", "release", "rolled_bills",
        "rolled_reports", "rolling", "routes", "ship", "statement", "tokens", "totals", "windows_of_days",
    )
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them, so that `make test-unit` keeps to what takes milliseconds."""
    for item in items:
        if item.path.parent == _HERE and item.path.stem in _ASKING:
            item.add_marker(pytest.mark.duckdb)

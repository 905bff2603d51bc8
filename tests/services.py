"""Real services in tests: a laptop without one skips, CI without one fails."""

import os

import pytest


def require(present: bool, what: str) -> None:
    """Skip the calling test unless ``what`` is there; in CI its absence is a failure.

    Args:
        present: whether it is there.
        what: what is needed and how to get it, for the message.
    """
    if present:
        return
    if os.environ.get("CI"):
        pytest.fail(f"CI must have {what}")
    pytest.skip(f"needs {what}")

"""Fixtures that every test may use."""

import pytest

from scheduler.contracts import clock, usage

pytest_plugins = ["tests.realpostgres", "tests.realslurm"]


@pytest.fixture
def fake_clock() -> clock.FakeClock:
    """A clock that the test moves."""
    return clock.FakeClock()


@pytest.fixture
def sink() -> usage.MemorySink:
    """A usage sink that keeps its rows in a list."""
    return usage.MemorySink()

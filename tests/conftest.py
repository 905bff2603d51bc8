"""Fixtures that every test may use, how far properties look, and which tests share a worker."""

from pathlib import Path

import hypothesis
import pytest

from scheduler.contracts import clock, usage

pytest_plugins = ["tests.realpostgres", "tests.realslurm"]

TESTS = Path(__file__).parent
# A busy machine is no fault of a property. `make test-long` looks further: --hypothesis-profile=long
hypothesis.settings.register_profile("brief", max_examples=50, deadline=None)
hypothesis.settings.register_profile("long", max_examples=2_000, deadline=None)
hypothesis.settings.load_profile("brief")
VLLM = ("0.32", "0.31")  # the newest first: its fork server is the one of tests that name none


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests that share something dear one worker each, under ``--dist loadgroup``.

    One cluster and one fork server for each vLLM version is what a machine has room for, and starting one
    takes longer than most tests on it. Others are kept together by module, with its fixtures.
    """
    for item in items:
        place = item.path.relative_to(TESTS).as_posix()
        if place.startswith(("contract/", "integration/")):
            item.add_marker(pytest.mark.xdist_group(_group(item) or place))


def _group(item: pytest.Item) -> str:
    if item.get_closest_marker("slurm"):
        return "slurm"
    called = getattr(item, "callspec", None)
    named = [version for version in VLLM if called and version in called.params.values()]
    if named or item.get_closest_marker("vllm"):
        return f"vllm-{named[0] if named else VLLM[0]}"
    return ""


@pytest.fixture
def fake_clock() -> clock.FakeClock:
    """A clock that the test moves."""
    return clock.FakeClock()


@pytest.fixture
def sink() -> usage.MemorySink:
    """A usage sink that keeps its rows in a list."""
    return usage.MemorySink()

"""Fixtures that every test may use, how far properties look, and which tests share a worker."""

import collections
import gc
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


def pytest_configure(config: pytest.Config) -> None:
    """Name the marker that is given here and nowhere else, and keep the order that is made below."""
    config.addinivalue_line("markers", "property: draws many examples; not among the unit tests")
    config.option.loadscopereorder = False  # xdist's begins with the most tests, not the longest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tell properties from unit tests; give tests that share something dear one worker each.

    The second is for ``--dist loadgroup``.

    One cluster and one fork server for each vLLM version is what a machine has room for, and starting one
    takes longer than most tests on it. Others are kept together by module, with its fixtures. Those that may
    take longest begin: at the end no worker should wait for another.
    """
    groups: dict[pytest.Item, str] = {}
    allowed_s: dict[str, float] = collections.defaultdict(float)
    for item in items:
        place = item.path.relative_to(TESTS).as_posix()
        if (
            place.startswith("properties/")
            or hypothesis.is_hypothesis_test(getattr(item, "function", None))
            or item.get_closest_marker("slow")
        ):
            item.add_marker("property")
        if place.startswith(("contract/", "integration/")):
            groups[item] = _group(item) or place
            item.add_marker(pytest.mark.xdist_group(groups[item]))
            allowed_s[groups[item]] = max(allowed_s[groups[item]], _allowed_s(item))
    items.sort(key=lambda item: -allowed_s[groups.get(item, "")])


def pytest_collection_finish() -> None:
    """Leave what was imported out of the garbage that is looked for between here and the end."""
    gc.collect()
    gc.freeze()


def _group(item: pytest.Item) -> str:
    if item.get_closest_marker("slurm"):
        return "slurm"
    if "laptop_house" in getattr(item, "fixturenames", ()):
        return "laptop"
    called = getattr(item, "callspec", None)
    named = [version for version in VLLM if called and version in called.params.values()]
    if named or item.get_closest_marker("vllm"):
        return f"vllm-{named[0] if named else VLLM[0]}"
    return ""


def _allowed_s(item: pytest.Item) -> float:
    """Return the time limit that a test of `make test` names for itself, 0 if it names none."""
    marker = item.get_closest_marker("timeout")
    if marker is None or item.get_closest_marker("long"):
        return 0.0
    return float(marker.args[0])


@pytest.fixture
def fake_clock() -> clock.FakeClock:
    """A clock that the test moves."""
    return clock.FakeClock()


@pytest.fixture
def sink() -> usage.MemorySink:
    """A usage sink that keeps its rows in a list."""
    return usage.MemorySink()

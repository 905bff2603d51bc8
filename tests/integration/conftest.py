"""What modules share: an installation on the embedded Slurm, whose start is long, and how things end."""

import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.integration.whole import running

PROXY = "http://127.0.0.1:9"  # nobody listens there
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")


@pytest.fixture(scope="session")
def laptop_house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[running.Running]:
    """An installation on the embedded Slurm; `laptop` is how tests take it.

    Its services inherit a cluster's proxy, which is dead (case E6).
    """
    env = {name: PROXY for lower in _PROXIES for name in (lower, lower.upper())}
    slurm = {"client": "embedded", "embedded_kill_wait_s": 5.0}
    made = running.Running(
        tmp_path_factory.mktemp("laptop"),
        slurm,
        "",
        {**env, "no_proxy": "", "NO_PROXY": ""},
    )
    try:
        made.up()
        assert "Traceback" not in made.log()
        yield made
    finally:
        made.close()


@pytest.fixture
def laptop(laptop_house: running.Running) -> running.Running:
    """The installation on the embedded Slurm at rest."""
    laptop_house.up()
    return laptop_house


@pytest.fixture
async def ends() -> AsyncIterator[contextlib.AsyncExitStack]:
    """What is pushed here ends with the test, also where that fails: what goes on would fail the next one."""
    async with contextlib.AsyncExitStack() as stack:
        yield stack

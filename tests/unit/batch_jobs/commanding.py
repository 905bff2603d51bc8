"""What the tests of fbatch, fqueue and fcancel have in common: a store, its API, files and a terminal."""

import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.contracts import ports
from tests.unit.batch_jobs import world

SCRIPT = b"""#!/bin/sh
#FBATCH --model=chat --job-name="two words"   # a comment
#FBATCH --time=4:00
#FBATCH --comment=first
#FBATCH --comment=second
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[world.TellingStore]:
    (tmp_path / "state").mkdir()
    found = world.open_store(tmp_path / "state")
    yield found
    found.close()


@pytest.fixture
def api(store: world.TellingStore, tmp_path: Path) -> world.AppApi:
    return world.AppApi(store, tmp_path / "state")


def write(tmp_path: Path, name: str, data: bytes) -> str:
    (tmp_path / name).write_bytes(data)
    return name


def fbatch(api: ports.Api, cwd: Path, *argv: str, stdin: str = "", **env: str) -> world.Said:
    return world.run_command("fbatch", argv, api, cwd, io.StringIO(stdin), **env)


class Terminal(io.StringIO):
    """A stream that says it is a terminal, with someone who types."""

    def isatty(self) -> bool:
        return True

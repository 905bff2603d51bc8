"""The tree of `forebay up`: a part that dies is started again, whatever stands in the way meanwhile."""

import asyncio
import stat
import sys
from pathlib import Path

import pytest

from forebay import tree

# Says that it is ready, and ends.
_PART = f"""#!{sys.executable} -S
import os, sys
os.write(int(sys.argv[sys.argv.index("--ready-fd") + 1]), b"{{}}\\n")
"""


async def test_a_restart_that_the_machine_refuses_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "part"
    program.write_text(_PART)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(tree, "_BACKOFF_S", (0.01,))
    logs = tmp_path / "logs"
    logs.mkdir()
    said: asyncio.Queue[str] = asyncio.Queue()
    parts = tree.Tree((), logs, {}, said.put_nowait)

    async def heard(words: str) -> None:
        async with asyncio.timeout(30):
            while words not in await said.get():
                pass

    open_before = len(list(Path("/proc/self/fd").iterdir()))
    assert await parts.start("broker") == {}
    try:
        logs.rename(tmp_path / "elsewhere")
        await heard("broker can't be started: [Errno 2]")
        await heard("broker can't be started: [Errno 2]")
        (tmp_path / "elsewhere").rename(logs)
        await heard("broker ended with code 0")
    finally:
        await parts.stop()
    assert len(list(Path("/proc/self/fd").iterdir())) <= open_before

"""The tree of `forebay up`: a part that dies is started again, whatever stands in the way meanwhile."""

import asyncio
import stat
import sys
from pathlib import Path

import pytest

from forebay import tree, up

# Says that it is ready, and ends.
_PART = f"""#!{sys.executable} -S
import os, sys
os.write(int(sys.argv[sys.argv.index("--ready-fd") + 1]), b"{{}}\\n")
"""

_TELLS_ITS_PORT = f"""#!{sys.executable} -S
import os, sys
port = os.environ.get("FOREBAY_GATEWAY_HTTP_PORT", "any")
told = '{{"port": "' + port + '"}}\\n'
os.write(int(sys.argv[sys.argv.index("--ready-fd") + 1]), told.encode())
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
    parts = tree.Tree((), logs, {}, said.put_nowait, 60.0)

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


async def test_a_gateway_that_is_started_again_keeps_its_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "part"
    program.write_text(_TELLS_ITS_PORT)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(tree, "_BACKOFF_S", (0.01,))
    (tmp_path / "logs").mkdir()
    restarted = asyncio.Event()
    parts = tree.Tree((), tmp_path / "logs", {}, lambda _: restarted.set(), 60.0)
    try:
        assert await parts.start("gateway") == {"port": "any"}
        parts.settle(up.kept({"http": "http://127.0.0.1:4711", "grpc": "127.0.0.1:4712"}))
        async with asyncio.timeout(30):
            while parts.parts["gateway"].ready != {"port": "4711"}:
                await restarted.wait()
                restarted.clear()
    finally:
        await parts.stop()


@pytest.mark.parametrize(("stable_s", "waits"), [(60.0, ["0.01", "0.02"]), (0.0, ["0.01", "0.01"])])
async def test_one_that_ends_soon_waits_longer_and_one_that_has_run_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stable_s: float, waits: list[str]
) -> None:
    program = tmp_path / "part"
    program.write_text(_PART)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(tree, "_BACKOFF_S", (0.01, 0.02))
    (tmp_path / "logs").mkdir()
    said: asyncio.Queue[str] = asyncio.Queue()
    parts = tree.Tree((), tmp_path / "logs", {}, said.put_nowait, stable_s)
    await parts.start("broker")
    try:
        async with asyncio.timeout(30):
            told = [await said.get() for _ in waits]
    finally:
        await parts.stop()
    assert told == [f"broker ended with code 0; starting it again in {wait} s" for wait in waits]

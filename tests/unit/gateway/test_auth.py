"""Credentials: API keys with a short memory, and MUNGE through the real munged."""

import asyncio
import dataclasses
import pathlib
import shutil
import subprocess
import threading
from collections.abc import Iterator

import pytest

from gateway import auth, settings
from scheduler.contracts import clock, errors, ports, requests
from tests import services
from tests.unit.gateway import harness


class Keys(ports.StaticKeys):
    """Counts look-ups; keys can be revoked."""

    def __init__(self) -> None:
        super().__init__(harness.KEYS)
        self.asked = 0
        self.revoked: set[str] = set()

    async def find(self, token: str) -> requests.Caller:
        self.asked += 1
        if token in self.revoked:
            raise errors.KeyExpired("API key was revoked: ask for a new one")
        return await super().find(token)


class Users:
    """A directory that knows everybody but mallory."""

    async def caller(self, user: str) -> requests.Caller:
        if user == "mallory":
            raise errors.Forbidden("no association")
        return requests.Caller("physics", user, "munge")


def credentials(
    keys: Keys, time: clock.Clock, *, users: Users | None = None, **options: object
) -> auth.Credentials:
    table = dataclasses.replace(settings.GatewaySettings(), **options)  # type: ignore[arg-type]  # field values by name
    return auth.Credentials(keys, users, time, table)


async def test_keys_are_remembered_for_ten_seconds_at_most(fake_clock: clock.FakeClock) -> None:
    keys = Keys()
    made = credentials(keys, fake_clock)
    for _ in range(3):
        assert await made.authenticate("Bearer ann") == harness.ANN
    assert keys.asked == 1
    keys.revoked.add("ann")
    await fake_clock.advance(9.9)
    assert await made.authenticate("bearer ann") == harness.ANN
    await fake_clock.advance(0.2)
    with pytest.raises(errors.KeyExpired):
        await made.authenticate("Bearer ann")


async def test_unknown_keys_are_not_remembered(fake_clock: clock.FakeClock) -> None:
    keys = Keys()
    made = credentials(keys, fake_clock)
    with pytest.raises(errors.Unauthenticated):
        await made.authenticate("Bearer new")
    keys.callers["new"] = harness.BOB
    assert await made.authenticate("Bearer new") == harness.BOB


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic YTpi", "Munge nonsense", "Munge MUNGE:AA:"]
)
async def test_no_credential(header: str | None, fake_clock: clock.FakeClock) -> None:
    with pytest.raises(errors.Unauthenticated):
        await credentials(Keys(), fake_clock).authenticate(header)


async def test_munge_that_is_not_there_is_a_clear_error(
    fake_clock: clock.FakeClock, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    made = credentials(Keys(), fake_clock, users=Users(), munge_socket=str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(errors.Internal, match="not installed"):
        await made.authenticate("Munge MUNGE:AwQF:")


async def test_munged_that_hangs_is_given_up(
    fake_clock: clock.FakeClock, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    hanging = tmp_path / "unmunge"
    hanging.write_text("#!/bin/sh\nread line; exec /bin/sleep 60\n")
    hanging.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    made = credentials(Keys(), fake_clock, users=Users(), munge_timeout_s=0.2)
    with pytest.raises(errors.Internal, match="did not answer within"):
        await made.authenticate("Munge MUNGE:AwQF:")


@pytest.fixture
def munge_socket(tmp_path: pathlib.Path) -> Iterator[str]:
    """A munged of our own, with its own key."""
    daemon = shutil.which("munged", path="/usr/sbin:/usr/bin")
    services.require(daemon is not None, "munged (apt-get install munge)")
    assert daemon is not None
    key, socket = tmp_path / "key", tmp_path / "socket"
    key.write_bytes(bytes(range(64)) * 2)
    key.chmod(0o600)
    names = ("pid", "log", "seed")
    process = subprocess.Popen(
        [
            daemon,
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={socket}",
            *[f"--{name}-file={tmp_path / name}" for name in names],
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(200):
            probe = subprocess.run(
                ["munge", "-n", f"--socket={socket}"], capture_output=True, check=False
            )
            if probe.returncode == 0:
                break
        yield str(socket)
    finally:
        process.terminate()
        process.wait(10)


async def test_munge_names_the_unix_user_once(
    munge_socket: str, fake_clock: clock.FakeClock
) -> None:
    def encode() -> str:
        argv = ["munge", "-n", f"--socket={munge_socket}"]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()

    made = credentials(Keys(), fake_clock, users=Users(), munge_socket=munge_socket)
    credential = await asyncio.to_thread(encode)
    caller = await made.authenticate(f"Munge {credential}")
    assert caller.key_id == "munge"
    assert caller.user == pathlib.Path(munge_socket).owner()
    with pytest.raises(errors.Unauthenticated, match="eplayed"):
        await made.authenticate(f"Munge {credential}")
    with pytest.raises(errors.Unauthenticated, match="refused"):
        await made.authenticate("Munge MUNGE:AwQFAAA=:")


async def test_munged_that_is_down_is_a_clear_error(
    fake_clock: clock.FakeClock, tmp_path: pathlib.Path
) -> None:
    services.require(shutil.which("unmunge") is not None, "unmunge (apt-get install munge)")
    made = credentials(Keys(), fake_clock, users=Users(), munge_socket=str(tmp_path / "none"))
    with pytest.raises(errors.Internal, match="is munged running"):
        await made.authenticate("Munge MUNGE:AwQFAAA=:")


async def test_a_flood_of_credentials_is_bounded_and_leaves_the_other_threads_alone(
    fake_clock: clock.FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, running = threading.Event(), threading.Semaphore(0)

    def slow(credential: str, options: settings.GatewaySettings) -> str:
        running.release()
        go.wait(20)
        return "ann"

    monkeypatch.setattr(auth, "unmunge", slow)
    made = credentials(Keys(), fake_clock, users=Users(), munge_parallel=2, munge_waiting=3)
    flood = [asyncio.create_task(made.authenticate("Munge MUNGE:abc:")) for _ in range(50)]
    try:
        await asyncio.sleep(0)
        refused = [task for task in flood if task.done()]
        assert len(refused) == 45
        for task in refused:
            error = task.exception()
            assert isinstance(error, errors.Busy)
            assert error.retry_after_s
        await asyncio.wait_for(asyncio.to_thread(lambda: None), 20)
    finally:
        go.set()
    checked = [task for task in flood if task not in refused]
    assert {(await task).user for task in checked} == {"ann"}
    assert (await made.authenticate("Munge MUNGE:abc:")).user == "ann"  # there is room again

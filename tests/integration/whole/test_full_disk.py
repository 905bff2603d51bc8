"""No room for usage rows: requests are refused before a token is spent, and served once there is room."""

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from scheduler.contracts.v1 import forebay_pb2
from tests import services
from tests.integration.whole import batches, clients, running, waiting

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


@contextlib.contextmanager
def filler(folder: Path) -> Iterator[Callable[[], None]]:
    """Yield what fills the file system of ``folder`` to the last byte; called again, it fills it again."""
    path = folder / "filler"
    with path.open("ab", buffering=0) as file:

        def fill() -> None:
            for size in (65536, 4096):
                with contextlib.suppress(OSError):
                    while file.write(b"\0" * size):
                        pass

        try:
            yield fill
        finally:
            path.unlink()


def test_refused_until_there_is_room(house: running.Running, key: str) -> None:
    spool = house.state / "spool"
    services.require(spool.is_mount(), "the right to mount a tmpfs")
    with filler(spool) as fill, concurrent.futures.ThreadPoolExecutor(8) as pool:

        def refused() -> bool:
            fill()  # segments that are shipped and sealed meanwhile give room back
            bodies = [clients.chat(1)] * 8
            statuses = set(
                pool.map(lambda body: clients.post(house, key, body).status_code, bodies)
            )
            assert statuses <= {200, 503}, statuses
            return statuses == {503}

        waiting.eventually(refused, "a full disk to be noticed")
        request_id = clients.new_id()
        stream = clients.post(house, key, clients.chat(9, stream=True), request_id=request_id)
        assert (stream.status_code, stream.json()["error"]["code"]) == (
            *(503, "recording_unavailable"),
        )
        assert int(stream.headers["retry-after"]) >= 1
        asked = forebay_pb2.GenerateRequest(model=running.MODEL, prompt="A", max_tokens=4)
        with clients.grpc_door(house) as door, pytest.raises(grpc.RpcError) as caught:
            list(door.Generate(asked, metadata=(("authorization", f"Bearer {key}"),), timeout=30))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert house.attempts_of(request_id) == []
        job = batches.Job.accepted(house, key, 20, 10)
        waiting.eventually(lambda: job.state()["reason"] == "Resources", "a job that waits")
        assert job.rows() == []

    waiting.eventually(
        lambda: clients.post(house, key, clients.chat(1)).status_code == 200, "room to be noticed"
    )
    job.finished()

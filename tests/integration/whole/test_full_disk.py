"""No room for usage rows: requests are refused before a token is spent, and served once there is room."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from scheduler.contracts.v1 import forebay_pb2
from tests import services
from tests.integration.whole import batches, clients, running, waiting

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(180)]


@contextlib.contextmanager
def full(folder: Path) -> Iterator[None]:
    """Fill the file system of ``folder`` to the last byte."""
    filler = folder / "filler"
    try:
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"\0" * 65536):
                pass
        yield
    finally:
        filler.unlink()


def test_refused_until_there_is_room(house: running.Running, key: str) -> None:
    spool = house.state / "spool"
    services.require(spool.is_mount(), "the right to mount a tmpfs")
    job = batches.Job.submit(house, key, 40, 60)
    sent: list[tuple[str, httpx.Response]] = []

    def refused() -> bool:
        sent.append((clients.new_id(), clients.post(house, key, clients.chat(1))))
        return sent[-1][1].status_code == 503

    with full(spool):
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
        assert all(answer.status_code == 200 for _, answer in sent[:-1])
        assert house.attempts_of(request_id) == []
        assert not job.state()["ended_us"]

    waiting.eventually(
        lambda: clients.post(house, key, clients.chat(1)).status_code == 200, "room to be noticed"
    )
    job.finished()

"""What gRPC reads of an engine's events."""

import grpc
import pytest

from scheduler.contracts import usage
from tests.unit.gateway import harness
from tests.unit.gateway.test_grpc import ANN, chat, stub


@pytest.mark.parametrize(
    "said", [b"data: {oops\n\n", b'data: {"choices": [5]}\n\n', b'data: {"choices": 5}\n\n']
)
async def test_what_is_no_chunk_is_the_engines_failure_and_not_ours(said: bytes) -> None:
    """HTTP passes an engine's bytes on; gRPC has to read them."""

    async def odd(received: harness.Received, out: harness.Out) -> None:
        await out.send(harness.PROMPT, harness.data(said, 7))
        await out.gone()

    async with harness.one_replica(odd) as (served, _), stub(served) as api:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await api.Generate(chat(), metadata=ANN).read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(caught.value.trailing_metadata() or ())["x-forebay-code"] == "engine_failed"
        (row,) = await served.rows(1)
        assert row.payer is usage.Payer.PLATFORM
        await served.idle()

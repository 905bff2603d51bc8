"""Threads that hang keep nobody from ending."""

import asyncio
import threading

import pytest

from scheduler.runtime import apart


def test_an_event_loop_ends_while_a_call_on_its_threads_hangs() -> None:
    over, begun, ended = threading.Event(), threading.Event(), threading.Event()

    def hangs() -> None:
        begun.set()
        over.wait(60)
        ended.set()

    async def body() -> None:
        asyncio.get_running_loop().set_default_executor(apart.Threads())
        call = asyncio.ensure_future(asyncio.to_thread(hangs))
        assert await asyncio.to_thread(begun.wait, 20)
        call.cancel()

    asyncio.run(body())
    assert not ended.is_set()
    over.set()
    assert ended.wait(20)


async def test_a_call_apart_returns_or_raises_what_it_would() -> None:
    assert await asyncio.wrap_future(apart.call(lambda: 7)) == 7

    def fails() -> None:
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        await asyncio.wrap_future(apart.call(fails))

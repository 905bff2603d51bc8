"""The end of an answer waits until its record is on disk, and nothing before it does."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from scheduler.contracts import errors, frames, usage
from tests.unit.gateway import harness
from tests.unit.gateway.asking import http
from tests.unit.gateway.test_forgiven import billed
from tests.unit.gateway.test_quotas import book, used

CHAT = "/v1/chat/completions"


class SlowDisk:
    """Holds every sync of a sink up until `spun`."""

    def __init__(self, served: harness.Served, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.spun = asyncio.Event(), asyncio.Event()
        self._really: Callable[[], Awaitable[None]] = served.sink.sync
        monkeypatch.setattr(served.sink, "sync", self._sync)

    async def _sync(self) -> None:
        self.asked.set()
        await self.spun.wait()
        await self._really()


async def failing(received: harness.Received, out: harness.Out) -> None:
    """Answer with two tokens, then fail."""
    await out.send(harness.PROMPT, harness.data(harness.chat_event({"content": "Hello"}), 7))
    await out.send(harness.data(harness.chat_event({"content": " world"}), 8))
    await out.error(frames.Error(errors.Internal.code, "the engine broke", 500))


@pytest.mark.parametrize(
    ("script", "end"), [(harness.hello, "data: [DONE]"), (failing, "the engine broke")]
)
async def test_a_stream_goes_on_and_its_end_waits(
    script: harness.Script, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with harness.one_replica(script) as (served, _):
        disk = SlowDisk(served, monkeypatch)
        got: list[str] = []

        async def read() -> None:
            body = harness.chat_body(stream=True)
            async with http(served) as session, session.stream("POST", CHAT, json=body) as answer:
                async for piece in answer.aiter_text():
                    got.append(piece)

        reading = asyncio.create_task(read())
        await harness.until(lambda: " world" in "".join(got))
        async with asyncio.timeout(20):
            await disk.asked.wait()
        assert served.closed_yet()
        assert end not in "".join(got)
        assert served.sink.synced == 0
        disk.spun.set()
        await reading
        assert end in "".join(got)
        assert served.sink.synced == len(served.sink.rows)


async def test_a_whole_answer_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async with harness.one_replica(harness.hello) as (served, _):
        disk = SlowDisk(served, monkeypatch)
        async with http(served) as session:
            asked = asyncio.create_task(session.post(CHAT, json=harness.chat_body()))
            async with asyncio.timeout(20):
                await disk.asked.wait()
            assert [row.outcome for row in served.closed()] == [usage.Outcome.OK]
            assert not asked.done()
            disk.spun.set()
            assert (await asked).status_code == 200


async def test_a_refusal_waits_for_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    async with harness.one_replica(harness.hello) as (served, _):
        disk = SlowDisk(served, monkeypatch)
        async with http(served) as session:
            body = harness.chat_body(model="nobody-has-it")
            assert (await session.post(CHAT, json=body)).status_code == 404
        disk.spun.set()


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_whose_record_is_not_kept_is_the_platforms(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client is told that it failed, and sends it again: its team would pay twice."""
    quotas = book(tokens_per_day=1000)

    async def refuses() -> None:
        raise errors.RecordingUnavailable("the disk does not answer")

    async with harness.one_replica(harness.hello, quotas=quotas) as (served, _):
        monkeypatch.setattr(served.sink, "sync", refuses)
        async with http(served) as session:
            said = (await session.post(CHAT, json=harness.chat_body(stream=stream))).text
        assert errors.RecordingUnavailable.code in said
        assert "[DONE]" not in said
        monkeypatch.undo()
        await served.idle()
        (row,) = served.closed()
        assert (row.outcome, row.payer) == (usage.Outcome.ERROR, usage.Payer.PLATFORM)
        assert billed(served.sink.rows) == used(quotas) == 0


async def test_rows_of_who_left_while_the_disk_wrote_get_there_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with harness.one_replica(harness.hello) as (served, _):
        disk = SlowDisk(served, monkeypatch)
        async with http(served) as session:
            asked = asyncio.create_task(session.post(CHAT, json=harness.chat_body()))
            await harness.until(served.closed_yet)
            async with asyncio.timeout(20):
                await disk.asked.wait()
            asked.cancel()
            await asyncio.wait({asked})
        await served.idle()
        disk.spun.set()
        await harness.until(lambda: served.sink.synced == len(served.sink.rows))

"""Going on with an answer: exact tokens across the seam, and frames that gather tokens under load."""

import asyncio
import json
from typing import Any, ClassVar

import pytest
from starlette import types

from engines.replica import app, engine, gather, response, seam, state
from engines.simulated import batching, core, replica, tokens
from engines.vllm import ledger
from gateway import emitted
from scheduler.contracts import clock, fleet, frames, resume, usage
from tests.unit.engines import asgi, scripted

SPELT = {
    9001: b"JK",
    9002: b"LM",
    9003: b"N",
    9004: b"OP",
    9005: b"Q",
    9006: "🦀".encode()[:2],
    9007: "🦀".encode()[2:],
}


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make the simulated engine sample these tokens, one after the other, then end."""
    told: list[int] = []
    plain = tokens.token_bytes

    def sample(self: batching.Sequence) -> int | None:
        at = len(self.output)
        if at >= len(told):
            return None
        self.output.append(told[at])
        return told[at]

    monkeypatch.setattr(batching.Sequence, "sample", sample)
    monkeypatch.setattr(tokens, "token_bytes", lambda n: SPELT.get(n) or plain(n))
    return told


async def answer(body: dict[str, Any], begun: resume.Resume | None = None) -> list[frames.Frame]:
    """Return the frames of a streamed completion."""
    inner = replica.Simulated(core.Options("m", time_scale=0.0), clock.SystemClock())
    options = app.Options(asgi.SECRET, fleet.Role.SHARED, 2, 1, state.About(replica_id="r-1"))
    served = app.build(inner, options, sink=usage.MemorySink(), time=clock.SystemClock())
    value = {"prompt": "x", "stream": True, "max_tokens": 9, **body}
    if begun is not None:
        value[resume.FIELD] = begun.to_json()
    async with inner.running():
        return (await asgi.post(served, asgi.identity(), value)).all


def text(found: list[frames.Frame]) -> str:
    payload = b"".join(f.payload for f in found if f.kind is frames.Kind.DATA).decode()
    events = [json.loads(line[6:]) for line in payload.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in event["choices"])


@pytest.mark.parametrize(
    ("said", "want"),
    [
        ([9001, 9002, 9003, 9004, 9005], "JK"),
        ([9001, 9002, 9003, 9005], "JKLMNQ"),
        ([9001, 9006, 9007, 9005], "JK🦀Q"),
    ],
)
async def test_every_cut_of_exact_tokens_g4_g6(says: list[int], said: list[int], want: str) -> None:
    """G4: stop ``LMNOP``; `JK|LM|N|OP` gives ``JK``, `JK|LM|N|Q` all; the same when killed after ``LM``.

    G6: the same when killed in the middle of a character.
    """
    says[:] = said
    body = {"stop": ["LMNOP"]}
    whole = await answer(body)
    assert text(whole) == want
    sent = emitted.Emitted()
    for cut, frame in enumerate(whole):
        if frame.kind is frames.Kind.PROMPT:
            sent.begin(frame)
            continue
        if frame.kind is not frames.Kind.DATA or b"[DONE]" in frame.payload:
            break
        sent.add(frame)
        if sent.why_not:
            break  # the end is out, and [DONE] with it
        for known in range(sent.resume(begun=True).shown, len(said)):
            # Whatever was sampled since, whether it was told ahead of its text or not.
            begun = sent.resume(begun=True)
            begun = resume.Resume(
                begun.prompt_token_ids, tuple(said[:known]), begun.shown, begun.chars, begun.created
            )
            rest = await answer(body, begun)
            assert text([*whole[: cut + 1], *rest]) == want, (cut, known)
            ids = [
                n
                for f in [*whole[: cut + 1], *rest]
                if f.kind is frames.Kind.DATA
                for n in f.token_ids
            ]
            assert ids == [n for f in whole if f.kind is frames.Kind.DATA for n in f.token_ids]


class TestLedger:
    """Which ids go out where an answer goes on."""

    SPELT: ClassVar[dict[int, str | None]] = {1: "JK", 2: "LM", 3: "N", 4: None, 5: "é"}

    def test_held_back_ids_go_out_once_with_their_text(self) -> None:
        book = ledger.Ledger(lambda n: self.SPELT[n])
        book.begin([1, 2], shown=1, chars=2)
        assert book.ahead == [2]
        book.add([3], "LM")
        assert (book.release(), book.ahead, book.said) == ([2], [3], 4)

    def test_half_a_character_is_ahead_of_its_text(self) -> None:
        book = ledger.Ledger(lambda n: self.SPELT[n])
        book.begin([1, 4], shown=1, chars=2)
        assert book.ahead == [4]
        book.add([5], "é")
        assert (book.release(), book.ahead) == ([4, 5], [])


@pytest.mark.parametrize(
    ("streams", "want"), [(0, 1), (1, 1), (32, 1), (33, 2), (65, 3), (97, 4), (5_000, 4)]
)
def test_more_streams_gather_more_tokens_up_to_a_few(streams: int, want: int) -> None:
    assert gather.tokens(streams) == want


class Sent:
    """Frames of a response as they go out."""

    def __init__(self) -> None:
        self.frames: list[frames.Frame] = []
        self._decoder = frames.Decoder()

    async def send(self, message: types.Message) -> None:
        self.frames += self._decoder.feed(message.get("body", b""))

    def data(self) -> list[tuple[int, ...]]:
        return [f.token_ids for f in self.frames if f.kind is frames.Kind.DATA]


async def say(reply: response.Response, tap: engine.Tap, n: int, reason: str | None = None) -> None:
    tap.sampled(1)
    tap.released(0, [n], 1)
    await reply.take(
        {"type": "http.response.body", "body": scripted.chunk("a", reason), "more_body": True}
    )


async def crowd(streams: int) -> tuple[Sent, engine.Tap, response.Response]:
    sent, tap = Sent(), engine.Tap(lambda: 1)
    tap.prompt([1, 2])
    reply = response.Response(sent.send, tap, framed=True, streams=lambda: streams)
    await scripted.begin(reply.take)
    return sent, tap, reply


async def test_the_first_token_and_the_last_never_wait_for_others() -> None:
    sent, tap, reply = await crowd(200)
    for n in range(10, 17):
        await say(reply, tap, n)
    assert sent.data() == [(10,), (11, 12, 13, 14)]
    await say(reply, tap, 17, "length")
    await reply.take(
        {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False}
    )
    assert reply.verdict() is None
    await reply.close(None)
    assert sent.data() == [(10,), (11, 12, 13, 14), (15, 16, 17), ()]
    assert sent.frames[-1].kind is frames.Kind.END
    assert sum(frame.chars for frame in sent.frames) == 8


async def test_with_few_streams_each_token_goes_out_at_once() -> None:
    sent, tap, reply = await crowd(3)
    for n in range(10, 14):
        await say(reply, tap, n)
    assert sent.data() == [(10,), (11,), (12,), (13,)]


async def test_a_token_waits_no_longer_than_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "LATEST_S", 0.001)
    sent, tap, reply = await crowd(200)
    await say(reply, tap, 10)
    await say(reply, tap, 11)
    async with asyncio.timeout(30):
        while len(sent.data()) < 2:  # noqa: ASYNC110 - a timer of the loop's own
            await asyncio.sleep(0.001)
    assert sent.data() == [(10,), (11,)]


async def test_the_end_of_an_answer_is_not_told_before_all_of_it_can_be() -> None:
    """Whoever has a finish_reason can't be resumed, so it waits for what follows it."""
    sent, tap, reply = await crowd(1)
    await say(reply, tap, 10)
    await say(reply, tap, 11, "stop")
    assert sent.data() == [(10,)]
    tap.finished(0, "stop")
    await reply.close(reply.counted("replica_lost", "gone", 502))
    assert sent.data() == [(10,)], "ids behind an answer's end would make it go on behind its end"


async def test_the_last_tokens_id_never_goes_out_before_its_text() -> None:
    """A frame that waits behind a slow reader must not take along what was handed out for the end."""
    sent, tap, reply = await crowd(200)
    await say(reply, tap, 10)
    await say(reply, tap, 11)  # waits to be gathered
    async with reply._order:  # the reader is behind: an earlier frame has its turn
        late = asyncio.ensure_future(reply._flush())
        await asyncio.sleep(0)
        await say(reply, tap, 12, "stop")
    await late
    assert sent.data() == [(10,)]
    tap.finished(0, "stop")
    await reply.close(reply.counted("replica_lost", "gone", 502))
    assert sent.data() == [(10,)]
    assert sum(frame.chars for frame in sent.frames) == 1


def test_the_seam_drops_the_opening_and_keeps_the_date() -> None:
    role = (
        b'data: {"created":9,"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
    )
    more = b'data: {"created": 9,"choices":[{"index":0,"delta":{"content":"\\"created\\":9"}}]}\n\n'
    at = seam.Seam(resume.Resume((1,), (2,), 1, 1, 77))
    assert at.event(role) == b""
    assert at.event(more) == more.replace(b'"created": 9', b'"created":77')
    fresh = seam.Seam(resume.Resume((1,), (2,)))
    assert fresh.event(role) == role


async def test_a_whole_batch_answer_tells_its_ids_as_they_come_and_goes_on_from_them() -> None:
    inner = replica.Simulated(core.Options("m", time_scale=0.0), clock.SystemClock())
    options = app.Options(asgi.SECRET, fleet.Role.SHARED, 2, 1, state.About(replica_id="r-1"))
    served = app.build(inner, options, sink=usage.MemorySink(), time=clock.SystemClock())
    value = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
    async with inner.running():
        batch = asgi.identity(tier="batch")
        found = await asgi.post(served, batch, value)
        plain = await asgi.post(served, asgi.identity("r2"), value)
        told = found.all
        parts = [f for f in told if f.kind is frames.Kind.DATA and not f.payload]
        assert len(parts) >= 2
        assert max(len(f.token_ids) for f in parts) < 2 * engine.SOME
        assert not [f for f in plain.all if f.kind is frames.Kind.DATA and not f.payload]
        assert found.token_ids() == plain.token_ids()
        sent = emitted.Emitted()
        for frame in told[: told.index(parts[1])]:
            if frame.kind is frames.Kind.PROMPT:
                sent.begin(frame)
            elif frame.kind is frames.Kind.DATA:
                sent.add(frame)
        begun = sent.resume(begun=False)
        assert len(begun.token_ids) >= engine.SOME
        rest = await asgi.post(served, batch, {**value, resume.FIELD: begun.to_json()})
    shown = begun.token_ids[: begun.shown]  # those ahead of their text come again
    assert (*shown, *rest.token_ids()) == tuple(found.token_ids())
    said = [json.loads(each.client_bytes)["choices"] for each in (found, rest)]
    assert said[0] == said[1]

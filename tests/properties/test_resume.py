"""An answer that is cut at any byte, again and again, reaches its client whole and once.

The replicas are real down to their engine, which is simulated and says the tokens that it is told; the
gateway's part is its own code for frames, for what was sent and for what follows a loss.
"""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Iterator
from typing import Any, ClassVar

import hypothesis
import pytest
from hypothesis import strategies

from engines.replica import app, gather, state
from engines.simulated import batching, core, replica, tokens
from gateway import dispatch, emitted
from gateway import replica as hop
from scheduler.contracts import clock, fleet, frames, requests, resume, usage
from tests.unit.engines import asgi

CRAB = "🦀".encode()
KANJI = "漢".encode()
# "Hello" and a stop string in pieces, characters in pieces, and what only begins like either.
SPELT = dict(
    enumerate(
        [
            *(b"Hello", b"Hel", b"lo", b" ", b"\n\n", b"\\", b'"role":"'),
            *(b"LM", b"L", b"MN", b"N", b"OP", b"P", b"LMNOP"),
            *(CRAB, CRAB[:1], CRAB[1:3], CRAB[3:], KANJI[:2], KANJI[2:]),
        ],
        start=9001,
    )
)
CUTS = 6
SAID: list[int] = []


@pytest.fixture(scope="module", autouse=True)
def _says() -> Iterator[None]:
    """Let the engine say `SAID`, then end."""
    plain = tokens.token_bytes

    def sample(self: batching.Sequence) -> int | None:
        at = len(self.output)
        if at >= len(SAID):
            return None
        self.output.append(SAID[at])
        return SAID[at]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching.Sequence, "sample", sample)
        patch.setattr(tokens, "token_bytes", lambda n: SPELT.get(n) or plain(n))
        yield


@dataclasses.dataclass
class Client:
    """Gets the payloads that a gateway passes on."""

    got: list[bytes] = dataclasses.field(default_factory=list)
    ids: list[int] = dataclasses.field(default_factory=list)

    @property
    def begun(self) -> bool:
        return bool(self.got)

    def prompt(self, frame: frames.Frame, version: str) -> None: ...

    def data(self, frame: frames.Frame) -> bool:
        if frame.payload:
            self.got.append(frame.payload)
        self.ids += frame.token_ids
        return True

    def restart(self) -> None:
        assert not self.got


@dataclasses.dataclass
class Record:
    """What `recording.Attempt` and a grant do with an answer's frames."""

    sent: emitted.Emitted
    first_token_us: ClassVar[int] = 0

    def prompt(self, frame: frames.Frame) -> None:
        self.sent.begin(frame)

    def prefilled(self) -> None: ...
    def first_token(self) -> None: ...


class Case:
    """One answer, whole and in pieces."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        self.path = path
        self.body = body
        inner = replica.Simulated(core.Options("m", time_scale=0.0), clock.SystemClock())
        options = app.Options(asgi.SECRET, fleet.Role.SHARED, 2, 1, state.About(replica_id="r-1"))
        self._served = app.build(inner, options, sink=usage.MemorySink(), time=clock.SystemClock())
        self.running = inner.running

    async def ask(self, begun: resume.Resume | None = None) -> bytes:
        """Return a replica's answer as it is on the wire."""
        value = self.body if begun is None else {**self.body, resume.FIELD: begun.to_json()}
        found = await asgi.run(
            self._served, "POST", self.path, asgi.headers(asgi.identity()), value
        )
        assert found.status == 200, found.json
        return bytes(found.body)

    async def whole(self, cuts: list[float]) -> tuple[Client, emitted.Emitted]:
        """Return what a client gets whose replicas die after these parts of what they would say."""
        client, sent = Client(), emitted.Emitted()
        losses = emitted.Losses(CUTS + 2, batch=False)
        job = dispatch.Job(_request(self.path), 1, "1", client, lambda: None, sent, losses)  # type: ignore[arg-type]
        begun: resume.Resume | None = None
        for cut in [*cuts, 1.0]:
            raw = await self.ask(begun)
            size = round(cut * (len(raw) - 1)) if cut < 1 else len(raw)
            record: Any = Record(sent)
            forwarding = dispatch._Forwarding(job, record, record, None, lambda _: None)
            for frame in frames.Decoder().feed(raw[:size]):
                if frame.kind is frames.Kind.END:
                    if forwarding.held is not None:
                        sent.add(forwarding.held)
                        client.data(forwarding.held)
                    return client, sent
                forwarding.take(frame)
            follows = losses.after(hop.Lost("cut", computed=True), sent, begun=client.begun)
            if follows is emitted.Next.RESUME:
                begun = sent.resume(begun=client.begun)
            elif follows is emitted.Next.RESTART:
                begun = None
                sent.clear()
                client.restart()
                client.ids.clear()
            else:
                assert sent.why_not == "its end was lost", losses.error()
                raise EndLost
        raise AssertionError("an answer without an end")


class EndLost(Exception):
    """What was cut off behind the end of the only choice is told to the client as an error."""


def _request(path: str) -> requests.InferenceRequest:
    caller = requests.Caller("t", "u", "k")
    return requests.InferenceRequest(
        asgi.identity().request_id, requests.Endpoint(path), {}, "m", requests.Tier.INTERACTIVE,  # type: ignore[arg-type]
        caller, stream=True, arrived_us=0,
    )  # fmt: skip


def _chunks(client: Client) -> list[dict[str, Any]]:
    lines = b"".join(client.got).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def _told(client: Client) -> dict[str, Any]:
    chunks = _chunks(client)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    deltas = [choice.get("delta", choice) for choice in choices]
    return {
        "text": "".join(d.get("content") or d.get("text") or "" for d in deltas),
        "ids": client.ids,
        "roles": sum("role" in delta for delta in deltas),
        "reasons": [c["finish_reason"] for c in choices if c["finish_reason"]],
        "dates": len({chunk["created"] for chunk in chunks}),
        "usage": [
            {**chunk["usage"], "prompt_tokens_details": None}
            for chunk in chunks
            if chunk.get("usage")
        ],
    }


@hypothesis.given(
    said=strategies.lists(strategies.sampled_from(sorted(SPELT)), min_size=1, max_size=10),
    cuts=strategies.lists(strategies.floats(0, 0.999), min_size=1, max_size=CUTS),
    stop=strategies.sampled_from([["LMNOP"], ["LMNOP", "Hello\n"], []]),
    path=strategies.sampled_from(["/v1/chat/completions", "/v1/completions"]),
    most=strategies.integers(1, 12),
    crowd=strategies.booleans(),
)
def test_no_cut_loses_or_repeats_anything(
    said: list[int], cuts: list[float], stop: list[str], path: str, most: int, crowd: bool
) -> None:
    what = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    asked = {"stop": stop, "stream_options": {"include_usage": True}, "max_tokens": most}

    async def compare() -> None:
        case = Case(path, {**what, **asked, "stream": True})
        async with case.running():
            undisturbed, counted = await case.whole([])
            with contextlib.suppress(EndLost):
                cut, sent = await case.whole(cuts)
                assert _told(cut) == _told(undisturbed)
                assert sent.tokens == counted.tokens

    SAID[:] = said
    with pytest.MonkeyPatch.context() as patch:
        if crowd:
            patch.setattr(gather, "FEW", 1)  # tokens share frames, as with many streams
            patch.setattr(gather, "tokens", lambda _: gather.MOST)
        asyncio.run(compare())


def test_a_cut_behind_the_first_token_repeats_nothing() -> None:
    """The first frame holds the role, the first token's text and its id, or nothing of them."""
    SAID[:] = [9001, 9001, 9004]
    what = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 9}

    async def compare() -> None:
        case = Case("/v1/chat/completions", what)
        async with case.running():
            raw = await case.ask()
            for size in range(0, len(raw), 13):
                with contextlib.suppress(EndLost):
                    client, _ = await case.whole([size / (len(raw) - 1)] if size else [0.0])
                    assert _told(client)["text"] == "HelloHello ", size

    asyncio.run(compare())

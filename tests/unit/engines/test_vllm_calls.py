"""What the engine did for a request, and which ids go out with which bytes."""

import dataclasses
from typing import Any

import pytest
from starlette import types

from engines.replica import engine
from engines.vllm import calls
from scheduler.contracts import requests

RID = "0190a1b2-0000-7000-8000-000000000001.1"


@dataclasses.dataclass
class Part:
    index: int
    token_ids: list[int]
    text: str
    finish_reason: str | None = None


@dataclasses.dataclass
class Output:
    outputs: list[Part]
    prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None
    finished: bool = False


@pytest.fixture
def taps() -> engine.Taps:
    return engine.Taps(lambda: 77)


def begin(running: calls.Calls, engine_id: str, choices: int = 1) -> calls.Call:
    call = running.begin(engine_id, {"prompt_token_ids": [5, 6]}, choices, lambda: None)
    assert call is not None
    return call


@pytest.mark.parametrize(
    ("engine_id", "number"),
    [(f"chatcmpl-{RID}", 0), (f"cmpl-{RID}-0", 0), (f"cmpl-{RID}-3", 3), (f"embd-{RID}-1", 1)],
)
def test_vllms_ids_lead_back_to_ours(taps: engine.Taps, engine_id: str, number: int) -> None:
    taps.open(RID)

    assert calls.Calls(taps).owner(engine_id) == (RID, number)


@pytest.mark.parametrize(
    "engine_id", ["chatcmpl-stranger", "cmpl-x-0", "cmpl", "", f"cmpl-{RID}-x"]
)
def test_what_is_not_ours_is_left_alone(taps: engine.Taps, engine_id: str) -> None:
    taps.open(RID)
    running = calls.Calls(taps)

    assert running.owner(engine_id) is None
    assert running.begin(engine_id, None, 1, lambda: None) is None


def test_a_request_is_counted_and_forgotten(taps: engine.Taps) -> None:
    tap = taps.open(RID)
    running = calls.Calls(taps)
    call = begin(running, f"chatcmpl-{RID}")
    call.note(Output([Part(0, [8], "a")], [5, 6], 1))
    call.note(Output([Part(0, [9], "b", "stop")]))
    call.release()

    assert tap.prompt_token_ids == (5, 6)
    assert (tap.prompt_tokens, tap.cached_tokens, tap.output_tokens) == (2, 1, 2)
    assert tap.first_token_us == 77
    assert tap.finish_reasons == {0: "stop"}
    assert tap.take() == {0: (8, 9)}
    assert list(running.of(RID)) == [f"chatcmpl-{RID}"]
    running.forget(RID)
    assert not running.of(RID)


def test_an_aborted_end_hands_nothing_out(taps: engine.Taps) -> None:
    """Its chunk is not sent, so its ids must not be either."""
    tap = taps.open(RID)
    call = begin(calls.Calls(taps), f"chatcmpl-{RID}")
    call.note(Output([Part(0, [8], "")], [5, 6]))
    call.note(Output([Part(0, [9], "held back", "abort")]))
    call.release()

    assert tap.take() == {}
    assert tap.output_tokens == 2
    assert tap.finish_reasons == {0: "abort"}


def test_choices_of_several_prompts_do_not_mix(taps: engine.Taps) -> None:
    tap = taps.open(RID)
    running = calls.Calls(taps)
    for number in (0, 1):
        call = begin(running, f"cmpl-{RID}-{number}", choices=2)
        call.note(Output([Part(1, [number], "x")], [5, 6]))
        call.release()

    assert tap.take() == {1: (0,), 3: (1,)}
    assert tap.prompt_tokens == 4


def test_an_embedding_counts_its_prompt_once(taps: engine.Taps) -> None:
    tap = taps.open(RID)
    call = begin(calls.Calls(taps), f"embd-{RID}-0")
    call.note_pooled(Output([], [5, 6, 7], 2, finished=True))

    assert (tap.prompt_tokens, tap.cached_tokens, tap.output_tokens) == (3, 2, 0)


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_ids_of_an_end_whose_text_is_never_sent_are_not_handed_out(
    taps: engine.Taps, reason: str
) -> None:
    tap = taps.open(RID)
    running = calls.Calls(taps)
    call = begin(running, f"chatcmpl-{RID}")
    call.note(Output([Part(0, [0], "x", reason)], [5, 6]))
    call.release()

    assert (tap.take(), tap.pending, tap.output_tokens) == ({}, False, 1)


def test_a_failure_is_told_to_the_tap(taps: engine.Taps) -> None:
    tap = taps.open(RID)
    begin(calls.Calls(taps), f"cmpl-{RID}-0").failed("EngineDeadError: gone")

    assert tap.failure == "EngineDeadError: gone"


class App:
    """An app that answers with given bodies; before each, the engine gives out one token."""

    def __init__(self, bodies: list[bytes], call: calls.Call | None = None) -> None:
        self._bodies = bodies
        self._call = call
        self.scope: types.Scope = {}

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        self.scope = scope
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for n, body in enumerate(self._bodies):
            if self._call is not None:
                self._call.note(Output([Part(0, [n], "x"), Part(1, [10 + n], "y")], [5, 6]))
            await send({"type": "http.response.body", "body": body, "more_body": True})


async def run(app: App, running: calls.Calls, tap: engine.Tap) -> list[Any]:
    """Return what the tap hands out at each message of the app."""
    taken: list[Any] = []

    async def send(message: types.Message) -> None:
        taken.append(tap.take())

    async def receive() -> types.Message:
        raise AssertionError("nobody asked for the body")

    scope = {"type": "http", "path": "/", "headers": [(b"x-request-id", RID.encode())]}
    await calls.Releasing(app, running)(scope, receive, send)
    return taken


async def test_ids_go_out_with_their_own_choices_event(taps: engine.Taps) -> None:
    tap = taps.open(RID)
    running = calls.Calls(taps)
    call = begin(running, f"chatcmpl-{RID}", choices=2)
    role = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
    first = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
    second = b'data: {"choices":[{"index":1,"delta":{"content":"y"}}]}\n\n'

    taken = await run(App([role, first, second], call), running, tap)

    assert taken == [{}, {}, {0: (0, 1)}, {1: (10, 11, 12)}]


async def test_text_in_or_behind_the_first_chunk_goes_out_with_its_ids(taps: engine.Taps) -> None:
    """Whoever resumed from such bytes without their ids would say the first token twice."""
    role = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":"%b"}}]}\n\n'
    first = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
    for body in (role % b"x", role % b"" + first):
        tap = taps.open(RID)
        running = calls.Calls(taps)
        call = begin(running, f"chatcmpl-{RID}")
        call.note(Output([Part(0, [9], "x")], [5, 6]))
        assert (await run(App([body]), running, tap))[1] == {0: (9,)}
        assert tap.take_chars() == 1
        taps.close(RID)


async def test_a_whole_answer_hands_out_all(taps: engine.Taps) -> None:
    tap = taps.open(RID)
    running = calls.Calls(taps)
    call = begin(running, f"cmpl-{RID}-0", choices=2)

    assert (await run(App([b'{"choices":[]}'], call), running, tap))[1] == {0: (0,), 1: (10,)}


def test_the_tier_is_the_priority(taps: engine.Taps) -> None:
    taps.open(RID).band = 2

    assert begin(calls.Calls(taps), f"cmpl-{RID}-0").priority == 2


class VLLMClientError(Exception):
    """vLLM's own for what a request did wrong, by its name; its other kinds derive from it."""


class Wrong(VLLMClientError):
    pass


@pytest.mark.parametrize(
    ("cause", "blames"),
    [(Wrong("token_id(s)\n [-1]"), True), (ValueError("a fault of ours"), False), (None, False)],
)
async def test_a_request_at_fault_is_told_from_a_fault_of_the_engine(
    taps: engine.Taps, cause: Exception | None, blames: bool
) -> None:
    """The web framework raises its own error from one for which it has a handler, but no status left."""
    tap = taps.open(RID)

    class Broken(App):
        async def __call__(self, *_: Any) -> None:
            raise RuntimeError("response already started") from cause

    kind = engine.Refused if blames else RuntimeError
    with pytest.raises(kind) as raised:
        await run(Broken([]), calls.Calls(taps), tap)
    assert str(raised.value) == ("token_id(s) [-1]" if blames else "response already started")


def test_an_abort_hands_on_the_ids_that_were_not_told_yet(taps: engine.Taps) -> None:
    """Of a batch sequence vLLM tells several tokens at once; the rest comes with its abort, as ids alone."""
    tap = taps.open(RID)
    running = calls.Calls(taps)
    call = begin(running, f"cmpl-{RID}-0")
    call.note(Output([Part(0, [7], "a")], [5, 6], 0))
    call.release()
    call.note(Output([Part(0, [8, 9], "bc", "abort")], finished=True))

    assert (tap.take(), list(tap.ahead)) == ({0: (7,)}, [8, 9])
    assert tap.output_tokens == 3


def test_only_a_batch_sequence_is_told_seldom(taps: engine.Taps) -> None:
    running = calls.Calls(taps)
    for number, tier in enumerate(requests.Tier):
        rid = f"{RID}{number}"
        taps.open(rid).band = tier.band
        assert begin(running, f"cmpl-{rid}-0").told_seldom is (tier is requests.Tier.BATCH)

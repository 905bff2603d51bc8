"""Strict JSON out of engines that have no number to give (case G11)."""

import base64
import json
import struct
from typing import Any

import pytest
from starlette import types

from engines.replica import engine
from scheduler.contracts import usage
from tests.unit.engines import asgi, scripted


def answering(*parts: bytes, kind: str) -> scripted.Script:
    async def script(inner: scripted.Scripted, key: str, tap: engine.Tap, send: types.Send) -> None:
        tap.prefilled(6)
        await scripted.begin(send, kind)
        for body in parts:
            await scripted.part(send, body)
        await scripted.part(send, b"", more=False)

    return script


def strict(raw: bytes) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return json.loads(raw, parse_constant=refuse)


async def ask(sink: usage.MemorySink, body: dict[str, Any], *parts: bytes) -> asgi.Call:
    kind = "text/event-stream" if body.get("stream") else "application/json"
    _, app = scripted.build(answering(*parts, kind=kind), sink)
    return await asgi.post(app, asgi.identity(), body)


CHAT = (
    '{"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":null,"logprobs":{"content":[{'
    '"token":"y","logprob":-0.5,"bytes":[121],"top_logprobs":[{"token":"y","logprob":-0.5},'
    '{"token":"n","logprob":%s}]}]}}]}'
)


@pytest.mark.parametrize("written", ["-9999.0", "-Infinity", "NaN"])
@pytest.mark.parametrize("stream", [True, False])
async def test_impossible_tokens_are_null_g11(
    sink: usage.MemorySink, written: str, stream: bool
) -> None:
    text = "naïve -9999.0 {}"
    raw = (CHAT % (text, written)).encode()
    parts = [b"data: " + raw + b"\n\n", b"data: [DONE]\n\n"] if stream else [raw]
    body = {"prompt": "x", "stream": stream, "logprobs": True, "top_logprobs": 2}
    call = await ask(sink, body, *parts)
    said = call.client_bytes.removesuffix(b"data: [DONE]\n\n").removeprefix(b"data: ")
    (choice,) = strict(said)["choices"]
    (entry,) = choice["logprobs"]["content"]
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, None]
    assert entry["logprob"] == -0.5
    assert entry["bytes"] == [121]
    assert choice["delta"]["content"] == text


async def test_completions_have_null_too_g11(sink: usage.MemorySink) -> None:
    logprobs = '{"tokens":["-9999.0"],"token_logprobs":[-9999.0],"top_logprobs":[{"a":-9999.0}]}'
    raw = b'{"choices":[{"index":0,"text":"t","logprobs":%s}]}' % logprobs.encode()
    said = strict((await ask(sink, {"prompt": "x", "logprobs": 1}, raw)).client_bytes)
    assert said["choices"][0]["logprobs"] == {
        "tokens": ["-9999.0"],
        "token_logprobs": [None],
        "top_logprobs": [{"a": None}],
    }


async def test_what_needs_no_change_keeps_its_bytes(sink: usage.MemorySink) -> None:
    text = b'data: {"choices":[{"index":0, "text":"-9999.0 NaN","logprobs":null}]}\n\n'
    done = b"data: [DONE]\n\n"
    call = await ask(sink, {"prompt": "x", "stream": True}, text, done)
    assert call.client_bytes == text + done
    raw = b'{"data": [{"index": 0, "embedding": [0.5, 1.0]}]}'
    assert (await ask(sink, {"input": "x"}, raw)).client_bytes == raw


def packed(*values: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


NAN = float("nan")


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ([0.5, 1.0], [0.5, NAN]),
        ([0.5, 1.0], [float("inf"), 1.0]),
        ([0.5, 1.0], [None, 1.0]),
        (packed(0.5, 1.0), packed(NAN, 1.0)),
    ],
)
async def test_a_vector_of_nan_fails_its_own_input_only_g11(
    sink: usage.MemorySink, good: Any, bad: Any
) -> None:
    rows = [{"index": n, "embedding": v} for n, v in enumerate([good, bad, good])]
    raw = json.dumps({"object": "list", "data": rows, "usage": {"prompt_tokens": 6}}).encode()
    call = await ask(sink, {"input": ["a", "b", "c"]}, raw)
    first, second, third = strict(call.client_bytes)["data"]
    assert first["embedding"] == third["embedding"] == good
    assert second["embedding"] is None
    assert second["error"]["code"] == "not_finite"
    assert "input[1]" in second["error"]["message"]
    assert call.end.prompt_tokens == 6

    alone = json.dumps({"data": [{"index": 0, "embedding": bad}]}).encode()
    refused = (await ask(sink, {"input": "b"}, alone)).error
    assert (refused.code, refused.status) == ("bad_request", 400)
    assert "no finite vector" in refused.message


async def test_another_packing_is_its_readers_to_judge(sink: usage.MemorySink) -> None:
    raw = json.dumps({"data": [{"index": 0, "embedding": packed(NAN)}]}).encode()
    body = {"input": "x", "encoding_format": "base64", "embed_dtype": "float16"}
    assert (await ask(sink, body, raw)).client_bytes == raw

"""The engines behind every subject of the gateway bench: instant answers, or a token each 20 ms.

One process listens on several ports, one a replica. It speaks plain OpenAI to the peers and frames to
whoever accepts them, with the same payload. Usage: ``gateway_mock.py REPLICAS``; prints its addresses.
"""

import asyncio
import itertools
import json
import re
import sys

import httptools
import uvloop

from scheduler.contracts import frames

TOKEN_S = 0.02
PROMPT_TOKENS = 500  # of a 2 KB body
_MAX_TOKENS = re.compile(rb'"max_tokens": ?(\d+)')
_STREAM = re.compile(rb'"stream": ?true')
_USED = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 8, "total_tokens": PROMPT_TOKENS + 8}
_WHOLE = json.dumps(
    {
        "id": "chatcmpl-bench",
        "object": "chat.completion",
        "created": 1,
        "model": "chat",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Water finds its own level here."},
                "finish_reason": "stop",
            }
        ],
        "usage": _USED,
    }
).encode()


def _event(delta: dict[str, str], reason: str | None = None) -> bytes:
    chunk = {
        "id": "chatcmpl-bench",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "chat",
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}],
    }
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


_FIRST = _event({"role": "assistant", "content": ""})
# Two in turn: LiteLLM ends a stream that says the same a hundred times as a fault of the model.
_TOKENS = [_event({"content": content}) for content in (" water", " level")]
TOKEN = _TOKENS[0]
_LAST = _event({}, "length")
_DONE = b"data: [DONE]\n\n"
_PROMPT = frames.Frame.of(frames.Kind.PROMPT, token_ids=range(PROMPT_TOKENS)).encode()


def _data(payload: bytes, *token_ids: int, chars: int = 0) -> bytes:
    return frames.Frame.of(frames.Kind.DATA, payload, token_ids, chars=chars).encode()


def _end(output: int) -> bytes:
    return frames.End(("stop",), PROMPT_TOKENS, 0, output).frame().encode()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _head(kind: str) -> bytes:
    return (
        b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n" % kind.encode()
    )


def _json(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
        len(body),
        body,
    )


FRAMED = _head(frames.MEDIA_TYPE)
_SSE = _head("text/event-stream; charset=utf-8")
WHOLE_FRAMED = (
    FRAMED + _chunk(_PROMPT + _data(_WHOLE, *range(8), chars=31) + _end(8)) + b"0\r\n\r\n"
)
STREAM_BEGIN = _chunk(_PROMPT + _data(_FIRST))
_WHOLE_PLAIN = _json(_WHOLE)
_FRAMED_TOKENS = tuple(_chunk(_data(event, 7, chars=6)) for event in _TOKENS)
TOKEN_FRAMED = _FRAMED_TOKENS[0]
_PLAIN_TOKENS = tuple(map(_chunk, _TOKENS))
_MODELS = _json(
    json.dumps(
        {"object": "list", "data": [{"id": "chat", "object": "model", "max_model_len": 8192}]}
    ).encode()
)
_INFO = _json(b'{"model_path": "chat", "tokenizer_path": "", "is_generation": true}')
_OK = _json(b"{}")


class Engine(asyncio.Protocol):
    """One connection of one replica."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._url = b""
        self._body: list[bytes] = []
        self._framed = False
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvloop's
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._url = b""
        self._body = []
        self._framed = False

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"accept":
            self._framed = value == frames.MEDIA_TYPE.encode()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if not self._url.endswith(b"/chat/completions"):
            known = {b"/v1/models": _MODELS, b"/get_model_info": _INFO, b"/model_info": _INFO}
            self._write(known.get(self._url.partition(b"?")[0], _OK))
            return
        body = b"".join(self._body)
        if not _STREAM.search(body):
            self._write(WHOLE_FRAMED if self._framed else _WHOLE_PLAIN)
            return
        found = _MAX_TOKENS.search(body)
        tokens = int(found.group(1)) if found else 16
        if self._framed:
            self._write(FRAMED + STREAM_BEGIN)
        else:
            self._write(_SSE + _chunk(_FIRST))
        self._tick(tokens, tokens)

    def _tick(self, left: int, tokens: int) -> None:
        if left == 0:
            if self._framed:
                self._write(_chunk(_data(_LAST) + _data(_DONE) + _end(tokens)) + b"0\r\n\r\n")
            else:
                self._write(_chunk(_LAST + _DONE) + b"0\r\n\r\n")
            return
        if not self._paused:  # an engine sends nothing to who does not read
            self._write((_FRAMED_TOKENS if self._framed else _PLAIN_TOKENS)[left & 1])
        self._timer = self._loop.call_later(TOKEN_S, self._tick, left - 1, tokens)

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


async def main(replicas: int) -> None:
    """Listen until killed."""
    loop = asyncio.get_running_loop()
    servers = [
        await loop.create_server(Engine, "127.0.0.1", 0, backlog=1024)
        for _ in itertools.repeat(0, replicas)
    ]
    addresses = ["{}:{}".format(*server.sockets[0].getsockname()[:2]) for server in servers]
    print(json.dumps(addresses), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))

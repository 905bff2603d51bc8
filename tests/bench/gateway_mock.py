"""The engines behind every subject of the gateway bench: instant answers, or a token each 20 ms.

One process listens on several ports, one a replica. It speaks plain OpenAI to the peers and frames to
whoever accepts them, with the same payload. As in an engine, all streams of a replica get their tokens at
the same step. Usage: ``gateway_mock.py REPLICAS``; prints its addresses.
"""

import asyncio
import functools
import json
import re
import sys

import httptools
import uvloop

from scheduler.contracts import frames, trunks

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


def chunk(data: bytes) -> bytes:
    """Return ``data`` as a chunk of a body."""
    return _chunk(data)


def record(number: int, data: bytes) -> bytes:
    """Return frames as a stream's record on a trunk."""
    return trunks.RECORD.pack(number, len(data)) + data


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
TRUNK = _head(trunks.MEDIA_TYPE)
_SSE = _head("text/event-stream; charset=utf-8")
WHOLE_FRAMED = (
    FRAMED + _chunk(_PROMPT + _data(_WHOLE, *range(8), chars=31) + _end(8)) + b"0\r\n\r\n"
)
FIRST_FRAMES = _PROMPT + _data(_FIRST)
STREAM_BEGIN = _chunk(FIRST_FRAMES)
_WHOLE_PLAIN = _json(_WHOLE)
TOKEN_FRAMES = tuple(_data(event, 7, chars=6) for event in _TOKENS)
_FRAMED_TOKENS = tuple(map(_chunk, TOKEN_FRAMES))
TOKEN_FRAMED = _FRAMED_TOKENS[0]
_LAST_FRAMES = _data(_LAST) + _data(_DONE)
_PLAIN_TOKENS = tuple(map(_chunk, _TOKENS))
_MODELS = _json(
    json.dumps(
        {"object": "list", "data": [{"id": "chat", "object": "model", "max_model_len": 8192}]}
    ).encode()
)
_INFO = _json(b'{"model_path": "chat", "tokenizer_path": "", "is_generation": true}')
_OK = _json(b"{}")


class Replica:
    """One engine: its steps, and the trunks that lead to it."""

    def __init__(self) -> None:
        self.trunks: dict[str, Engine] = {}
        self._running: dict[Engine, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def begin(self, stream: "Engine", tokens: int) -> None:
        """Let a stream have so many tokens, one a step."""
        self._running[stream] = tokens
        if self._timer is None:
            self._due = asyncio.get_running_loop().time()
            self._next()

    def end(self, stream: "Engine") -> None:
        """Forget a stream."""
        self._running.pop(stream, None)

    def _next(self) -> None:
        loop = asyncio.get_running_loop()
        self._due = max(self._due + TOKEN_S, loop.time())
        self._timer = loop.call_at(self._due, self._step) if self._running else None

    def _step(self) -> None:
        for stream, left in list(self._running.items()):
            if left:
                self._running[stream] = left - 1
                stream.token(left)
            else:
                del self._running[stream]
                stream.last()
        for trunk in self.trunks.values():
            trunk.flush()
        self._next()


class Engine(asyncio.Protocol):
    """One connection of one replica: a client's, or a trunk."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._url = b""
        self._body: list[bytes] = []
        self._framed = False
        self._named = ""
        self._trunk: Engine | None = None  # where this stream's frames go
        self._number = 0
        self._tokens = 0
        self._paused = False
        self._said: list[bytes] = []  # on this trunk, in this step
        self._held: set[int] = set()  # streams of this trunk whose readers are behind

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvloop's
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._replica.end(self)
        self._replica.trunks = {n: e for n, e in self._replica.trunks.items() if e is not self}

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
        self._named = ""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"accept":
            self._framed = value == frames.MEDIA_TYPE.encode()
        elif name.lower() == trunks.HEADER.encode():
            self._named = value.decode()

    def on_headers_complete(self) -> None:
        if self._url == trunks.PATH.encode():
            self._replica.trunks[self._named] = self
            self._write(TRUNK)

    def on_body(self, body: bytes) -> None:
        if self._url == trunks.PATH.encode():
            word, number = trunks.WORD.unpack(body)  # the bench's gateway sends one at a time
            (self._held.add if word == trunks.PAUSE else self._held.discard)(number)
        else:
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
        self._tokens = int(found.group(1)) if found else 16
        self._trunk = None
        wanted = trunks.parse(self._named)
        if wanted is not None and (trunk := self._replica.trunks.get(wanted[0])) is not None:
            self._trunk, self._number = trunk, wanted[1]
            self._write(FRAMED)
            self._say(FIRST_FRAMES)
            trunk.flush()
        elif self._framed:
            self._write(FRAMED + STREAM_BEGIN)
        else:
            self._write(_SSE + _chunk(_FIRST))
        self._replica.begin(self, self._tokens)

    def token(self, left: int) -> None:
        """Send one; an engine sends nothing to who does not read."""
        if self._trunk is not None:
            if self._number not in self._trunk._held:
                self._say(TOKEN_FRAMES[left & 1])
        elif not self._paused:
            self._write((_FRAMED_TOKENS if self._framed else _PLAIN_TOKENS)[left & 1])

    def last(self) -> None:
        """End the answer."""
        if self._trunk is not None:
            self._say(_LAST_FRAMES + _end(self._tokens))
            self._write(b"0\r\n\r\n")
        elif self._framed:
            self._write(_chunk(_LAST_FRAMES + _end(self._tokens)) + b"0\r\n\r\n")
        else:
            self._write(_chunk(_LAST + _DONE) + b"0\r\n\r\n")

    def _say(self, data: bytes) -> None:
        if self._trunk is not None:
            self._trunk._said.append(record(self._number, data))

    def flush(self) -> None:
        """Send what this trunk's streams have said in this step."""
        if self._said:
            self._write(_chunk(b"".join(self._said)))
            self._said.clear()

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


async def main(replicas: int) -> None:
    """Listen until killed."""
    loop = asyncio.get_running_loop()
    servers = []
    for _ in range(replicas):
        made = functools.partial(Engine, Replica())
        servers.append(await loop.create_server(made, "127.0.0.1", 0, backlog=1024))
    addresses = ["{}:{}".format(*server.sockets[0].getsockname()[:2]) for server in servers]
    print(json.dumps(addresses), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))

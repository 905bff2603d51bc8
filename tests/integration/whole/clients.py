"""Clients over HTTP: whole answers, and streams that are read in a thread while things happen."""

import contextlib
import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import httpx

from scheduler.contracts.v1 import forebay_pb2_grpc
from tests.integration.whole import running

_numbers = itertools.count(1)
CHAT = "/v1/chat/completions"


def chat(tokens: int, **more: Any) -> dict[str, Any]:
    """Return a chat request's body for exactly ``tokens`` tokens."""
    return {
        "model": running.MODEL,
        "messages": [{"role": "user", "content": "Tell me of the river and the mill"}],
        "max_tokens": tokens,
        "ignore_eos": True,
        **more,
    }


def new_id() -> str:
    """Return a caller's own request id, by which its usage rows are found."""
    return f"caller-{next(_numbers)}"


def post(
    house: running.Running, key: str, body: Any, *, request_id: str = "", path: str = CHAT
) -> httpx.Response:
    """Send a request and return the whole answer; ``body`` is sent as it is if it is bytes."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    if request_id:
        headers["X-Request-Id"] = request_id
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return house.client.post(house.http + path, content=content, headers=headers)


@contextlib.contextmanager
def grpc_door(house: running.Running) -> Iterator[forebay_pb2_grpc.InferenceStub]:
    """Open a gRPC channel to the gateway."""
    options = (("grpc.enable_http_proxy", 0), ("grpc.max_send_message_length", -1))
    with grpc.insecure_channel(house.grpc, options=options) as channel:
        yield forebay_pb2_grpc.InferenceStub(channel)


class Stream:
    """A streamed chat answer, read in a thread.

    Args:
        house: where.
        key: whose.
        tokens: how long the answer is.
        leave_after: the client goes away after so many tokens; 0: it stays.

    Attributes:
        pieces: the texts so far.
        reason: the finish reason, "" if none came.
        done: whether `[DONE]` came.
        error: the error object that came, if one did.
        broken: what the client library raised, "" if nothing.
    """

    def __init__(
        self, house: running.Running, key: str, tokens: int, *, leave_after: int = 0
    ) -> None:
        self.request_id = new_id()
        self.pieces: list[str] = []
        self.reason = ""
        self.done = False
        self.error: dict[str, Any] | None = None
        self.broken = ""
        self._first = threading.Event()
        self._leave_after = leave_after
        self._body = chat(tokens, stream=True)
        self._client = house.client
        self._url = house.http + CHAT
        self._headers = {"Authorization": f"Bearer {key}", "X-Request-Id": self.request_id}
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def whole(self) -> bool:
        """Whether the client has reason to believe that the answer is complete."""
        return self.done and bool(self.reason) and self.error is None and not self.broken

    @property
    def cut(self) -> bool:
        """Whether the client was told clearly that it is not."""
        return self.error is not None and not self.done and not self.reason and not self.broken

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._thread.is_alive()

    def begun(self) -> "Stream":
        """Wait for the first token."""
        assert self._first.wait(60), f"no token came: {self.error} {self.broken}"
        assert self.pieces, f"no token came: {self.error} {self.broken}"
        return self

    def ended(self) -> "Stream":
        """Wait for the end, whichever it is."""
        self._thread.join(180)
        assert not self._thread.is_alive(), "the stream does not end"
        return self

    def leave(self) -> None:
        """Go away after the next token."""
        self._leave_after = 1

    def _read(self) -> None:
        try:
            with self._client.stream(
                "POST", self._url, json=self._body, headers=self._headers
            ) as answer:
                if answer.status_code != 200:
                    answer.read()
                    self.error = answer.json()["error"]
                    return
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        self._take(line.removeprefix("data: "))
                    if self._leave_after and len(self.pieces) >= self._leave_after:
                        return
        except httpx.HTTPError as error:
            self.broken = repr(error)
        finally:
            self._first.set()

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            self.done = True
            return
        chunk = json.loads(data)
        if "error" in chunk:
            self.error = chunk["error"]
            return
        for choice in chunk["choices"]:
            if text := choice["delta"].get("content"):
                self.pieces.append(text)
                self._first.set()
            self.reason = choice["finish_reason"] or self.reason

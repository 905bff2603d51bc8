"""The answer to a batch line as the batch runner gets it: tokens as they come, the whole answer at its end.

An answer that is short enough to be of one piece goes out as plain JSON, as to every client. From the first
ids on that come before their text it is a sequence of frames (`scheduler.contracts.frames`): PROMPT, DATA
frames of ids alone, one DATA frame with the JSON body, END; or ERROR, whose payload is the error's body
with ``status`` and ``retry_after_s`` beside it. So the runner can go on from these ids elsewhere.
"""

import collections

import msgspec
from uvicorn.protocols.http import httptools_impl

from gateway import exchange
from scheduler.contracts import errors, frames, quota

VERSION = "x-forebay-version"  # header: which version the ids belong to
_HEAD = (
    b"content-type: " + frames.MEDIA_TYPE.encode() + b"\r\n"
    b"x-forebay-request-id: %b\r\nx-request-id: %b\r\n"
    + VERSION.encode()
    + b": %b\r\ntransfer-encoding: chunked\r\n"
)
_OK = httptools_impl.STATUS_LINE[200]


class Line:
    """Where the answer to one try at a batch line goes.

    Attributes:
        begun: False: no text has gone out, so another replica may begin it anew, or go on from its ids.
    """

    __slots__ = ("_exchange", "_parts", "_prompt", "_request_id", "_telling", "_version")
    begun = False

    def __init__(self, asked: exchange.Exchange, request_id: str) -> None:
        self._exchange = asked
        self._request_id = request_id
        self._parts: collections.deque[bytes] = collections.deque()
        self._prompt: frames.Frame | None = None
        self._version = ""
        self._telling = False

    def prompt(self, frame: frames.Frame, version: str) -> None:
        """Keep the prompt's ids until there are others to tell."""
        self._version = version
        if self._telling:
            self._write(frame)
        else:
            self._prompt = frame

    def data(self, frame: frames.Frame) -> bool:
        """Keep text, tell ids; False: the runner is behind."""
        if frame.payload:
            self._parts.append(frame.payload)
            return True
        return self._write(frame)

    def _write(self, *items: frames.Frame) -> bool:
        data = b""
        if not self._telling:
            self._telling = True
            named = self._request_id.encode()
            head = _HEAD % (named, named, self._version.encode("latin-1", "replace"))
            data = self._exchange.head(_OK, head)
            if self._prompt is not None:
                items = (self._prompt, *items)
        encoded = b"".join(item.encode() for item in items)
        return self._exchange.write(data + self._exchange.chunk(encoded))

    def quotas(self, told: quota.Headers) -> None:
        """Nothing is told: the runner has no limits of its own."""

    async def drained(self) -> None:
        """Return once the runner has read enough."""
        await self._exchange.drained()

    def restart(self) -> None:
        """Forget the text of a lost replica; its ids are told anew, after its successor's prompt."""
        self._parts.clear()

    def finish(self) -> None:
        """Send the answer."""
        body = b"".join(self._parts)
        if not self._telling:
            self._exchange.answer(body, self._request_id)
            return
        self._write(frames.Frame(frames.Kind.DATA, body), frames.Frame(frames.Kind.END, b"{}"))
        self._exchange.end()

    def fail(self, error: errors.ForebayError) -> None:
        """Send an error in its place."""
        if not self._telling:
            self._exchange.refuse(error, self._request_id)
            return
        said = {
            **error.openai(),
            "status": error.status,
            "retry_after_s": error.retry_after_s or 0,
        }
        self._write(frames.Frame(frames.Kind.ERROR, msgspec.json.encode(said)))
        self._exchange.end()

"""Reads a replica's HTTP/1.1 response, cut anywhere, as frames. Pure: bytes in, frames out.

Our own replicas answer, so only what HTTP says of a response's framing is read: status, content type,
Content-Length, chunks, and the end of the connection. Frames are taken straight out of what was received
unless one of them is cut.
"""

import functools
from typing import Any

from scheduler.contracts import frames

_MAX_HEAD = 64 * 1024
_MAX_LINE = 1024  # of a chunk's size, extensions included, or of a trailer
_MAX_TEXT = (
    64 * 1024
)  # of an answer that is no frames: an engine's error, of which nobody reads more
_FRAMES = frames.MEDIA_TYPE.encode()
_NONE: tuple[frames.Frame, ...] = ()


class BadResponse(ValueError):
    """The bytes are no HTTP response, or none that we can read."""


class Reader:
    """One response.

    Attributes:
        status: the HTTP status, 0 before the head is whole.
        content_type: media type without parameters, in lower case.
        framed: the body is frames.
        keep_alive: the connection may serve another request after it.
        complete: every byte of it has come.
        text: the body, if it is not frames, up to 64 KiB.
    """

    __slots__ = (
        "_chunked", "_cut", "_left", "_rest", "_sized", "_trailer", "complete", "content_type", "framed",
        "keep_alive", "status", "text",
    )  # fmt: skip

    def __init__(self) -> None:
        self.status = 0
        self.content_type = b""
        self.framed = False
        self.keep_alive = True
        self.complete = False
        self.text = b""
        self._chunked = False
        self._sized = False
        self._left = (
            0  # bytes of the body, or of the chunk with its line's end, that are still to come
        )
        self._trailer = False
        self._rest = b""  # what was cut off of a head or of a line
        self._cut = bytearray()  # what was cut off of a frame

    def feed(self, data: bytes) -> "list[frames.Frame] | tuple[frames.Frame, ...]":
        """Take what has come; returns the frames that are now whole.

        Raises:
            BadResponse: it is no response.
            frames.FrameError: its body is no frames.
        """
        if self._rest:
            data, self._rest = self._rest + data, b""
        at = 0
        while not self.status:
            stop = data.find(b"\r\n\r\n", at)
            if stop < 0:
                if len(data) - at > _MAX_HEAD:
                    raise BadResponse("its head has no end")
                self._rest = data[at:]
                return _NONE
            self._head(data[at:stop])
            at = stop + 4
        found: list[frames.Frame] = []
        while at < len(data):
            if self.complete:
                raise BadResponse("it says more than its answer")
            if self._chunked and self.framed and not (self._left or self._trailer or self._cut):
                # By far the most tokens come so, one whole chunk of whole frames: no further calls.
                line = data.find(b"\r\n", at, at + _MAX_LINE)
                length = size(data[at:line]) if line > 0 else 0
                stop = line + 2 + length
                if length and stop + 2 <= len(data):
                    done = frames.scan(data, line + 2, stop, found)
                    if done < stop:
                        self._cut += data[done:stop]
                    at = stop + 2
                    continue
            at = self._chunk(data, at, found) if self._chunked else self._plain(data, at, found)
        return found

    def end(self) -> None:
        """Hear that the connection ended, which may be how the body ends."""
        if self.status and not self._chunked and not self._sized:
            self.complete = True

    def _plain(self, data: bytes, at: int, found: list[frames.Frame]) -> int:
        """Take a piece of a body without chunks; returns where it ends."""
        stop = min(len(data), at + self._left) if self._sized else len(data)
        self._body(data, at, stop, found)
        if self._sized:
            self._left -= stop - at
            self.complete = self._left == 0
        return stop

    def _chunk(self, data: bytes, at: int, found: list[frames.Frame]) -> int:
        """Take a piece of a chunk, or of what stands between chunks; returns where it ends."""
        if not self._left:
            stop = data.find(b"\r\n", at, at + _MAX_LINE)
            if stop < 0:
                if len(data) - at >= _MAX_LINE:
                    raise BadResponse("a chunk's size has no end")
                self._rest = data[at:]
                return len(data)
            if self._trailer:
                self.complete = stop == at
                return stop + 2
            length = size(data[at:stop])
            at = stop + 2
            if not length:
                self._trailer = True
                return at
            self._left = length + 2
        stop = at + self._left
        if stop <= len(data):  # to its end, which is a line's
            self._left = 0
            self._body(
                data, at, max(at, stop - 2), found
            )  # of that line's end one byte may be past
            return stop
        stop = len(data)
        self._body(data, at, min(stop, at + max(0, self._left - 2)), found)
        self._left -= stop - at
        return stop

    def _body(self, data: bytes, at: int, stop: int, found: list[frames.Frame]) -> None:
        if not self.framed:
            self.text = (self.text + data[at:stop])[:_MAX_TEXT]
            return
        cut = self._cut
        if cut:
            cut += data[at:stop]
            done = frames.scan(cut, 0, len(cut), found)
            del cut[:done]
            return
        done = frames.scan(data, at, stop, found)
        if done < stop:
            cut += data[done:stop]

    def _head(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        version, _, rest = first.partition(b" ")
        code = rest[:3]
        if version not in (b"HTTP/1.1", b"HTTP/1.0") or not code.isdigit():
            raise BadResponse("it is no HTTP/1.1")
        status = int(code)
        if status < 200:
            return  # an interim answer; the real one follows
        self.keep_alive = version == b"HTTP/1.1"
        for line in lines:
            name, _, value = line.partition(b":")
            name = name.lower()
            if name == b"content-type":
                self.content_type = value.partition(b";")[0].strip().lower()
            elif name == b"content-length":
                self._left, self._sized = _length(value), True
            elif name == b"transfer-encoding":
                self._chunked = value.strip().lower() == b"chunked"
                if not self._chunked:
                    raise BadResponse("its transfer encoding is not chunked")
            elif name == b"connection" and b"close" in value.lower():
                self.keep_alive = False
        if self._chunked:
            self._left, self._sized = 0, False
        self.framed = status == 200 and self.content_type == _FRAMES
        self.complete = status in (204, 304) or (self._sized and not self._left)
        self.keep_alive = self.keep_alive and (self._chunked or self._sized or self.complete)
        self.status = status


@functools.lru_cache(4096)  # a stream's chunks are of a few sizes
def size(line: bytes) -> int:
    """Return a chunk's size."""
    digits = line.partition(b";")[0].strip()
    try:
        found = int(digits, 16)
    except ValueError:
        raise BadResponse("a chunk's size is no number") from None
    if found < 0 or not digits.isalnum() or len(digits) > 15:
        raise BadResponse("a chunk's size is no number")
    return found


def _length(value: bytes) -> int:
    digits = value.strip()
    if not digits.isdigit() or len(digits) > 18:
        raise BadResponse("its Content-Length is no number")
    return int(digits)


def words(fault: Any) -> str:
    """Return what an exception says, in one line."""
    return str(fault) or type(fault).__name__

"""The frames on the hop from a replica to the gateway.

A response with the content type `MEDIA_TYPE` is a sequence of frames. A DATA frame holds bytes that
are ready for the client (whole SSE events, or a piece of the JSON body) and, beside them, the ids of
the tokens that these bytes stand for, so that the gateway forwards without parsing and still knows
every token when it has to resume elsewhere.

Wire format, network byte order, `HEADER`: kind u8, pad u8, choice u16, tokens u32, bytes u32; then
``tokens`` × u32 token ids; then ``bytes`` octets.
A stream that ends without an END or an ERROR frame was cut: the replica is lost.
"""

import dataclasses
import enum
import json
import struct
from collections.abc import Iterator
from typing import Any

MEDIA_TYPE = "application/vnd.forebay.frames"
HEADER = struct.Struct("!BxHII")
MAX_FRAME_BYTES = 64 * 1024 * 1024  # a non-streaming answer with logprobs stays far below


class Kind(enum.IntEnum):
    """What a frame says."""

    DATA = 1  # bytes for the client and the token ids that they stand for
    PROMPT = 2  # the prompt's token ids, once, before the first DATA; no bytes
    END = 3  # last frame of a complete answer; bytes are `End` as JSON, not for the client
    ERROR = 4  # last frame of a failed one; bytes are `Error` as JSON, not for the client


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """One frame; `payload` is bytes for the client in DATA, JSON for the gateway in END and ERROR."""

    kind: Kind
    payload: bytes = b""
    token_ids: tuple[int, ...] = ()
    choice: int = 0

    def encode(self) -> bytes:
        """Return the frame's wire form."""
        head = HEADER.pack(self.kind, self.choice, len(self.token_ids), len(self.payload))
        return head + struct.pack(f"!{len(self.token_ids)}I", *self.token_ids) + self.payload


@dataclasses.dataclass(frozen=True, slots=True)
class End:
    """What the replica counted for a complete answer.

    Attributes:
        finish_reasons: per choice, as the engine says (`stop`, `length`, `tool_calls`, …).
        prompt_tokens: whole prompt, cached part included.
        cached_tokens: prompt tokens that came from the prefix cache.
        output_tokens: over all choices.
    """

    finish_reasons: tuple[str, ...]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int

    def frame(self) -> Frame:
        """Return the END frame that carries this."""
        return Frame(Kind.END, json.dumps(dataclasses.asdict(self)).encode())

    @classmethod
    def parse(cls, payload: bytes) -> "End":
        """Read the payload of an END frame."""
        fields: dict[str, Any] = json.loads(payload)
        fields["finish_reasons"] = tuple(fields["finish_reasons"])
        return cls(**fields)


@dataclasses.dataclass(frozen=True, slots=True)
class Error:
    """Why an answer ended early.

    Attributes:
        code: a code of `scheduler.contracts.errors` (`preempted`, `replica_lost`, `bad_request`, …).
        message: one line for the caller.
        status: the HTTP status that the engine gave, if it refused the request.
        prompt_tokens: prompt tokens computed before the end, cached part included.
        cached_tokens: of these, from the prefix cache.
        output_tokens: tokens sampled before the end.
    """

    code: str
    message: str
    status: int = 500
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def frame(self) -> Frame:
        """Return the ERROR frame that carries this."""
        return Frame(Kind.ERROR, json.dumps(dataclasses.asdict(self)).encode())

    @classmethod
    def parse(cls, payload: bytes) -> "Error":
        """Read the payload of an ERROR frame."""
        return cls(**json.loads(payload))


_KINDS = frozenset(Kind)


class FrameError(ValueError):
    """The byte stream is not a sequence of frames."""


class Decoder:
    """Turns chunks of bytes, cut anywhere, into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def empty(self) -> bool:
        """Whether every byte fed so far belonged to a whole frame."""
        return not self._buffer

    def feed(self, chunk: bytes) -> Iterator[Frame]:
        """Take ``chunk`` and yield the frames that are now whole.

        Raises:
            FrameError: an unknown kind, or a length beyond `MAX_FRAME_BYTES`.
        """
        self._buffer += chunk
        at = 0
        try:
            while len(self._buffer) - at >= HEADER.size:
                kind, choice, tokens, size = HEADER.unpack_from(self._buffer, at)
                if kind not in _KINDS or 4 * tokens + size > MAX_FRAME_BYTES:
                    raise FrameError(
                        f"frame header out of range: kind {kind}, {tokens} tokens, {size} bytes"
                    )
                end = at + HEADER.size + 4 * tokens + size
                if len(self._buffer) < end:
                    break
                token_ids = struct.unpack_from(f"!{tokens}I", self._buffer, at + HEADER.size)
                yield Frame(Kind(kind), bytes(self._buffer[end - size : end]), token_ids, choice)
                at = end
        finally:
            del self._buffer[:at]

"""The frames on the hop from a replica to the gateway.

A response with the content type `MEDIA_TYPE` is a sequence of frames. A DATA frame holds bytes that
are ready for the client (whole SSE events, or a piece of the JSON body) and, beside them, the ids of
the tokens that these bytes stand for, so that the gateway forwards without parsing and still knows
every token when it has to resume elsewhere.

Wire format, network byte order, `HEADER`: kind u8, pad u8, choice u16, tokens u32, ahead u32, chars u32,
bytes u32; then ``tokens`` and ``ahead`` × u32 token ids; then ``bytes`` octets.
Text and ids need not end at the same place (a possible stop string is held back, a character may take
two tokens): ``chars`` counts the client's text, and ids whose text is not wholly out stand apart, ``ahead``
of it, so that whoever resumes loses nothing and no client sees the ids of a stop string.
A stream that ends without an END or an ERROR frame was cut: the replica is lost.
"""

import dataclasses
import enum
import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from scheduler.contracts import stored

MEDIA_TYPE = "application/vnd.forebay.frames"
HEADER = struct.Struct("!BxHIIII")
NO_ADAPTER = "adapter_missing"  # code of a replica's 429: others have seats there
MAX_FRAME_BYTES = 64 * 1024 * 1024  # a non-streaming answer with logprobs stays far below


class Kind(enum.IntEnum):
    """What a frame says."""

    DATA = 1  # bytes for the client and the token ids that they stand for
    PROMPT = 2  # the prompt's token ids, once, before the first DATA; bytes: why it can't be resumed, or none
    END = 3  # last frame of a complete answer; bytes are `End` as JSON, not for the client
    ERROR = 4  # last frame of a failed one; bytes are `Error` as JSON, not for the client


class Frame(NamedTuple):
    """One frame. A named tuple, and the ids left packed: one is made for every streamed token.

    Attributes:
        kind: what it says.
        payload: bytes for the client in DATA, JSON for the gateway in END and ERROR.
        packed: the token ids as they are on the wire, u32 in network byte order.
        choice: index of the choice that the ids and the text belong to.
        chars: Unicode code points of the choice's text in ``payload``; 0 where the replica can't tell.
            In PROMPT: how many of the ids came from the prefix cache.
        ahead: packed ids of the tokens behind those whose text the engine holds back, all or in part;
            they come again in ``packed``, with their text.
    """

    kind: Kind
    payload: bytes = b""
    packed: bytes = b""
    choice: int = 0
    chars: int = 0
    ahead: bytes = b""

    @classmethod
    def of(
        cls,
        kind: Kind,
        payload: bytes = b"",
        token_ids: Sequence[int] = (),
        choice: int = 0,
        chars: int = 0,
        ahead: Sequence[int] = (),
    ) -> "Frame":
        """Return a frame with these token ids."""
        return cls(kind, payload, pack(token_ids), choice, chars, pack(ahead))

    @property
    def tokens(self) -> int:
        """Return how many token ids it holds."""
        return len(self.packed) // 4

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return the token ids."""
        return unpack(self.packed)

    def encode(self) -> bytes:
        """Return the frame's wire form."""
        ahead = len(self.ahead) // 4
        head = HEADER.pack(
            self.kind, self.choice, self.tokens, ahead, self.chars, len(self.payload)
        )
        return head + self.packed + self.ahead + self.payload


def pack(token_ids: Sequence[int]) -> bytes:
    """Return token ids as they are on the wire."""
    return struct.pack(f"!{len(token_ids)}I", *token_ids)


def unpack(packed: bytes) -> tuple[int, ...]:
    """Return the token ids in ``packed``."""
    return struct.unpack(f"!{len(packed) // 4}I", packed)


@dataclasses.dataclass(frozen=True, slots=True)
class End:
    """What the replica counted for a complete answer; a resumed one counts as if it had never stopped.

    Attributes:
        finish_reasons: per choice, as the engine says (`stop`, `length`, `tool_calls`, …).
        prompt_tokens: whole prompt, cached part included.
        cached_tokens: prompt tokens that came from the prefix cache.
        output_tokens: over all choices.
        estimated: the engine told no usage, these are a guess.
    """

    finish_reasons: tuple[str, ...]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    estimated: bool = False

    def frame(self) -> Frame:
        """Return the END frame that carries this."""
        return Frame(Kind.END, json.dumps(dataclasses.asdict(self)).encode())

    @classmethod
    def parse(cls, payload: bytes) -> "End":
        """Read the payload of an END frame."""
        fields: dict[str, Any] = json.loads(payload)
        return stored.read(cls, fields, finish_reasons=tuple(fields["finish_reasons"]))


@dataclasses.dataclass(frozen=True, slots=True)
class Error:
    """Why an answer ended early, and what this attempt alone has computed.

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
        return stored.read(cls, json.loads(payload))


_KINDS: dict[int, Kind] = {int(kind): kind for kind in Kind}
_SIZE = HEADER.size
_unpack = HEADER.unpack_from
_new = tuple.__new__


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
        found: list[Frame] = []
        done = scan(self._buffer, 0, len(self._buffer), found)
        del self._buffer[:done]
        return iter(found)


def scan(data: bytes | bytearray, at: int, stop: int, found: list[Frame]) -> int:
    """Append the whole frames in ``data[at:stop]`` to ``found``.

    Returns:
        Where the first frame begins that is not whole: ``stop`` if there is none.

    Raises:
        FrameError: an unknown kind, or a length beyond `MAX_FRAME_BYTES`.
    """
    while stop - at >= _SIZE:
        number, choice, tokens, ahead, chars, size = _unpack(data, at)
        kind = _KINDS.get(number)
        if kind is None or 4 * (tokens + ahead) + size > MAX_FRAME_BYTES:
            raise FrameError(
                f"frame header out of range: kind {number}, {tokens} tokens, {size} bytes"
            )
        ids = at + _SIZE
        held = ids + 4 * tokens
        text = held + 4 * ahead
        end = text + size
        if end > stop:
            break
        held_back = bytes(data[held:text]) if ahead else b""
        packed, payload = bytes(data[ids:held]), bytes(data[text:end])
        # As `Frame(…)` does it, without its Python function: one for every token.
        found.append(_new(Frame, (kind, payload, packed, choice, chars, held_back)))
        at = end
    return at

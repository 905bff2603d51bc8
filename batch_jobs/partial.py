"""The beginning of a line's answer: what its journal keeps of it, and what a replica goes on from.

Pure. Ids stay packed as they are on the wire (u32): a file's lines may have long prompts.
"""

import dataclasses
import json
import struct
import zlib
from typing import Self

from scheduler.contracts import frames, resume

_PROMPT = struct.Struct("!IH")  # cached tokens, bytes of the version's name
_TOKENS = struct.Struct("!II")  # index of the first id, ids whose text was released


class PartialError(ValueError):
    """The bytes are none of ours."""


@dataclasses.dataclass(slots=True)
class Partial:
    """What is known of an answer.

    Attributes:
        version: of the model; ids mean something to it alone.
        prompt: the prompt's ids, packed.
        cached: of these, what the first try had from the prefix cache.
        tokens: ids of the answer whose text the engine had released, packed.
        ahead: ids behind them whose text it held back, packed.
    """

    version: str
    prompt: bytes
    cached: int = 0
    tokens: bytes = b""
    ahead: bytes = b""

    @property
    def known(self) -> int:
        """How many tokens of the answer are known."""
        return (len(self.tokens) + len(self.ahead)) // 4

    def prompt_data(self) -> bytes:
        """Return what a PROMPT entry holds."""
        name = self.version.encode()[:0xFFFF]
        return _PROMPT.pack(self.cached, len(name)) + name + zlib.compress(self.prompt, 1)

    @classmethod
    def of_prompt(cls, data: bytes) -> Self:
        """Read a PROMPT entry.

        Raises:
            PartialError: it is damaged.
        """
        try:
            cached, size = _PROMPT.unpack_from(data)
            name = data[_PROMPT.size : _PROMPT.size + size].decode()
            return cls(name, zlib.decompress(data[_PROMPT.size + size :]), cached)
        except (struct.error, zlib.error, UnicodeDecodeError) as error:
            raise PartialError(f"a prompt's entry is damaged: {error}") from None

    def tokens_data(self, frame: frames.Frame) -> bytes:
        """Return what the TOKENS entry holds that adds a DATA frame's ids to what is known."""
        start = len(self.tokens) // 4
        return _TOKENS.pack(start, start + frame.tokens) + frame.packed + frame.ahead

    def take(self, data: bytes) -> None:
        """Take a TOKENS entry.

        Raises:
            PartialError: it is damaged, or does not follow what is known.
        """
        if len(data) < _TOKENS.size or len(data) % 4:
            raise PartialError("an entry of tokens is cut")
        start, shown = _TOKENS.unpack_from(data)
        whole = self.tokens[: 4 * start] + data[_TOKENS.size :]
        if 4 * start > len(self.tokens) or 4 * shown > len(whole):
            raise PartialError("an entry of tokens does not follow the one before")
        self.tokens, self.ahead = whole[: 4 * shown], whole[4 * shown :]

    def into(self, payload: bytes) -> bytes:
        """Return a line's body with this beginning in it.

        Args:
            payload: the body's JSON object, which is never empty: it names a model.
        """
        begun = resume.Resume(
            prompt_token_ids=frames.unpack(self.prompt),
            token_ids=frames.unpack(self.tokens + self.ahead),
            shown=len(self.tokens) // 4,
            cached_tokens=self.cached,
        )
        value = json.dumps(begun.to_json(), separators=(",", ":")).encode()
        return payload[:-1] + b',"%b":' % resume.FIELD.encode() + value + b"}"

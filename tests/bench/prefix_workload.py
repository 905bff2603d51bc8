"""The prefix benches' requests: Mooncake's conversation trace, a sixteenth of its size.

A block of 512 tokens becomes one of 32 (a KV block of the test engine), a prompt keeps the blocks that it
shares with others, and a chunk of 2 KB behind a fingerprint becomes one of 128 bytes. Prompts are cut at
what the tiny model's context holds. Text is made of words that are one token each, so that a block of the
trace is a block of the engine.
"""

import dataclasses
import functools
import json
import random
from collections.abc import Sequence
from pathlib import Path

from engines import tinymodel
from scheduler.core import prefixes

TRACE = Path(__file__).parents[1] / "data" / "traces" / "mooncake_conversation.jsonl"
SCALE = 16
BLOCK_TOKENS = 512 // SCALE
BLOCK_BYTES = BLOCK_TOKENS * 1536  # of KV cache: 3 layers, 2 heads of 32, keys and values, float32
CHUNK_BYTES = prefixes.CHUNK_BYTES // SCALE
WHOLE = 3000  # requests in the file
MOST_BLOCKS = 59  # 1,888 tokens: the rest of 2,048 is for the answer


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One request of the workload.

    Attributes:
        arrived_s: seconds after the first, in the trace's own time.
        blocks: the trace's ids of the prompt's whole blocks.
        output_tokens: of the answer.
    """

    arrived_s: float
    blocks: tuple[int, ...]
    output_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, without the one that begins every text."""
        return len(self.blocks) * BLOCK_TOKENS

    @property
    def text(self) -> str:
        """The prompt."""
        return "".join([block_text(block) for block in self.blocks])


def load(count: int = WHOLE) -> list[Request]:
    """Return about ``count`` requests of the trace's 3,000, in its order.

    Whole conversations are drawn, by the block that tells them apart, so that as much is shared as in all.
    Those that come in one instant are spread over its 3 s.
    """
    found: list[Request] = []
    with TRACE.open(encoding="ascii") as lines:
        for line in lines:
            row = json.loads(line)
            blocks = tuple(row["hash_ids"][: row["input_length"] // 512][:MOST_BLOCKS])
            if blocks and _draw(blocks) * WHOLE < count:
                output = max(1, row["output_length"] // SCALE)
                found.append(Request(row["timestamp"] / 1000, blocks, output))
    return _spread(found)


def _draw(blocks: Sequence[int]) -> float:
    """Return a number in [0, 1) for a prompt's conversation; all begin with the same first block."""
    return random.Random(blocks[min(1, len(blocks) - 1)]).random()


def _spread(rows: Sequence[Request]) -> list[Request]:
    spread: list[Request] = []
    start = 0
    while start < len(rows):
        same = [r for r in rows[start : start + 1000] if r.arrived_s == rows[start].arrived_s]
        spread += [
            dataclasses.replace(each, arrived_s=each.arrived_s + 3.0 * n / len(same))
            for n, each in enumerate(same)
        ]
        start += len(same)
    return spread


@functools.cache
def words() -> tuple[str, ...]:
    """Return words that the tiny model's tokenizer takes as one token each, with the space before them."""
    vocabulary = tinymodel.tokenizer()["model"]["vocab"]
    found = (name[1:] for name in vocabulary if name.startswith("Ġ"))
    return tuple(
        sorted(word for word in found if word.isascii() and word.isalpha() and len(word) > 2)
    )


@functools.lru_cache(maxsize=100_000)
def block_text(block: int) -> str:
    """Return a block's text: 32 words drawn by its id."""
    draws = random.Random(block)
    return "".join([" " + draws.choice(words()) for _ in range(BLOCK_TOKENS)])


def token_ids(text: str) -> list[int]:
    """Return the ids that the tiny model's tokenizer gives such a text."""
    return [_ids()[word] for word in text.split()]


@functools.cache
def _ids() -> dict[str, int]:
    vocabulary = tinymodel.tokenizer()["model"]["vocab"]
    return {word: vocabulary["Ġ" + word] for word in words()}

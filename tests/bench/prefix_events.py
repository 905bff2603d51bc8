"""The second stage that was tried: an index that hears every replica's KV events (ADR 7).

vLLM tells each block that it stores (its hash, its parent's, its token ids) and each that it evicts, so that
whoever listens knows the cache exactly. Here the listener sits in the gateway and has the prompt's token
ids, which a gateway without a tokenizer has not: no way of reporting the events could know more.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from scheduler.contracts import ids
from scheduler.core import holders, prefixes


class Blocks:
    """The blocks that one replica holds."""

    def __init__(self) -> None:
        self._by_content: dict[tuple[Any, tuple[int, ...]], Any] = {}
        self._content: dict[Any, tuple[Any, tuple[int, ...]]] = {}

    def __len__(self) -> int:
        return len(self._content)

    def apply(self, event: Mapping[str, Any]) -> None:
        """Take one event."""
        kind = event["type"]
        if kind == "BlockStored":
            parent, size = event["parent_block_hash"], event["block_size"]
            token_ids = event["token_ids"]
            for number, block in enumerate(event["block_hashes"]):
                content = (parent, tuple(token_ids[number * size : (number + 1) * size]))
                self._by_content[content] = block
                self._content[block] = content
                parent = block
        elif kind == "BlockRemoved":
            for block in event["block_hashes"]:
                known = self._content.pop(block, None)
                if known is not None:
                    self._by_content.pop(known, None)
        elif kind == "AllBlocksCleared":
            self._by_content.clear()
            self._content.clear()

    def held(self, token_ids: Sequence[int], size: int) -> int:
        """Return how many of a prompt's tokens are cached, from the first on."""
        parent: Any = None
        for start in range(0, len(token_ids) - size + 1, size):
            block = self._by_content.get((parent, tuple(token_ids[start : start + size])))
            if block is None:
                return start
            parent = block
        return len(token_ids) // size * size


class EventIndex(prefixes.Index):
    """An index that knows what replicas hold by their events, and adds what is on its way.

    Args:
        blocks: each replica's.
        tokens: returns a prompt's token ids.
        size: tokens of a block.
        chunk_bytes: of the fingerprints.
    """

    def __init__(
        self,
        blocks: Mapping[ids.ReplicaId, Blocks],
        tokens: Callable[[prefixes.Prefix], Sequence[int]],
        size: int,
        chunk_bytes: int,
    ) -> None:
        super().__init__(chunk_bytes=chunk_bytes)
        self._blocks = blocks
        self._tokens = tokens
        self._size = size

    def holders(self, prefix: prefixes.Prefix, least: float = 0.0) -> holders.Holders:
        """Return the part of a prompt that each replica's cache holds, by its events."""
        token_ids = self._tokens(prefix)
        found = {}
        for name, blocks in self._blocks.items():
            share = blocks.held(token_ids, self._size) / max(1, len(token_ids))
            if share and share >= least:
                found[name] = share
        return holders.Holders.of(found)


async def listen(endpoint: str, blocks: Blocks) -> None:
    """Apply a replica's events until cancelled."""
    import zmq
    import zmq.asyncio

    with contextlib.closing(zmq.asyncio.Context.instance().socket(zmq.SUB)) as socket:
        socket.connect(endpoint)
        socket.subscribe(b"")
        while True:
            _, _, payload = await socket.recv_multipart()
            batch = msgspec.msgpack.decode(payload)
            for event in batch[1]:
                blocks.apply(event)
            await asyncio.sleep(0)

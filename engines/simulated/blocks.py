"""KV blocks with a prefix cache: a hash chain names each full block, the longest unused goes first.

Pure bookkeeping: no time, no engine.
"""

import collections
import hashlib
import struct
from collections.abc import Sequence


def chain(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the name of a full block: it stands for these tokens after everything before them."""
    packed = struct.pack(f"!{len(token_ids)}I", *token_ids)
    return hashlib.blake2b(parent + packed, digest_size=16).digest()


class BlockPool:
    """A fixed number of blocks.

    Args:
        count: blocks in all.
        size: tokens in a block.
    """

    def __init__(self, count: int, size: int) -> None:
        self.count = count
        self.size = size
        self._unused = list(range(count))
        self._users: collections.Counter[int] = collections.Counter()
        self._names: dict[int, bytes] = {}
        self._by_name: dict[bytes, int] = {}
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()

    @property
    def free(self) -> int:
        """Blocks that can be had: never used, or cached and idle."""
        return len(self._unused) + len(self._idle)

    def match(self, token_ids: Sequence[int]) -> list[int]:
        """Take the cached blocks of the longest known prefix; at least one token is left to compute."""
        taken: list[int] = []
        name = b""
        for start in range(0, max(0, len(token_ids) - 1) // self.size * self.size, self.size):
            name = chain(name, token_ids[start : start + self.size])
            block = self._by_name.get(name)
            if block is None:
                break
            self._idle.pop(block, None)
            self._users[block] += 1
            taken.append(block)
        return taken

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` blocks, evicting idle cached ones; None, and nothing taken, if there are too few."""
        if count > self.free:
            return None
        taken: list[int] = []
        for _ in range(count):
            block = self._unused.pop() if self._unused else self._evict()
            self._users[block] = 1
            taken.append(block)
        return taken

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        self._by_name.pop(self._names.pop(block), None)
        return block

    def seal(self, block: int, name: bytes) -> None:
        """Give a full block its name, so that others find it; the first block of a name keeps it."""
        if name not in self._by_name and block not in self._names:
            self._by_name[name] = block
            self._names[block] = name

    def release(self, blocks: Sequence[int]) -> None:
        """Stop using blocks; named ones stay cached, the tail of a chain is evicted before its head."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] > 0:
                continue
            del self._users[block]
            if block in self._names:
                self._idle[block] = None
            else:
                self._unused.append(block)

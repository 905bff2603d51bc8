"""Which replica is thought to hold which prompt's beginning: the prefix index.

A prompt is known here by its fingerprints: one 64-bit number for each chunk of its text, each standing
for everything up to there (`gateway.fingerprints` makes them). What a replica holds is predicted when a
request is dispatched to it, confirmed or corrected by the cached tokens that the engine counts, and
bounded by the size of its KV cache. A hint only: nothing breaks where it is wrong. Pure.
"""

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping

from scheduler.contracts import ids
from scheduler.core import holders

CHUNK_BYTES = 2048  # about 500 tokens of English; what a later chunk of a long prompt covers
FIRST_FRACTION = (
    8  # the first chunk is an eighth, then doubling: a system prompt of 500 bytes counts
)
COMMON = 16  # replicas; more holders than this and a quarter of all, and a prefix attracts nobody
BYTES_PER_TOKEN = 4.0  # until answers have told better
_LEAST_PAIRS = 64  # of one replica, however many there are
_MORE_DROPPED = 16  # pairs at once, beyond as many as are added
_LEARN = 0.05  # weight of one answer in the learned bytes per token


@dataclasses.dataclass(frozen=True, slots=True)
class Prefix:
    """A prompt's fingerprints.

    Attributes:
        chain: one for each whole chunk, first to last.
        size: bytes of the whole prompt text, also what no chunk covers.
    """

    chain: tuple[int, ...] = ()
    size: int = 0


NONE = Prefix()


def ends(count: int, chunk_bytes: int = CHUNK_BYTES) -> tuple[int, ...]:
    """Return where the first ``count`` chunks end, in bytes.

    They double from an eighth of a chunk to a whole one: 256, 512, 1024, 2048, and from there each
    chunk more: 4096, 6144 …
    """
    found: list[int] = []
    end = max(1, chunk_bytes // FIRST_FRACTION)
    while len(found) < count:
        found.append(end)
        end = end * 2 if end < chunk_bytes else end + chunk_bytes
    return tuple(found)


class _Shelf:
    """What one replica is thought to hold, least recently used first.

    The order is a plain dict's own: an `OrderedDict` takes twice the memory, and of the requests that find it
    full one in fifty waited 0.1 ms until it had made itself anew. What goes first is asked for once for
    all that goes, since a dict looks past what it has dropped before each time.

    Attributes:
        held: chunk → its bytes; negative until an answer has confirmed it.
        size: sum of the bytes.
        kv_tokens: size of its KV cache, 0 where that is not known.
        block_tokens: of one of its blocks.
        bit: its place in the index's masks.
    """

    __slots__ = ("bit", "block_tokens", "held", "kv_tokens", "size")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.held: dict[int, int] = {}
        self.size = 0
        self.kv_tokens = 0
        self.block_tokens = 0


class Index:
    """The prefixes of one model's replicas.

    Args:
        limit: (replica, chunk) pairs kept in all, or 64 for each replica if that is more; shared evenly,
            the least recently used go first.
        chunk_bytes: size of a later chunk, as the fingerprints were made.
    """

    def __init__(self, limit: int = 500_000, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._limit = limit
        self._chunk_bytes = chunk_bytes
        self._ends = ends(64, chunk_bytes)
        self._shelves: dict[ids.ReplicaId, _Shelf] = {}
        self._at: dict[int, ids.ReplicaId] = {}  # bit → replica
        self._masks: dict[int, int] = {}  # chunk → bits of the replicas that hold it
        self._pairs = 0
        self._widest: _Shelf | None = None  # gives up what others need of the limit
        self.bytes_per_token = BYTES_PER_TOKEN

    def __len__(self) -> int:
        """Return how many (replica, chunk) pairs are kept."""
        return self._pairs

    def tokens(self, prefix: Prefix) -> int:
        """Return the estimated length of a prompt in tokens."""
        return int(prefix.size / self.bytes_per_token)

    def holders(self, prefix: Prefix, least: float = 0.0) -> holders.Holders:
        """Return who holds how much of a prompt.

        Args:
            prefix: the prompt.
            least: shares below this are left out.
        """
        if not prefix.chain or not prefix.size:
            return holders.NOBODY
        bounds, masks, size = self._bounds(len(prefix.chain)), self._masks, prefix.size
        most = max(COMMON, len(self._shelves) // 4)
        levels: list[tuple[float, int]] = []
        seen = 0
        for depth in range(len(prefix.chain) - 1, -1, -1):
            share = bounds[depth] / size
            if share < least:
                break
            holding = masks.get(prefix.chain[depth], 0)
            if fresh := holding & ~seen:
                if holding.bit_count() > most:
                    break  # so many hold it (a system prompt) that it tells nobody apart
                seen |= fresh
                levels.append((share, fresh))
        return holders.Holders(levels, self._at, self._bit) if levels else holders.NOBODY

    def longest(self, prefix: Prefix, least: float = 0.0) -> dict[ids.ReplicaId, float]:
        """Return the same as one mapping, shares in (0, 1]."""
        return self.holders(prefix, least).shares()

    def first_new(self, prefix: Prefix) -> int | None:
        """Return the first fingerprint that nobody holds, or the last; None if there are none."""
        for chunk in prefix.chain:
            if chunk not in self._masks:
                return chunk
        return prefix.chain[-1] if prefix.chain else None

    def confirmed(self, prefix: Prefix, replica_id: ids.ReplicaId) -> float:
        """Return the share of a prompt that a replica surely held when it last answered for it."""
        shelf = self._shelves.get(replica_id)
        depth = 0
        if shelf is not None:
            while depth < len(prefix.chain) and shelf.held.get(prefix.chain[depth], -1) > 0:
                depth += 1
        return self._share(prefix, depth)

    def dispatched(self, prefix: Prefix, replica_id: ids.ReplicaId) -> None:
        """Predict that a replica will hold a prompt that goes to it now."""
        shelf = self._shelf(replica_id)
        chain, bounds = prefix.chain, self._bounds(len(prefix.chain))
        held, masks, bit = shelf.held, self._masks, shelf.bit
        before = len(held)
        # Deepest first, as an engine evicts the tail of a chain before its head.
        for depth in range(len(chain) - 1, -1, -1):
            chunk = chain[depth]
            if chunk not in held:
                size = bounds[depth] - (bounds[depth - 1] if depth else 0)
                held[chunk] = -size
                shelf.size += size
                masks[chunk] = masks.get(chunk, 0) | bit
        added = len(held) - before
        self._pairs += added
        self._trim(shelf, added)

    def returned(
        self,
        prefix: Prefix,
        replica_id: ids.ReplicaId,
        claimed: float,
        *,
        prompt_tokens: int,
        cached_tokens: int,
    ) -> None:
        """Learn from an answer what its replica held, and holds now.

        Where it had less in its cache than was `confirmed` when the request went there, the engine has
        evicted it, and so everything that was used less recently than what is missing.

        Args:
            prefix: the prompt.
            replica_id: who answered.
            claimed: what `confirmed` returned at dispatch.
            prompt_tokens: the whole prompt, as the engine counts.
            cached_tokens: of these, found in its cache.
        """
        shelf = self._shelves.get(replica_id)
        if shelf is None or prompt_tokens <= 0:
            return
        if prefix.size:
            said = prefix.size / prompt_tokens
            self.bytes_per_token += _LEARN * (said - self.bytes_per_token)
        bounds, before = self._bounds(len(prefix.chain)), len(shelf.held)
        # Text and tokens run in step only roughly, an engine counts whole blocks, and it always computes
        # the last one: a chunk and two blocks are no miss.
        slack = self._chunk_bytes + 2 * shelf.block_tokens * self.bytes_per_token
        had = cached_tokens / prompt_tokens * prefix.size + slack
        missing = next(
            (
                chunk
                for chunk, end in zip(prefix.chain, bounds, strict=False)
                if had < end <= claimed * prefix.size
            ),
            None,
        )
        if missing is not None and missing in shelf.held:
            self._drop_through(shelf, missing)
        for depth in range(len(prefix.chain) - 1, -1, -1):
            chunk = prefix.chain[depth]
            size = bounds[depth] - (bounds[depth - 1] if depth else 0)
            if shelf.held.pop(chunk, None) is None:
                self._add(shelf, chunk, size)
            else:
                shelf.held[chunk] = size  # at the end now
        self._trim(shelf, max(0, len(shelf.held) - before))

    def capacity(self, replica_id: ids.ReplicaId, blocks: int, block_tokens: int) -> None:
        """Note a replica's KV cache: how many blocks of how many tokens; 0 where it does not say."""
        shelf = self._shelf(replica_id)
        shelf.kv_tokens, shelf.block_tokens = blocks * block_tokens, block_tokens

    def gone(self, replica_id: ids.ReplicaId) -> None:
        """Forget a replica, or what an earlier incarnation of it held."""
        shelf = self._shelves.pop(replica_id, None)
        if shelf is None:
            return
        for chunk in list(shelf.held):
            self._remove(shelf, chunk)
        del self._at[shelf.bit]
        if self._widest is shelf:
            self._widest = None

    def keep(self, replicas: Collection[ids.ReplicaId]) -> None:
        """Forget every replica that is not among ``replicas``."""
        for name in [name for name in self._shelves if name not in replicas]:
            self.gone(name)

    def _shelf(self, replica_id: ids.ReplicaId) -> _Shelf:
        shelf = self._shelves.get(replica_id)
        if shelf is None:
            bit = _lowest_free(self._at)
            shelf = self._shelves[replica_id] = _Shelf(bit)
            self._at[bit] = replica_id
        return shelf

    def _bit(self, replica_id: ids.ReplicaId) -> int:
        shelf = self._shelves.get(replica_id)
        return 0 if shelf is None else shelf.bit

    def _bounds(self, count: int) -> tuple[int, ...]:
        if count > len(self._ends):
            self._ends = ends(2 * count, self._chunk_bytes)
        return self._ends

    def _share(self, prefix: Prefix, depth: int) -> float:
        return self._bounds(depth)[depth - 1] / prefix.size if depth else 0.0

    def _add(self, shelf: _Shelf, chunk: int, size: int) -> None:
        shelf.held[chunk] = size
        shelf.size += abs(size)
        self._pairs += 1
        self._masks[chunk] = self._masks.get(chunk, 0) | shelf.bit

    def _remove(self, shelf: _Shelf, chunk: int) -> None:
        shelf.size -= abs(shelf.held.pop(chunk))
        self._pairs -= 1
        left = self._masks[chunk] & ~shelf.bit
        if left:
            self._masks[chunk] = left
        else:
            del self._masks[chunk]

    def _drop_through(self, shelf: _Shelf, last: int) -> None:
        """Drop what was used no more recently than ``last``."""
        older = list(itertools.takewhile(lambda chunk: chunk != last, shelf.held))
        for chunk in (*older, last):
            self._remove(shelf, chunk)

    def _trim(self, shelf: _Shelf, added: int) -> None:
        """Hold no more than its KV cache does, and no more than its part of the index; ``added`` came now.

        Replicas that came earlier had larger parts: they give up as much as was added, not all at once,
        since that would be hundreds of thousands of pairs when a second replica joins the first.
        """
        count = len(self._shelves)
        most = max(_LEAST_PAIRS, self._limit // count)
        fits = shelf.kv_tokens * self.bytes_per_token if shelf.kv_tokens else math.inf
        left, size = len(shelf.held), shelf.size
        dropped = []
        # A request pays for what it adds and for some more, not for a cache that has turned out smaller.
        for chunk, part in itertools.islice(shelf.held.items(), added + _MORE_DROPPED):
            if left <= most and size <= fits:
                break
            dropped.append(chunk)
            left, size = left - 1, size - abs(part)
        for chunk in dropped:
            self._remove(shelf, chunk)
        while (over := self._pairs - max(self._limit, _LEAST_PAIRS * count)) > 0:
            if self._widest is None or len(self._widest.held) <= most:
                self._widest = max(self._shelves.values(), key=lambda each: len(each.held))
            over = min(over, max(1, len(self._widest.held) - most))
            for chunk in list(itertools.islice(self._widest.held, over)):
                self._remove(self._widest, chunk)


def _lowest_free(taken: Mapping[int, ids.ReplicaId]) -> int:
    bit = 1
    while bit in taken:
        bit <<= 1
    return bit

"""The prefix bench's own arithmetic: its requests, its modelled caches, and the reader of KV events."""

import dataclasses
from typing import Any

from engines import tinymodel
from gateway import fingerprints
from tests.bench import prefix_events, prefix_replay
from tests.bench import prefix_workload as workload


def test_a_block_of_the_trace_is_a_block_of_the_engine() -> None:
    rows = workload.load(300)
    assert len(rows) == 285  # whole conversations: about a tenth
    assert sorted(rows, key=lambda row: row.arrived_s) == rows
    assert {row.blocks for row in rows} <= {row.blocks for row in workload.load(600)}
    for row in rows[:20]:
        assert 0 < row.prompt_tokens <= workload.MOST_BLOCKS * workload.BLOCK_TOKENS
        assert row.prompt_tokens + 1 < tinymodel.CONTEXT
        assert len(workload.token_ids(row.text)) == row.prompt_tokens
    one, other = rows[0], rows[1]
    assert one.blocks[0] == other.blocks[0]
    assert one.text.startswith(workload.block_text(one.blocks[0]))
    chains = [
        fingerprints.chain(0, row.text.encode(), workload.CHUNK_BYTES) for row in (one, other)
    ]
    assert chains[0].chain[0] == chains[1].chain[0]
    assert chains[0].chain[-1] != chains[1].chain[-1]


def test_a_modelled_cache_evicts_tails_first_and_never_what_is_in_use() -> None:
    cache = prefix_replay.Cache(4)
    cache.take([1, 2, 3])
    assert cache.hits([1, 2, 9]) == 2
    cache.take([7, 8])
    assert cache.hits([1, 2, 3]) == 3  # in use: over its size for a moment
    cache.leave([1, 2, 3])
    cache.leave([7, 8])
    cache.take([4, 5])
    assert cache.hits([1, 2, 3]) == 0
    assert cache.hits([7, 8]) == 2
    cache.take([6])
    assert cache.hits([7, 8]) == 1
    assert len(cache) == 4


def test_an_infinite_cache_and_perfect_knowledge_are_no_worse() -> None:
    """Twelve conversations of six turns, in turn; three replicas hold a third of them each, at most."""
    rows = [
        workload.Request(turn * 12.0 + talk, tuple(range(talk * 100, talk * 100 + 4 * turn + 4)), 9)
        for turn in range(6)
        for talk in range(12)
    ]
    engine = prefix_replay.Engine(blocks=400, at_once=4)
    got = {arm: prefix_replay.replay(rows, arm, engine) for arm in prefix_replay.ARMS}
    assert got["oracle"].hit_share >= got["stage1"].hit_share > 1.5 * got["random"].hit_share
    assert got["stage1"].hit_share >= 0.9 * got["oracle"].hit_share
    assert got["stage1"] == prefix_replay.replay(rows, "stage1", engine)
    tight = dataclasses.replace(engine, blocks=40)
    assert prefix_replay.replay(rows, "stage1", tight).hit_share < got["stage1"].hit_share


def stored(hashes: list[int], parent: int | None, token_ids: list[int]) -> dict[str, Any]:
    names = {"block_hashes": hashes, "parent_block_hash": parent, "token_ids": token_ids}
    return {"type": "BlockStored", **names, "block_size": 2, "medium": "GPU"}


def test_kv_events_tell_what_is_cached() -> None:
    blocks = prefix_events.Blocks()
    blocks.apply(stored([10, 20], None, [1, 2, 3, 4]))
    blocks.apply(stored([30], 20, [5, 6]))
    assert blocks.held([1, 2, 3, 4, 5, 6, 7], 2) == 6
    assert blocks.held([1, 2, 9, 9], 2) == 2
    assert blocks.held([3, 4], 2) == 0  # the same tokens elsewhere are another block
    blocks.apply({"type": "BlockRemoved", "block_hashes": [20, 99], "medium": "GPU"})
    assert blocks.held([1, 2, 3, 4, 5, 6], 2) == 2
    blocks.apply(stored([20], 10, [3, 4]))
    assert blocks.held([1, 2, 3, 4, 5, 6], 2) == 6
    blocks.apply({"type": "AllBlocksCleared"})
    assert blocks.held([1, 2], 2) == len(blocks) == 0

"""The prefix index: predicted, confirmed, corrected, bounded, forgotten."""

import pytest

from scheduler.contracts import ids
from scheduler.core import prefixes

R1, R2, R3 = (ids.ReplicaId(name) for name in ("r1", "r2", "r3"))


def prompt(*chain: int, rest: int = 0) -> prefixes.Prefix:
    """Return a prompt of these chunks and ``rest`` bytes behind the last."""
    size = prefixes.ends(len(chain))[-1] if chain else 0
    return prefixes.Prefix(tuple(chain), size + rest)


def answer(
    index: prefixes.Index, prefix: prefixes.Prefix, replica: ids.ReplicaId, cached: float
) -> None:
    """Dispatch and return, the engine having had ``cached`` of the prompt."""
    claimed = index.confirmed(prefix, replica)
    index.dispatched(prefix, replica)
    tokens = max(1, prefix.size // 4)
    index.returned(
        prefix, replica, claimed, prompt_tokens=tokens, cached_tokens=round(cached * tokens)
    )


def test_chunks_double_to_their_size() -> None:
    assert prefixes.ends(6) == (256, 512, 1024, 2048, 4096, 6144)
    assert prefixes.ends(3, chunk_bytes=64) == (8, 16, 32)
    assert prefixes.ends(0) == ()


def test_a_prompt_is_predicted_where_it_was_sent() -> None:
    index = prefixes.Index()
    assert index.longest(prompt(1, 2)) == {}
    index.dispatched(prompt(1, 2, 3), R1)
    index.dispatched(prompt(1, 2), R2)
    assert index.longest(prompt(1, 2, 3, 4)) == {R1: 0.5, R2: 0.25}
    assert index.longest(prompt(1, 2, 3, 4), least=0.3) == {R1: 0.5}
    assert index.longest(prompt(9)) == {}
    assert index.longest(prefixes.NONE) == {}


def test_what_nobody_holds_names_a_new_prefix() -> None:
    index = prefixes.Index()
    index.dispatched(prompt(1, 2), R1)
    assert index.first_new(prompt(1, 2, 3, 4)) == 3
    assert index.first_new(prompt(1, 2)) == 2
    assert index.first_new(prefixes.NONE) is None


def test_a_prediction_is_no_claim_before_an_answer() -> None:
    index = prefixes.Index()
    index.dispatched(prompt(1, 2), R1)
    assert index.confirmed(prompt(1, 2), R1) == 0.0
    answer(index, prompt(1, 2), R1, 0.0)
    assert index.confirmed(prompt(1, 2), R1) == 1.0
    assert index.confirmed(prompt(1, 2), R2) == 0.0


def test_a_miss_drops_what_was_used_no_later_than_what_is_missing() -> None:
    index = prefixes.Index()
    for first in (1, 2, 3):
        answer(index, prompt(first, first + 10, first + 20, first + 30, first + 40), R1, 0.0)
    answer(index, prompt(2, 12, 22, 32, 42), R1, 0.0)  # evicted, so 1 must be gone too
    assert index.longest(prompt(1)) == {}
    assert index.longest(prompt(2)) == {R1: 1.0}  # it has just computed it
    assert index.longest(prompt(3)) == {R1: 1.0}


def test_a_partial_hit_drops_the_tail_alone() -> None:
    index = prefixes.Index()
    old, both = (9, 19, 29, 39, 49), (1, 11, 21, 31, 41)
    answer(index, prompt(*old), R1, 0.0)
    answer(index, prompt(*both), R1, 0.0)
    answer(index, prompt(*both), R1, 0.3)  # the tail is gone: everything older is as well
    assert index.longest(prompt(*old)) == {}
    assert index.longest(prompt(*both)) == {R1: 1.0}


def test_a_hit_corrects_nothing() -> None:
    index = prefixes.Index()
    answer(index, prompt(1, 2, 3, 4, 5), R1, 0.0)
    answer(index, prompt(6, 7, 8, 9, 10), R1, 0.0)
    answer(index, prompt(1, 2, 3, 4, 5), R1, 0.98)
    assert len(index) == 10


def test_a_second_request_before_the_first_answer_corrects_nothing() -> None:
    """Both are computed at once: the second finds nothing cached, though nothing was evicted."""
    index = prefixes.Index()
    answer(index, prompt(9), R1, 0.0)
    index.dispatched(prompt(1, 2, 3), R1)
    answer(index, prompt(1, 2, 3), R1, 0.0)
    assert index.longest(prompt(9)) == {R1: 1.0}


def test_no_more_than_the_kv_cache_holds_the_least_recent_first() -> None:
    index = prefixes.Index()
    index.capacity(R1, 64, 16)  # 4 KB of text at 4 bytes a token: two prompts of 2 KB
    for first in (10, 20, 30):
        answer(index, prompt(first, first + 1, first + 2, first + 3), R1, 0.0)
    assert index.longest(prompt(10, 11, 12, 13)) == {}
    assert index.longest(prompt(20, 21, 22, 23)) == {R1: 1.0}
    answer(index, prompt(40, 41, 42), R1, 0.0)
    # The tail goes before the head, as in the engine.
    assert index.longest(prompt(20, 21, 22, 23)) == {R1: 0.5}


def test_memory_is_bounded_and_shared_evenly() -> None:
    index = prefixes.Index(limit=200)
    for number in range(1000):
        index.dispatched(prompt(number * 2, number * 2 + 1), R1)
        index.dispatched(prompt(number * 2, number * 2 + 1), R2)
    assert len(index) <= 200
    assert set(index.longest(prompt(1998, 1999))) == {R1, R2}


def test_who_came_first_gives_way_to_who_joins() -> None:
    index = prefixes.Index(limit=200)
    for number in range(200):
        index.dispatched(prompt(number), R1)
    for number in range(100):
        index.dispatched(prompt(1000 + number), R2)
        assert len(index) == 200
    assert index.longest(prompt(99)) == {}, "the least recently used of the fullest went"
    assert index.longest(prompt(100)) == {R1: 1.0}
    assert index.longest(prompt(1000)) == {R2: 1.0}


def test_a_replica_that_is_gone_is_forgotten_and_its_place_is_taken() -> None:
    index = prefixes.Index()
    index.dispatched(prompt(1), R1)
    index.dispatched(prompt(1), R2)
    index.gone(R1)
    index.gone(R1)
    assert index.longest(prompt(1)) == {R2: 1.0}
    index.dispatched(prompt(2), R3)
    assert index.longest(prompt(2)) == {R3: 1.0}
    index.keep({R3})
    assert len(index) == 1
    index.returned(prompt(1), R1, 1.0, prompt_tokens=9, cached_tokens=0)  # a late answer: no harm
    assert index.longest(prompt(1)) == {}


def test_tokens_are_learned_from_answers() -> None:
    index = prefixes.Index()
    assert index.tokens(prompt(1, 2, 3, 4)) == 512
    index.dispatched(prompt(1), R1)
    for _ in range(200):
        index.returned(prompt(1), R1, 0.0, prompt_tokens=128, cached_tokens=0)
    assert index.bytes_per_token == pytest.approx(2.0, abs=0.01)


def test_a_prefix_that_most_hold_tells_nobody_apart() -> None:
    """A system prompt on every replica must not make a decision look at each of them."""
    index = prefixes.Index()
    for number in range(100):
        index.dispatched(prompt(1, 2, 1000 + number), ids.ReplicaId(f"r{number}"))
    assert index.longest(prompt(1, 2)) == {}
    assert index.longest(prompt(1, 2, 1007)) == {ids.ReplicaId("r7"): 1.0}

"""A request of several texts: one seat or one for each, and always the work and the room of all of them."""

from typing import Any

from gateway import asks, standing
from scheduler.contracts import clock, fleet, ids, quota, requests
from scheduler.core import outputs
from tests.unit.gateway import fleets, harness
from tests.unit.gateway.test_room_rules import ask, room


def asking(endpoint: requests.Endpoint, body: dict[str, Any]) -> asks.Asking:
    tier = requests.Tier.INTERACTIVE
    return asks.of(
        requests.InferenceRequest(
            ids.RequestId("r"), endpoint, body, "chat", tier, harness.ANN, False, 1
        )
    )


def test_a_ranking_is_work_by_all_of_its_documents_and_keeps_the_longest() -> None:
    replica = fleets.make_replica("r1", max_context=2048)
    known = standing.Standing(fleets.make_view([replica], runner="embed"))
    body = {"model": "chat", "query": "q" * 40, "documents": ["d" * 360] * 50}
    asked = asking(requests.Endpoint.RERANK, body)
    found = asks.needs(asked, known, 0.0, outputs.Outputs(outputs.Rules()), 0)
    assert (found.seats, found.room_tokens, found.prompt_tokens) == (1, 101, 5001)


async def test_large_rankings_wait_here_and_not_inside_an_engine(
    fake_clock: clock.FakeClock,
) -> None:
    """By its longest document each looked small, and an engine got thousands of texts at once."""
    made, _ = room(fake_clock, fleets.make_replica("r1", seats=8))
    large: dict[str, Any] = {"endpoint": "/v1/rerank", "chars": 400, "all_chars": 20_000}
    first, second = (made.enter(ask(name, prompts=50, **large)) for name in "ab")
    assert (first.open is None, second.open is None) == (False, True)
    made.leave(first, quota.Spent(5_000, 0, 0))
    await fake_clock.advance(0)
    assert second.open is not None
    made.leave(second)
    assert made.loads.idle


async def test_each_prompt_of_a_list_needs_room(fake_clock: clock.FakeClock) -> None:
    stats = fleet.ReplicaStats(at_us=1, seats=8, kv_blocks=500, kv_free=500, kv_block_tokens=16)
    made, _ = room(fake_clock, fleets.make_replica("r1", stats=stats, max_context=8192))
    lists: dict[str, Any] = {"prompt_tokens": 3000, "all_tokens": 6000, "max_tokens": 10}
    first, second = (made.enter(ask(name, prompts=2, seats=2, **lists)) for name in "ab")
    assert first.open is not None
    first.open.prefilled()
    await fake_clock.advance(0)
    assert second.open is None  # 8,000 tokens hold one list of 6,000
    made.leave(first)
    await fake_clock.advance(0)
    assert second.open is not None
    made.leave(second)


def test_seats_and_texts_of_each_endpoint() -> None:
    for endpoint, body, seats, texts in (
        (requests.Endpoint.COMPLETIONS, {"prompt": ["a", "b"], "n": 3}, 6, 2),
        (requests.Endpoint.COMPLETIONS, {"prompt": [[1], [2, 3]]}, 2, 2),
        (requests.Endpoint.COMPLETIONS, {"prompt": [1, 2, 3], "n": 2}, 2, 1),
        (requests.Endpoint.CHAT, harness.chat_body(n=2), 2, 1),
        (requests.Endpoint.EMBEDDINGS, {"input": ["a", "b", "c"]}, 1, 3),
        (requests.Endpoint.RESPONSES, {"input": [{"role": "user", "content": "a"}]}, 1, 1),
        (requests.Endpoint.RERANK, {"query": "a", "documents": ["b", "c"]}, 1, 2),
    ):
        found = asking(endpoint, {"model": "chat", **body})
        assert (found.seats, found.prompts) == (seats, texts), body

"""How an HTTP caller names an adapter: with the model, by a field or by a header."""

from typing import Any

import httpx
import pytest

from tests.unit.gateway import harness

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({"model": "chat:poet"}, {}),
        ({"forebay_adapter": "poet"}, {}),
        ({}, {"X-Forebay-Adapter": "poet"}),
        ({"forebay_adapter": "poet"}, {"X-Forebay-Adapter": "nobody"}),  # the field wins
    ],
)
async def test_it_is_the_same_adapter(body: dict[str, Any], headers: dict[str, str]) -> None:
    async with harness.one_replica(harness.hello) as (served, fake):
        answer = await ask(served.http, body, headers)
        assert answer.status_code == 200, answer.text
        (received,) = fake.received
        assert received.body["model"] == "poet"
        assert not [name for name in received.body if name.startswith("forebay_")]
        assert served.closed()[0].identity.adapter == "poet"


async def test_one_that_is_not_there_is_said_so_whichever_way() -> None:
    async with harness.one_replica(harness.hello) as (served, fake):
        for body in ({"model": "chat:nope"}, {"forebay_adapter": "nope"}):
            answer = await ask(served.http, body, {})
            assert answer.status_code == 404
            assert answer.json()["error"]["message"] == (
                "model 'chat' has no adapter 'nope': see /v1/models"
            )
        assert not fake.received


async def ask(url: str, body: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
    """Send a chat as ann."""
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        key = {"Authorization": "Bearer ann"}
        return await http.post(CHAT, json={**ASKED, **body}, headers={**key, **headers})

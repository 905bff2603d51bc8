"""Bodies on their way through: parsed fast, judged as before, and passed on as they came."""

import dataclasses
import json
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import asks, checks, upstream
from scheduler.contracts import errors, ids, requests, resume
from tests.unit.gateway import asking, harness

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def judged(parse: Any, raw: bytes) -> tuple[str, Any]:
    try:
        return "", repr(parse(raw))  # repr: 1 and 1.0 and True are told apart
    except errors.BadRequest as error:
        return error.message, None


def slow(raw: bytes) -> Any:
    value = checks._slowly(raw)
    if not isinstance(value, dict):
        raise errors.BadRequest(f"body: must be a JSON object, not a {checks.kind(value)}")
    return value


@settings(deadline=None)
@given(VALUES, st.integers(0, 200), st.integers(0, 255), st.booleans())
def test_the_fast_parser_says_what_the_slow_one_says(
    value: Any, at: int, byte: int, spoil: bool
) -> None:
    for ascii_only in (True, False):
        raw = bytearray(
            json.dumps({"model": value}, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
        )
        if spoil:
            raw[at % len(raw)] = byte
        assert judged(checks.parse, bytes(raw)) == judged(slow, bytes(raw))


def asked(raw: bytes, **changes: Any) -> requests.InferenceRequest:
    return requests.InferenceRequest(
        request_id=ids.RequestId("q"),
        endpoint=changes.pop("endpoint", requests.Endpoint.CHAT),
        body=json.loads(raw),
        tier=requests.Tier.INTERACTIVE,
        caller=harness.ANN,
        stream=False,
        arrived_us=1,
        raw=raw,
        **{"model": "chat", **changes},
    )


def test_a_body_without_wishes_goes_on_as_it_came() -> None:
    raw = b' { "model":"chat" ,"messages" : [ ], "seed":1e2 }  '
    assert upstream.body(asked(raw)) is raw


def test_an_adapters_name_is_put_in_place() -> None:
    raw = b'{"messages": [], "model" :  "chat:poet", "seed": 1}'
    sent = upstream.body(asked(raw, adapter="poet"))
    assert sent == b'{"messages": [], "model" :  "poet", "seed": 1}'


def test_where_it_stands_in_doubt_the_body_is_written_anew() -> None:
    for raw in (
        b'{"model": "chat\\u003apoet", "user": "chat:poet"}',
        b'{"model": "chat:poet", "user": "chat:poet"}',
        b'{"model": "chat:poet", "metadata": {"model": "chat:poet"}}',
        b'{"model": 1, "model": "chat:poet"}',
        b'{"metadata": {"model": "chat:poet"}, "model": "chat\\u003apoet"}',
        b'{"model": "chat:poet", "model": "chat\\u003apoet"}',
        b'{"metadata": {"model": "chat:poet"}, "mod\\u0065l": "chat\\u003apoet"}',
    ):
        sent = json.loads(upstream.body(asked(raw, adapter="poet")))
        assert sent == {**json.loads(raw), "model": "poet"}


def test_our_own_fields_and_a_resume_are_not_the_clients() -> None:
    raw = b'{"model": "chat", "forebay_priority": "batch", "n": 1}'
    assert json.loads(upstream.body(asked(raw))) == {"model": "chat", "n": 1}
    hidden = b'{"model": "chat", "forebay\\u005fpriority": "batch", "n": 1}'
    assert json.loads(upstream.body(asked(hidden))) == {"model": "chat", "n": 1}
    plain = asked(b'{"model": "chat"}')
    begun = resume.Resume((1,), (2,), 1, 1)
    assert set(json.loads(upstream.body(plain, begun))) == {"model", resume.FIELD}
    made = dataclasses.replace(plain, raw=b"", body={"model": "x", "n": 2})
    assert json.loads(upstream.body(made)) == {"model": "chat", "n": 2}


async def test_only_an_answer_without_a_bound_of_its_own_is_given_one() -> None:
    async with (
        harness.one_replica(harness.hello, output_most_tokens=77) as (served, fake),
        asking.http(served) as http,
    ):
        bare = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}
        for more in ({}, {"max_tokens": 9}, {"max_completion_tokens": 9}):
            assert (await http.post("/v1/chat/completions", json={**bare, **more})).is_success
    told = [received.headers.get("x-forebay-most-tokens") for received in fake.received]
    assert told == ["77", None, None]
    assert "max_tokens" not in fake.received[0].body  # a bound that its prompt leaves no room for


LONG = 50_000


@pytest.mark.parametrize(
    "prompt", [[7] * LONG, [[7] * LONG, [7] * LONG], ["a"] * LONG], ids=["ids", "lists", "texts"]
)
def test_a_long_list_takes_no_step_of_python_for_each_item(prompt: list[Any]) -> None:
    """A body of 20 MB of token ids stopped every stream of its process for seconds."""
    raw = json.dumps({"model": "chat", "prompt": prompt, "tools": [[{}]] * 200}).encode()
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1

    one = asked(b"{}", endpoint=requests.Endpoint.COMPLETIONS)
    sys.setprofile(count)
    try:
        body = checks.parse(raw)
        checks.check(requests.Endpoint.COMPLETIONS, body, ("tools",))
        asks.of(dataclasses.replace(one, body=body, raw=raw))
    finally:
        sys.setprofile(None)
    assert steps < LONG // 10

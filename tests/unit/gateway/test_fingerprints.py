"""Fingerprints: equal beginnings agree, and whatever changes the engine's blocks tells them apart."""

import json
import subprocess
import sys
from typing import Any

import pytest

from gateway import fingerprints
from scheduler.contracts import ids, requests
from scheduler.core import prefixes

SYSTEM = "You are a careful assistant of the institute. " * 12  # 552 bytes
QUESTION = "What flows through the gate at night? " * 200


def ask(body: dict[str, Any], **changes: Any) -> requests.InferenceRequest:
    fields: dict[str, Any] = {
        "request_id": ids.RequestId("x"),
        "endpoint": requests.Endpoint.CHAT,
        "model": "chat",
        "tier": requests.Tier.INTERACTIVE,
        "caller": requests.Caller("t", "u", "k"),
        "stream": False,
        "arrived_us": 0,
        **changes,
    }
    return requests.InferenceRequest(body=body, **fields)


def chat(*turns: str, **fields: Any) -> dict[str, Any]:
    roles = ("system", "user", "assistant")
    messages = [
        {"role": roles[0] if not n else roles[1 + (n - 1) % 2], "content": text}
        for n, text in enumerate(turns)
    ]
    return {"model": "chat", "messages": messages, **fields}


def shared(one: prefixes.Prefix, other: prefixes.Prefix) -> int:
    """Return how many fingerprints two prompts begin with alike; none may agree behind them."""
    count = 0
    while one.chain[count : count + 1] and one.chain[count] == dict(enumerate(other.chain)).get(
        count
    ):
        count += 1
    assert not set(one.chain[count:]) & set(other.chain[count:])
    return count


def of(body: dict[str, Any], **changes: Any) -> prefixes.Prefix:
    return fingerprints.of(ask(body, **changes))


def test_a_conversation_that_goes_on_keeps_its_fingerprints() -> None:
    first = of(chat(SYSTEM, QUESTION))
    second = of(chat(SYSTEM, QUESTION, "Water.", "And by day?"))
    assert shared(first, second) == len(first.chain) == len(prefixes.ends(6))
    assert second.size > first.size > 8000


def test_a_system_prompt_of_500_bytes_is_shared() -> None:
    one, other = of(chat(SYSTEM, "a" * 3000)), of(chat(SYSTEM, "b" * 3000))
    assert shared(one, other) == 2  # 256 and 512


def test_text_within_a_message_is_shared_too() -> None:
    one = of(chat("You help.", QUESTION + "Summarise it."))
    other = of(chat("You help.", QUESTION + "Translate it."))
    assert shared(one, other) >= 5
    prompts = [of({"prompt": QUESTION + tail}) for tail in ("x", "y")]
    assert shared(*prompts) == len(prompts[0].chain)


@pytest.mark.parametrize(
    "changes",
    [
        {"tools": [{"type": "function", "function": {"name": "weather"}}]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"documents": [{"text": "a"}]},
        {"cache_salt": "physics"},
        {"tool_choice": "none"},
    ],
)
def test_what_stands_before_the_messages_tells_apart(changes: dict[str, Any]) -> None:
    plain, other = of(chat(SYSTEM, QUESTION)), of(chat(SYSTEM, QUESTION, **changes))
    assert shared(plain, other) == 0
    assert other == of(json.loads(json.dumps(chat(SYSTEM, QUESTION, **changes))))


def test_adapter_and_model_tell_apart_and_sampling_does_not() -> None:
    plain = of(chat(SYSTEM, QUESTION))
    assert shared(plain, of(chat(SYSTEM, QUESTION), adapter="poet")) == 0
    assert shared(plain, of(chat(SYSTEM, QUESTION), model="other")) == 0
    assert plain == of(chat(SYSTEM, QUESTION, temperature=0.1, seed=3, user="ada", max_tokens=9))


def test_roles_and_parts_of_a_message_count() -> None:
    user = {"model": "chat", "messages": [{"role": "user", "content": QUESTION}]}
    system = {"model": "chat", "messages": [{"role": "system", "content": QUESTION}]}
    assert shared(of(user), of(system)) == 0
    parts = [{"type": "text", "text": QUESTION}]
    as_parts = {"model": "chat", "messages": [{"role": "user", "content": parts}]}
    assert of(as_parts) == of(user)  # the engine's template makes the same of both
    picture = {"type": "image_url", "image_url": {"url": "data:" + "A" * 3000}}
    other = {"type": "image_url", "image_url": {"url": "data:" + "B" * 3000}}
    one, two = ([{"role": "user", "content": [p, *parts]}] for p in (picture, other))
    assert shared(of({"messages": one}), of({"messages": two})) == 0
    calls = {"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}
    called = [
        {"role": "assistant", "content": None, **calls},
        {"role": "user", "content": QUESTION},
    ]
    silent = [{"role": "assistant", "content": None}, {"role": "user", "content": QUESTION}]
    assert shared(of({"messages": called}), of({"messages": silent})) == 0


def test_token_ids_several_prompts_and_short_ones() -> None:
    numbers = list(range(2000))
    assert shared(of({"prompt": numbers}), of({"prompt": [*numbers[:1000], 7, 7]})) > 2
    assert of({"prompt": [QUESTION, "other"]}).chain == of({"prompt": QUESTION}).chain
    assert of({"prompt": [QUESTION, "other"]}).size == of({"prompt": QUESTION}).size + 5
    assert of({"prompt": [numbers, [1]]}).chain == of({"prompt": numbers}).chain
    assert of({"prompt": "short"}).chain == ()
    assert of({"prompt": ""}) == prefixes.NONE
    assert of({"input": QUESTION}, endpoint=requests.Endpoint.EMBEDDINGS) == prefixes.NONE


@pytest.mark.parametrize("content", [None, 3, {"a": 1}, [1, "x", None], ["y"], "\ud800" * 300])
def test_odd_content_has_a_fingerprint_and_no_error(content: Any) -> None:
    of({"messages": [{"role": "user", "content": content}, {"content": "x"}, {}, 7]})


def test_every_process_makes_the_same() -> None:
    """Hash seeds and interned strings differ between processes; fingerprints must not."""
    body = chat(SYSTEM, QUESTION, tools=[{"type": "function", "function": {"name": "weather"}}])
    code = (
        "import json,sys; from tests.unit.gateway import test_fingerprints as t;"
        "print(t.of(json.loads(sys.stdin.read())).chain[-1])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, '.'); {code}"],
        input=json.dumps(body),
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "5"},
    )
    assert int(done.stdout) == of(body).chain[-1]

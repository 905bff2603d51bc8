"""What answers say, streamed or whole, in the forms that engines give."""

import json
from typing import Any

import pytest

from gateway import said


def stream(*values: dict[str, Any]) -> bytes:
    return (
        b"".join(b"data: " + json.dumps(v).encode() + b"\n\n" for v in values) + b"data: [DONE]\n\n"
    )


def chunk(delta: dict[str, Any], index: int = 0) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": delta}]}


CALL = {"name": "weather", "arguments": '{"city": "Bern"}'}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            stream(chunk({"role": "assistant", "content": ""}), chunk({"content": "Hel"})),
            json.dumps({"choices": [{"index": 0, "message": {"content": "Hel"}}]}).encode(),
        ),
        (
            stream(
                {"choices": [{"index": 0, "text": "a"}]}, {"choices": [{"index": 0, "text": "b"}]}
            ),
            json.dumps({"choices": [{"index": 0, "text": "ab"}]}).encode(),
        ),
        (
            stream(
                chunk({"tool_calls": [{"index": 0, "function": {"name": "weather"}}]}),
                chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]}),
                chunk({"tool_calls": [{"index": 0, "function": {"arguments": '"Bern"}'}}]}),
            ),
            json.dumps({"choices": [{"message": {"tool_calls": [{"function": CALL}]}}]}).encode(),
        ),
        (
            stream(
                {"type": "response.output_text.delta", "delta": "Hi"},
                {
                    "type": "response.completed",
                    "response": {"output": [{"content": [{"text": "Hi"}]}]},
                },
            ),
            json.dumps({"output": [{"content": [{"text": "Hi"}]}]}).encode(),
        ),
        (
            stream(
                {
                    "type": "response.incomplete",
                    "response": {"output": [{"content": [{"text": "Hi"}]}]},
                },
            ),
            json.dumps({"output": [{"content": [{"text": "Hi"}]}]}).encode(),
        ),
    ],
)
def test_a_stream_says_what_the_whole_answer_says(one: bytes, other: bytes) -> None:
    assert said.text(one) == said.text(other) is not None


def test_choices_are_told_apart() -> None:
    mixed = stream(
        chunk({"content": "a"}, 1), chunk({"content": "b"}, 0), chunk({"content": "c"}, 1)
    )
    assert said.text(mixed) == said.text(
        stream(chunk({"content": "b"}), chunk({"content": "ac"}, 1))
    )
    assert said.text(mixed) != said.text(
        stream(chunk({"content": "ac"}), chunk({"content": "b"}, 1))
    )


@pytest.mark.parametrize(
    "answer",
    [b"", b"data: [DONE]\n\n", b"data: {no json\n\n", b'{"data": [{"embedding": [1.0]}]}', b"[]"],
)
def test_an_answer_without_text_has_none(answer: bytes) -> None:
    assert said.text(answer) is None


@pytest.mark.parametrize(
    ("body", "greedy"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 0.0}, True),
        ({}, False),
        ({"temperature": 0.7}, False),
    ],
)
def test_only_temperature_0_is_greedy(body: dict[str, Any], greedy: bool) -> None:
    assert said.greedy(body) is greedy

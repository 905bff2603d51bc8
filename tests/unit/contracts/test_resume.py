"""What can be resumed, judged by the body; and what a beginning must look like."""

from typing import Any

import pytest

from scheduler.contracts import resume

PLAIN: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 5,
    "temperature": 0.7,
    "top_p": 0.9,
    "stop": ["x"],
    "user": "ada",
}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logprobs": False, "tools": []},
        {"seed": 7, "temperature": 0},
        {"response_format": {"type": "text"}, "top_logprobs": None},
        {"prompt": "a", "messages": None},
        {"prompt": ["a"]},
        {"prompt": [1, 2, 3]},
        {"prompt": [[1, 2, 3]]},
        {"forebay_priority": "interactive"},
    ],
)
def test_what_can_be_resumed(change: dict[str, Any]) -> None:
    assert resume.why_not({**PLAIN, **change}) == ""


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"n": 2}, "n is above 1"),
        ({"best_of": 3}, "best_of is above 1"),
        ({"prompt": ["a", "b"]}, "several prompts"),
        ({"prompt": [[1], [2]]}, "several prompts"),
        ({"seed": 7}, "seeded"),
        ({"seed": 7, "temperature": None}, "seeded"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"frequency_penalty": -1}, "frequency_penalty"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 0}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"echo": True}, "echo"),
        ({"a_field_of_next_year" + "x" * 50: 1}, "a_field_of_next_year"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "more than text"),
    ],
)
def test_what_cannot(change: dict[str, Any], why: str) -> None:
    found = resume.why_not({**PLAIN, **change})
    assert why in found
    assert len(found) < 80


def test_a_beginning_crosses_the_hop() -> None:
    begun = resume.Resume((1, 2), (3, 4), 1, 5, 77, 1)
    assert (
        resume.Resume.from_json(begun.to_json() | {"token_ids": [3, 4], "prompt_token_ids": [1, 2]})
        == begun
    )


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, "object"),
        ([], "object"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"token_ids": [1]}, "prompt_token_ids"),
        ({"prompt_token_ids": [1], "token_ids": ["x"]}, "token_ids"),
        ({"prompt_token_ids": [1], "token_ids": [True]}, "token_ids"),
        ({"prompt_token_ids": [2**32]}, "prompt_token_ids"),
        ({"prompt_token_ids": [1], "chars": -1}, "chars"),
        ({"prompt_token_ids": [1], "shown": 1}, "shown"),
        ({"prompt_token_ids": [1], "more": 1}, "object"),
    ],
)
def test_what_is_no_beginning_is_one_line(value: Any, names: str) -> None:
    with pytest.raises(resume.ResumeError, match=names):
        resume.Resume.from_json(value)

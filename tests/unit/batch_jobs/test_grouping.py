"""Lines that share the beginning of their prompts run one after the other."""

import random

import pytest

from batch_jobs import client, grouping, lines
from tests.unit.batch_jobs import world


def work(custom_id: str, **body: object) -> client.Work:
    line = lines.parse(lines.RawLine(1, world.line(custom_id, **body)), lines.Rules())
    assert isinstance(line, lines.Line)
    return client.Work.of(line)


def chat(*said: str, **more: object) -> bytes:
    messages = [{"role": "user", "content": text} for text in said]
    return grouping.prefix({"messages": messages, **more})


def test_the_key_is_the_prompts_beginning_whatever_stands_before_it() -> None:
    assert chat("a" * 99, "b", max_tokens=3) == chat("a" * 99, "b", temperature=1)
    assert len(chat("x" * 9_000, "y")) == 4_096
    assert grouping.prefix({"prompt": "once upon"}) == b"once upon"
    assert grouping.prefix({"prompt": [1, 2, 3]}) == b"123"
    assert grouping.prefix({"input": ["a", "b"]}) == b'"a""b"'
    assert grouping.prefix({}) == grouping.prefix({"messages": None}) == b""


def test_sorted_lines_share_at_least_ten_times_what_shuffled_ones_do() -> None:
    chance = random.Random(7)
    systems = [f"system {n} " + "rule " * 200 for n in range(40)]
    keys = [chat(system, f"question {n}") for system in systems for n in range(25)]
    chance.shuffle(keys)
    shuffled = grouping.saved(keys)
    assert grouping.saved(sorted(keys)) > 10 * shuffled


@pytest.mark.parametrize("model", ["chat", "chat:poet"])
def test_models_and_adapters_are_kept_apart(model: str) -> None:
    found = work("a", model=model)
    assert found.prefix[0] == model
    assert found.line.body == {"model": model}
    assert b"messages" in found.payload

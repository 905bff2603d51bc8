"""Estimates of tokens: learned, bounded, forgotten."""

import pytest

from scheduler.core import outputs


def test_an_output_is_the_quantile_of_the_teams_own_answers_and_never_above_max_tokens() -> None:
    learned = outputs.Outputs(outputs.Rules(first_tokens=256, quantile=0.9, kept=10))
    assert learned.output_tokens("m", "a", 0) == 256
    assert learned.output_tokens("m", "a", 100) == 100
    for tokens in range(10, 110, 10):
        learned.learn("m", "a", tokens)
    assert learned.output_tokens("m", "a", 0) == 100
    assert learned.output_tokens("m", "a", 64) == 64
    assert learned.output_tokens("m", "b", 0) == 256
    assert learned.output_tokens("other", "a", 0) == 256
    for _ in range(10):
        learned.learn("m", "a", 7)
    assert learned.output_tokens("m", "a", 0) == 7  # the newest only


def test_the_least_recently_used_team_is_forgotten() -> None:
    learned = outputs.Outputs(outputs.Rules(teams=2))
    for team in ("a", "b", "a", "c"):
        learned.learn("m", team, 5)
    assert [learned.output_tokens("m", team, 0) for team in "abc"] == [5, 256, 5]


def test_a_models_ratio_is_learned_from_what_came_back() -> None:
    learned = outputs.Outputs(outputs.Rules())
    assert learned.prompt_tokens("m", 4000) == 1001
    for _ in range(200):
        learned.learn_prompt("m", 1000, 500)
    assert learned.prompt_tokens("m", 4000) == pytest.approx(2000, rel=0.05)
    assert learned.prompt_tokens("other", 4000) == 1001
    for _ in range(5000):  # the text changes: the past fades
        learned.learn_prompt("m", 1000, 200)
    assert learned.prompt_tokens("m", 4000) == pytest.approx(800, rel=0.05)
    learned.learn_prompt("m", 0, 10)
    learned.learn_prompt("m", 10, 0)
    assert learned.prompt_tokens("m", 0) == 1


@pytest.mark.parametrize(
    ("tokens", "bound"),
    [(0, 0), (1, 256), (256, 256), (257, 384), (385, 512), (513, 768), (16_385, 24_576)],
)
def test_room_classes(tokens: int, bound: int) -> None:
    assert outputs.room_class(tokens) == bound


def test_a_class_is_at_most_half_more_than_what_is_needed() -> None:
    for tokens in range(257, 40_000, 37):
        assert tokens <= outputs.room_class(tokens) <= tokens * 1.51

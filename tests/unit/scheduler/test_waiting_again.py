"""Who has had a turn and waits again is not sent away to make room."""

import pytest

from scheduler.contracts import requests
from scheduler.core import admission
from tests.unit.scheduler.queues import B, I, S, drained, names, offer, queue, rules, ticket


@pytest.mark.parametrize("tier", [I, S])
def test_who_has_had_its_turn_makes_room_for_nobody(tier: requests.Tier) -> None:
    """Its client may have half of an answer: who comes is refused, whichever bound is reached."""
    waiting = queue(rules(size=100, total=2))
    mine = ticket("mine", tier, team="a", size=60)
    waiting.pass_by(mine, 0.0)
    waiting.requeue(mine, 0.0)
    (answer,) = offer(waiting, ticket("b", tier, team="b", size=50))
    assert isinstance(answer, admission.Refused)
    offer(waiting, ticket("c", tier, team="a"))
    (answer,) = offer(waiting, ticket("i", team="c"))
    if tier is S:
        assert isinstance(answer, admission.Admitted)
        assert names(answer.shed) == ["c"]  # its team's, which has not had a turn yet
        (answer,) = offer(waiting, ticket("j", team="d"))
    assert isinstance(answer, admission.Refused)
    assert "mine" in drained(waiting)


def test_a_line_of_batch_that_waits_again_gives_way() -> None:
    """Nobody has heard anything of it, and its runner sends it again."""
    waiting = queue(rules(total=1))
    line = ticket("line", B)
    waiting.pass_by(line, 0.0)
    waiting.requeue(line, 0.0)
    (answer,) = offer(waiting, ticket("i"))
    assert isinstance(answer, admission.Admitted)
    assert names(answer.shed) == ["line"]


def test_a_new_shape_makes_nobody_younger() -> None:
    """Whose version has changed would else count as the last that came, and age from then on."""
    waiting = queue()
    offer(waiting, ticket("a", S, shape="v1"), ticket("b", S, arrived=5.0, shape="v2"))
    waiting.reshape(lambda one: "v2", 0.0)
    oldest = waiting.oldest(S)
    assert oldest is not None
    assert oldest.request_id == "a"

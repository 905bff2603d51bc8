"""`fctl rollout --wait`: what it prints and how it ends, whatever becomes of the gateway meanwhile."""

import io
from collections.abc import Sequence
from typing import Any

import pytest

from scheduler.contracts import command_line, ports
from scheduler.runtime import rollout_commands


class Gateway:
    """Answers with one state of the rollout after the other; None: it restarts."""

    def __init__(self, *states: dict[str, Any] | None) -> None:
        self.states = list(states)
        self.waited_s = 0.0

    def call(self, method: str, path: str, **_: Any) -> ports.ApiResponse:
        assert (method, path) == ("GET", "/admin/rollouts")
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if state is None:
            raise command_line.Unanswered("gateway does not answer")
        return ports.ApiResponse(200, {"rollouts": [other(), state]}, b"")

    def pause(self, seconds: float) -> None:
        self.waited_s += seconds


def step(percent: int, state: str = "stepping", outcome: str = "", **more: Any) -> dict[str, Any]:
    told = {"percent": percent, "state": state, "outcome": outcome, "reason": "as asked"}
    return {"model": "chat", "version": "v2", **told, **more}


def other() -> dict[str, Any]:
    return {**step(7), "model": "digest"}


def follow(gateway: Gateway) -> tuple[int, Sequence[str]]:
    out = io.StringIO()
    code = rollout_commands.follow("chat", "v2", api=gateway, out=out, pause=gateway.pause)
    return code, out.getvalue().splitlines()


def test_a_gateway_that_restarts_between_two_looks_ends_nothing() -> None:
    gateway = Gateway(step(5), None, None, step(5), step(100), step(100, "over", "done"))
    code, told = follow(gateway)
    assert code == 0
    assert told == [
        "5 %: stepping: as asked",
        "100 %: stepping: as asked",
        "100 %: done: as asked",
    ]


@pytest.mark.parametrize(
    ("last", "code"),
    [
        (step(5, "over", "rolled back"), 1),
        (step(100, "over", "done"), 0),
        (step(5, stays=True), 0),
    ],
)
def test_it_ends_as_the_rollout_did(last: dict[str, Any], code: int) -> None:
    assert follow(Gateway(step(1), last))[0] == code


def test_no_gateway_for_a_minute_is_told_from_a_rollout_that_was_taken_back() -> None:
    gateway = Gateway(step(5), None)
    with pytest.raises(command_line.Unanswered) as raised:
        follow(gateway)
    assert raised.value.code == command_line.UNANSWERED
    assert 55 <= gateway.waited_s <= 61


@pytest.mark.parametrize(
    ("now", "words"), [(step(1, version="v3"), "that of v3"), (other(), "none")]
)
def test_another_rollout_is_not_this_one(now: dict[str, Any], words: str) -> None:
    with pytest.raises(command_line.CommandError, match=words):
        follow(Gateway(step(5), now))

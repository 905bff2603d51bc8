"""What is known of an answer so far, and what follows when its replica is lost."""

import pytest

from gateway import emitted, replica
from scheduler.contracts import errors, frames, quota, resume

PROMPT = frames.Frame.of(frames.Kind.PROMPT, token_ids=(1, 2, 3), chars=2)
FIRST = b'data: {"created": 77, "choices": [{"finish_reason": null}]}\n\n'


def data(
    payload: bytes, *ids: int, chars: int = 0, ahead: tuple[int, ...] = (), choice: int = 0
) -> frames.Frame:
    return frames.Frame.of(frames.Kind.DATA, payload, ids, choice, chars, ahead)


def sent(*items: frames.Frame) -> emitted.Emitted:
    found = emitted.Emitted()
    for item in items:
        if item.kind is frames.Kind.PROMPT:
            found.begin(item)
        else:
            found.add(item)
    return found


def test_ids_ahead_of_their_text_are_part_of_it_and_come_once() -> None:
    found = sent(PROMPT, data(FIRST, 7, chars=2, ahead=(8, 9)))
    assert (found.tokens, found.why_not) == (3, "")
    assert found.resume(begun=True) == resume.Resume((1, 2, 3), (7, 8, 9), 1, 2, 77, 2)

    found.add(data(b"data: {}\n\n", 8, 9, chars=5))
    assert found.resume(begun=True) == resume.Resume((1, 2, 3), (7, 8, 9), 3, 7, 77, 2)


def test_what_the_client_has_not_got_does_not_count_as_text() -> None:
    found = sent(PROMPT, data(b"", ahead=(7, 8)))
    assert found.resume(begun=False) == resume.Resume((1, 2, 3), (7, 8), 0, 0, 0, 2)


@pytest.mark.parametrize(
    ("items", "why"),
    [
        ((), "does not tell the tokens' ids"),
        ((frames.Frame.of(frames.Kind.PROMPT, b"n is above 1", (1,)),), "n is above 1"),
        ((PROMPT, data(b"data: {}\n\n", 7)), "unknown kind"),
        ((PROMPT, data(FIRST, 7), data(b'{"finish_reason": "stop"}')), "its end was lost"),
    ],
)
def test_why_an_answer_cannot_go_on(items: tuple[frames.Frame, ...], why: str) -> None:
    assert why in sent(*items).why_not


def test_tokens_of_other_choices_are_counted_only() -> None:
    found = sent(PROMPT, data(FIRST, 7), data(b"", 8, 9, choice=1))
    assert found.tokens == 3
    assert found.resume(begun=True).token_ids == (7,)


def test_an_answer_that_begins_anew_keeps_what_it_has_cost() -> None:
    found = sent(PROMPT, data(FIRST, 7))
    found.spend(quota.Spent(3, 0, 1))
    found.spend(quota.Spent(0, 0, 2))
    found.clear()
    assert (found.tokens, found.prompt_tokens, found.spent) == (0, 0, quota.Spent(3, 0, 3))


LOST = replica.Lost("gone", computed=True)
LEAVES = replica.Lost("leaves", computed=True, kind=errors.Draining)
BEGUN = (PROMPT, data(FIRST, 7, chars=1))


FAILED = replica.Lost("odd", computed=False, kind=errors.EngineFailed)


def test_two_engines_that_fail_on_it_are_the_limit_and_the_error_says_so() -> None:
    losses = emitted.Losses(2, batch=False)
    assert losses.after(FAILED, sent(), begun=False) is emitted.Next.RESTART
    assert not losses.died
    assert losses.after(LOST, sent(*BEGUN), begun=True) is emitted.Next.RESUME
    assert losses.died
    assert losses.after(FAILED, sent(*BEGUN), begun=True) is emitted.Next.FAIL
    error = losses.error()
    assert (error.code, error.retry_after_s) == ("engine_failed", None)
    assert "2 times" in error.message
    assert "set aside" in error.message


def test_losses_of_which_nobody_knows_who_is_at_fault_have_an_end_too() -> None:
    losses = emitted.Losses(2, batch=False)
    for _ in range(7):
        assert losses.after(LOST, sent(*BEGUN), begun=True) is emitted.Next.RESUME
    assert losses.after(LOST, sent(*BEGUN), begun=True) is emitted.Next.FAIL
    error = losses.error()
    assert (error.code, error.retry_after_s) == ("replica_lost", 1.0)
    assert "set aside" not in error.message
    once = emitted.Losses(1, batch=False)
    assert once.after(LOST, sent(*BEGUN), begun=True) is emitted.Next.FAIL


def test_an_answer_is_further_only_beyond_the_furthest_loss() -> None:
    found = sent(*BEGUN, data(b"", *range(30)))
    losses = emitted.Losses(2, batch=False)
    losses.after(LOST, found, begun=False)
    found.clear()
    found.add(data(FIRST, *range(40)))
    assert not found.further(batch=False)
    found.add(data(b"", *range(7)))
    assert found.further(batch=False)
    assert not found.further(batch=True), (
        "64 of a line's ids and 16 in its engine may not be told yet"
    )
    found.add(data(b"", *range(80)))
    assert found.further(batch=True)


def test_replicas_that_leave_as_planned_are_no_loss() -> None:
    losses = emitted.Losses(2, batch=False)
    for _ in range(5):
        assert losses.after(LEAVES, sent(*BEGUN), begun=True) is emitted.Next.RESUME
    assert losses.after(LOST, sent(*BEGUN), begun=True) is emitted.Next.RESUME


def test_a_replica_that_was_gone_before_is_no_fault_of_the_request() -> None:
    losses = emitted.Losses(2, batch=False)
    missed = replica.Lost("not reachable", computed=False)
    for _ in range(7):
        assert losses.after(missed, sent(), begun=False) is emitted.Next.RESTART
    assert losses.after(missed, sent(), begun=False) is emitted.Next.FAIL
    assert "can be reached" in losses.error().message
    assert isinstance(losses.error(), errors.NoReplica)


@pytest.mark.parametrize(
    ("items", "begun", "batch", "want"),
    [
        ((), False, False, emitted.Next.RESTART),
        (BEGUN, False, False, emitted.Next.RESUME),  # a whole answer whose tokens are known
        ((PROMPT, data(FIRST)), True, False, emitted.Next.RESUME),  # only its opening went out
        ((data(FIRST, 7),), True, False, emitted.Next.FAIL),
        (BEGUN, True, True, emitted.Next.FAIL),  # the batch runner does it itself
    ],
)
def test_what_follows_a_loss(
    items: tuple[frames.Frame, ...], begun: bool, batch: bool, want: emitted.Next
) -> None:
    losses = emitted.Losses(2, batch=batch)
    assert losses.after(LOST, sent(*items), begun=begun) is want

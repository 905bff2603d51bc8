"""Which answers end a line, which are tried again, and which count."""

import json

import pytest

from batch_jobs import verdicts
from batch_jobs.verdicts import Answer, Verdict
from scheduler.contracts import errors


def said(status: int, code: str | None = None) -> Answer:
    body = {} if code is None else {"error": {"code": code, "message": "why\nso"}}
    return Answer(status, json.dumps(body).encode())


def blamed(blame: str) -> Answer:
    error = errors.ReplicaLost("gone")
    error.blame = errors.Blame(blame)
    return Answer(error.status, json.dumps(error.openai()).encode())


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (said(200), Verdict.OK),
        (Answer(200, b"[1]"), Verdict.RETRY),
        (Answer(200, b'{"a": NaN}'), Verdict.RETRY),
        (Answer(200, b'{"a":'), Verdict.RETRY),
        (Answer(200, b'{"a": "\xff"}'), Verdict.RETRY),
        (said(503, "preempted"), Verdict.PREEMPTED),
        (said(429, "overloaded"), Verdict.WAIT),
        (Answer(429, b"nginx says no"), Verdict.WAIT),
        (said(429, "quota_exceeded"), Verdict.WAIT),
        (said(400, "request_larger_than_quota"), Verdict.REFUSED),
        (said(503, "no_replica"), Verdict.WAIT),
        (said(503, "busy"), Verdict.WAIT),
        (said(503, "recording_unavailable"), Verdict.WAIT),
        (said(504, "deadline_exceeded"), Verdict.WAIT),
        (said(401, "invalid_api_key"), Verdict.WAIT),
        (Answer(verdicts.NOT_SENT), Verdict.WAIT),
        (Answer(verdicts.CUT), Verdict.RETRY),
        (Answer(verdicts.TOO_LATE), Verdict.RETRY),
        (said(502, "replica_lost"), Verdict.SUSPECT),
        (blamed("shared"), Verdict.SUSPECT),
        (blamed("alone"), Verdict.GUILTY),
        (blamed("none"), Verdict.BYSTANDER),
        (said(502), Verdict.RETRY),
        (said(503), Verdict.RETRY),
        (said(504), Verdict.RETRY),
        (said(500, "internal"), Verdict.RETRY),
        (said(499, "cancelled"), Verdict.WAIT),
        (said(408), Verdict.RETRY),
        (said(400, "context_length_exceeded"), Verdict.REFUSED),
        (said(403, "forbidden"), Verdict.REFUSED),
        (said(404, "model_not_found"), Verdict.REFUSED),
        (said(413, "body_too_large"), Verdict.REFUSED),
        (said(422), Verdict.REFUSED),
    ],
)
def test_each_answer_has_its_verdict(answer: Answer, verdict: Verdict) -> None:
    assert verdicts.judge(answer).verdict is verdict


def test_code_and_message_come_from_the_body_in_one_line() -> None:
    judged = verdicts.judge(said(400, "bad_request"))
    assert (judged.code, judged.message) == ("bad_request", "why so")
    assert verdicts.judge(Answer(418, b"teapot")).code == "http_418"


def test_backoff_doubles_to_its_cap_and_spreads_by_line() -> None:
    waits = [verdicts.backoff_s(n, first_s=1.0, most_s=8.0, key=5) for n in range(1, 40)]
    for n, wait in enumerate(waits, 1):
        full = min(8.0, 2.0 ** (n - 1))
        assert full / 2 <= wait <= full
    assert waits == [verdicts.backoff_s(n, first_s=1.0, most_s=8.0, key=5) for n in range(1, 40)]
    spread = {verdicts.backoff_s(1, first_s=1.0, most_s=8.0, key=key) for key in range(100)}
    assert len(spread) > 90


def test_retry_after_is_heeded_up_to_the_cap() -> None:
    assert verdicts.backoff_s(1, first_s=0.1, most_s=8.0, key=1, asked_s=3.0) == 3.0
    assert verdicts.backoff_s(1, first_s=0.1, most_s=8.0, key=1, asked_s=3000.0) == 8.0


@pytest.mark.parametrize(
    ("code", "asked_s", "longest_s"),
    [
        ("overloaded", 40.0, 5.0),
        ("quota_exceeded", 2.0, 5.0),  # the rest of a minute, or a place
        ("quota_exceeded", 40.0, 40.0),
        ("quota_exceeded", 40_000.0, 60.0),  # the rest of a day: it may be raised before
        ("quota_exceeded", 0.0, 60.0),  # shut out
    ],
)
def test_a_used_up_quota_is_not_asked_for_as_often_as_room(
    code: str, asked_s: float, longest_s: float
) -> None:
    judged = verdicts.judge(said(429, code))
    assert verdicts.longest_wait_s(judged, asked_s, room_s=5.0, quota_s=60.0) == longest_s


@pytest.mark.parametrize(
    ("code", "body", "alone"),
    [
        ("quota_exceeded", b'{"model": "m"}', True),
        ("overloaded", b'{"model": "m", "forebay_version": "2"}', False),
        ("no_replica", b'{"model": "m"}', False),
        ("no_replica", b'{"model": "m", "forebay_version": "2"}', True),
        ("no_replica", json.dumps({"prompt": 'say "forebay_version"'}).encode(), False),
    ],
)
def test_what_says_nothing_of_others_lines_of_the_model(
    code: str, body: bytes, alone: bool
) -> None:
    """A job of a version that is away would hold up all jobs of its model."""
    assert verdicts.alone(verdicts.judge(said(503, code)), body) is alone

"""Pauses double up to a limit."""

from scheduler.core import backoff


def test_pauses_double_up_to_the_limit() -> None:
    failures = backoff.Failures()
    pauses = []
    for _ in range(6):
        failures = backoff.failed(failures, 100.0, "why", first_s=1.0, most_s=10.0)
        pauses.append(failures.until - 100.0)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert (failures.count, failures.reason) == (6, "why")
    assert failures.waits(109.9)
    assert not failures.waits(110.0)
    assert not backoff.Failures().waits(0.0)


def test_many_failures_do_not_overflow() -> None:
    failures = backoff.Failures(count=10_000)
    assert backoff.failed(failures, 0.0, "", first_s=1.0, most_s=60.0).until == 60.0

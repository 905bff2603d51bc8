"""Which of an attempt's rows gives what."""

from accounting import merge
from scheduler.contracts import usage
from tests.unit.accounting import samples

OPEN = samples.row("open")


def one(*rows: usage.UsageRow) -> usage.UsageRow:
    (merged,) = merge.merge(rows)
    return merged


def test_close_wins_when_it_ended_well() -> None:
    close = samples.row("close", output_tokens=5, uncached_prompt_tokens=9)
    replica = samples.row("replica", output_tokens=6, outcome="client_gone")
    assert one(OPEN, replica, close) == close


def test_a_gateway_that_saw_less_learns_the_counts_from_the_replica() -> None:
    close = samples.row(
        "close", output_tokens=3, outcome="client_gone", reason="left", payer="platform"
    )
    replica = samples.row(
        "replica",
        output_tokens=8,
        uncached_prompt_tokens=4,
        cached_prompt_tokens=2,
        first_token_us=77,
    )
    merged = one(close, replica, OPEN)
    assert merged == samples.row(
        "close",
        outcome="client_gone",
        reason="left",
        payer="platform",
        output_tokens=8,
        uncached_prompt_tokens=4,
        cached_prompt_tokens=2,
        first_token_us=77,
    )


def test_a_replica_that_died_leaves_the_gateways_counts() -> None:
    close = samples.row("close", output_tokens=30, outcome="replica_lost", first_token_us=9)
    replica = samples.row("replica", output_tokens=12, uncached_prompt_tokens=4, first_token_us=8)
    assert one(OPEN, replica, close) == close


def test_the_replicas_row_speaks_where_the_gateway_died() -> None:
    replica = samples.row("replica", outcome="client_gone", output_tokens=12)
    assert one(OPEN, replica) == replica


def test_nobody_said_more_than_open() -> None:
    assert one(OPEN, OPEN).outcome is usage.Outcome.OPEN


def test_attempts_of_one_request_stay_apart() -> None:
    first = samples.row("close", attempt=1, outcome="replica_lost", output_tokens=4)
    second = samples.row("close", attempt=2, output_tokens=10)
    assert merge.merge([second, first]) == [first, second]

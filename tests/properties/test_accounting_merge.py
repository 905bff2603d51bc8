"""The view that the reports read and the rules as written choose the same row, whatever was recorded."""

import dataclasses
import pathlib
import tempfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accounting import books, merge, spool
from scheduler.contracts import clock, usage
from tests.unit.accounting import samples

pytestmark = pytest.mark.duckdb
KINDS = st.sampled_from(list(usage.RowKind))
COUNTS = st.integers(0, 3)


@st.composite
def rows(draw: st.DrawFn) -> usage.UsageRow:
    kind = draw(KINDS)
    return samples.row(
        kind,
        draw(st.sampled_from(["a", "b", "a:1"])),
        draw(st.integers(1, 2)),
        outcome=draw(st.sampled_from(list(usage.Outcome))),
        payer=draw(st.sampled_from(list(usage.Payer))),
        uncached_prompt_tokens=draw(COUNTS),
        cached_prompt_tokens=draw(COUNTS),
        output_tokens=draw(COUNTS),
        first_token_us=draw(COUNTS),
        ended_us=draw(COUNTS),
        waste_tokens=draw(COUNTS),
        reason=draw(st.sampled_from(["", "é", "z", "\U0001f980"])),
        team=draw(st.sampled_from(["007", "7", "1e3", "NULL", ""])),
    )


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(rows(), max_size=12))
def test_the_view_says_what_the_rules_say(written: list[usage.UsageRow]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        state = pathlib.Path(folder)
        sink = spool.Spool(state / "spool" / "w", "w", segment_bytes=1, clock=clock.FakeClock())
        for row in written:
            sink.append(row)
        sink.close()
        with books.Books(state).reading() as reading:
            seen = reading.query("SELECT * FROM usage ORDER BY request_id, attempt")
    merged = merge.merge(written)
    assert seen == [row.flat() for row in merged]
    keys = {(row.identity.request_id, row.identity.attempt) for row in written}
    assert len(merged) == len(keys)


@given(st.lists(rows(), max_size=12), st.randoms(use_true_random=False))
def test_order_and_repetition_change_nothing(written: list[usage.UsageRow], random: object) -> None:
    once = merge.merge(written)
    shuffled = written * 2
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis gives a random.Random
    assert merge.merge(shuffled) == once


@given(st.lists(rows(), max_size=12), st.data())
def test_what_was_merged_before_and_is_merged_again_with_late_rows_is_the_same(
    written: list[usage.UsageRow], data: st.DataObject
) -> None:
    """An attempt has one row of a kind, perhaps written twice over: what a compaction relies on."""
    one_version = {
        (row.identity.request_id, row.identity.attempt, row.kind): row for row in written
    }
    twice = [*one_version.values(), *one_version.values()]
    early = [row for row in twice if data.draw(st.booleans())]
    late = [row for row in twice if row not in early or data.draw(st.booleans())]
    assert merge.merge([*merge.merge(early), *late]) == merge.merge(twice)


@given(st.lists(rows(), max_size=12), st.data())
def test_a_close_that_is_amended_after_it_was_merged_counts_what_its_replica_told(
    written: list[usage.UsageRow], data: st.DataObject
) -> None:
    """Of one that did not end ok a second CLOSE may come, with a later end and what the first one knew of."""
    close = data.draw(rows().filter(lambda row: row.outcome is not usage.Outcome.OK))
    close = dataclasses.replace(close, kind=usage.RowKind.CLOSE)
    replicas = [row for row in written if row.kind is usage.RowKind.REPLICA][:1]
    replica = [dataclasses.replace(row, identity=close.identity) for row in replicas]
    amended = dataclasses.replace(
        close,
        payer=data.draw(st.sampled_from(list(usage.Payer))),
        outcome=data.draw(st.sampled_from([close.outcome, usage.Outcome.CANCELLED])),
        output_tokens=close.output_tokens + data.draw(COUNTS),
        waste_tokens=data.draw(COUNTS),
        ended_us=close.ended_us + 1,
    )
    at_once = merge.merge([close, *replica, amended])
    assert merge.merge([*merge.merge([close, *replica]), amended]) == at_once
    assert merge.merge([*merge.merge([amended, close]), *replica]) == at_once
    assert at_once[0].output_tokens == max(row.output_tokens for row in (close, *replica, amended))

"""What can be read back of a segment, whatever happened to its bytes."""

import dataclasses
import json
from typing import Any

import pytest

from accounting import segment
from scheduler.contracts import usage
from tests.unit.accounting import samples

ROWS: list[usage.Row] = [
    samples.row("open"),
    samples.row("close", team="007", custom_id='a|b\n"漢\ud800', output_tokens=7),
    samples.gpu(),
    samples.replica("serving", samples.NOON, samples.NOON + 5),
]


def whole() -> bytes:
    return segment.encode_header("w", 5) + b"".join(map(segment.encode, ROWS))


def test_rows_come_back_as_they_went_in() -> None:
    read = segment.parse(whole() + segment.encode_seal(len(ROWS)), "s")
    assert read.rows == ROWS
    assert (read.problem, read.sealed, read.header["writer"]) == ("", True, "w")


def test_a_live_segment_with_its_preallocated_rest_is_no_fault() -> None:
    read = segment.parse(whole() + bytes(5000), "s")
    assert (read.rows, read.problem, read.sealed) == (ROWS, "", False)


@pytest.mark.parametrize("rest", [b"", bytes(3000)])
def test_torn_at_every_byte_keeps_the_whole_rows_before_it(rest: bytes) -> None:
    data = whole()
    ends = [len(segment.encode_header("w", 5))]
    for row in ROWS:
        ends.append(ends[-1] + len(segment.encode(row)))
    for cut in range(ends[0], len(data) + 1):
        read = segment.parse(data[:cut] + rest, "s")
        kept = sum(end <= cut for end in ends[1:])
        assert read.rows == ROWS[:kept]
        at_edge = cut in ends or data[ends[kept] : cut].strip(b"\0") == b""
        assert (read.problem == "") == at_edge, cut


def test_a_flipped_bit_anywhere_never_yields_a_row_that_was_not_written() -> None:
    data = whole()
    start = len(segment.encode_header("w", 5))
    for at in range(start, len(data)):
        for bit in (0x01, 0x80):
            broken = bytearray(data)
            broken[at] ^= bit
            read = segment.parse(bytes(broken), "s")
            assert read.problem
            assert read.rows == ROWS[: len(read.rows)]
            assert len(read.rows) < len(ROWS)


def test_a_damaged_header_is_named() -> None:
    for data in (b"", bytes(4096), b"PAR1" + bytes(50)):
        read = segment.parse(data, "x.seg")
        assert read.rows == []
        assert read.problem.startswith("x.seg ")


def test_a_seal_that_counts_more_rows_is_a_fault() -> None:
    read = segment.parse(whole() + segment.encode_seal(9), "s")
    assert "sealed with 9 rows, 4 found" in read.problem


@pytest.mark.parametrize(
    ("name", "value"), [("output_tokens", -1), ("output_tokens", 1.5), ("team", 7)]
)
def test_a_row_of_no_valid_form_is_reported_and_the_next_is_read(name: str, value: object) -> None:
    bad = json.loads(segment.encode(ROWS[1])[segment.FRAME_BYTES :])
    bad[1 + segment.COLUMNS["u"].index(name)] = value
    data = segment.encode_header("w", 5) + segment.frame(json.dumps(bad).encode())
    read = segment.parse(data + segment.encode(ROWS[0]), "s")
    assert read.rows == [ROWS[0]]
    assert name in read.problem


@pytest.mark.parametrize("payload", [b"{", b"[]", b"7", b'["u"]', b'["x", 1]', b'"text"'])
def test_a_record_that_no_writer_of_ours_makes_stops_nothing(payload: bytes) -> None:
    data = segment.encode_header("w", 5) + segment.frame(payload) + segment.encode(ROWS[0])
    read = segment.parse(data, "s")
    assert read.rows == [ROWS[0]]
    assert "no valid form" in read.problem


def test_columns_of_another_release_are_read_by_name() -> None:
    header = json.loads(segment.encode_header("w", 5)[len(segment.MAGIC) + segment.FRAME_BYTES :])
    columns = ["from_the_future", *reversed(segment.COLUMNS["g"])]
    header["columns"]["g"] = columns
    values = {**dataclasses.asdict(samples.gpu()), "from_the_future": {"x": 1}}
    row = ["g", *[values[name] for name in columns]]
    data = segment.MAGIC + segment.frame(json.dumps(header).encode())
    read = segment.parse(data + segment.frame(json.dumps(row).encode()), "s")
    assert read.rows == [samples.gpu()]


def test_texts_of_any_length_fit_half_of_the_smallest_segment() -> None:
    names: dict[str, Any] = {
        f.name: "漢" * 9000 for f in dataclasses.fields(usage.Identity) if f.type is str
    }
    record = segment.encode(samples.row("close", **names, reason="x" * 100_000))
    assert len(record) < 128 * 1024
    read = segment.parse(segment.encode_header("w", 5) + record, "s")
    first = read.rows[0]
    assert isinstance(first, usage.UsageRow)
    assert first.identity.team == "漢" * segment.LONGEST_TEXT

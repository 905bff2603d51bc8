"""What can be read back of a segment, whatever happened to its bytes."""

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting import columns, segment
from scheduler.contracts import usage
from tests.unit.accounting import samples

ROWS: list[usage.Row] = [
    samples.row("open"),
    samples.row("close", team="007", custom_id='a|b\n"漢\ud800', output_tokens=7),
    samples.gpu(),
    samples.replica("serving", samples.NOON, samples.NOON + 5),
]


def same(found: columns.Rows, rows: list[usage.Row]) -> bool:
    """Whether the columns hold what Arrow makes of the rows (which can't keep lone surrogates)."""
    wanted = columns.of_rows(rows)
    assert found.tables.keys() == wanted.keys()
    return all(found.tables[name].to_pydict() == wanted[name].to_pydict() for name in wanted)


def whole() -> bytes:
    return segment.encode_header("w", 5) + b"".join(map(segment.encode, ROWS))


def test_rows_come_back_as_they_went_in() -> None:
    read = segment.parse(whole() + segment.encode_seal(len(ROWS)), "s")
    assert read.rows == ROWS
    assert (read.problem, read.sealed, read.header["writer"]) == ("", True, "w")
    found = columns.read(segment.scan(whole() + segment.encode_seal(len(ROWS)), "s"))
    assert (found.count, found.problem) == (len(ROWS), "")
    assert same(found, ROWS)


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
        assert read.problem.startswith("x.seg: is ")


def test_a_seal_that_counts_more_rows_is_a_fault() -> None:
    read = segment.parse(whole() + segment.encode_seal(9), "s")
    assert "sealed with 9 rows, 4 found" in read.problem


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("output_tokens", "-1"),
        ("output_tokens", "1.5"),
        ("ended_us", ""),
        ("started_us", "9" * 30),
        ("team", "\\"),
        ("team", "漢\\n"),
        ("team", "a\x1fb"),
        ("outcome", "fine"),
        ("kind", ""),
    ],
)
def test_a_row_of_no_valid_form_is_reported_and_the_next_is_read(name: str, value: str) -> None:
    bad = segment.encode(ROWS[0])[segment.FRAME_BYTES :].decode().split(segment.SEPARATOR)
    bad[1 + segment.COLUMNS["u"].index(name)] = value
    data = segment.encode_header("w", 5) + segment.frame(segment.SEPARATOR.join(bad).encode())
    read = segment.parse(data + segment.encode(ROWS[0]), "s")
    assert read.rows == [ROWS[0]]
    assert "record 0 has no valid form" in read.problem
    found = columns.read(segment.scan(data + segment.encode(ROWS[0]), "s"))
    assert (found.count, found.problem) == (1, read.problem)
    assert same(found, [ROWS[0]])


@pytest.mark.parametrize(
    "payload", [b"{", b"[]", b"7", b'["u"]', b'["x", 1]', b'"text"', b"u", b"\x1f", b"\xff"]
)
def test_a_record_that_no_writer_of_ours_makes_stops_nothing(payload: bytes) -> None:
    data = segment.encode_header("w", 5) + segment.frame(payload) + segment.encode(ROWS[0])
    read = segment.parse(data, "s")
    assert read.rows == [ROWS[0]]
    assert "no valid form" in read.problem


def test_columns_of_another_release_are_read_by_name() -> None:
    header = json.loads(segment.encode_header("w", 5)[len(segment.MAGIC) + segment.FRAME_BYTES :])
    names = ["from_the_future", *reversed(segment.COLUMNS["g"])]
    header["columns"]["g"] = names
    values = {**dataclasses.asdict(samples.gpu()), "from_the_future": "x"}
    row = segment.SEPARATOR.join(["g", *[str(values[name]) for name in names]])
    data = segment.MAGIC + segment.frame(json.dumps(header).encode()) + segment.frame(row.encode())
    read = segment.parse(data, "s")
    assert read.rows == [samples.gpu()]
    assert same(columns.read(segment.scan(data, "s")), [samples.gpu()])


def test_a_column_that_the_writer_did_not_know_has_its_default() -> None:
    header = json.loads(segment.encode_header("w", 5)[len(segment.MAGIC) + segment.FRAME_BYTES :])
    wasted = samples.row("close", waste_tokens=5)
    names = [name for name in segment.COLUMNS["u"] if name != "waste_tokens"]
    header["columns"]["u"] = names
    row = segment.SEPARATOR.join(["u", *[str(wasted.flat()[name]) for name in names]])
    data = segment.MAGIC + segment.frame(json.dumps(header).encode()) + segment.frame(row.encode())
    want = dataclasses.replace(wasted, waste_tokens=0)
    assert segment.parse(data, "s").rows == [want]
    assert same(columns.read(segment.scan(data, "s")), [want])


@given(st.text(), st.text(), st.integers(0, 2**63 - 1))
def test_any_text_and_count_come_back_both_ways(team: str, reason: str, tokens: int) -> None:
    rows: list[usage.Row] = [
        samples.row("close", team=team, reason=reason, output_tokens=tokens),
        samples.row("open", custom_id=reason, user=team),
    ]
    data = segment.encode_header("w", 5) + b"".join(map(segment.encode, rows))
    assert segment.parse(data, "s").rows == rows
    assert same(columns.read(segment.scan(data, "s")), rows)


def test_open_and_close_share_what_was_encoded_and_say_the_same() -> None:
    encoder = segment.Encoder()
    begin = samples.row("open", reason="")
    end = dataclasses.replace(samples.row("close", output_tokens=9), identity=begin.identity)
    again = dataclasses.replace(end, kind=usage.RowKind.REPLICA)
    for row in (begin, end, again, begin, begin):
        assert encoder.encode(row) == segment.encode(row)


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

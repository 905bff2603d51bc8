"""What can be read back of a segment, whatever happened to its bytes."""

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting import columns, decoding, records, segment
from scheduler.contracts import errors, usage
from tests.unit.accounting import samples

IDS = ["01936f3a-7c00-7abc-8def-0123456789ab", "01936f3a-7c01-7abc-8def-0123456789ab"]
ROWS: list[usage.Row] = [
    samples.row("open"),
    samples.row("open", IDS[0], team="007", custom_id="漢|\\"),
    samples.row("close", IDS[1], attempt=2, reason="a\nb", waste_tokens=3, batch_job_id=8),
    samples.row("close", team="007", custom_id='a|b\n"漢\ud800', output_tokens=7),
    samples.gpu(),
    samples.replica("serving", samples.NOON, samples.NOON + 5),
]


def same(found: columns.Rows, rows: list[usage.Row]) -> bool:
    """Whether the columns hold what Arrow makes of the rows (which can't keep lone surrogates)."""
    wanted = columns.of_rows(rows)
    assert found.tables.keys() == wanted.keys()
    return all(found.tables[name].to_pydict() == wanted[name].to_pydict() for name in wanted)


def encoded(*rows: usage.Row) -> list[bytes]:
    """Return the records of each row, as one writer's."""
    encoder = records.Encoder()
    return [encoder.encode(row) for row in rows]


def parsed(data: bytes) -> segment.Segment:
    return decoding.decode(segment.scan(data, "s"))


def whole() -> bytes:
    return segment.encode_header("w", 5) + b"".join(encoded(*ROWS))


def test_rows_come_back_as_they_went_in() -> None:
    read = parsed(whole() + segment.encode_seal(len(ROWS)))
    assert read.rows == ROWS
    assert (read.problem, read.sealed, read.header["writer"]) == ("", True, "w")
    found = columns.read(segment.scan(whole() + segment.encode_seal(len(ROWS)), "s"))
    assert (found.count, found.problem) == (len(ROWS), "")
    assert same(found, ROWS)


def test_a_live_segment_with_its_preallocated_rest_is_no_fault() -> None:
    read = parsed(whole() + bytes(5000))
    assert (read.rows, read.problem, read.sealed) == (ROWS, "", False)


@pytest.mark.parametrize("rest", [b"", bytes(3000)], ids=["short", "zeros"])
def test_torn_at_every_byte_keeps_the_whole_rows_before_it(rest: bytes) -> None:
    data = whole()
    ends = [len(segment.encode_header("w", 5))]
    between = set()  # records end here as well, those of definitions
    for each in encoded(*ROWS):
        at = 0
        while at < len(each):
            at += records.FRAME_BYTES + int.from_bytes(each[at : at + 4], "little")
            between.add(ends[-1] + at)
        ends.append(ends[-1] + len(each))
    for cut in range(ends[0], len(data) + 1):
        read = parsed(data[:cut] + rest)
        torn = data[:cut] + rest  # a row's own last bytes may be zeros
        kept = sum(torn[:end] == data[:end] for end in ends[1:])
        assert read.rows == ROWS[:kept]
        last = max(end for end in {*between, ends[0]} if torn[:end] == data[:end])
        at_edge = torn[last:].strip(b"\0") == b""
        assert (read.problem == "") == at_edge, cut


def test_a_flipped_bit_anywhere_never_yields_a_row_that_was_not_written() -> None:
    data = whole()
    start = len(segment.encode_header("w", 5))
    for at in range(start, len(data)):
        for bit in (0x01, 0x80):
            broken = bytearray(data)
            broken[at] ^= bit
            read = parsed(bytes(broken))
            assert read.problem
            assert read.rows == ROWS[: len(read.rows)]
            assert len(read.rows) < len(ROWS)


def test_a_damaged_header_is_named() -> None:
    for data in (b"", bytes(4096), b"PAR1" + bytes(50)):
        read = decoding.decode(segment.scan(data, "x.seg"))
        assert read.rows == []
        assert read.problem.startswith("x.seg: is ")


def test_a_seal_that_counts_more_rows_is_a_fault() -> None:
    read = parsed(whole() + segment.encode_seal(9))
    assert f"sealed with 9 rows, {len(ROWS)} found" in read.problem


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
    bad = encoded(ROWS[0])[0][records.FRAME_BYTES :].decode().split(records.SEPARATOR)
    bad[1 + records.COLUMNS["u"].index(name)] = value
    data = segment.encode_header("w", 5) + records.frame(records.SEPARATOR.join(bad).encode())
    read = parsed(data + encoded(ROWS[0])[0])
    assert read.rows == [ROWS[0]]
    assert "record 0 has no valid form" in read.problem
    found = columns.read(segment.scan(data + encoded(ROWS[0])[0], "s"))
    assert (found.count, found.problem) == (1, read.problem)
    assert same(found, [ROWS[0]])


@pytest.mark.parametrize(
    "payload", [b"{", b"[]", b"7", b'["u"]', b'["x", 1]', b'"text"', b"u", b"\x1f", b"\xff"]
)
def test_a_record_that_no_writer_of_ours_makes_stops_nothing(payload: bytes) -> None:
    data = segment.encode_header("w", 5) + records.frame(payload) + encoded(ROWS[0])[0]
    read = parsed(data)
    assert read.rows == [ROWS[0]]
    assert "no valid form" in read.problem


def test_columns_of_another_release_are_read_by_name() -> None:
    header = json.loads(segment.encode_header("w", 5)[len(segment.MAGIC) + records.FRAME_BYTES :])
    names = ["from_the_future", *reversed(records.COLUMNS["g"])]
    header["columns"]["g"] = names
    values = {**dataclasses.asdict(samples.gpu()), "from_the_future": "x"}
    row = records.SEPARATOR.join(["g", *[str(values[name]) for name in names]])
    data = segment.MAGIC + records.frame(json.dumps(header).encode()) + records.frame(row.encode())
    read = parsed(data)
    assert read.rows == [samples.gpu()]
    assert same(columns.read(segment.scan(data, "s")), [samples.gpu()])


def test_a_column_that_the_writer_did_not_know_has_its_default() -> None:
    header = json.loads(segment.encode_header("w", 5)[len(segment.MAGIC) + records.FRAME_BYTES :])
    wasted = samples.row("close", waste_tokens=5)
    names = [name for name in records.COLUMNS["u"] if name != "waste_tokens"]
    header["columns"]["u"] = names
    row = records.SEPARATOR.join(["u", *[str(wasted.flat()[name]) for name in names]])
    data = segment.MAGIC + records.frame(json.dumps(header).encode()) + records.frame(row.encode())
    want = dataclasses.replace(wasted, waste_tokens=0)
    assert parsed(data).rows == [want]
    assert same(columns.read(segment.scan(data, "s")), [want])


@given(st.text(), st.text(), st.integers(0, 2**63 - 1))
def test_any_text_and_count_come_back_both_ways(team: str, reason: str, tokens: int) -> None:
    rows: list[usage.Row] = [
        samples.row("close", team=team, reason=reason, output_tokens=tokens),
        samples.row("open", custom_id=reason, user=team),
    ]
    data = segment.encode_header("w", 5) + b"".join(encoded(*rows))
    assert parsed(data).rows == rows
    assert same(columns.read(segment.scan(data, "s")), rows)


def test_open_and_close_share_what_was_encoded_and_say_the_same() -> None:
    begin = samples.row("open", IDS[0], caller_request_id="theirs")
    end = dataclasses.replace(samples.row("close", output_tokens=9), identity=begin.identity)
    again = dataclasses.replace(end, kind=usage.RowKind.REPLICA)
    rows: list[usage.Row] = [begin, end, again, begin, begin, end]
    written = encoded(*rows)
    data = segment.encode_header("w", 5) + b"".join(written)
    assert parsed(data).rows == rows
    assert same(columns.read(segment.scan(data, "s")), rows)
    assert len(written[1]) < 200 < len(written[0])


def test_thousands_of_requests_take_few_bytes_each_and_become_columns() -> None:
    rows: list[usage.Row] = []
    for n in range(3000):
        name = f"01936f3a-7c00-7abc-8def-{n:012x}"
        begin = samples.row("open", name, team=f"team{n % 50}", arrived_us=n, started_us=n)
        close = samples.row("close", output_tokens=n, reason=f"it was {n % 3}")
        rows += [begin, dataclasses.replace(close, identity=begin.identity)]
    data = segment.encode_header("w", 5) + b"".join(encoded(*rows))
    assert len(data) < 150 * len(rows)
    found = columns.read(segment.scan(data, "s"))
    assert (found.count, found.problem) == (len(rows), "")
    assert same(found, rows)
    assert parsed(data).rows == rows


@pytest.mark.parametrize("value", [-1, 2**63, 1.5, "7", None])
def test_numbers_that_no_reader_takes_are_refused_whatever_the_id(value: Any) -> None:
    encoder = records.Encoder()
    for name in ("output_tokens", "ended_us", "arrived_us", "attempt", "batch_job_id"):
        with pytest.raises(errors.Internal, match="no whole number"):
            encoder.encode(samples.row("close", IDS[0], **{name: value}))
    data = segment.encode_header("w", 5) + encoder.encode(ROWS[1])
    assert parsed(data).rows == [ROWS[1]]


def test_a_compact_row_without_its_definition_is_named_and_the_others_are_read() -> None:
    first, second = encoded(samples.row("open", IDS[0]), samples.row("open", IDS[1]))
    size = 117 + records.FRAME_BYTES
    broken = bytearray(second[records.FRAME_BYTES :])
    assert len(second) == size
    broken[1:5] = (77).to_bytes(4, "little")
    swapped = bytearray(second[records.FRAME_BYTES :])
    swapped[1:5] = (1).to_bytes(4, "little")
    negative = bytearray(second[records.FRAME_BYTES :])
    negative[-1] = 0x80
    data = segment.encode_header("w", 5) + first
    data += b"".join(records.frame(bytes(each)) for each in (broken, swapped, negative)) + second
    read = parsed(data)
    assert len(read.rows) == 2
    assert read.problem.count("no valid form") == 3
    found = columns.read(segment.scan(data, "s"))
    assert (found.count, found.problem) == (2, read.problem)
    assert same(found, read.rows)


def test_a_compact_row_of_another_release_is_read_by_name() -> None:
    header = json.loads(segment.encode_header("w", 5)[len(segment.MAGIC) + records.FRAME_BYTES :])
    header["compact"]["fields"].append(["carbon_mg", "q"])
    header["compact"]["groups"]["where"].append("rack")
    found = segment.scan(segment.encode_header("w", 5) + b"".join(encoded(ROWS[1])), "s")
    shared = [each + b"\x1fr7" if each.startswith(b"Dwhere") else each for each in found.shared]
    payloads = [each + bytes(8) for each in found.payloads]
    later = found._replace(shared=shared, payloads=payloads, header=header)
    assert decoding.decode(later).rows == [ROWS[1]]
    assert same(columns.read(later), [ROWS[1]])


def test_texts_of_any_length_fit_half_of_the_smallest_segment() -> None:
    names: dict[str, Any] = {
        f.name: "漢" * 9000 for f in dataclasses.fields(usage.Identity) if f.type is str
    }
    (record,) = encoded(samples.row("close", **names, reason="x" * 100_000))
    many: dict[str, Any] = {**dict.fromkeys(names, "漢" * 2000), "request_id": IDS[0]}
    for record_of_many in encoded(samples.row(**many), samples.row("open", **many)):
        assert len(record_of_many) < 128 * 1024
    assert len(record) < 128 * 1024
    read = parsed(segment.encode_header("w", 5) + record)
    first = read.rows[0]
    assert isinstance(first, usage.UsageRow)
    assert first.identity.team == "漢" * records.LONGEST_TEXT

"""The form of a spool segment on disk: how rows become bytes, and what can be read back.

A segment is ``FOREBAY2``, then records: length (u32), CRC-32 (u32) of the length's bytes and the payload,
payload, all little-endian. The first record is the header, a JSON object: who writes, and the column names
of each kind of row, so that a later release can read this one's segments. A row is a line of text: its tag
and its values, parted by the unit separator (0x1F), which a reader can turn into columns without looking
at each row (`accounting.columns`). A value with a backslash, a control character or a lone surrogate in
it is written with Python's ``unicode_escape``. The last record of a sealed segment is the JSON array
``["seal", rows]``. Length 0 is the preallocated rest.

``FOREBAY1``, of the first release, has JSON arrays for rows and is read as well. Standard library only:
this loads inside an engine's environment.
"""

import dataclasses
import json
import operator
import os
import socket
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scheduler.contracts import errors, usage

MAGIC = b"FOREBAY2"
_MAGICS = (MAGIC, b"FOREBAY1")
SUFFIX = ".seg"
TAKEN = ".taken"  # the marker beside an unsealed segment that the shipper has taken over
FRAME_BYTES = 8
FORMAT = 2
SEPARATOR = "\x1f"
LONGEST_TEXT = 1024
_LARGE_ROW = 16_384
_LARGEST_ROW = 96 * 1024  # fits half of the smallest segment, whatever a caller's words are
_INT64 = 2**63
_KNOWN_AT_MOST = 8192  # identities between OPEN and CLOSE; more are encoded twice

IDENTITY = tuple(field.name for field in dataclasses.fields(usage.Identity))
END = tuple(f.name for f in dataclasses.fields(usage.UsageRow) if f.name != "identity")
_GPU = tuple(field.name for field in dataclasses.fields(usage.GpuRow))
_REPLICA = tuple(field.name for field in dataclasses.fields(usage.ReplicaTimeRow))
COLUMNS = {"u": (*IDENTITY, *END), "g": _GPU, "r": _REPLICA}

_get_identity: Callable[[Any], tuple[Any, ...]] = operator.attrgetter(*IDENTITY)
_ENUMS = frozenset({"kind", "outcome", "payer"})  # their own `str` is slow
_get_end: Callable[[Any], tuple[Any, ...]] = operator.attrgetter(
    *[f"{name}._value_" if name in _ENUMS else name for name in END]
)
_get_gpu: Callable[[Any], tuple[Any, ...]] = operator.attrgetter(*_GPU)
_get_replica: Callable[[Any], tuple[Any, ...]] = operator.attrgetter(*_REPLICA)
_IDENTITY_FORMAT = SEPARATOR.join(["u", *["%s"] * len(IDENTITY)])
_END_FORMAT = SEPARATOR.join(["%s"] * len(END))
_frame_head = struct.Struct("<II")
_SEAL = b'["seal",'
_BRACKET = ord("[")


class Scan(NamedTuple):
    """The records of one segment, checked and not yet decoded.

    Attributes:
        payloads: every whole record of a row before the first fault, in the order written.
        faults: what could not be read (a live segment's zero rest is no fault).
        sealed: whether its writer closed it, so that nothing follows.
        header: who wrote it; empty if not even that could be read.
    """

    name: str
    payloads: list[bytes]
    faults: list[str]
    sealed: bool
    header: dict[str, Any]


class Segment(NamedTuple):
    """What one segment holds; `problem` is one line on what could not be read, or ""."""

    rows: list[usage.Row]
    problem: str
    sealed: bool
    header: dict[str, Any]


def frame(payload: bytes) -> bytes:
    """Return ``payload`` as one record."""
    size = len(payload).to_bytes(4, "little")
    return size + zlib.crc32(payload, zlib.crc32(size)).to_bytes(4, "little") + payload


def values_of(row: usage.Row) -> tuple[Any, ...]:
    """Return a row's tag and its values in the order of `COLUMNS`."""
    if isinstance(row, usage.UsageRow):
        return ("u", *_get_identity(row.identity), *_get_end(row))
    if isinstance(row, usage.GpuRow):
        return ("g", *_get_gpu(row))
    return ("r", *_get_replica(row))


class Encoder:
    """Turns rows into records; what OPEN and CLOSE of an attempt share is encoded once.

    That they share it is seen by the identity being the same object, as the gateway's is.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[usage.Identity, str]] = {}

    def encode(self, row: usage.Row) -> bytes:
        """Return a row as a record, ready to be written.

        Raises:
            errors.Internal: a number that no reader would take; nothing is changed.
        """
        _refuse_odd(row)
        if not isinstance(row, usage.UsageRow):
            return frame(_payload_of(values_of(row)))
        identity = row.identity
        known = self._known.pop(id(identity), None)
        if known is None:
            begin = _plain(_IDENTITY_FORMAT % _get_identity(identity), len(IDENTITY))
            if row.kind is usage.RowKind.OPEN and begin:
                if len(self._known) >= _KNOWN_AT_MOST:
                    self._known.clear()
                self._known[id(identity)] = identity, begin
        else:
            begin = known[1]
        end = _plain(_END_FORMAT % _get_end(row), len(END) - 1)
        if not begin or not end or len(begin) + len(end) > _LARGE_ROW:
            return frame(_payload_of(values_of(row)))
        return frame(f"{begin}{SEPARATOR}{end}".encode())


def _refuse_odd(row: usage.Row) -> None:
    numbers = _NUMBERS[type(row)](row)
    for value in numbers:
        if type(value) is not int or not 0 <= value < _INT64:
            raise errors.Internal(
                f"usage row not recorded: {value!r} among its numbers {numbers}, "
                f"which is no whole number from 0 to {_INT64 - 1}: its writer has to be mended"
            )


def encode(row: usage.Row) -> bytes:
    """Return one row as a record."""
    return Encoder().encode(row)


def _plain(text: str, separators: int) -> str:
    """Return a text that stands for itself, or "" if one of its values has to be escaped."""
    if (
        text.count(SEPARATOR) != separators
        or "\\" in text
        or "\n" in text
        or "\r" in text
        or "\0" in text
    ):
        return ""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return ""
    return text


def _payload_of(values: Sequence[Any]) -> bytes:
    """Return a row's payload the careful way: texts escaped, and cut until it fits a segment."""
    payload = SEPARATOR.join(map(escaped, values)).encode()
    longest = LONGEST_TEXT
    while len(payload) > _LARGE_ROW:
        cut = [value[:longest] if isinstance(value, str) else value for value in values]
        payload = SEPARATOR.join(map(escaped, cut)).encode()
        if len(payload) <= _LARGEST_ROW:
            break
        longest //= 2
    return payload


def escaped(value: Any) -> str:
    """Return a value as the text that stands for it in a row."""
    text = str(value)
    return text if _plain(text, 0) else text.encode("unicode_escape").decode("ascii")


def unescaped(text: str) -> str:
    r"""Return the value of a text.

    Raises:
        ValueError: it has a backslash and is nothing that `escaped` makes.
    """
    return text.encode("ascii").decode("unicode_escape") if "\\" in text else text


def encode_header(writer: str, created_us: int) -> bytes:
    """Return the beginning of a segment that this process is about to write."""
    header = {
        "format": FORMAT,
        "writer": writer,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "where": _where(),
        "process_start": _process_start(os.getpid()),
        "created_us": created_us,
        "columns": COLUMNS,
    }
    return MAGIC + frame(json.dumps(header, separators=(",", ":")).encode())


def encode_seal(rows: int) -> bytes:
    """Return the record that ends a segment."""
    return frame(f'["seal",{rows}]'.encode())


SEAL_BYTES = len(encode_seal(_INT64))


def read_segment(path: Path) -> Segment:
    """Read a segment up to the first fault; never past a bad checksum.

    Raises:
        FileNotFoundError: it is gone (shipped and removed).
    """
    return parse(path.read_bytes(), path.name)


def scan_segment(path: Path) -> Scan:
    """Find the records of a segment; errors as of `read_segment`."""
    return scan(path.read_bytes(), path.name)


def parse(data: bytes, name: str) -> Segment:
    """Read a segment's bytes, row by row; ``name`` is for the message."""
    return decode(scan(data, name))


def scan(data: bytes, name: str) -> Scan:
    """Find the records of a segment, each checked by its checksum."""
    faults: list[str] = []
    payloads: list[bytes] = []
    header: dict[str, Any] = {}
    offset = len(MAGIC)
    if data[:offset] not in _MAGICS:
        faults.append("is empty" if not data.strip(b"\0") else "is no spool segment of ours")
        return Scan(name, payloads, faults, False, header)
    head, crc32, end = _frame_head.unpack_from, zlib.crc32, len(data)
    begun: dict[int, int] = {}  # checksum of a length's four bytes
    sealed = False
    while not sealed and offset + FRAME_BYTES <= end:
        size, checksum = head(data, offset)
        if size == 0:
            break
        start = offset + FRAME_BYTES
        payload = data[start : start + size]
        if size not in begun:
            begun[size] = crc32(data[offset : offset + 4])
        if len(payload) < size or crc32(payload, begun[size]) != checksum:
            break
        if payload[0] == _BRACKET and payload.startswith(_SEAL):
            sealed = True
            counted = int(payload[len(_SEAL) : -1])
            if counted != len(payloads):
                faults.append(f"sealed with {counted} rows, {len(payloads)} found")
        elif offset == len(MAGIC):
            header = _header(payload)
        else:
            payloads.append(payload)
        offset = start + size
    lost = len(
        data[offset:].rstrip(b"\0")
    )  # a live segment ends in zeros, whatever the length says
    if lost:
        what = "follow the seal" if sealed else "are torn or damaged"
        faults.append(f"{lost} bytes from offset {offset} {what}")
    return Scan(name, payloads, faults, sealed or _ends_sealed(data), header)


def _ends_sealed(data: bytes) -> bool:
    """Return whether a seal ends the file, though what comes before it can't be read."""
    at = data.rfind(_SEAL, -SEAL_BYTES) - FRAME_BYTES
    return at >= len(MAGIC) and frame(data[at + FRAME_BYTES :]) == data[at:]


def _header(payload: bytes) -> dict[str, Any]:
    try:
        value = json.loads(payload)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def decode(found: Scan) -> Segment:
    """Build the rows of a scan one by one; those of no valid form are named and left out."""
    rows: list[usage.Row] = []
    faults = list(found.faults)
    for number, payload in enumerate(found.payloads):
        try:
            rows.append(_row(payload, found.header))
        except (LookupError, TypeError, ValueError) as error:  # whole, yet not what we write
            faults.append(f"record {number} has no valid form ({error})")
    return Segment(rows, problem_of(found.name, faults, len(rows)), found.sealed, found.header)


def problem_of(name: str, faults: Sequence[str], kept: int) -> str:
    """Return one line on a segment's faults, or "" if it has none."""
    return f"{name}: {'; '.join(faults)}; {kept} rows are kept" if faults else ""


def _row(payload: bytes, header: dict[str, Any]) -> usage.Row:
    """Build a row from its values, by the header's column names: unknown ones are left out."""
    value = json.loads(payload) if payload.startswith(b"[") else _values(payload, header)
    tag = value[0]
    found = dict(zip(header["columns"][tag], value[1:], strict=True))
    row = {name: _checked(name, found[name]) for name in COLUMNS[tag] if name in found}
    if tag == "g":
        return usage.GpuRow(**row)
    if tag == "r":
        return usage.ReplicaTimeRow(**row)
    identity = usage.Identity(**{name: row.pop(name) for name in IDENTITY if name in row})
    row["kind"] = usage.RowKind(row["kind"])
    row["outcome"] = usage.Outcome(row.get("outcome", usage.Outcome.OPEN))
    row["payer"] = usage.Payer(row.get("payer", usage.Payer.TEAM))
    return usage.UsageRow(identity=identity, **row)


def _values(payload: bytes, header: dict[str, Any]) -> list[Any]:
    tag, *texts = payload.decode().split(SEPARATOR)
    names = header["columns"][tag]
    return [tag, *map(_value, names, texts)] if len(names) == len(texts) else [tag, *texts]


def _value(name: str, text: str) -> Any:
    if name in TEXT_COLUMNS:
        return unescaped(text)
    return int(text) if text.isascii() and text.isdigit() else text


TEXT_COLUMNS = frozenset(
    field.name
    for kind in (usage.Identity, usage.UsageRow, usage.GpuRow, usage.ReplicaTimeRow)
    for field in dataclasses.fields(kind)
    if field.type is not int and field.name != "identity"
)


_NUMBERS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    usage.UsageRow: operator.attrgetter(
        *[f"identity.{name}" for name in IDENTITY if name not in TEXT_COLUMNS],
        *[name for name in END if name not in TEXT_COLUMNS],
    ),
    usage.GpuRow: operator.attrgetter(*[name for name in _GPU if name not in TEXT_COLUMNS]),
    usage.ReplicaTimeRow: operator.attrgetter(
        *[name for name in _REPLICA if name not in TEXT_COLUMNS]
    ),
}


def _checked(name: str, value: Any) -> Any:
    if name in TEXT_COLUMNS:
        if type(value) is not str:
            raise TypeError(f"{name} is no text")
    elif type(value) is not int or not 0 <= value < _INT64:
        raise TypeError(f"{name} is no count")
    return value


def writer_alive(header: dict[str, Any]) -> bool | None:
    """Return whether a segment's writer lives; None if that can't be seen from here."""
    if not header or header.get("where") != _where():
        return None
    start = _process_start(int(header["pid"]))
    return bool(start) and start == header["process_start"]


def _where() -> str:
    """Name the space in which this process's id means something: this boot, this PID namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"  # never equal elsewhere: unknown


def _process_start(pid: int) -> str:
    """Return a process's start in clock ticks since boot, "" if there is none (or it is a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in {"Z", "X"} else fields[19]

"""The form of a spool segment on disk: how rows become bytes, and what can be read back.

A segment is ``FOREBAY1``, then records: length (u32), CRC-32 (u32) of the length's bytes and the
payload, payload (compact JSON), all little-endian. The first record is the header: who writes, and the
column names of each kind of row, so that a later release can read this one's segments. A row is a JSON
array: its tag, then its values. The last record of a sealed segment counts its rows. Length 0 is the
preallocated rest. Standard library only: this loads inside an engine's environment.
"""

import dataclasses
import json
import operator
import os
import socket
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from scheduler.contracts import usage

MAGIC = b"FOREBAY1"
SUFFIX = ".seg"
TAKEN = ".taken"  # the marker beside an unsealed segment that the shipper has taken over
FRAME_BYTES = 8
FORMAT = 1
LONGEST_TEXT = 1024
_LARGE_ROW = 16_384
_INT64 = 2**63

IDENTITY = tuple(field.name for field in dataclasses.fields(usage.Identity))
END = tuple(f.name for f in dataclasses.fields(usage.UsageRow) if f.name != "identity")
_GPU = tuple(field.name for field in dataclasses.fields(usage.GpuRow))
_REPLICA = tuple(field.name for field in dataclasses.fields(usage.ReplicaTimeRow))
COLUMNS = {"u": (*IDENTITY, *END), "g": _GPU, "r": _REPLICA}

_get_identity: Callable[[Any], tuple[Any, ...]] = operator.attrgetter(*IDENTITY)
_get_end: Callable[[Any], tuple[Any, ...]] = operator.attrgetter(*END)
_get_gpu: Callable[[Any], tuple[Any, ...]] = operator.attrgetter(*_GPU)
_get_replica: Callable[[Any], tuple[Any, ...]] = operator.attrgetter(*_REPLICA)
_to_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class Segment(NamedTuple):
    """What one segment holds.

    Attributes:
        rows: every whole row before the first fault, in the order written.
        problem: one line on what could not be read, or "" (a live segment's zero rest is no fault).
        sealed: whether its writer closed it, so that nothing follows.
        header: who wrote it; empty if not even that could be read.
    """

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


def encode(row: usage.Row) -> bytes:
    """Return a row as a record, ready to be written."""
    values = values_of(row)
    payload = _to_json(values).encode()
    if len(payload) > _LARGE_ROW:  # a caller's words may be long; a row must always fit a segment
        cut = [value[:LONGEST_TEXT] if isinstance(value, str) else value for value in values]
        payload = _to_json(cut).encode()
    return frame(payload)


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
    return MAGIC + frame(_to_json(header).encode())


def encode_seal(rows: int) -> bytes:
    """Return the record that ends a segment."""
    return frame(_to_json(("seal", rows)).encode())


SEAL_BYTES = len(encode_seal(_INT64))


def read_segment(path: Path) -> Segment:
    """Read a segment up to the first fault; never past a bad checksum.

    Raises:
        FileNotFoundError: it is gone (shipped and removed).
    """
    return parse(path.read_bytes(), path.name)


def parse(data: bytes, name: str) -> Segment:
    """Read a segment's bytes; ``name`` is for the message."""
    rows: list[usage.Row] = []
    faults: list[str] = []
    header: dict[str, Any] = {}
    sealed = False
    offset = len(MAGIC)
    if data[:offset] != MAGIC:
        what = "is empty" if not data.strip(b"\0") else "is no spool segment of this release"
        return Segment(rows, f"{name} {what}", False, header)
    while not sealed and data[offset : offset + 4].strip(b"\0"):
        payload = _payload(data, offset)
        if payload is None:
            lost = len(data[offset:].rstrip(b"\0"))
            faults.append(f"{lost} bytes from offset {offset} are torn or damaged")
            break
        offset += FRAME_BYTES + len(payload)
        try:
            value = json.loads(payload)
            if isinstance(value, dict):
                header = value
            elif value[0] == "seal":
                sealed = True
                if value[1] != len(rows) + len(faults):
                    faults.append(f"sealed with {value[1]} rows, {len(rows)} found")
            else:
                rows.append(_decode(value, header))
        except (
            LookupError,
            TypeError,
            ValueError,
        ) as error:  # whole, yet not what a writer of ours makes
            faults.append(f"record {len(rows) + len(faults)} has no valid form ({error})")
    problem = f"{name}: {'; '.join(faults)}; {len(rows)} rows are kept" if faults else ""
    return Segment(rows, problem, sealed, header)


def _payload(data: bytes, offset: int) -> bytes | None:
    size = int.from_bytes(data[offset : offset + 4], "little")
    start = offset + FRAME_BYTES
    payload = data[start : start + size]
    checksum = int.from_bytes(data[offset + 4 : start], "little")
    if len(payload) < size or size == 0:
        return None
    if zlib.crc32(payload, zlib.crc32(data[offset : offset + 4])) != checksum:
        return None
    return payload


def _decode(value: list[Any], header: dict[str, Any]) -> usage.Row:
    """Build a row from its values, by the header's column names: unknown ones are left out."""
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


TEXT_COLUMNS = frozenset(
    field.name
    for kind in (usage.Identity, usage.UsageRow, usage.GpuRow, usage.ReplicaTimeRow)
    for field in dataclasses.fields(kind)
    if field.type is not int and field.name != "identity"
)


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

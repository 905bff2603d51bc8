"""The form of a spool segment on disk: how records are framed, and what can be read back.

A segment is ``FOREBAY3``, then records: length (u32), CRC-32 (u32) of the length's bytes and the payload,
payload, all little-endian. The first record is the header, a JSON object: who writes, and how its rows are
laid out, so that a later release can read this one's segments. What rows and definitions are is in
`accounting.records`. The last record of a sealed segment is the JSON array ``["seal", rows]``. Length 0 is
the preallocated rest.

``FOREBAY2`` has no compact rows, and ``FOREBAY1``, of the first release, has JSON arrays for rows; both are
read as well. Standard library only: this loads inside an engine's environment.
"""

import json
import os
import socket
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from accounting import records
from scheduler.contracts import usage

MAGIC = b"FOREBAY3"
_MAGICS = (MAGIC, b"FOREBAY2", b"FOREBAY1")
SUFFIX = ".seg"
TAKEN = ".taken"  # the marker beside an unsealed segment that the shipper has taken over
FORMAT = 3
_INT64 = 2**63
_PEEK_BYTES = 8192  # more than a header takes

_frame_head = struct.Struct("<II")
_SEAL = b'["seal",'
_BRACKET = ord("[")
_DEFINITION = records.DEFINITION[0]


class Scan(NamedTuple):
    """The records of one segment, checked and not yet decoded.

    Attributes:
        payloads: every whole record of a row before the first fault, in the order written.
        shared: the definitions among them.
        faults: what could not be read (a live segment's zero rest is no fault).
        sealed: whether its writer closed it, so that nothing follows.
        header: who wrote it; empty if not even that could be read.
    """

    name: str
    payloads: list[bytes]
    shared: list[bytes]
    faults: list[str]
    sealed: bool
    header: dict[str, Any]


class Segment(NamedTuple):
    """What one segment holds; `problem` is one line on what could not be read, or ""."""

    rows: list[usage.Row]
    problem: str
    sealed: bool
    header: dict[str, Any]


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
        "columns": records.COLUMNS,
        "compact": records.LAYOUT,
    }
    return MAGIC + records.frame(json.dumps(header, separators=(",", ":")).encode())


def encode_seal(rows: int) -> bytes:
    """Return the record that ends a segment."""
    return records.frame(f'["seal",{rows}]'.encode())


SEAL_BYTES = len(encode_seal(_INT64))


def scan_segment(path: Path) -> Scan:
    """Find the records of a segment up to the first fault; never past a bad checksum.

    Raises:
        FileNotFoundError: it is gone (shipped and removed).
    """
    return scan(path.read_bytes(), path.name)


def peek(path: Path) -> tuple[dict[str, Any], bool]:
    """Return who writes a segment and whether it is closed, by its two ends alone; errors as above.

    One that was closed by a writer that then died before it gave the rest back is taken for open.
    """
    with path.open("rb") as stream:
        begin = stream.read(_PEEK_BYTES)
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - SEAL_BYTES))
        end = stream.read()
    at = end.rfind(_SEAL) - records.FRAME_BYTES
    closed = at >= 0 and records.frame(end[at + records.FRAME_BYTES :]) == end[at:]
    return scan(begin, path.name).header, closed


def scan(data: bytes, name: str) -> Scan:
    """Find the records of a segment, each checked by its checksum."""
    faults: list[str] = []
    payloads: list[bytes] = []
    shared: list[bytes] = []
    header: dict[str, Any] = {}
    offset = len(MAGIC)
    if data[:offset] not in _MAGICS:
        faults.append("is empty" if not data.strip(b"\0") else "is no spool segment of ours")
        return Scan(name, payloads, shared, faults, False, header)
    head, crc32, end = _frame_head.unpack_from, zlib.crc32, len(data)
    begun: dict[int, int] = {}  # checksum of a length's four bytes
    sealed = False
    while not sealed and offset + records.FRAME_BYTES <= end:
        size, checksum = head(data, offset)
        if size == 0:
            break
        start = offset + records.FRAME_BYTES
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
        elif payload[0] == _DEFINITION:
            shared.append(payload)
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
    return Scan(name, payloads, shared, faults, sealed or _ends_sealed(data), header)


def _ends_sealed(data: bytes) -> bool:
    """Return whether a seal ends the file, though what comes before it can't be read."""
    at = data.rfind(_SEAL, -SEAL_BYTES) - records.FRAME_BYTES
    return at >= len(MAGIC) and records.frame(data[at + records.FRAME_BYTES :]) == data[at:]


def _header(payload: bytes) -> dict[str, Any]:
    try:
        value = json.loads(payload)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def problem_of(name: str, faults: Sequence[str], kept: int) -> str:
    """Return one line on a segment's faults, or "" if it has none."""
    return f"{name}: {'; '.join(faults)}; {kept} rows are kept" if faults else ""


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

"""Rows from records one by one: what `accounting.columns` can't take at once, so that a fault is named.

Every release's forms are read here, by the names in the segment's header: text and compact rows of today,
JSON arrays of the first release.
"""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accounting import records, segment
from scheduler.contracts import usage

_INT64 = 2**63


def read_segment(path: Path) -> segment.Segment:
    """Read a segment up to the first fault; never past a bad checksum.

    Raises:
        FileNotFoundError: it is gone (shipped and removed).
    """
    return decode(segment.scan_segment(path))


def decode(found: segment.Scan) -> segment.Segment:
    """Build the rows of a scan one by one; those of no valid form are named and left out."""
    rows: list[usage.Row] = []
    faults = list(found.faults)
    for number, payload in enumerate(found.payloads):
        try:
            rows.append(_row(payload, found))
        except (LookupError, TypeError, ValueError, struct.error) as error:
            faults.append(f"record {number} has no valid form ({error})")  # whole, yet not ours
    problem = segment.problem_of(found.name, faults, len(rows))
    return segment.Segment(rows, problem, found.sealed, found.header)


def _row(payload: bytes, found: segment.Scan) -> usage.Row:
    """Build a row from its values, by the header's column names: unknown ones are left out."""
    if payload.startswith(records.COMPACT):
        tag, values = "u", _compact(payload, found)
    else:
        tag, *given = json.loads(payload) if payload.startswith(b"[") else _texts(payload, found)
        values = dict(zip(found.header["columns"][tag], given, strict=True))
    row = {name: _checked(name, values[name]) for name in records.COLUMNS[tag] if name in values}
    if tag == "g":
        return usage.GpuRow(**row)
    if tag == "r":
        return usage.ReplicaTimeRow(**row)
    identity = usage.Identity(**{name: row.pop(name) for name in records.IDENTITY if name in row})
    row["kind"] = usage.RowKind(row["kind"])
    row["outcome"] = usage.Outcome(row.get("outcome", usage.Outcome.OPEN))
    row["payer"] = usage.Payer(row.get("payer", usage.Payer.TEAM))
    return usage.UsageRow(identity=identity, **row)


def _compact(payload: bytes, found: segment.Scan) -> dict[str, Any]:
    layout = found.header["compact"]
    codes = "".join(code for _, code in layout["fields"])
    numbers = struct.unpack(f"<{codes}", payload[len(records.COMPACT) :])
    values: dict[str, Any] = {}
    for (name, _), value in zip(layout["fields"], numbers, strict=True):
        if name in layout["groups"]:
            group, *texts = records.defined(found.shared[value])
            if group != name:
                raise ValueError(f"{name} is a {group}")
            values.update(zip(layout["groups"][name], texts, strict=True))
        else:
            values[name] = value.decode("ascii") if isinstance(value, bytes) else value
    return values


def _texts(payload: bytes, found: segment.Scan) -> Sequence[Any]:
    tag, *texts = payload.decode().split(records.SEPARATOR)
    names = found.header["columns"][tag]
    return [tag, *map(_value, names, texts)] if len(names) == len(texts) else [tag, *texts]


def _value(name: str, text: str) -> Any:
    if name in records.TEXT_COLUMNS:
        return records.unescaped(text)
    return int(text) if text.isascii() and text.isdigit() else text


def _checked(name: str, value: Any) -> Any:
    if name in records.TEXT_COLUMNS:
        if type(value) is not str:
            raise TypeError(f"{name} is no text")
    elif type(value) is not int or not 0 <= value < _INT64:
        raise TypeError(f"{name} is no count")
    return value

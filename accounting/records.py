"""What is in a segment's records: how a row becomes bytes, and the row again.

A row has one of two forms. The careful one is a line of text: its tag and its values, parted by the unit
separator (0x1F); a value with a backslash, a control character or a lone surrogate in it is written with
Python's ``unicode_escape``. The compact one is for usage rows, of which there are thousands a second:
``U``, then numbers of fixed width. Texts that repeat (who, where, how it ended) are in definitions: a
record ``D`` with the name of a group of columns and their values as text; a row has the definitions'
numbers, counted from 0 in the order in which they stand in the segment, each before its first use. So a
reader turns all rows of a segment into columns at once (`accounting.columns`). A usage row that does not
fit this form (an id of another length, a count beyond 32 bits) is written carefully.

The segment's header has the layout (`LAYOUT`), so that a later release can read it. Standard library only:
this loads inside an engine's environment.
"""

import dataclasses
import operator
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scheduler.contracts import errors, usage

SEPARATOR = "\x1f"
COMPACT = b"U"
DEFINITION = b"D"
FRAME_BYTES = 8
LONGEST_TEXT = 1024
_LARGE_ROW = 16_384
_LARGE_DEFINITION = 8192
_LARGEST_ROW = 96 * 1024  # fits half of the smallest segment, whatever a caller's words are
_INT64 = 2**63
_KNOWN_AT_MOST = 8192  # identities between OPEN and CLOSE, and definitions; more are written twice

IDENTITY = tuple(field.name for field in dataclasses.fields(usage.Identity))
END = tuple(f.name for f in dataclasses.fields(usage.UsageRow) if f.name != "identity")
_GPU = tuple(field.name for field in dataclasses.fields(usage.GpuRow))
_REPLICA = tuple(field.name for field in dataclasses.fields(usage.ReplicaTimeRow))
COLUMNS = {"u": (*IDENTITY, *END), "g": _GPU, "r": _REPLICA}
TEXT_COLUMNS = frozenset(
    field.name
    for kind in (usage.Identity, usage.UsageRow, usage.GpuRow, usage.ReplicaTimeRow)
    for field in dataclasses.fields(kind)
    if field.type is not int and field.name != "identity"
)

# The compact form: groups of columns that a definition holds, and the fields of a row after its tag, with
# the codes of `struct` (little-endian); a group's field is the number of its definition.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "who": ("cluster", "team", "user", "key_id"),
    "what": ("model", "version", "adapter", "endpoint", "tier"),
    "where": ("replica_id", "lease_id", "slurm_job_id"),
    "names": ("custom_id", "caller_request_id"),
    "end": ("kind", "outcome", "payer", "reason"),
}
_BEGIN = (
    *[(group, "I") for group in GROUPS if group != "end"],
    ("request_id", "36s"),
    ("attempt", "I"),
    ("batch_job_id", "q"),
    ("arrived_us", "q"),
    ("started_us", "q"),
)
_END = (
    ("end", "I"),
    ("uncached_prompt_tokens", "I"),
    ("cached_prompt_tokens", "I"),
    ("output_tokens", "I"),
    ("waste_tokens", "I"),
    ("first_token_us", "q"),
    ("ended_us", "q"),
)
FIELDS = (*_BEGIN, *_END)
LAYOUT = {"fields": FIELDS, "groups": GROUPS}
_ID_BYTES = 36  # a UUID in its usual form


def _struct(tag: str, fields: Sequence[tuple[str, str]]) -> struct.Struct:
    return struct.Struct("<" + tag + "".join(code for _, code in fields))


_pack_begin = _struct("c", _BEGIN).pack
_pack_end = _struct("", _END).pack
_COMPACT_BYTES = _struct("c", FIELDS).size
_COMPACT_CRC = zlib.crc32(_COMPACT_BYTES.to_bytes(4, "little"))
_pack_head = struct.Struct("<II").pack

Getter = Callable[[Any], tuple[Any, ...]]
_Defined = dict[tuple[str, ...], int]
_ENUMS = frozenset({"kind", "outcome", "payer"})  # their own `str` and `hash` are slow
_get_identity: Getter = operator.attrgetter(*IDENTITY)
_get_end: Getter = operator.attrgetter(
    *[f"{name}._value_" if name in _ENUMS else name for name in END]
)
_get_gpu: Getter = operator.attrgetter(*_GPU)
_get_replica: Getter = operator.attrgetter(*_REPLICA)
_NO_NAMES = ("", "")
_OPEN = usage.RowKind.OPEN  # an attribute of an enumeration takes longer than the comparison


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


class _TooLong(Exception):
    """These texts want the careful form, which cuts them."""


class Encoder:
    """Turns the rows of one segment into records, in the order in which they are written there.

    What OPEN and CLOSE of an attempt share is encoded once; that they share it is seen by the identity
    being the same object, as the gateway's is.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[usage.Identity, bytes]] = {}
        self._who: _Defined = {}
        self._what: _Defined = {}
        self._where: _Defined = {}
        self._names: _Defined = {}
        self._ends: _Defined = {}
        self._count = 0
        self._fresh: list[bytes] = []

    def encode(self, row: usage.Row) -> bytes:
        """Return a row as records that are to be written before the next one's.

        Raises:
            errors.Internal: a number that no reader would take; nothing is changed.
        """
        payload = self._compact(row) if type(row) is usage.UsageRow else b""
        if payload:
            checksum = zlib.crc32(payload, _COMPACT_CRC)
            record = _pack_head(_COMPACT_BYTES, checksum) + payload
        else:
            record = _careful(row)
        if not self._fresh:
            return record
        fresh, self._fresh = self._fresh, []
        return b"".join((*fresh, record))

    def _compact(self, row: usage.UsageRow) -> bytes:
        """Return a row's payload, b"" if it wants the careful form."""
        known = self._known.pop(id(row.identity), None)
        first_token_us, ended_us = row.first_token_us, row.ended_us
        ending = (row.kind._value_, row.outcome._value_, row.payer._value_, row.reason)
        try:
            begin = self._begin(row) if known is None else known[1]
            if first_token_us < 0 or ended_us < 0 or not begin:
                return b""
            end = self._ends.get(ending)
            if end is None:
                end = self._define("end", self._ends, ending)
            return begin + _pack_end(
                end,
                row.uncached_prompt_tokens,
                row.cached_prompt_tokens,
                row.output_tokens,
                row.waste_tokens,
                first_token_us,
                ended_us,
            )
        except (struct.error, TypeError, _TooLong):
            return b""

    def _begin(self, row: usage.UsageRow) -> bytes:
        """Return what an identity takes, b"" if it wants the careful form; an OPEN row's is kept.

        Raises:
            struct.error, TypeError, _TooLong: the same.
        """
        its = row.identity
        request_id, batch_job_id = its.request_id, its.batch_job_id
        arrived_us, started_us = its.arrived_us, its.started_us
        if len(request_id) != _ID_BYTES or not request_id.isascii():
            return b""
        if arrived_us < 0 or started_us < 0 or batch_job_id < 0:
            return b""
        texts: tuple[str, ...] = (its.cluster, its.team, its.user, its.key_id)
        if (who := self._who.get(texts)) is None:
            who = self._define("who", self._who, texts)
        texts = (its.model, its.version, its.adapter, its.endpoint, its.tier)
        if (what := self._what.get(texts)) is None:
            what = self._define("what", self._what, texts)
        texts = (its.replica_id, its.lease_id, its.slurm_job_id)
        if (where := self._where.get(texts)) is None:
            where = self._define("where", self._where, texts)
        texts = (its.custom_id, its.caller_request_id)
        if (names := self._names.get(texts)) is None:
            names = self._define("names", self._names, texts)
        begin = _pack_begin(
            *(COMPACT, who, what, where, names, request_id.encode()),
            *(its.attempt, batch_job_id, arrived_us, started_us),
        )
        if row.kind is _OPEN:
            if len(self._known) >= _KNOWN_AT_MOST:
                self._known.clear()
            self._known[id(its)] = its, begin
        return begin

    def _define(self, group: str, known: _Defined, texts: tuple[str, ...]) -> int:
        payload = DEFINITION + _joined((group, *texts)).encode()
        if len(payload) > _LARGE_DEFINITION:
            raise _TooLong
        number = self._count
        self._count += 1
        self._fresh.append(frame(payload))
        if group != "names" or texts == _NO_NAMES:  # other names are those of one request
            if len(known) >= _KNOWN_AT_MOST:
                known.clear()
            known[texts] = number
        return number


def _careful(row: usage.Row) -> bytes:
    numbers = _NUMBERS[type(row)](row)
    for value in numbers:
        if type(value) is not int or not 0 <= value < _INT64:
            raise errors.Internal(
                f"usage row not recorded: {value!r} among its numbers {numbers}, "
                f"which is no whole number from 0 to {_INT64 - 1}: its writer has to be mended"
            )
    return frame(_payload_of(values_of(row)))


def _plain(text: str, separators: int) -> bool:
    """Return whether a text stands for itself."""
    if text.count(SEPARATOR) != separators:
        return False
    if "\\" in text or "\n" in text or "\r" in text or "\0" in text:
        return False
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _joined(values: Sequence[Any]) -> str:
    """Return values as one text, escaped where that is needed."""
    text = SEPARATOR.join(map(str, values))
    return text if _plain(text, len(values) - 1) else SEPARATOR.join(map(escaped, values))


def _payload_of(values: Sequence[Any]) -> bytes:
    """Return values as text, cut until they fit a segment."""
    payload = _joined(values).encode()
    longest = LONGEST_TEXT
    while len(payload) > _LARGE_ROW:
        cut = [value[:longest] if isinstance(value, str) else value for value in values]
        payload = _joined(cut).encode()
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


def defined(payload: bytes) -> tuple[str, ...]:
    """Return a definition: its group and its texts.

    Raises:
        ValueError: it is no text.
    """
    group, *texts = payload[len(DEFINITION) :].decode().split(SEPARATOR)
    return (group, *map(unescaped, texts))


_NUMBERS: dict[type, Getter] = {
    usage.UsageRow: operator.attrgetter(
        *[f"identity.{name}" for name in IDENTITY if name not in TEXT_COLUMNS],
        *[name for name in END if name not in TEXT_COLUMNS],
    ),
    usage.GpuRow: operator.attrgetter(*[name for name in _GPU if name not in TEXT_COLUMNS]),
    usage.ReplicaTimeRow: operator.attrgetter(
        *[name for name in _REPLICA if name not in TEXT_COLUMNS]
    ),
}

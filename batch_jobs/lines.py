"""The lines of a batch file: split, checked one by one, in bounded memory.

Tolerated: blank lines, CRLF, a UTF-8 byte order mark at the start of the file, a missing newline at
its end, a missing ``method`` (POST). Everything else that is wrong with a line makes a `BadLine` of it
and touches no other line. Line numbers count from 1, blank lines included.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from batch_jobs import jsontext, sites
from scheduler.contracts import requests

BOM = b"\xef\xbb\xbf"
MAX_CUSTOM_ID = 512
_OURS = "forebay_"
_THEIRS = frozenset({"forebay_cache_hint", "forebay_version"})
_ADAPTER = "forebay_adapter"  # lines are grouped by the model's name: adapters share no prefix
ENDPOINTS = frozenset(str(endpoint) for endpoint in requests.Endpoint)


@dataclasses.dataclass(frozen=True, slots=True)
class RawLine:
    """A line without its newline; `data` is empty where the line was longer than allowed.

    Attributes:
        at: where in the file `data` begins.
    """

    number: int
    data: bytes
    too_long: bool = False
    at: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A request that may be sent."""

    number: int
    custom_id: str
    endpoint: str
    body: dict[str, Any]

    @property
    def model(self) -> str:
        """The model that the line asks for."""
        return str(self.body["model"])


@dataclasses.dataclass(frozen=True, slots=True)
class BadLine:
    """A line that can't be sent, and why.

    Attributes:
        custom_id: the line's own, or None where it has none that is its alone.
        code: `invalid_json`, `duplicate_custom_id`, ….
        message: one line, without the line number.
    """

    number: int
    custom_id: str | None
    code: str
    message: str


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """What a job asks of its lines.

    Attributes:
        model: for lines whose body names none; "": they are refused.
        endpoint: for lines without a url; "": they are refused.
        models: models that the caller may use; empty means all.
        only: the one endpoint that lines may name; "": any.
        served: the models that there are; None: nobody can tell.
    """

    model: str = ""
    endpoint: str = ""
    models: tuple[str, ...] = ()
    only: str = ""
    served: Mapping[str, sites.Served] | None = None


class Splitter:
    """Cuts chunks of a file into lines, keeping at most one line of allowed length.

    Args:
        max_line_bytes: a longer line is given out empty.
        number: lines before the first chunk.
        at: bytes before the first chunk.

    Attributes:
        number: of the last line that was given out.
        at: where in the file the line after it begins.
    """

    def __init__(self, max_line_bytes: int, number: int = 0, at: int = 0) -> None:
        self._max = max_line_bytes
        self._rest = bytearray()
        self._too_long = False
        self._fed = at
        self.number = number
        self.at = at

    def feed(self, chunk: bytes) -> Iterator[RawLine]:
        """Take ``chunk`` and yield the lines that end in it."""
        at = 0
        while (end := chunk.find(b"\n", at)) >= 0:
            piece = chunk[at:end]
            at = end + 1
            begin, self.at = self.at, self._fed + at
            if self._rest or self._too_long or len(piece) > self._max or not self.number:
                self._take(piece)
                yield self._line(begin)
            else:  # as nearly all are: whole in one chunk
                self.number += 1
                yield RawLine(self.number, piece, False, begin)
        if at < len(chunk):
            self._take(chunk[at:])
        self._fed += len(chunk)

    def close(self) -> Iterator[RawLine]:
        """Yield the last line, if it has no newline."""
        if self._rest or self._too_long:
            yield self._line(self.at)

    def _take(self, piece: bytes) -> None:
        if self._too_long or len(self._rest) + len(piece) > self._max:
            self._too_long = True
            self._rest.clear()
        else:
            self._rest += piece

    def _line(self, begin: int) -> RawLine:
        self.number += 1
        data = bytes(self._rest)
        if self.number == 1 and data.startswith(BOM):
            data, begin = data[len(BOM) :], begin + len(BOM)
        line = RawLine(self.number, data, self._too_long, begin)
        self._rest.clear()
        self._too_long = False
        return line


class Seen:
    """A set of custom ids in 12 to 24 bytes each: open-addressed tables of their digests.

    A Python set of strings takes ten times that, too much for ten million lines. Digests of 9 bytes
    collide for ten million ids with a probability of 1e-8. Many small tables, since one that grows is
    there twice for a moment.
    """

    _SIZE = 9
    _EMPTY = bytes(_SIZE)
    _TABLES = 64

    def __init__(self) -> None:
        self._tables = [bytearray(16 * self._SIZE) for _ in range(self._TABLES)]
        self._counts = [0] * self._TABLES

    def __len__(self) -> int:
        return sum(self._counts)

    def add(self, custom_id: str) -> bool:
        """Add an id; return False if it was there already."""
        digest = hashlib.blake2b(custom_id.encode(), digest_size=self._SIZE).digest()
        number = digest[-1] % self._TABLES
        table = self._tables[number]
        if self._counts[number] * 4 * self._SIZE >= len(table) * 3:
            table = self._tables[number] = self._grown(table)
        new = self._put(table, digest)
        self._counts[number] += new
        return new

    def _put(self, table: bytearray, digest: bytes) -> bool:
        mask = len(table) // self._SIZE - 1
        slot = int.from_bytes(digest[:8], "little") & mask
        while True:
            at = slot * self._SIZE
            held = table[at : at + self._SIZE]
            if held == digest:
                return False
            if held == self._EMPTY:
                table[at : at + self._SIZE] = digest
                return True
            slot = (slot + 1) & mask

    def _grown(self, old: bytearray) -> bytearray:
        table = bytearray(2 * len(old))
        for at in range(0, len(old), self._SIZE):
            digest = bytes(old[at : at + self._SIZE])
            if digest != self._EMPTY:
                self._put(table, digest)
        return table


class Refused(Exception):
    """Carries a code and a message from a check to `parse`."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.custom_id = custom_id


def parse(raw: RawLine, rules: Rules) -> Line | BadLine | None:
    """Read one line; None for a blank one. Says nothing about duplicates: that is `Seen`'s."""
    if not raw.too_long and not raw.data.strip():
        return None
    try:
        return _line(raw, rules)
    except Refused as refused:
        return BadLine(raw.number, refused.custom_id, refused.code, refused.message)


def check(raw: RawLine, rules: Rules, seen: Seen) -> Line | BadLine | None:
    """Read one line as `parse` does, and refuse a custom_id that came before.

    The second line of an id loses it (its `custom_id` is None), so that each id stands once in the results.
    """
    line = parse(raw, rules)
    if line is None or line.custom_id is None or seen.add(line.custom_id):
        return line
    shown = json.dumps(line.custom_id[:80])
    return BadLine(
        raw.number,
        None,
        "duplicate_custom_id",
        f"custom_id {shown} was used by a line before: change it",
    )


def _line(raw: RawLine, rules: Rules) -> Line:
    fields = _object(raw)
    custom_id = _custom_id(fields)
    try:
        if fields.get("method", "POST") != "POST":
            raise Refused("invalid_method", "method must be POST")
        url = fields.get("url", rules.endpoint or None)
        if not isinstance(url, str) or url not in ENDPOINTS:
            known = ", ".join(sorted(ENDPOINTS))
            raise Refused("invalid_url", f"url (or --endpoint) must be one of {known}")
        if rules.only and url != rules.only:
            raise Refused("mismatched_url", f"url is {url}, the batch's endpoint is {rules.only}")
        return Line(raw.number, custom_id, url, _body(fields, rules))
    except Refused as refused:
        refused.custom_id = custom_id
        raise


def _object(raw: RawLine) -> dict[str, Any]:
    if raw.too_long:
        raise Refused("line_too_long", "the line is longer than batch_jobs.max_line_bytes allows")
    try:
        fields = jsontext.read(raw.data)
    except UnicodeDecodeError as error:
        raise Refused(
            "invalid_utf8",
            f"not UTF-8: byte 0x{raw.data[error.start]:02X} at column {error.start + 1}",
        ) from None
    except RecursionError:
        raise Refused("invalid_json", "not JSON that we read: nested too deeply") from None
    except ValueError as error:
        raise Refused("invalid_json", f"not JSON: {str(error)[:200]}") from None
    if not isinstance(fields, dict):
        raise Refused("invalid_line", f"must be a JSON object, not {_kind(fields)}")
    return fields


def _custom_id(fields: dict[str, Any]) -> str:
    custom_id = fields.get("custom_id")
    if custom_id is None:
        raise Refused("missing_custom_id", "custom_id is missing")
    if not isinstance(custom_id, str) or not custom_id or len(custom_id) > MAX_CUSTOM_ID:
        raise Refused(
            "invalid_custom_id", f"custom_id must be a text of 1 to {MAX_CUSTOM_ID} characters"
        )
    try:
        custom_id.encode()
    except UnicodeEncodeError:
        raise Refused("invalid_custom_id", "custom_id holds half a surrogate pair") from None
    return custom_id


def _body(fields: dict[str, Any], rules: Rules) -> dict[str, Any]:
    body = fields.get("body")
    if body is None:
        raise Refused("missing_body", "body is missing")
    if not isinstance(body, dict):
        raise Refused("invalid_body", f"body must be a JSON object, not {_kind(body)}")
    if "model" not in body and rules.model:
        body["model"] = rules.model
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise Refused("missing_model", "body.model is missing: name it there or with --model")
    if rules.models and model not in rules.models:
        raise Refused("forbidden", f"you may not use model {json.dumps(model[:80])}")
    if rules.served is not None and model not in rules.served:
        why = sites.fault(model, rules.served)
        if why:
            raise Refused("model_not_found", why)
    if body.get("stream"):
        raise Refused("invalid_body", "body.stream can't be true in a batch: leave it out")
    for field in body:
        if field.startswith(_OURS) and field not in _THEIRS:
            why = f"body.{field[:64]} is set by the batch job: leave it out"
            if field == _ADAPTER:
                why = f"body.{field}: name the adapter with the model, as model:adapter"
            raise Refused("invalid_body", why)
    return body


def _kind(value: object) -> str:
    kinds = {list: "an array", str: "a text", bool: "a truth value", type(None): "null"}
    return kinds.get(type(value), "a number")

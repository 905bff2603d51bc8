"""JSON as batch files hold it: strict, one line, quick for what is usual. Pure.

msgspec reads and writes it; what that refuses is looked at again by the standard library, which takes half a
surrogate pair in a text as the engines do, and says where a fault is in words that people know.
"""

import json
import math
from typing import Any

import msgspec

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode
_BREAKS = (  # ends of lines to Python's `str.splitlines`, though not to JSONL: results are read both ways
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
    (b"\xc2\x85", b"\\u0085"),
)


def read(data: bytes) -> Any:
    """Read one value.

    Raises:
        UnicodeDecodeError: it is not UTF-8.
        RecursionError: it is nested too deeply.
        ValueError: it is not JSON, NaN, Infinity and numbers beyond a double's range included.
    """
    try:
        return _decode(data)
    except (msgspec.MsgspecError, ValueError):
        return json.loads(data.decode(), parse_constant=_no_constant, parse_float=_finite)


def write(value: Any) -> bytes:
    """Return a value that was read as one line without spaces."""
    try:
        data = _encode(value)
    except UnicodeEncodeError:  # half a surrogate pair
        return json.dumps(value, separators=(",", ":")).encode()
    if not data.isascii():
        for raw, escaped in _BREAKS:
            data = data.replace(raw, escaped)
    return data


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is no number that fits")
    return value

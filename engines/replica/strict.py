"""Answers in strict JSON: null where an engine has no number to give.

A token that a grammar forbids has no log probability (engines write -Infinity, or vLLM's -9999.0), and a
vector of a model that overflowed holds NaN. JSON knows neither, and one such vector must not cost the other
inputs of its request. Answers without them, nearly all, are searched and never rewritten.
"""

import array
import base64
import binascii
import json
import math
import re
import sys
from typing import Any

_FLOOR = -9999.0  # what vLLM writes for an impossible token
_SUSPICIOUS = re.compile(rb"-9999\b|-?Infinity\b|\bNaN\b")
_LOGPROBS = frozenset({"logprobs", "prompt_logprobs"})


class Unusable(ValueError):
    """None of the inputs has a vector."""


def event(raw: bytes) -> bytes:
    """Return a server-sent event with null for impossible log probabilities."""
    head, mark, payload = raw.partition(b"data:")
    if not _SUSPICIOUS.search(payload):
        return raw
    try:
        value = json.loads(payload)
    except ValueError:
        return raw
    return head + mark + b" " + _dump(_tidy(value)) + b"\n\n"


def whole(raw: bytes, value: Any, request: bytes, *, changed: bool = False) -> bytes:
    """Return a whole answer in strict JSON.

    Args:
        raw: its bytes.
        value: what they say.
        request: the request's body.
        changed: they say less than ``value`` by now.

    Raises:
        Unusable: it is an embedding's, and none of its vectors is finite.
    """
    changed = _vectors(value, request) or changed
    if _SUSPICIOUS.search(raw):
        value, changed = _tidy(value), True
    return _dump(value) if changed else raw


def _vectors(value: Any, request: bytes) -> bool:
    """Replace each vector that is not finite by null and an error; returns whether there was one."""
    rows = value.get("data") if isinstance(value, dict) else None
    if not isinstance(rows, list) or b'"embed_dtype"' in request or b'"endianness"' in request:
        return False  # another packing was asked for: only its reader can tell
    rows = [row for row in rows if isinstance(row, dict) and "embedding" in row]
    bad = [row for row in rows if not _finite(row["embedding"])]
    if bad and len(bad) == len(rows):
        raise Unusable("input: the model gives no finite vector for it")
    for row in bad:
        row["embedding"] = None
        row["error"] = {
            "message": f"input[{row.get('index')}]: the model gives no finite vector for it",
            "type": "invalid_request_error",
            "param": "input",
            "code": "not_finite",
        }
    return bool(bad)


def _finite(vector: Any) -> bool:
    """Say whether a vector, as numbers or base64 of little-endian float32, holds only numbers."""
    try:
        if isinstance(vector, str):
            packed = array.array("f", base64.b64decode(vector))
            if sys.byteorder == "big":
                packed.byteswap()
            return math.isfinite(sum(packed))
        return math.isfinite(sum(vector))  # float32 values can't overflow the sum
    except (TypeError, ValueError, binascii.Error):
        return (
            not isinstance(vector, list) or None not in vector
        )  # vectors of vectors, and the like


def _tidy(value: Any, *, logprob: bool = False) -> Any:
    if isinstance(value, dict):
        return {k: _tidy(v, logprob=logprob or k in _LOGPROBS) for k, v in value.items()}
    if isinstance(value, list):
        return [_tidy(item, logprob=logprob) for item in value]
    if isinstance(value, float) and (not math.isfinite(value) or (logprob and value <= _FLOOR)):
        return None
    return value


def _dump(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()

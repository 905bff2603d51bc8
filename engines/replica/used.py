"""What engines leave out of an answer, or say unasked.

Makes every ``usage`` say how much of the prompt was in the cache, and takes documents out of a ranking whose
caller has them and said so (Jina's and Cohere's `return_documents`, which vLLM does not know).
"""

import json
import re
from typing import Any

COUNTS = re.compile(rb'"usage"\s*:\s*\{')  # in a text its quotes would be escaped
_DETAILS = {"prompt_tokens": "prompt_tokens_details", "input_tokens": "input_tokens_details"}


def event(raw: bytes, cached_tokens: int) -> bytes:
    """Return a server-sent event with the count in its ``usage``, if it has one."""
    head, mark, payload = raw.partition(b"data:")
    try:
        value = json.loads(payload)
    except ValueError:
        return raw
    if not fill(value, cached_tokens):
        return raw
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=True)
    return head + mark + b" " + text.encode() + b"\n\n"


def fill(value: Any, cached_tokens: int) -> bool:
    """Put the count into the ``usage`` of a chunk, an answer or a response; returns whether it lacked.

    An embedding's has none: it counts no output.
    """
    if not isinstance(value, dict):
        return False
    used = value.get("usage")
    if not isinstance(used, dict):
        return "response" in value and fill(value["response"], cached_tokens)
    for count, name in _DETAILS.items():
        if count not in used or not ("completion_tokens" in used or "output_tokens" in used):
            continue
        details = used.get(name)
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            return False
        used[name] = {
            **(details if isinstance(details, dict) else {}),
            "cached_tokens": cached_tokens,
        }
        return True
    return False


def unasked(value: Any, request: bytes) -> bool:
    """Take the documents out of a ranking that was asked for without; returns whether there were any."""
    if b'"return_documents"' not in request or not isinstance(value, dict):
        return False
    asked = json.loads(request)
    rows = value.get("results")
    if asked.get("return_documents") is not False or not isinstance(rows, list):
        return False
    found = [row.pop("document", None) for row in rows if isinstance(row, dict)]
    return any(each is not None for each in found)

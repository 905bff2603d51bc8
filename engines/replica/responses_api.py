"""What the events and answers of `/v1/responses` say: which opens, which ends, which is an error. Pure.

Their stream has no ``[DONE]``: the event that holds the finished response is the last one, and a client
that has it has the whole answer. Events of text, by far the most, are searched and not parsed.
"""

import json
import re
from typing import Any

from engines.replica import sse
from scheduler.contracts import requests

PATH = requests.Endpoint.RESPONSES.value
_OPENING = frozenset({"response.created", "response.queued", "response.in_progress"})
_WHOLE = {"response.completed": "stop", "response.incomplete": "length"}
_TELLING = re.compile(
    rb'"type"\s*:\s*"(?:error|response\.(?:created|queued|in_progress|completed|incomplete|failed))"'
)
_ERROR = re.compile(rb'"error"\s*:\s*\{')


def read(event: bytes) -> sse.Reading:
    """Say what ``event`` means; text that looks like a telling one has its quotes escaped."""
    if sse.DONE in event and sse.data(event) == sse.DONE:
        return sse.Reading(skip=True)  # some servers send it all the same
    if not _TELLING.search(event) and not _ERROR.search(event):
        return sse.PLAIN
    try:
        value = json.loads(sse.data(event))
    except ValueError:
        return sse.PLAIN
    if not isinstance(value, dict):
        return sse.PLAIN
    name, response = value.get("type"), value.get("response")
    if name in _OPENING:
        return sse.Reading(opening=True)
    if name in _WHOLE:
        reading = read_json(response)
        return sse.Reading(True, reading.finished or ((0, _WHOLE[name]),), reading.error)
    if name == "response.failed":
        found = response.get("error") if isinstance(response, dict) else None
        return sse.read_json({"error": found if isinstance(found, dict) else {}})
    if name == "error" and not isinstance(value.get("error"), dict):
        return sse.read_json({"error": value})
    return sse.read_json(value) if "error" in value else sse.PLAIN


def read_json(value: Any) -> sse.Reading:
    """Say what a whole response means."""
    status = value.get("status") if isinstance(value, dict) else None
    if status == "failed" or not isinstance(value, dict) or value.get("object") != "response":
        found = value.get("error") if isinstance(value, dict) else None
        return sse.read_json({"error": found if isinstance(found, dict) else {}})
    reason = {"completed": "stop", "incomplete": "length"}.get(str(status), "abort")
    details = value.get("incomplete_details")
    if isinstance(details, dict) and details.get("reason") == "content_filter":
        reason = "content_filter"
    return sse.Reading(finished=((0, reason),))


def last(event: bytes) -> bytes:
    """Return the event that ends a stream in the form by which its readers know it: its name first."""
    payload = sse.data(event)
    name = str(json.loads(payload)["type"])
    return b"event: %b\ndata: %b\n\n" % (name.encode(), payload)

"""The events of an answer that goes on elsewhere, made to follow those that its client has got."""

import json
import re

from scheduler.contracts import resume

_CREATED = re.compile(rb'"created"\s*:\s*\d+')


class Seam:
    """Drops the chunk that opens a chat answer, and dates every other as the first one was.

    Args:
        begun: the beginning; with nothing of it at the client the events pass as they are.
    """

    def __init__(self, begun: resume.Resume) -> None:
        self._created = b'"created":%d' % begun.created if begun.created else b""
        self._opening = bool(begun.created)

    def event(self, event: bytes) -> bytes:
        """Return the event as the client shall get it; b"" for one that it has."""
        if not self._created:
            return event
        if self._opening:
            self._opening = False
            if _opens(event):
                return b""
        return _CREATED.sub(self._created, event, count=1)


def _opens(event: bytes) -> bool:
    """Whether an event names the role and holds no text."""
    try:
        (choice,) = json.loads(event.partition(b"data:")[2])["choices"]
        delta = choice["delta"]
        return "role" in delta and not delta.get("content")
    except (ValueError, KeyError, TypeError):
        return False

"""How much memory bodies may take while they are read, all of a process together.

A body has its own limit; thousands of large ones at once, each within it, would fill the machine. What is
read already has other bounds: the queue's bytes, and the seats.
"""

from types import TracebackType

from scheduler.contracts import errors

LEAST = 64 * 1024  # as much of a body is read before its sender is known
RETRY_S = 1.0


class Bodies:
    """Counts bytes.

    Args:
        limit: bytes that all bodies being read may take.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.held = 0

    def reading(self) -> "Reading":
        """Return the count of one body; leave it when the body is whole or given up."""
        return Reading(self)

    def change(self, more: int) -> None:
        """Count ``more`` bytes, or fewer if negative.

        Raises:
            errors.Busy: there is no room for them.
        """
        if more > 0 and self.held + more > self._limit:
            raise errors.Busy(
                "too many large requests are being read at once: try again", retry_after_s=RETRY_S
            )
        self.held += more


class Reading:
    """One body's part; it doubles as the body comes, so that a slow client holds what it has sent."""

    __slots__ = ("_bodies", "_size")

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._size = 0

    def hold(self, size: int) -> int:
        """Make room for what has come and as much again; returns the bytes for which there is room.

        Raises:
            errors.Busy: there is none.
        """
        if size >= self._size:
            wanted = max(LEAST, 2 * size)
            self._bodies.change(wanted - self._size)
            self._size = wanted
        return self._size

    def __enter__(self) -> "Reading":
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the room back."""
        self._bodies.change(-self._size)
        self._size = 0

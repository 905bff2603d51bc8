"""How the kernel finds out that a node at the other end is gone: a dead one ends no connection."""

import dataclasses
import socket


@dataclasses.dataclass(frozen=True, slots=True)
class Probes:
    """What the kernel asks of a silent connection.

    Attributes:
        idle_s: silence before the first probe, and between two, in whole seconds.
        count: unanswered probes after which the connection ends.
        unacknowledged_s: how long sent bytes may stay unacknowledged, in seconds.
    """

    idle_s: int = 5
    count: int = 3
    unacknowledged_s: float = 15.0

    def apply(self, raw: socket.socket) -> None:
        """Set them on a connection; one of this machine's own sockets has no node to lose."""
        if raw.family == socket.AF_UNIX:
            return
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, self.idle_s)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, self.idle_s)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, self.count)
        raw.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self.unacknowledged_s * 1000)
        )

"""Keeps connections to replicas between two requests, and looks around for those that are silent.

Knows time and who is at the other ends; what comes on a connection is `hop`'s business.
"""

import asyncio
import collections
import contextlib

from gateway import hop, probing, vouching

_IDLE_S = 60.0  # far below a replica's own 300 s, so that it never closes first
_LOOK_S = 1.0
_LATE_S = 0.05


class Pool:
    """Keeps connections, and looks around for those that are silent or rest for too long.

    Args:
        connect_s: time to connect, in seconds.
        look_s: time between two looks, in seconds.
        probes: the kernel's own look.

    Attributes:
        vouching: what the fleet says of those at the other ends; call `doubt` after a change.
    """

    def __init__(
        self, connect_s: float, look_s: float = _LOOK_S, probes: probing.Probes | None = None
    ) -> None:
        self.probes = probes or probing.Probes()
        self.vouching = vouching.Vouching()
        self._connect_s = connect_s
        self._look_s = look_s
        self._idle: dict[str, collections.deque[hop.Connection]] = {}
        self._busy: set[hop.Connection] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def get(self, address: str) -> hop.Connection:
        """Return a connection to ``address``, an old one if there is one.

        Raises:
            OSError: it can't be reached; `TimeoutError` among them.
        """
        idle = self._idle.get(address)
        found = idle.pop() if idle else await self._connect(address)
        self._busy.add(found)
        return found

    async def _connect(self, address: str) -> hop.Connection:
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        if self._timer is None:
            self._timer = loop.call_later(self._look_s, self._look)
        connecting = loop.create_task(
            loop.create_connection(
                lambda: hop.Connection(self, address), host.strip("[]"), int(port)
            )
        )
        try:
            done, _ = await asyncio.wait({connecting}, timeout=self._connect_s)
            if not done:  # a loop that was late itself hears its timers first, then its sockets
                await asyncio.wait({connecting}, timeout=_LATE_S)
            if not connecting.done():
                raise TimeoutError(f"no connection within {self._connect_s:g} s")
            return connecting.result()[1]
        except BaseException:
            connecting.add_done_callback(_drop)
            connecting.cancel()
            raise

    def put(self, connection: hop.Connection) -> None:
        """Let a connection rest."""
        self._busy.discard(connection)
        self._idle.setdefault(connection.address, collections.deque()).append(connection)

    def forget(self, connection: hop.Connection) -> None:
        """Drop a connection that is being closed."""
        self._busy.discard(connection)
        idle = self._idle.get(connection.address)
        if idle is not None:
            with contextlib.suppress(ValueError):
                idle.remove(connection)
            if not idle:
                del self._idle[connection.address]

    def close(self) -> None:
        """Close every connection."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        resting = [each for idle in self._idle.values() for each in idle]
        for connection in [*self._busy, *resting]:
            connection.abort()

    def doubt(self) -> None:
        """End connections to replicas that the fleet no longer vouches for; their requests go elsewhere."""
        now = asyncio.get_running_loop().time()
        resting = [each for idle in self._idle.values() for each in idle]
        for connection in [*self._busy, *resting]:
            owner = connection.owner
            if owner is None:
                continue
            limit_s = self.vouching.silence_s(owner)
            # Paused: its client is behind, and we do not listen. That is no silence of the replica's.
            if limit_s <= 0 or (now - connection.heard > limit_s and not connection.paused):
                answer = connection.answer
                connection.abort()
                if answer is not None:
                    answer.broken(hop.Broken("its replica is gone, as the fleet knows"))

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._timer = loop.call_later(self._look_s, self._look)
        self.doubt()
        for connection in [c for c in self._busy if now - c.heard > c.silence_s and not c.paused]:
            answer, silence_s = connection.answer, connection.silence_s
            connection.abort()
            if answer is not None:
                answer.broken(hop.Broken(f"silent for {silence_s:g} s"))
        for idle in list(self._idle.values()):
            for connection in [each for each in idle if now - each.heard > _IDLE_S]:
                connection.abort()


def _drop(connecting: "asyncio.Task[tuple[asyncio.Transport, hop.Connection]]") -> None:
    """Close a connection that came when nobody waited for it any more."""
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result()[1].abort()

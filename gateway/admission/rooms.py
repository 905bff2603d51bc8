"""Puts a process's way to admission together: its own queues, another process's, or several hosts'."""

import asyncio
import contextlib
import dataclasses
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from gateway import dependencies, local_room, metrics, waiting
from gateway.admission import dialing, owner, place, remote, split
from scheduler.contracts import fleet

FIRST_VIEW_S = 2.0
HURRY_S = 0.01  # many that come at once are one report
Run = Callable[[], Awaitable[None]]


@dataclasses.dataclass(slots=True)
class Admission:
    """A process's way to admission.

    Attributes:
        room: what the request path asks.
        own: the queues that this process owns, None if it owns none.
        runs: what must be kept running.
    """

    room: waiting.Room
    own: local_room.LocalRoom | None
    runs: list[Run]


async def report(
    deps: dependencies.Dependencies, own: local_room.LocalRoom, numbers: metrics.Metrics
) -> None:
    """Tell the demand of the queues owned here to the broker, and show it, until cancelled."""
    while True:
        await _turn(deps, own.hurry)
        demand = own.demand()
        deps.fleet.report(demand)
        numbers.queues(demand, own.seats(), own.stale())


async def _turn(deps: dependencies.Dependencies, hurry: asyncio.Event) -> None:
    """Return when it is time for the next report, or something must not wait for that."""
    waits = [
        asyncio.ensure_future(deps.clock.sleep(deps.settings.report_s)),
        asyncio.ensure_future(hurry.wait()),
    ]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
    if hurry.is_set():
        await deps.clock.sleep(HURRY_S)
        hurry.clear()


@contextlib.asynccontextmanager
async def joined(deps: dependencies.Dependencies) -> AsyncIterator[Admission]:
    """Take part in admission as ``deps.place`` says; without one, admit here and for nobody else.

    Raises:
        OSError: an address can't be bound.
    """
    where = deps.place
    if where is None:
        alone = local_room.LocalRoom(deps)
        yield Admission(alone, alone, [alone.run])
        return
    async with contextlib.AsyncExitStack() as stack:
        own: local_room.LocalRoom | None = None
        if where.owns:
            await first_view(deps)
            own = local_room.LocalRoom(deps)
            served = owner.Owner(own, where.token, where.gateway, where.workers)
            await stack.enter_async_context(_listening(served, where))
            made = Admission(own, own, [own.run])
            home: split.Home = own
        else:
            worker = f"{where.gateway} worker {os.getpid()}"
            near = remote.RemoteRoom(deps, dialing.unix(where.socket), where.token, worker)
            made = Admission(near, None, [near.run])
            home = near
        if where.listen:
            room = _split(deps, where, home)
            made.room = room
            made.runs.append(room.run)
        yield made


async def first_view(deps: dependencies.Dependencies) -> None:
    """Wait a moment for the fleet: who knows of no replica would refuse those that wait for one."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FIRST_VIEW_S):
            if deps.fleet.view() is None:
                await deps.fleet.changed(-1)


def _split(
    deps: dependencies.Dependencies, where: place.Place, home: split.Home
) -> split.SplitRoom:
    worker = f"{where.gateway} worker {os.getpid()}"

    def gateways() -> tuple[fleet.Gateway, ...]:
        view = deps.fleet.view()
        return () if view is None else view.gateways

    def link(to: fleet.Gateway) -> remote.RemoteRoom:
        dial = dialing.tcp(to.admission, deps.settings.connect_timeout_s)
        return remote.RemoteRoom(deps, dial, where.token, worker)

    return split.SplitRoom(where.gateway, home, gateways, link)


@contextlib.asynccontextmanager
async def _listening(served: owner.Owner, where: place.Place) -> AsyncIterator[None]:
    """Hear workers of this host at the socket file, and of others at the address."""
    loop = asyncio.get_running_loop()
    servers: list[asyncio.Server] = []
    try:
        if where.socket:
            bound = _unix(Path(where.socket))
            servers.append(await loop.create_unix_server(served.accept, sock=bound))
        if where.listen:
            host, _, port = where.listen.rpartition(":")
            host = host.strip("[]")
            try:
                heard = await loop.create_server(served.accept, host, int(port))
            except OSError as error:
                raise OSError(
                    error.errno, f"[gateway] admission_listen {where.listen}: {error.strerror}"
                ) from error
            servers.append(heard)
            name = where.advertise or host
            bare = f"[{name}]" if ":" in name else name
            where.told(f"{bare}:{heard.sockets[0].getsockname()[1]}")
        yield
    finally:
        for server in servers:
            server.close()
        served.close()
        if where.socket:
            Path(where.socket).unlink(missing_ok=True)


def _unix(path: Path) -> socket.socket:
    """Return a listening socket that only this user may open; an earlier owner's file is replaced."""
    path.unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        made.bind(str(path))
    except OSError:
        made.close()
        raise
    finally:
        os.umask(before)
    made.listen(128)
    made.setblocking(False)
    return made

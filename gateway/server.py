"""Runs one gateway process: HTTP and gRPC on one event loop, until SIGTERM or SIGINT."""

import asyncio
import contextlib
import dataclasses
import functools
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import fastapi
import uvicorn

from gateway import app, assembly, dependencies, grpc_server, hotpath, protocol, settings
from gateway.admission import rooms
from scheduler.contracts import webserver

_SEND_BYTES = 128 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Addresses:
    """Where a gateway listens: ``host:port`` of each interface."""

    http: str
    grpc: str


class _Uvicorn(webserver.Server):
    """Leaves signals to `serve`, which has two servers to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    deps: dependencies.Dependencies,
    *,
    routers: Sequence[fastapi.APIRouter] = (),
    ready: Callable[[Addresses], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or ``stop``; running answers get `drain_s` to end.

    Args:
        deps: the ports.
        routers: further HTTP routes, see `app.create`.
        ready: called once both interfaces listen.
        stop: set it to end from inside the process; signals are then not listened to.

    Raises:
        webserver.CannotListen: a port can't be bound; the message names it.
    """
    table = deps.settings
    ending = stop or asyncio.Event()
    if (
        table.workers > 1
    ):  # the others take connections meanwhile: this one would refuse what they can serve
        await rooms.first_view(deps)
    with _listen(table) as bound, _signals(ending if stop is None else None):
        async with assembly.running(deps) as gateway:
            http = _Uvicorn(_config(app.create(gateway, routers), hotpath.HotPath(gateway)))
            grpc = grpc_server.server(gateway)
            try:
                grpc_port = await grpc.start(f"{table.host}:{table.grpc_port}")
            except RuntimeError as error:
                what = f"[gateway] grpc_port {table.grpc_port}: {error}"
                raise webserver.CannotListen(what) from error
            serving = asyncio.create_task(http.serve(sockets=[bound]))
            sweeping = asyncio.create_task(protocol.sweep(http.server_state.connections))
            try:
                if ready is not None:
                    http_port = bound.getsockname()[1]
                    ready(Addresses(f"{table.host}:{http_port}", f"{table.host}:{grpc_port}"))
                await _first(ending, serving)
            finally:
                sweeping.cancel()
                await _stop(gateway, http, grpc, serving)


async def _stop(
    gateway: assembly.Gateway,
    http: webserver.Server,
    grpc: grpc_server.Served,
    serving: "asyncio.Task[None]",
) -> None:
    """Say that we are leaving, drain, then close both servers."""
    await grpc.leave()
    await gateway.path.drain(gateway.deps.settings.drain_s)
    http.stop()
    await asyncio.wait({serving})
    await grpc.server.stop(1.0)
    if not serving.cancelled() and (error := serving.exception()) is not None:
        raise error


def _config(application: fastapi.FastAPI, hot: hotpath.HotPath) -> uvicorn.Config:
    # uvicorn asks for a class, and calls it.
    made: Any = functools.partial(protocol.Protocol, hot)
    return uvicorn.Config(
        application,
        http=made,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,  # answers have been drained before
    )


@contextlib.contextmanager
def _listen(table: settings.GatewaySettings) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in table.host else socket.AF_INET
    try:
        bound = socket.create_server(
            (table.host, table.http_port),
            family=family,
            backlog=2048,
            reuse_port=table.workers > 1,
        )
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise webserver.CannotListen(
            f"[gateway] http_port {table.http_port} on {table.host}: {why}"
        ) from error
    with bound:
        # Inherited by every connection: what a client that does not read may hold in the kernel.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        yield bound


@contextlib.contextmanager
def _signals(ending: asyncio.Event | None) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    caught = (signal.SIGTERM, signal.SIGINT) if ending is not None else ()
    for number in caught:
        loop.add_signal_handler(number, ending.set if ending else lambda: None)
    try:
        yield
    finally:
        for number in caught:
            loop.remove_signal_handler(number)


async def _first(ending: asyncio.Event, serving: "asyncio.Task[None]") -> None:
    """Return when either the end is wanted or the HTTP server has ended by itself."""
    wanted = asyncio.create_task(ending.wait())
    try:
        await asyncio.wait({wanted, serving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        wanted.cancel()
        await asyncio.wait({wanted})

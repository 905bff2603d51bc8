"""Serves a replica: opens its engine, binds port 0, tells the supervisor the address, ends on SIGTERM."""

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time as timing
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import uvicorn
from starlette import types

from engines.replica import app, engine, launch, spans
from scheduler.contracts import clock, errors, usage, webserver

GRACE_S = 2  # for answers on their last bytes once every sequence has left
SPANS_S = 0.3  # for spans that wait to be sent: the process ends without running exit handlers
_log = logging.getLogger(__name__)

OpenEngine = Callable[
    [launch.Launch, clock.Clock, launch.Reporter],
    contextlib.AbstractAsyncContextManager[engine.Engine],
]
"""How an engine is opened: an async context manager, entered once the engine can answer."""


async def run(
    record: launch.Launch,
    open_engine: OpenEngine,
    sink: usage.UsageSink,
    reporter: launch.Reporter,
    time: clock.Clock | None = None,
    leave: Callable[[], None] = lambda: None,
) -> None:
    """Serve one replica until SIGTERM or SIGINT.

    Args:
        record: which replica, and how.
        open_engine: how its engine is opened.
        sink: where its usage rows go.
        reporter: the supervisor's ear.
        time: the clock; the machine's if not given.
        leave: called once every answer has ended and its rows are on disk; it may end the process, where
            an orderly end of the engine would only keep others waiting for its GPUs.

    Raises:
        launch.LaunchError: the record can't be used.
        Exception: whatever the engine raised while it opened.
    """
    time = time or clock.SystemClock()
    options = record.options()
    phases: dict[str, float] = {}
    async with contextlib.AsyncExitStack() as stack:
        with _timed("engine", phases, reporter):
            inner = await stack.enter_async_context(open_engine(record, time, reporter))
        stack.push_async_callback(_finish, sink)
        tracer = spans.from_environment()
        served = app.build(inner, options, sink=sink, time=time, tracer=tracer)
        async with listening(served, record.host, served.retire) as (address, ended):
            reporter.listening(address, record.incarnation, phases)
            await ended.wait()
        await _finish(sink)
        await asyncio.to_thread(tracer.flush, SPANS_S)
        leave()


async def _finish(sink: usage.UsageSink) -> None:
    """Bring the rows to disk, and close a sink that can be: its segment is then ready to be shipped."""
    try:
        await sink.sync()
        close: Callable[[], None] | None = getattr(sink, "close", None)
        if close is not None:
            close()
    except errors.RecordingUnavailable as error:
        _log.error("usage rows are not on disk: %s", error.message)


@contextlib.contextmanager
def _timed(name: str, phases: dict[str, float], reporter: launch.Reporter) -> Iterator[None]:
    started = timing.monotonic()
    yield
    phases[name] = round(timing.monotonic() - started, 3)
    reporter.phase(name, phases[name])


Retire = Callable[[], Awaitable[None]]


class _Server(webserver.Server):
    """Says when it is up, and leaves signals to us.

    uvicorn's own handling raises SIGTERM again once it has stopped, which would end the process before the
    engine is closed and the rows are on disk.
    """

    def __init__(
        self, config: uvicorn.Config, retire: Retire | None, end: Callable[[], None] | None
    ) -> None:
        super().__init__(config)
        self.up = asyncio.Event()
        self._end = end
        self._retire = retire
        self._retiring: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so."""
        try:
            await super().startup(sockets=sockets)
        except SystemExit as error:  # uvicorn's answer to a failed lifespan; ours is an error told
            raise RuntimeError("the engine's app failed in its start-up; see the log") from error
        self.up.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let what would go on for ever end with the answers."""
        if self._end is not None:
            self._end()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Turn SIGTERM and SIGINT into a stop; more of them do no harm."""
        loop = asyncio.get_running_loop()
        if threading.current_thread() is not threading.main_thread():
            yield  # a test's thread: only the main one may take signals
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._leave)
        yield
        # The handlers stay: a second SIGTERM during the last syncs must not cut them short.

    def _leave(self) -> None:
        if self._retire is None:
            self.stop()
        elif self._retiring is None:
            self._retiring = asyncio.ensure_future(self._retire())
            self._retiring.add_done_callback(lambda _: self.stop())


@contextlib.asynccontextmanager
async def listening(
    served: types.ASGIApp, host: str, retire: Retire | None = None
) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Serve ``served`` on a port of the kernel's choice.

    Args:
        served: the ASGI app.
        host: the address to bind.
        retire: what a SIGTERM waits for before the server stops; None stops at once.

    Yields:
        Its ``host:port``, and the event that is set once it has stopped.
    """
    bound = socket.create_server((host, 0), family=_family(host), backlog=1024)
    server = _Server(
        uvicorn.Config(
            served,
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_keep_alive=300,
            timeout_graceful_shutdown=GRACE_S,
            server_header=False,
        ),
        retire,
        served.end if isinstance(served, app.Replica) else None,
    )
    ended = asyncio.Event()
    task = asyncio.create_task(server.serve(sockets=[bound]))
    task.add_done_callback(lambda _: ended.set())
    up = asyncio.create_task(server.up.wait())
    try:
        await asyncio.wait({task, up}, return_when=asyncio.FIRST_COMPLETED)
        if not server.started:
            cause = task.exception() if task.done() else None
            raise RuntimeError(f"the replica's HTTP server did not start: {cause}")
        yield f"{host}:{bound.getsockname()[1]}", ended
    finally:
        up.cancel()
        server.stop()
        await asyncio.wait({task})
        bound.close()
        if (error := task.exception()) is not None and server.started:
            _log.error("HTTP server", exc_info=error)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET

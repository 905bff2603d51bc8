"""A gateway of several processes: one that admits, N that take connections on the same ports.

This parent decides nothing. It holds the ports, starts its children again when they die, and at the end lets
all workers drain at once, the one that admits last. The ports serve as long as one worker lives.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import multiprocess

from forebay import admission_service, doors, installation, tree
from gateway import settings as gateway_settings

_log = logging.getLogger(__name__)


async def gateway(here: installation.Installation, told: doors.Told) -> None:
    """Run the gateway's processes until SIGTERM or SIGINT."""
    table = here.config.table(gateway_settings.GatewaySettings)
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    with _ports(table) as (http_port, grpc_port), _folder() as folder:
        numbers = folder / "metrics"
        numbers.mkdir()
        env = {
            **os.environ,
            "FOREBAY_GATEWAY_HTTP_PORT": str(http_port),
            "FOREBAY_GATEWAY_GRPC_PORT": str(grpc_port),
            "PROMETHEUS_MULTIPROC_DIR": str(numbers),
            admission_service.PLACE: admission_service.placed(
                f"{socket.gethostname()}-{http_port}", folder / "admission.sock", table.workers
            ),
        }
        config = here.config.path
        options = ("--config", str(config)) if config is not None else ()
        crowd = tree.Tree(options, here.state / "logs", env, _log.warning, here.stable_s)
        crowd.ended = lambda pid: _forget(pid, numbers)
        workers = [f"gateway-worker-{number}" for number in range(1, table.workers + 1)]
        try:
            await crowd.start("gateway-admission")
            ready = await asyncio.gather(
                *(crowd.start(name, command="gateway-worker") for name in workers)
            )
            news = {key: str(value) for key, value in ready[0].items()}
            doors.publish(here.state / doors.FILE, news)
            told(news)
            await ending.wait()
        finally:
            await crowd.end(workers)
            await crowd.stop()


def _forget(pid: int, numbers: Path) -> None:
    """Take a dead process's gauges out of the metrics; what it counted stays counted."""
    with contextlib.suppress(OSError):
        multiprocess.mark_process_dead(pid, str(numbers))  # type: ignore[no-untyped-call]  # its own


@contextlib.contextmanager
def _ports(table: gateway_settings.GatewaySettings) -> Iterator[tuple[int, int]]:
    """Hold both ports, so that all workers and their successors get the same.

    A socket that is bound and does not listen gets no connection.

    Raises:
        OSError: one can't be bound; the message names it.
    """
    family = socket.AF_INET6 if ":" in table.host else socket.AF_INET
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        for key, port in (("http_port", table.http_port), ("grpc_port", table.grpc_port)):
            held = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            try:
                held.bind((table.host, port))
            except OSError as error:
                raise OSError(
                    error.errno, f"[gateway] {key} {port} on {table.host}: {error.strerror}"
                ) from error
            found.append(held.getsockname()[1])
        yield found[0], found[1]


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Make a folder for the socket and the metrics' files, only ours; it goes at the end.

    Not in the state folder, which may be on a shared file system: two hosts must not meet in it, files that
    are mapped into memory want a local disk, and a socket's path may have no more than 107 bytes.
    """
    with tempfile.TemporaryDirectory(prefix="forebay-gateway-", ignore_cleanup_errors=True) as made:
        yield Path(made)

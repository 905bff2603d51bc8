"""The process that owns a gateway's queues where there are several workers: no HTTP, no gRPC, only links."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator

from gateway import dependencies, metrics
from gateway.admission import rooms


async def serve(
    deps: dependencies.Dependencies,
    *,
    ready: Callable[[], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Admit until SIGTERM, SIGINT or ``stop``; workers notice the end and go on with what runs.

    Args:
        deps: the ports; ``deps.place`` says where workers come.
        ready: called once workers are heard.
        stop: set it to end from inside the process; signals are then not listened to.

    Raises:
        OSError: an address can't be bound.
    """
    ending = stop or asyncio.Event()
    with _signals(None if stop else ending):
        async with rooms.joined(deps) as admission:
            own = admission.own
            if own is None:
                raise ValueError("the admission process must own the queues")

            runs = [*(run() for run in admission.runs), rooms.report(deps, own, metrics.Metrics())]
            tasks = [asyncio.ensure_future(run) for run in runs]
            ended = asyncio.ensure_future(ending.wait())
            try:
                if ready is not None:
                    ready()
                done, _ = await asyncio.wait({ended, *tasks}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # a part that fails ends the process with its error
            finally:
                for task in (ended, *tasks):
                    task.cancel()
                await asyncio.gather(ended, *tasks, return_exceptions=True)


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

"""Processes that the crash tests start and kill.

``write STATE`` appends and syncs attempts for ever and prints the number of each acknowledged one;
``ship STATE N`` runs one pass of the shipper and is killed at its N-th step on the file system;
``steps STATE`` runs one whole pass and prints how many such steps it has.
"""

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accounting import ship, spool
from scheduler.contracts import clock
from tests.unit.accounting import samples

STEPS = ("open", "write", "fsync", "rename", "unlink", "mkdir")
WRITERS = 8


async def write(state: Path) -> None:
    """Write attempts as a busy gateway does: OPEN, CLOSE, and an acknowledgement after the sync."""
    sink = spool.Spool(state / "spool" / "g", "g", segment_bytes=1, clock=clock.SystemClock())
    numbers = itertools.count()

    async def client() -> None:
        while True:
            number = next(numbers)
            sink.ready()
            sink.append(samples.row("open", f"q{number}"))
            await asyncio.sleep(0)
            sink.append(samples.row("close", f"q{number}", output_tokens=number))
            await sink.sync()
            os.write(1, f"{number}\n".encode())

    await asyncio.gather(*[client() for _ in range(WRITERS)])


def shipping(state: Path, fatal: int) -> int:
    """Run a pass; before step number ``fatal`` the process kills itself. Returns the steps taken."""
    taken = 0

    def guarded(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            nonlocal taken
            if taken == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            taken += 1
            return real(*args, **named)

        return call

    for name in STEPS:
        setattr(os, name, guarded(getattr(os, name)))
    ship.ship(state, clock.SystemClock(), batch_bytes=1)
    return taken


def main() -> None:
    """Do what the arguments say."""
    state = Path(sys.argv[2])
    if sys.argv[1] == "write":
        asyncio.run(write(state))
    elif sys.argv[1] == "ship":
        shipping(state, int(sys.argv[3]))
    else:
        os.write(1, f"{shipping(state, -1)}\n".encode())


if __name__ == "__main__":
    main()

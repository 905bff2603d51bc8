"""A process that the crash tests kill: it writes attempts as a busy gateway does, for ever.

``STATE [PREFIX]`` prints PREFIX and the number of each acknowledged attempt. It loads what a gateway's writer
needs and nothing else, so that hundreds of them are started in little time.
"""

import asyncio
import itertools
import os
import sys
from pathlib import Path

from accounting import spool
from scheduler.contracts import clock
from tests.unit.accounting import samples

WRITERS = 8


async def write(state: Path, prefix: str) -> None:
    """Write attempts as a busy gateway does: OPEN, CLOSE, and an acknowledgement after the sync."""
    sink = spool.Spool(state / "spool" / "g", "g", segment_bytes=1, clock=clock.SystemClock())
    numbers = itertools.count()

    async def client() -> None:
        while True:
            number = next(numbers)
            sink.ready()
            sink.append(samples.row("open", f"q{prefix}{number}"))
            await asyncio.sleep(0)
            sink.append(samples.row("close", f"q{prefix}{number}", output_tokens=number))
            await sink.sync()
            os.write(1, f"{prefix}{number}\n".encode())

    await asyncio.gather(*[client() for _ in range(WRITERS)])


if __name__ == "__main__":
    asyncio.run(write(Path(sys.argv[1]), "".join(sys.argv[2:])))

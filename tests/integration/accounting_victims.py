"""Processes that the crash tests start and kill.

``ship STATE N`` runs one pass of the shipper and is killed at its N-th step on the file system;
``steps STATE`` runs one whole pass and prints how many such steps it has; ``compact STATE N`` is killed at
the N-th step of a compaction, ``roll STATE N`` at the N-th statement of a rollup's pass (-1: never, and the
number of steps is printed); ``keep STATE`` ships, rolls up and compacts for ever.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from accounting import books, compact, rolling, rollup, ship
from scheduler.contracts import clock
from tests.unit.accounting import samples

STEPS = ("open", "write", "fsync", "rename", "unlink", "mkdir")
LATER = clock.FakeClock(samples.NOON + 5 * samples.DAY_US)
# Some hours after the samples: the first day is over and the second goes on.
HOURS_LATER = clock.FakeClock(samples.NOON + samples.DAY_US + samples.DAY_US // 8)


class Fatal:
    """Counts steps; before step number ``fatal`` the process kills itself."""

    def __init__(self, fatal: int) -> None:
        self.fatal = fatal
        self.taken = 0

    def guarded(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``real``, counted."""

        def call(*args: Any, **named: Any) -> Any:
            if self.taken == self.fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            self.taken += 1
            return real(*args, **named)

        return call

    def guard_files(self) -> None:
        """Count the steps on the file system."""
        for name in STEPS:
            setattr(os, name, self.guarded(getattr(os, name)))


def shipping(state: Path, fatal: int) -> int:
    """Run a pass of the shipper; returns the steps taken."""
    steps = Fatal(fatal)
    steps.guard_files()
    ship.ship(state, clock.SystemClock(), batch_bytes=1)
    return steps.taken


def compacting(state: Path, fatal: int) -> int:
    """Run a compaction of a day and of an hour of the next; returns the steps taken."""
    steps = Fatal(fatal)
    steps.guard_files()
    compact.compact(state, HOURS_LATER, piece_rows=30, loose_files=1)
    return steps.taken


def rolling_up(state: Path, fatal: int) -> int:
    """Run a pass of the rollups; returns the statements executed."""
    steps = Fatal(fatal)
    really = rollup.opened

    class Session:
        def __init__(self, real: Any) -> None:
            self._real = real
            self.execute = steps.guarded(real.execute)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

    @contextlib.contextmanager
    def opened(*args: Any, **named: Any) -> Iterator[Any]:
        with really(*args, **named) as session:
            yield Session(session)

    with mock.patch.object(rollup, "opened", opened):
        rolling.roll(books.Books(state), LATER)
    return steps.taken


def keep(state: Path) -> None:
    """Do what the leading broker does, without a pause."""
    records = books.Books(state)
    while True:
        ship.ship(state, clock.SystemClock())
        rolling.roll(records, LATER)
        compact.compact(state, HOURS_LATER, loose_files=1)
        compact.compact(state, LATER)


def main() -> None:
    """Do what the arguments say."""
    state = Path(sys.argv[2])
    passes = {"ship": shipping, "compact": compacting, "roll": rolling_up}
    if sys.argv[1] == "keep":
        keep(state)
    else:
        name, fatal = (sys.argv[1], int(sys.argv[3])) if len(sys.argv) > 3 else ("ship", -1)
        os.write(1, f"{passes[name](state, fatal)}\n".encode())


if __name__ == "__main__":
    main()

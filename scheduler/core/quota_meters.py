"""Counters of one limit each: over any minute, over a calendar window, and at once.

A place that `take` returns says where an amount was counted, so that `settle` corrects it there, even
after the window has rolled over. Two times go in: UTC µs for calendar windows, and steady µs, which
never go back, for the rest.
"""

from typing import Any

from scheduler.core import quota_limits as limits

CELL_US = 1_000_000
CELLS = 61  # 60 whole seconds and the one that is running: no 60 s ever hold more than the limit
FIRST_WAIT_S = 1.0  # until something has ended, nobody knows how long requests of this owner run
_OLD_CELLS = 3  # calendar windows kept: this one, the last, and one that a stepped clock came from
_NEVER = 1 << 62


class Meter:
    """What every counter has: its limit."""

    __slots__ = ("amount", "hard", "key", "quiet_until_us", "unit")

    def __init__(self, limit: limits.Limit) -> None:
        self.key = limit.key
        self.unit = int(limit.key.kind.unit)
        self.amount = limit.amount
        self.hard = limit.hard
        self.quiet_until_us = 0  # a refusal was told; not again before this

    def change(self, limit: limits.Limit) -> None:
        """Take another amount; what is counted stays."""
        self.amount = limit.amount
        self.hard = limit.hard

    def used(self, utc: int, steady: int) -> int:
        """Return what is used and reserved now."""
        raise NotImplementedError

    def fits(self, asked: int, utc: int, steady: int) -> bool:
        """Return whether ``asked`` may be taken; a soft limit always lets it."""
        return self.used(utc, steady) + asked <= self.amount or not self.hard

    def take(self, asked: int, steady: int) -> Any:
        """Count ``asked`` at the time of the last `fits`, and return its place."""
        raise NotImplementedError

    def settle(self, place: Any, asked: int, spent: int, steady: int) -> None:
        """Replace what was taken by what was spent."""
        raise NotImplementedError

    def wait_s(self, asked: int, utc: int, steady: int) -> float:
        """Return in how many seconds ``asked``, which does not fit now, may fit."""
        raise NotImplementedError


class RollingMeter(Meter):
    """A sliding window of a minute in cells of a second: O(1) amortised, and exact when given back.

    A token bucket would be one number, but lets twice the limit through in the minute after a pause.
    """

    __slots__ = ("_cells", "_newest", "_total")

    def __init__(self, limit: limits.Limit) -> None:
        super().__init__(limit)
        self._cells = [0] * CELLS
        self._newest = 0
        self._total = 0

    def used(self, utc: int, steady: int) -> int:
        """Return what was taken in the last minute."""
        second = steady // CELL_US
        gone = second - self._newest
        if gone > 0:
            if gone >= CELLS:
                self._cells = [0] * CELLS
                self._total = 0
            else:
                cells = self._cells
                for old in range(self._newest + 1, second + 1):
                    self._total -= cells[old % CELLS]
                    cells[old % CELLS] = 0
            self._newest = second
        return self._total

    def take(self, asked: int, steady: int) -> int:
        """Count it in the newest cell."""
        self._total += asked
        self._cells[self._newest % CELLS] += asked
        return self._newest

    def settle(self, place: int, asked: int, spent: int, steady: int) -> None:
        """Give back where it was taken; what was spent beyond counts from now on."""
        self.used(0, steady)
        if spent > asked:
            place = self._newest
        elif self._newest - place >= CELLS:
            return  # its minute is over
        self._cells[place % CELLS] += spent - asked
        self._total += spent - asked

    def wait_s(self, asked: int, utc: int, steady: int) -> float:
        """Return when enough of the oldest cells have left the window."""
        left = self.used(utc, steady) + asked - self.amount
        for second in range(self._newest - CELLS + 1, self._newest + 1):
            left -= self._cells[second % CELLS]
            if left <= 0:
                return ((second + CELLS) * CELL_US - steady) / 1e6
        return float(CELLS)

    def clears_s(self, steady: int) -> float:
        """Return in how many seconds the whole limit is free again."""
        self.used(0, steady)
        for second in range(self._newest, self._newest - CELLS, -1):
            if self._cells[second % CELLS]:
                return ((second + CELLS) * CELL_US - steady) / 1e6
        return 0.0


class ConcurrentMeter(Meter):
    """How many run or wait at once."""

    __slots__ = ("_mean_us", "_running")

    def __init__(self, limit: limits.Limit) -> None:
        super().__init__(limit)
        self._running = 0
        self._mean_us = 0.0

    def used(self, utc: int, steady: int) -> int:
        """Return how many there are."""
        return self._running

    def take(self, asked: int, steady: int) -> int:
        """Count one more; its place is when it began."""
        self._running += asked
        return steady

    def settle(self, place: int, asked: int, spent: int, steady: int) -> None:
        """Count one less and learn how long it took (a mean over about ten)."""
        self._running -= asked
        took = float(steady - place)
        self._mean_us = took if not self._mean_us else self._mean_us * 0.9 + took * 0.1

    def wait_s(self, asked: int, utc: int, steady: int) -> float:
        """Return the mean time between two ends."""
        if not self._mean_us or not self._running:
            return FIRST_WAIT_S
        return self._mean_us / self._running / 1e6


class Cell:
    """One day or month of one counter.

    Attributes:
        known: settled, by anybody; the registry's sum and what it has not been told yet.
        pending: of that, what is still to be told.
        reserved: held by open requests of this process.
    """

    __slots__ = ("end_us", "key", "known", "pending", "reserved", "start_us")

    def __init__(self, key: limits.Key, span: tuple[int, int], known: int) -> None:
        self.key = key
        self.start_us, self.end_us = span
        self.known = known
        self.pending = 0
        self.reserved = 0


class CalendarMeter(Meter):
    """A day or a month in UTC. What was taken before midnight is settled before midnight.

    Args:
        limit: the limit.
        memory: sums of settled amounts by counter and window, and cells with news for the registry.
        warn_percent: share of the limit at which a warning is due.
    """

    __slots__ = ("_memory", "_warn_percent", "alarm", "cells", "current")

    def __init__(self, limit: limits.Limit, memory: "Memory", warn_percent: int) -> None:
        super().__init__(limit)
        self._memory = memory
        self._warn_percent = warn_percent
        self.cells: dict[int, Cell] = {}
        self.current = Cell(limit.key, (0, 0), 0)
        self.alarm = 0
        self._arm()

    def change(self, limit: limits.Limit) -> None:
        """Take another amount, and warn anew."""
        if (self.amount, self.hard) != (limit.amount, limit.hard):
            super().change(limit)
            self._arm()

    def cell(self, utc: int) -> Cell:
        """Return the window of ``utc``."""
        found = self.current
        if not found.start_us <= utc < found.end_us:
            self.current = found = self._find(utc)
        return found

    def used(self, utc: int, steady: int) -> int:
        """Return what is settled and reserved in the window."""
        cell = self.cell(utc)
        return cell.known + cell.reserved

    def fits(self, asked: int, utc: int, steady: int) -> bool:
        """Return whether ``asked`` fits into the window."""
        cell = self.cell(utc)
        return cell.known + cell.reserved + asked <= self.amount or not self.hard

    def take(self, asked: int, steady: int) -> Cell:
        """Reserve it in the window."""
        cell = self.current
        cell.reserved += asked
        return cell

    def settle(self, place: Cell, asked: int, spent: int, steady: int) -> None:
        """Spend in the window of the reservation."""
        place.reserved -= asked
        if spent:
            place.known += spent
            place.pending += spent
            self._memory.dirty[place] = None

    def wait_s(self, asked: int, utc: int, steady: int) -> float:
        """Return when the window ends: only then is there surely room."""
        return (self.cell(utc).end_us - utc) / 1e6

    def told(self) -> None:
        """Note that the warning was given; the next one is for the whole limit, then none."""
        self.alarm = self.amount + 1 if self.alarm <= self.amount else _NEVER

    def _find(self, utc: int) -> Cell:
        start, end = limits.window(self.key.kind.period, utc)
        found = self.cells.get(start)
        if found is None:
            known = self._memory.known(self.key, start)
            found = self.cells[start] = Cell(self.key, (start, end), known)
            if len(self.cells) > _OLD_CELLS:
                del self.cells[min(self.cells)]
            self._arm()
        return found

    def _arm(self) -> None:
        self.alarm = max(1, -(-self.amount * self._warn_percent // 100))


class Memory:
    """Settled sums as the registry has them, and which cells have news for it."""

    def __init__(self) -> None:
        self.stored: dict[tuple[limits.Key, int], int] = {}
        self.transit: dict[tuple[limits.Key, int], int] = {}
        self.dirty: dict[Cell, None] = {}

    def known(self, key: limits.Key, start_us: int) -> int:
        """Return what is settled in a window, as far as it was heard or is on its way."""
        place = key, start_us
        return self.stored.get(place, 0) + self.transit.get(place, 0)

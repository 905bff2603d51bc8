"""The durable sink: a process appends rows to its own segments, and `sync` returns when they are on disk.

Rules that the shipper relies on:

- A segment has one writer for its whole life, and its name never returns (O_EXCL).
- Space is taken when a segment is opened, and the next one is opened when the current one is half
  full. So a full disk shows in `ready`, while those already admitted still find room for their rows.
- After each fdatasync the writer looks whether the shipper has taken its segment over (a writer that was
  frozen for minutes is thought dead). If so, the rows not yet acknowledged are written again into a new
  segment; readers merge by key, so that a row written twice counts once.
- A failed fdatasync is never repeated on the same file: the kernel may have dropped the pages.

Standard library only: this loads inside an engine's environment.
"""

import asyncio
import concurrent.futures
import errno
import os
import re
import secrets
import threading
from pathlib import Path

from accounting import datasync, flights, segment
from accounting.open_segment import OpenSegment
from scheduler.contracts import clock as clocks
from scheduler.contracts import errors, usage

SEGMENT_BYTES = 4 * 1024 * 1024
LEAST_SEGMENT_BYTES = 256 * 1024  # a row with the longest texts must fit, in half of it
MAX_AGE_S = 60.0
_EMPTY_AGE_S = 3600.0  # well before the shipper takes an empty one for forgotten
_RETRY_S = 1.0  # a full disk is asked again this often, so that `ready` stays cheap
_RETIRED_AT_MOST = 4


class Spool:
    """A `usage.UsageSink` on local disk: one for each process, made after the last fork.

    `append` and `ready` belong to one thread (the event loop's). `sync` has the kernel do its work where it
    offers that, else it works in a thread of its own, as it does for all but the plain case.

    Args:
        folder: where the segments go; made if it is not there. Several writers may share it.
        writer: a word for the process (`gateway-0`), for file names and messages.
        segment_bytes: size at which a segment is sealed, at least 256 KiB; each writer holds up to
            twice as much disk ahead.
        max_age_s: age at which a segment with rows is sealed, at the next append.
        clock: where time comes from.

    Raises:
        errors.RecordingUnavailable: the first segment can't be opened.
    """

    def __init__(
        self,
        folder: Path,
        writer: str,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        max_age_s: float = MAX_AGE_S,
        clock: clocks.Clock,
    ) -> None:
        self._folder = folder
        self._writer = re.sub(r"[^A-Za-z0-9_-]+", "-", writer) or "writer"
        self._segment_bytes = max(segment_bytes, LEAST_SEGMENT_BYTES)
        self._max_age_s = max_age_s
        self._clock = clock
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards what follows; never held over an fdatasync
        self._flushing = threading.Lock()  # one flush at a time
        self._current: OpenSegment | None = None
        self._spare: OpenSegment | None = None
        self._retired: list[OpenSegment] = []
        self._lost: list[OpenSegment] = []
        self._orphans: list[usage.Row] = []  # not acknowledged, and their segment was lost
        self._opened_at = 0.0
        self._count = 0
        self._fault = ""
        self._retry_at = float("-inf")
        self._appended = 0
        self._synced = 0
        self._closed = False
        self._flights = flights.Flights(folder)
        self._kernel = datasync.open_()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, f"spool-{self._writer}")
        with self._lock:
            self._advance()

    def append(self, row: usage.Row) -> None:
        """Write a row; it survives this process at once, and the machine after the next `sync`.

        Raises:
            errors.RecordingUnavailable: there is no room for it.
            errors.Internal: it holds a number that no reader would take; it is not recorded.
        """
        with self._lock:
            self._own()
            self._write(row)
            self._appended += 1
        if len(self._retired) > _RETIRED_AT_MOST and not self._flushing.locked():
            self._flush()  # nobody syncs: bound what waits

    def ready(self) -> None:
        """Return if there is room for the rows of everything admitted, and this request's.

        Raises:
            errors.RecordingUnavailable: with what to do; asks the disk again once a second.
        """
        current = self._current
        roomy = current is not None and current.free * 2 >= self._segment_bytes
        well = not (self._orphans or self._closed or self._flights.hung)
        if well and (roomy or self._spare is not None):
            return
        if self._flights.hung:
            raise self._flights.silent()
        with self._lock:
            self._own()
            self._repay()
            if self._current is None:
                self._advance()
            elif self._spare is None and self._current.free * 2 < self._segment_bytes:
                self._spare = self._open()

    async def sync(self) -> None:
        """Return when every row appended so far is on disk; concurrent callers share one fdatasync.

        Raises:
            errors.RecordingUnavailable: the disk refused it.
        """
        target = self._appended
        while self._synced < target:
            await self._flights.landing(self._begin)

    def _begin(self, loop: asyncio.AbstractEventLoop, land: flights.Land) -> "asyncio.Future[None]":
        """Let the kernel sync the current segment; the thread, if there is more to do, or it can't.

        The kernel's ends without an exception: whoever waits looks at `_synced`, and a segment that was
        lost is the next flush's business.
        """
        kernel, current = self._kernel, self._current
        if kernel is None or current is None or not self._flushing.acquire(blocking=False):
            return self._threaded(loop, land)
        with self._lock:
            one_thing = not (self._retired or self._lost or self._orphans or current.new)
            mark, count = self._appended, len(current.unsynced)
        done: asyncio.Future[None] = loop.create_future()
        thread = threading.get_ident()

        def wake() -> None:
            flights.wake(done)
            land(None)

        def landed(fault: int) -> None:
            try:
                if self._settled(current, count, fault):
                    self._synced = mark
            finally:
                self._flushing.release()
            if loop.is_closed():
                return
            if threading.get_ident() == thread:
                wake()
            else:  # `close`, in another thread, has waited for it
                loop.call_soon_threadsafe(wake)

        if one_thing and kernel.begin(current.fd, landed):
            return done
        self._flushing.release()
        if one_thing:  # not offered here after all
            kernel.close()
            self._kernel = None
        return self._threaded(loop, land)

    def _threaded(
        self, loop: asyncio.AbstractEventLoop, land: flights.Land
    ) -> "asyncio.Future[None]":
        flight = loop.run_in_executor(self._thread, self._flush)
        flight.add_done_callback(lambda done: land(None if done.cancelled() else done.exception()))
        return flight

    def _settled(self, one: OpenSegment, count: int, fault: int) -> bool:
        """Note a segment as synced; False if it failed or was taken, and its rows must go elsewhere."""
        taken = fault == 0 and one.taken()
        with self._lock:
            if fault == 0 and not taken:
                del one.unsynced[:count]
                return True
            if fault:
                self._unavailable(OSError(fault, os.strerror(fault)))
                self._retry_at = float("-inf")
            else:
                self._fault = f"usage spool {self._folder}: segments are taken while being written"
            self._lose(one)
        return False

    def close(self) -> None:
        """Write everything out, seal the segment and stop the thread; blocks for a few ms.

        Raises:
            errors.RecordingUnavailable: the disk refused the last rows.
        """
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
        if self._kernel is not None:
            self._kernel.land()
        try:
            if self._appended > self._synced:
                self._flush()
            with self._lock:
                last, self._current = self._current, None
                spare, self._spare = self._spare, None
                if last is not None:
                    self._retired.append(last)
            self._seal_retired()
            if spare is not None:
                spare.discard()
        finally:
            self._thread.shutdown()
            if self._kernel is not None:
                self._kernel.close()
                self._kernel = None

    def _own(self) -> None:
        if os.getpid() != self._pid or self._closed:
            why = (
                "is closed" if self._closed else f"belongs to process {self._pid}, not to its fork"
            )
            raise errors.RecordingUnavailable(f"usage spool {self._folder} {why}: open another one")

    def _write(self, row: usage.Row) -> None:
        """Write a row to the current segment or the next; the lock is held."""
        current = self._current
        if current is None or self._clock.monotonic() - self._opened_at >= self._max_age_s:
            current = self._room()
        try:
            if not current.append(row):
                current = self._advance()
                if not current.append(row):
                    raise errors.Internal(f"usage row not recorded: {row!r:.200} is too large")
        except OSError as error:
            self._lose(current)
            raise self._unavailable(error) from error

    def _room(self) -> OpenSegment:
        """Return the segment to write to; the lock is held."""
        current = self._current
        if current is None:
            return self._advance()
        age = self._clock.monotonic() - self._opened_at
        if age >= (self._max_age_s if current.rows else _EMPTY_AGE_S):
            try:
                return self._advance()
            except errors.RecordingUnavailable:
                return current  # age alone is no reason to lose a row
        return current

    def _advance(self) -> OpenSegment:
        """Go over to the spare or a new segment; the lock is held."""
        fresh = self._spare or self._open()
        self._spare = None
        if self._current is not None:
            self._retired.append(self._current)
        self._current = fresh
        self._opened_at = self._clock.monotonic()
        return fresh

    def _repay(self) -> None:
        """Write again what a lost segment owes; the lock is held."""
        while self._orphans:
            self._write(self._orphans[0])
            del self._orphans[0]

    def _open(self) -> OpenSegment:
        if self._clock.monotonic() < self._retry_at:
            raise errors.RecordingUnavailable(self._fault, retry_after_s=_RETRY_S)
        now = self._clock.wall_us()
        name = f"{self._writer}.{self._pid}.{now}.{self._count}.{secrets.token_hex(3)}"
        self._count += 1
        header = segment.encode_header(self._writer, now)
        try:
            return OpenSegment(self._folder, name + segment.SUFFIX, self._segment_bytes, header)
        except OSError as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: OSError) -> errors.RecordingUnavailable:
        self._fault = (
            f"usage spool {self._folder}: {error.strerror or error}: "
            "free space there, or set forebay.state_dir to another disk"
        )
        self._retry_at = self._clock.monotonic() + _RETRY_S
        return errors.RecordingUnavailable(self._fault, retry_after_s=_RETRY_S)

    def _lose(self, lost: OpenSegment) -> None:
        """Leave a segment whose file can't be trusted; what it owes goes to the next. Lock held."""
        self._orphans.extend(lost.unsynced)
        lost.unsynced = []
        if lost in self._lost:
            return
        if lost is self._current:
            self._current = None
        elif lost in self._retired:
            self._retired.remove(lost)
        self._lost.append(lost)  # closed by the next flush: a sync may be under way on it

    def _flush(self) -> None:
        """Make everything appended so far durable (in the spool's thread)."""
        with self._flushing:
            for _ in range(3):  # a segment taken from us, then a disk that fails, then the truth
                with self._lock:
                    self._repay()
                    mark = self._appended
                    work = [*self._retired, *([self._current] if self._current else [])]
                    counts = [len(one.unsynced) for one in work]
                if all(self._settle(*each) for each in zip(work, counts, strict=True)):
                    self._synced = mark
                    break
            else:
                raise errors.RecordingUnavailable(self._fault, retry_after_s=_RETRY_S)
        self._seal_retired()

    def _settle(self, one: OpenSegment, count: int) -> bool:
        """Sync one segment; False if its rows must go elsewhere."""
        if count == 0:
            return True
        fault = 0
        try:
            one.sync()
        except OSError as error:
            fault = error.errno or errno.EIO
        return self._settled(one, count, fault)

    def _seal_retired(self) -> None:
        """Seal what has been left and owes nothing; a failure leaves it to the shipper's take-over."""
        with self._flushing:
            with self._lock:
                done = [one for one in self._retired if not one.unsynced]
                self._retired = [one for one in self._retired if one.unsynced]
                lost, self._lost = self._lost, []
            for one in lost:
                one.close()
            for one in done:
                try:
                    if one.rows:
                        one.seal()
                    else:
                        one.discard()
                except OSError as error:
                    self._unavailable(error)

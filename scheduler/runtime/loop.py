"""When things happen: the leader's periodic work, on APScheduler.

Work that the composition passes in (rollups, clean-up) runs on the leader alone, once for each period:
the registry notes which periods are done. A leader that dies half-way leaves its period undone, and
the next one does it again, so such work must give the same when repeated for the same period.
"""

import asyncio
import dataclasses
import datetime
import logging
from collections.abc import Awaitable, Callable, Sequence

from apscheduler.schedulers import asyncio as aps
from apscheduler.triggers import interval
from sqlalchemy import exc

from scheduler.contracts import clock
from scheduler.runtime.registry import database, lead

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Periodic:
    """Work for the leader.

    Attributes:
        name: unique; the registry keeps the newest period done under it.
        every_s: length of a period; periods are aligned to the epoch (60: whole minutes).
        run: called with the UTC µs at which the period began; repeating it must change nothing.
    """

    name: str
    every_s: float
    run: Callable[[int], Awaitable[None]]


async def run_period(work: Periodic, row: lead.Lead, epoch: int, time: clock.Clock) -> list[int]:
    """Do the period that is now and one that was left half done; return those that were done here.

    Raises:
        database.Fenced: another broker leads.
    """
    length_us = round(work.every_s * 1_000_000)
    start_us = time.wall_us() // length_us * length_us
    done: list[int] = []
    while True:
        period_us = await asyncio.to_thread(row.begin_period, epoch, work.name, start_us)
        if period_us is None:
            return done
        await work.run(period_us)
        await asyncio.to_thread(row.end_period, epoch, work.name, period_us)
        done.append(period_us)


class Loop:
    """Runs named jobs again and again, each never beside itself, until closed.

    A job that raises is logged and runs again next time; one that is fenced ends the lead.
    """

    def __init__(self, fenced: Callable[[], None]) -> None:
        # A tick that takes longer than its interval is normal on a busy machine, not a warning each.
        logging.getLogger("apscheduler").setLevel(logging.ERROR)
        self._scheduler = aps.AsyncIOScheduler(timezone=datetime.UTC)
        self._fenced = fenced
        self._running: set[asyncio.Task[object]] = set()

    def every(self, name: str, seconds: float, job: Callable[[], Awaitable[object]]) -> None:
        """Run ``job`` every so many seconds; runs that were missed are not made up for."""

        async def once() -> None:
            task = asyncio.current_task()
            if task is not None:
                self._running.add(task)
            try:
                await job()
            except asyncio.CancelledError:
                log.debug("%s: cut short, this lead is over", name)
            except database.Fenced as error:
                log.warning("%s: %s", name, error)
                self._fenced()
            except exc.SQLAlchemyError as error:
                log.warning("%s: registry does not answer, tried again: %s", name, error)
            except Exception:
                log.exception("%s failed, tried again", name)
            finally:
                if task is not None:
                    self._running.discard(task)

        self._scheduler.add_job(
            once,
            interval.IntervalTrigger(seconds=seconds, timezone=datetime.UTC),
            id=name,
            max_instances=1,
            coalesce=True,
            misfire_grace_time=None,
            next_run_time=datetime.datetime.now(datetime.UTC),
        )

    def start(self) -> None:
        """Begin."""
        self._scheduler.start()

    async def close(self) -> None:
        """Start nothing more and cancel what runs: whatever a crash may cut, this may too."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)
        running = set(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)


def periodic_jobs(
    works: Sequence[Periodic], row: lead.Lead, epoch: int, time: clock.Clock
) -> list[tuple[Periodic, Callable[[], Awaitable[object]]]]:
    """Return each work with the job that runs its newest period."""

    def job(work: Periodic) -> Callable[[], Awaitable[object]]:
        return lambda: run_period(work, row, epoch, time)

    return [(work, job(work)) for work in works]

"""A broker's life: it stands by until it leads, leads until another one does, and stands by again."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from sqlalchemy import exc

from scheduler.runtime import broker, firings, leadership, loop
from scheduler.runtime.registry import database

log = logging.getLogger(__name__)
LOOK_S = 30.0  # between two tries to read the ledger, and how late a look back may be
TIDY_S = 600.0  # between two looks at what the registry may forget
PERIOD_LOOK_S = 10.0  # a new leader finds a period that was left half done within so long


async def serve(
    parts: broker.Parts,
    *,
    periodic: Sequence[loop.Periodic] = (),
    ready: Callable[[str], None] | None = None,
) -> None:
    """Run a broker until cancelled.

    Args:
        parts: what it is made of.
        periodic: work for the leader alone.
        ready: called with the address each time this broker begins to lead.
    """
    claim = leadership.Leadership(parts.registry.lead, parts.options, parts.time)
    while True:
        epoch = await claim.acquire()
        over = asyncio.Event()
        leader = broker.Leader(parts, epoch)
        runner = loop.Loop(over.set)
        placing: asyncio.Task[None] | None = None
        try:
            # From now on: reading a slow registry may take longer than a lead lasts.
            runner.every("renew the lead", parts.options.leader_renew_s, claim.renew)
            runner.start()
            where = await leader.start()
            placing = asyncio.create_task(leader.follow_adapters())
            _begin(runner, leader, parts.options.tick_s, parts.options.leader_renew_s)
            for work, job in loop.periodic_jobs(periodic, parts.registry.lead, epoch, parts.time):
                runner.every(work.name, min(work.every_s, PERIOD_LOOK_S), job)
            if ready is not None:
                ready(where)
            await over.wait()
            log.warning("epoch %d is over: another broker leads", epoch)
        except (exc.SQLAlchemyError, database.Fenced) as error:
            log.warning("epoch %d could not begin, standing by again: %s", epoch, error)
        except Exception:
            # A registry in which this release can't read something: another broker's may.
            log.exception("epoch %d could not begin, standing by again", epoch)
        finally:
            if placing is not None:
                placing.cancel()
            await runner.close()
            await leader.stop()
            await claim.release()
        if not leader.address:  # it could not even begin
            await parts.time.sleep(parts.options.leader_renew_s)


def _begin(runner: loop.Loop, leader: broker.Leader, tick_s: float, look_s: float) -> None:
    """Let a leader's own work begin."""
    runner.every("tick", tick_s, leader.tick)
    runner.every("go on without the registry", tick_s, leader.bridge)
    runner.every("say who leads", look_s, leader.announce)
    runner.every("note what schedules began", firings.LOOK_S, leader.note_firings)
    runner.every("look back", LOOK_S, leader.look_back)
    runner.every("forget what is long over", TIDY_S, leader.tidy)

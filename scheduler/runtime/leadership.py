"""Who leads: a broker takes the lead when it is free or has run out, and renews it while it works.

Clocks of two hosts may differ; safety does not rest on them. A leader that was replaced finds out at
its next write, which the newer epoch fences.
"""

import asyncio
import logging
import os
import secrets
import socket

from sqlalchemy import exc

from scheduler.contracts import clock
from scheduler.runtime import settings
from scheduler.runtime.registry import lead

log = logging.getLogger(__name__)
RELEASE_S = 5.0  # a registry that hangs is not waited for: the lead runs out by itself


class Leadership:
    """One broker's claim to lead.

    Attributes:
        epoch: the epoch of its lead, 0 while it does not lead.
    """

    def __init__(self, row: lead.Lead, options: settings.Settings, time: clock.Clock) -> None:
        self._row = row
        self._options = options
        self._time = time
        self._ttl_us = round(options.leader_ttl_s * 1_000_000)
        self.holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self.epoch = 0

    async def acquire(self) -> int:
        """Wait until the lead is ours; return its epoch."""
        waiting = False
        while True:
            try:
                epoch = await asyncio.to_thread(
                    self._row.take, self.holder, self._time.wall_us(), self._ttl_us
                )
            except exc.SQLAlchemyError as error:
                log.warning("registry does not answer, so there is no lead to take: %s", error)
                epoch = None
            if epoch is not None:
                self.epoch = epoch
                return epoch
            if not waiting:
                log.info("another broker leads: standing by")
                waiting = True
            await self._time.sleep(self._options.leader_renew_s)

    async def renew(self) -> None:
        """Keep the lead.

        A registry that does not answer takes no lead away: no other broker can take it then.

        Raises:
            database.Fenced: another broker leads.
        """
        try:
            await asyncio.to_thread(self._row.renew, self.epoch, self._time.wall_us(), self._ttl_us)
        except exc.SQLAlchemyError as error:
            log.warning("registry does not answer, lead not renewed: %s", error)

    async def release(self) -> None:
        """Give the lead up, so that a standby takes it at once."""
        try:
            async with asyncio.timeout(RELEASE_S):
                await asyncio.to_thread(self._row.release, self.epoch)
        except (exc.SQLAlchemyError, TimeoutError) as error:
            log.warning("registry does not answer, the lead runs out by itself: %s", error)
        self.epoch = 0

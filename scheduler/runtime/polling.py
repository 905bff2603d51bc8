"""Asks Slurm for what it has, beside the leader's ticks."""

import asyncio
import logging
from concurrent import futures

from scheduler.contracts import clock, fleet, ids, slurm
from scheduler.core import leases
from scheduler.runtime import live

log = logging.getLogger(__name__)
HURRY_S = 0.5  # between polls while a lease is on its way in or out
RESERVED_S = 10.0  # between two looks at Slurm's reservations, which admins make hours ahead
_Answer = tuple[tuple[slurm.Job, ...], tuple[slurm.Node, ...], tuple[slurm.Reservation, ...] | None]


class Poller:
    """Asks Slurm for all jobs and nodes, one poll at a time, in a thread, never in the tick's way.

    Args:
        port: Slurm.
        picture: is given what Slurm says of Forebay's own jobs; nobody else's job is a lease.
        time: for when polls are due.
        every_s: seconds between two polls while nothing moves.
        users: whose jobs are Forebay's, beside the port's own user.

    Attributes:
        error: why the last poll got no answer, "" if it did.
        unread: why reservations are as they were last read, "" if they are new.
    """

    def __init__(
        self,
        port: slurm.SlurmPort,
        picture: live.Live,
        time: clock.Clock,
        every_s: float,
        users: frozenset[str] = frozenset(),
    ) -> None:
        self._port = port
        self._users = port.users | users
        self._forged: frozenset[ids.SlurmJobId] = frozenset()  # what was warned of
        self._live = picture
        self._time = time
        self._every_s = every_s
        self._due = float("-inf")
        self._reserved_due = float("-inf")
        self._running: asyncio.Task[None] | None = None
        # Its own thread: a controller that hangs must not take those that write the registry.
        self._thread = futures.ThreadPoolExecutor(1, "slurm-poll")
        self.error = ""
        self.unread = ""

    def kick(self) -> None:
        """Start a poll if one is due and none is under way."""
        if self._running is not None and not self._running.done():
            return
        if self._time.monotonic() >= self._due:
            self._running = asyncio.create_task(self.poll())

    def soon(self) -> None:
        """Make the next poll due now: something in Slurm has just changed."""
        self._due = float("-inf")

    async def poll(self) -> None:
        """Ask once and give the answer to the live picture."""
        began = self._time.monotonic()
        self._due = began + (min(HURRY_S, self._every_s) if self._hurry() else self._every_s)
        try:
            here = asyncio.get_running_loop()
            reserved = began >= self._reserved_due
            jobs, nodes, kept = await here.run_in_executor(self._thread, self._ask, reserved)
        except Exception as error:
            # Whatever it is: what was read before must not pass for Slurm's word of now.
            if not self.error:
                odd = not isinstance(error, slurm.SlurmError)
                log.warning(
                    "Slurm does not answer, leases are left as they are: %s", error, exc_info=odd
                )
            self.error = str(error) or type(error).__name__
            self._live.absorb_poll(None, (), began)
            return
        if self.error:
            log.info("Slurm answers again")
        self.error = ""
        if reserved:
            self._reserved_due = began + RESERVED_S
        if kept is not None:
            self._live.reservations = kept
        mine, forged = leases.ours(jobs, self._users, self._live.cluster)
        self._warn(forged)
        self._live.absorb_poll(mine, nodes, began)

    async def close(self) -> None:
        """Leave the poll under way, if there is one."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _warn(self, forged: tuple[slurm.Job, ...]) -> None:
        """Say once of each job of somebody else that bears a stamp that it is left alone."""
        for job in forged:
            if job.job_id not in self._forged:
                log.warning(
                    "job %s of user %s bears a lease's stamp and is left alone: leases run as %s; "
                    "if it is one, add the user to [slurm] service_users",
                    job.job_id, job.user or "?", ", ".join(sorted(self._users)),
                )  # fmt: skip
        self._forged = frozenset(job.job_id for job in forged)

    def _ask(self, reserved: bool) -> _Answer:
        """Ask for all in one go: reservations only if they are due."""
        kept = self._reservations() if reserved else None
        return self._port.jobs(), self._port.nodes(), kept

    def _reservations(self) -> tuple[slurm.Reservation, ...] | None:
        """Ask for them; None if they can't be read: one odd reservation must hide no job."""
        try:
            kept = self._port.reservations()
        except slurm.SlurmGarbled as error:
            if not self.unread:
                log.warning("reservations stay as they were last read: %s", error)
            self.unread = str(error)
            return None
        self.unread = ""
        return kept

    def _hurry(self) -> bool:
        moving = {fleet.LeaseState.REQUESTED, fleet.LeaseState.PENDING, fleet.LeaseState.CLOSING}
        return any(entry.lease.state in moving for entry in self._live.leases.values())

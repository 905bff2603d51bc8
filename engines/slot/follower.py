"""A rank past the first of a replica over several nodes, in the slot that its node has for it.

It serves nobody and decides nothing: it has the weights on its node's disk, starts when rank 0 says where it
waits, and ends when it is told to. One that ends by itself is told as lost, and that life of rank 0 ends too.
"""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from engines.slot import children, hold, kept, means, wanted
from engines.weights import stager
from scheduler.contracts import fleet, wire
from scheduler.contracts.v1 import control_pb2 as pb

_R = fleet.ReplicaState
_log = logging.getLogger(__name__)


class Follower(kept.Kept):
    """Keeps one rank; its number is in the wish."""

    def __init__(
        self, replica_id: str, what: fleet.ReplicaSpec, wish: wanted.Wish, given: means.Means
    ) -> None:
        super().__init__(replica_id, what, wish, given)
        self._failed: str | None = None  # the life of rank 0 that it could not work for

    @property
    def final(self) -> bool:
        """Whether its life is over."""
        return self.state is _R.STOPPED

    def want(self, wish: wanted.Wish) -> None:
        """Change what is wanted of it; one that was told to stop stays told."""
        if (self._wish.run or not wish.run) and wish != self._wish:
            self._wish = dataclasses.replace(wish, rank=self._wish.rank, nodes=self._wish.nodes)
            self._bell.set()

    def stop_batch(self) -> None:
        """Do nothing: what runs is rank 0's to say."""

    def stop(self, *, at_once: bool) -> None:
        """Stop; there is nothing to drain here."""
        del at_once
        self.want(dataclasses.replace(self._wish, run=False))

    def report(self) -> pb.ReplicaReport:
        """Return what is to be told of it; it has no address."""
        return pb.ReplicaReport(
            replica_id=self.replica_id,
            state=self.state.value,
            role=self._wish.role.value,
            meet=self._failed or "",
            incarnation=self._incarnation,
            reason=self._reason,
            staging=self._disk.staging,
            spec=wire.spec_to_pb(self._what),
        )

    async def run(self) -> None:
        """Live, with a process for each life of rank 0. Cancelled, it kills its process."""
        try:
            while not self.final:
                if not self._wish.run:
                    self._become(_R.STOPPED, "told to stop")
                elif self._failed == self._wish.meet:
                    await self._beat()
                elif await self._provided():
                    if self._wish.meet:
                        await self._run_once(self._wish.meet)
                    else:
                        self._become(_R.ASLEEP, "waits for rank 0")
                        await self._beat()
        finally:
            self._disk.close()

    async def _provided(self) -> bool:
        """Have the weights on this node's disk; false: not so, or not wanted now."""
        try:
            return await self._disk.have(lambda: self._wish.run, self._beat, self._bell.set)
        except (stager.Refused, OSError) as error:
            self._fail(self._wish.meet, f"not started: {error}")
            return False

    async def _run_once(self, meet: str) -> None:
        """Live with one process, until it ends or rank 0 is not the one that it works for."""
        self._incarnation += 1
        try:
            child = self._begin(self._incarnation, self._heard, meet)
        except (children.StartError, *hold.FAULTS, OSError) as error:
            self._clear()
            self._fail(meet, f"not started: {error}")
            return
        self._become(_R.WARM, "")
        ended = self._watch(child)
        fault, noted = "", 0
        try:
            while not ended.done() and self._wish.run and self._wish.meet == meet:
                await self._beat()
                if child.pid != noted:
                    noted = child.pid
                    self._hold.note(noted)
            if ended.done():
                said = children.last_lines(self._papers.log)
                fault = str(ended.result()) + (said and f"; log ends: {said}")
        except hold.FAULTS as error:
            fault = str(error)
        finally:
            await self._end(child, ended)
        if fault:
            self._fail(meet, fault)
        else:
            self._become(_R.ASLEEP, "waits for rank 0")

    def _fail(self, meet: str, reason: str) -> None:
        """Tell that it can't work for this life of rank 0; it may for the next one."""
        self._failed = meet
        self._become(_R.LOST, reason)

    def _heard(self, status: Mapping[str, Any]) -> None:
        """Take a status line of the process: its pid may be known by now."""
        _log.info("replica %s rank %d: %s", self.replica_id, self._wish.rank, status)
        self._bell.set()

"""What keeper and follower have in common: a wish, a process with its files, and the GPUs that it holds."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

from engines.replica import launch
from engines.slot import children, hold, means, papers, provision, wanted
from scheduler.contracts import fleet

_log = logging.getLogger(__name__)


class Kept:
    """One rank of a replica in its slot; the only one, mostly.

    Args:
        replica_id: of which replica.
        what: its spec.
        wish: what is wanted of it at first.
        given: what to work with.
    """

    def __init__(
        self, replica_id: str, what: fleet.ReplicaSpec, wish: wanted.Wish, given: means.Means
    ) -> None:
        self.replica_id = replica_id
        self.state = fleet.ReplicaState.STARTING
        self._what = what
        self._wish = wish
        self._means = given
        self._options = given.slot.options
        self._reason = ""
        self._incarnation = 0
        self._hold = hold.Hold(replica_id, given)
        self._disk = provision.Provision(
            what, given.stager, given.time, lambda line: self._become(self.state, line)
        )
        self._bell = asyncio.Event()
        self._papers = papers.Papers.of(given.slot, replica_id, wish.rank)

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs that it holds."""
        return self._hold.gpus

    def _begin(
        self, incarnation: int, heard: Callable[[Mapping[str, Any]], None], meet: str
    ) -> children.Child:
        """Take GPUs and start a process on them.

        Args:
            incarnation: its number.
            heard: called with each of its status lines.
            meet: where the ranks meet, "" where there is one alone.

        Raises:
            children.StartError: it can't be started.
            hold.FAULTS: its GPUs are somebody else's.
        """
        given, wish = self._means, self._wish
        needs = -(-self._what.gpus // wish.nodes // given.slot.parts)
        self._hold.take(given.gpus, needs, os.getpid())
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus), **given.stager.caches(self._what)}
        rank = launch.Rank(wish.rank, wish.nodes, meet) if meet else None
        return given.starter.start(
            self._papers.order(given, self._disk.spec, wish.role, incarnation, visible, heard, rank)
        )

    def _watch(self, child: children.Child) -> "asyncio.Task[children.Exit]":
        """Return the task that ends with a process, and rings then."""
        ended = asyncio.create_task(child.wait())
        ended.add_done_callback(lambda _: self._bell.set())
        return ended

    async def _end(self, child: children.Child, ended: "asyncio.Task[children.Exit]") -> None:
        """Kill what is left of a process, and leave nothing of it."""
        child.signal(signal.SIGKILL)
        await asyncio.wait({ended}, timeout=2.0)
        self._clear()

    async def _ring(self, seconds: float) -> None:
        """Wait for news, or for so long."""
        try:
            await asyncio.wait_for(self._bell.wait(), max(0.01, seconds))
        except TimeoutError:
            return
        finally:
            self._bell.clear()

    async def _beat(self) -> None:
        """Wait for news, or for a heartbeat."""
        await self._ring(self._options.heartbeat_s)

    def _become(self, state: fleet.ReplicaState, reason: str) -> None:
        if state is not self.state or reason != self._reason:
            rank = f" rank {self._wish.rank}" if self._wish.rank else ""
            _log.info("replica %s%s: %s → %s: %s", self.replica_id, rank, self.state, state, reason)
            self.state, self._reason = state, reason
            self._means.changed(True)

    def _clear(self) -> None:
        """Leave nothing: no process that it started, no secret, no note."""
        self._papers.kill(self._means.slot)
        self._papers.burn()
        self._let_go()

    def _let_go(self) -> None:
        """Hold no GPU."""
        self._hold.give_back()

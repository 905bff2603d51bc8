"""A slot's supervisor: follows what its agent says should run, and reports what does.

It outlives its replicas and they never outlive it. It leaves when told, when Slurm says SIGTERM and the
agent had its time, or when the agent is gone.
"""

import asyncio
import logging
import os
import pathlib
import signal
from collections.abc import Mapping

import aiohttp

from engines import gpus, link, places, private, processes
from engines.slot import control, follower, keeper, means, occupancy, spec, starters, wanted
from engines.weights import stager
from scheduler.contracts import clock, fleet, wire
from scheduler.contracts.v1 import control_pb2 as pb
from scheduler.contracts.v1 import control_pb2_grpc

WATCH_S = 0.5
FAREWELL_S = 5.0  # for the last report; a slot that leaves at once may not be connected yet
_log = logging.getLogger(__name__)


class Supervisor:
    """One slot.

    Args:
        told: its spec.
        time: the clock.
    """

    def __init__(self, told: spec.SlotSpec, time: clock.Clock) -> None:
        self._spec = told
        self._options = told.options
        self._time = time
        self._node = places.node()
        self._state = "starting"
        self._reason = ""
        self._epoch = -1
        self._desired: pb.SlotDesired | None = None
        self._gpus: tuple[str, ...] = ()
        self._keepers: dict[str, keeper.Keeper | follower.Follower] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._leave = asyncio.Event()
        self._leave_now = False
        self._means: means.Means | None = None
        ends: link.Ends[pb.SlotReport, pb.SlotDesired] = link.Ends(
            where=lambda: told.agent_address,
            open_call=lambda channel: control_pb2_grpc.SlotLinkStub(channel).Connect,
            report=self.report,
            take=self.take,
        )
        pace = link.Pace(self._options.stats_s / 4, self._options.heartbeat_s)
        token = private.read(pathlib.Path(told.token_file))
        self._link = link.Link(ends, token, pace, f"slot {told.slot_id}")

    def report(self) -> pb.SlotReport:
        """Return the slot's whole state."""
        return pb.SlotReport(
            slot_id=self._spec.slot_id,
            epoch=max(self._epoch, 0),
            node=self._node,
            gpu_ids=self._gpus,
            gpus=self._spec.gpus,
            state=self._state,
            replicas=[one.report() for one in self._keepers.values()],
            reason=self._reason,
            pid=os.getpid(),
        )

    def take(self, desired: pb.SlotDesired) -> None:
        """Follow a desired state, unless it is of an older leader."""
        if desired.slot_id != self._spec.slot_id:
            raise ValueError(
                f"desired state of slot {desired.slot_id} came to {self._spec.slot_id}"
            )
        if desired.epoch < self._epoch:
            _log.info("older epoch %d ignored, following %d", desired.epoch, self._epoch)
            return
        self._epoch, self._desired = desired.epoch, desired
        self._reconcile(desired)
        if desired.close:
            self._close(self._reason or "asked")
        self._changed(False)

    def _reconcile(self, desired: pb.SlotDesired) -> None:
        named: set[str] = set()
        for item in desired.replicas:
            named.add(item.replica_id)
            wish = self._wish(item, closing=desired.close)
            known = self._keepers.get(item.replica_id)
            if known is not None:
                known.want(wish)
            elif self._means is not None and self._state == "ready" and not desired.close:
                try:
                    self._begin(item, wish, self._means)
                except ValueError as error:
                    # What only a newer broker knows; it hears that the replica is not there.
                    _log.warning("replica %s can't be started: %s", item.replica_id, error)
        for replica_id, known in list(self._keepers.items()):
            if replica_id in named:
                continue
            if known.final:
                del self._keepers[replica_id]
            else:
                known.want(wanted.Wish(fleet.Role.INTERACTIVE, False, self._options.drain_s))

    @staticmethod
    def _wish(item: pb.ReplicaDesired, *, closing: bool) -> wanted.Wish:
        run = item.run and not closing
        told = tuple((one.name, one.path) for one in item.adapters)
        return wanted.Wish(
            fleet.role_of_others(item.role),
            run,
            item.drain_s,
            run and item.asleep,
            told if item.adapters_told else None,
            max(1, item.nodes),
            item.rank,
            item.meet,
            item.fault,
        )

    def _begin(self, item: pb.ReplicaDesired, wish: wanted.Wish, given: means.Means) -> None:
        kind = follower.Follower if wish.rank else keeper.Keeper
        one = kind(item.replica_id, wire.spec_from_pb(item.spec), wish, given)
        self._keepers[item.replica_id] = one
        self._tasks[item.replica_id] = asyncio.create_task(one.run())

    def _changed(self, urgent: bool) -> None:
        self._link.changed(urgent=urgent)
        self._drop_forgotten()

    def _drop_forgotten(self) -> None:
        """Forget ended replicas that nobody asks for any more."""
        named = {item.replica_id for item in self._desired.replicas} if self._desired else set()
        for replica_id, one in list(self._keepers.items()):
            if one.final and self._desired is not None and replica_id not in named:
                del self._keepers[replica_id]

    def _close(self, reason: str) -> None:
        if self._state in {"starting", "ready"}:
            self._state, self._reason = "closing", reason
            self._link.changed(urgent=True)
        self._leave.set()

    def _sigterm(self) -> None:
        """Slurm wants the step to end: stop batch now, tell the agent, leave when it says so."""
        if self._state in {"starting", "ready"}:
            _log.info("SIGTERM")
            self._state, self._reason = "closing", "sigterm"
            for one in self._keepers.values():
                one.stop_batch()
            self._link.changed(urgent=True)
            asyncio.get_running_loop().call_later(self._options.grace_s, self._leave.set)

    async def run(self) -> int:
        """Supervise until the slot is to be closed; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._sigterm)
        linked = asyncio.create_task(self._link.run())
        watching = asyncio.create_task(self._watch_agent())
        begin = starters.Starters(self._spec, lambda: self._changed(False))
        try:
            async with control.client() as session:
                self._open(begin, session)
                await self._leave.wait()
                await self._end_replicas()
            await begin.close()
            self._state = "lost" if self._state == "lost" else "closed"
            if not self._leave_now:
                await self._link.farewell(FAREWELL_S)
        finally:
            for task in (linked, watching, *self._tasks.values()):
                task.cancel()
            await asyncio.wait({linked, watching, *self._tasks.values()}, timeout=3.0)
            processes.kill_marked({processes.SLOT: self._spec.slot_id})
        return 0

    def _open(self, begin: starters.Starter, session: aiohttp.ClientSession) -> None:
        try:
            whole = -(-self._spec.gpus // self._spec.parts)
            self._gpus = gpus.of_step(os.environ, whole)
        except gpus.GpuError as error:
            # Told once and left: the broker sees a lost slot and why, and nothing is tried again here.
            self._state, self._reason = "lost", str(error)
            self._leave.set()
            return
        self._means = means.Means(
            slot=self._spec,
            node=self._node,
            host=places.listen_host(self._options.host),
            gpus=gpus.on_node(os.environ, self._gpus),
            held=self._held,
            starter=begin,
            session=session,
            notes=occupancy.Occupancy(self._options.gpu_lock_dir, self._node),
            stager=stager.Stager(self._options),
            time=self._time,
            changed=self._changed,
        )
        if self._state == "starting":
            self._state = "ready"
        self._link.changed(urgent=True)
        if self._desired is not None:
            self._reconcile(self._desired)

    def _held(self) -> Mapping[str, str]:
        return {gpu: one.replica_id for one in self._keepers.values() for gpu in one.gpus}

    async def _end_replicas(self) -> None:
        for one in self._keepers.values():
            one.stop(at_once=self._leave_now)
        running = {task for task in self._tasks.values() if not task.done()}
        if running:
            await asyncio.wait(running)

    async def _watch_agent(self) -> None:
        """Leave when the agent is gone: at once where its process is seen, after a while elsewhere."""
        told = self._spec
        here = told.agent_machine == places.machine()
        loop = asyncio.get_running_loop()
        while True:
            gone = here and not processes.alive(told.agent_pid, told.agent_started)
            lost_at = self._link.lost_at
            limit = self._options.agent_lost_s
            silent = not here and lost_at is not None and loop.time() - lost_at > limit
            if gone or silent:
                _log.error("the agent is gone: everything here ends")
                self._leave_now = True
                self._close("the agent is gone")
                for one in self._keepers.values():
                    one.stop(at_once=True)
                return
            await asyncio.sleep(WATCH_S)


async def serve(told: spec.SlotSpec, time: clock.Clock) -> int:
    """Run one slot until it is closed; returns the exit code."""
    return await Supervisor(told, time).run()

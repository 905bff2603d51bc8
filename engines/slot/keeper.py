"""One replica's life in its slot: start, watch, change role, drain, stop; what is wrong is told, not mended.

A replica that ends is not started again here: a new one is the broker's decision and has a new id. One
that is parked (rung 2) and woken keeps its id and is another incarnation: its process ends, all its memory
with it, and waking forks it anew from the slot's server, which has everything imported.
"""

import asyncio
import dataclasses
import logging
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines import gpus, private, processes
from engines.replica import launch
from engines.slot import children, control, means, occupancy, provision, wanted
from engines.weights import stager
from scheduler.contracts import fleet, wire
from scheduler.contracts.v1 import control_pb2 as pb

_R = fleet.ReplicaState
STEPS_TO_WAIT = 50  # an engine that stands still for so many of its own steps hangs
KILL_AFTER = 2.0  # times as long as it takes to leave the routes
FINAL = frozenset({_R.STOPPED, _R.QUARANTINED, _R.LOST})
_log = logging.getLogger(__name__)


class Keeper:
    """Keeps one replica.

    Args:
        replica_id: which.
        what: its spec.
        wish: what is wanted of it at first.
        given: what to work with.
    """

    def __init__(
        self, replica_id: str, what: fleet.ReplicaSpec, wish: wanted.Wish, given: means.Means
    ) -> None:
        self.replica_id = replica_id
        self.state = _R.STARTING
        self.gpus: tuple[str, ...] = ()
        self._what = what
        self._wish = wish
        self._means = given
        self._options = given.slot.options
        self._role = wish.role
        self._reason = ""
        self._address = ""
        self._incarnation = 0
        self._phases: dict[str, float] = {}
        self._stats: Mapping[str, Any] | None = None
        self._work: Mapping[str, int] | None = None
        self._running = 0
        self._steps = (-1, 0.0)  # steps seen last, and when they grew or there was no work
        self._answered = 0.0
        self._at_once = False
        self._may_leave = False
        self._disk = provision.Provision(
            what, given.stager, given.time, lambda line: self._become(self.state, line)
        )
        self._bell = asyncio.Event()
        self._secret_file = Path(given.slot.run_dir) / f"{replica_id}.secret"
        self._record_file = Path(given.slot.run_dir) / f"{replica_id}.json"
        self._log_file = Path(given.slot.log_dir) / f"{replica_id}.log"

    @property
    def final(self) -> bool:
        """Whether its life is over."""
        return self.state in FINAL

    def want(self, wish: wanted.Wish) -> None:
        """Change what is wanted of it; one that was told to stop stays told."""
        if not self._wish.run and wish.run:
            return
        if wish != self._wish:
            self._wish = wish
            self._bell.set()

    def stop_batch(self) -> None:
        """Abort batch now and take none any more; the rest goes on, and the replica may leave by itself."""
        self._may_leave = True
        self.want(dataclasses.replace(self._wish, role=fleet.Role.INTERACTIVE))

    def stop(self, *, at_once: bool) -> None:
        """Drain and stop; at once: without the drain, killed if need be."""
        self._at_once = self._at_once or at_once
        self.want(dataclasses.replace(self._wish, run=False))
        self._bell.set()

    def report(self) -> pb.ReplicaReport:
        """Return what is to be told of it."""
        report = pb.ReplicaReport(
            replica_id=self.replica_id,
            state=self.state.value,
            role=self._role.value,
            address=self._address,
            incarnation=self._incarnation,
            secret_file=str(self._secret_file),
            reason=self._reason,
            phases_s=self._phases,
            staging=self._disk.staging,
            spec=wire.spec_to_pb(self._what),
        )
        if self._stats is not None:
            report.stats.CopyFrom(pb.ReplicaStats(**self._stats))
        if self._work is not None:
            report.work.CopyFrom(pb.EngineWork(**self._work))
        return report

    async def run(self) -> None:
        """Live: from start to a final state, parked and woken in between. Cancelled, it kills its process."""
        if not self._wish.run:
            self._become(_R.STOPPED, "it was to stop before it had started")
        try:
            while not self.final:
                if self._wish.up:
                    if await self._provide():
                        await self._run_once()
                elif self._wish.run:
                    self._become(_R.ASLEEP, "parked")
                    await self._ring(self._options.heartbeat_s)
                else:
                    self._become(_R.STOPPED, "told to stop while it was parked or staged")
        finally:
            self._disk.close()

    async def _provide(self) -> bool:
        """Have the weights on this node's disk; false: not so, or not wanted now."""
        try:
            there = await self._disk.have(
                lambda: self._wish.up,
                lambda: self._ring(self._options.heartbeat_s),
                self._bell.set,
            )
        except (stager.Refused, OSError) as error:
            self._become(_R.LOST, f"not started: {error}")
            return False
        self._phases = {} if self._disk.took_s is None else {"stage": self._disk.took_s}
        return there

    async def _run_once(self) -> None:
        """Live with one process: until it is parked, or for good."""
        try:
            child = self._start()
        except (children.StartError, gpus.GpuError, occupancy.Occupied, OSError) as error:
            self._clear()
            self._become(_R.LOST, f"not started: {error}")
            return
        if self.state is _R.ASLEEP:
            self._become(_R.WARM, "waking")
        ended = asyncio.create_task(child.wait())
        ended.add_done_callback(lambda _: self._bell.set())
        try:
            state, reason = await self._live(child, ended)
        except asyncio.CancelledError:
            state, reason = _R.STOPPED, "its slot was closed"
            raise
        except Exception as error:
            _log.exception("replica %s", self.replica_id)
            state, reason = _R.LOST, f"supervisor: {type(error).__name__}: {error}"
        finally:
            child.signal(signal.SIGKILL)
            await asyncio.wait({ended}, timeout=2.0)
            self._clear()
            self._become(state, reason)

    def _start(self) -> children.Child:
        given = self._means
        self.gpus = gpus.choose(given.gpus, given.held(), self._what.gpus, self.replica_id)
        self._role = self._wish.role
        me = self._holder(os.getpid())
        given.notes.take(self._on_node, me)
        private.new_secret(self._secret_file)
        slot = given.slot
        record = launch.Launch(
            replica_id=self.replica_id,
            cluster=slot.cluster,
            lease_id=slot.lease_id,
            slot_id=slot.slot_id,
            slurm_job_id=slot.slurm_job_id,
            node=given.node,
            spec=self._disk.spec,
            role=self._wish.role,
            secret_file=str(self._secret_file),
            host=given.host,
            incarnation=self._incarnation + 1,
            sink_factory=slot.sink_factory,
        )
        private.write(self._record_file, children.record_text(record))
        extra = {
            processes.LEASE: slot.lease_id,
            processes.SLOT: slot.slot_id,
            processes.REPLICA: self.replica_id,
            "CUDA_VISIBLE_DEVICES": ",".join(self.gpus),
            **given.stager.caches(self._what),
        }
        order = children.Order(
            record=record,
            record_file=self._record_file,
            env=children.environment(extra),
            extra_env=extra,
            log=self._log_file,
            heard=self._heard,
        )
        child = given.starter.start(order)
        if child.pid:
            given.notes.take(self._on_node, self._holder(child.pid))
        return child

    @property
    def _on_node(self) -> tuple[str, ...]:
        return tuple(self._means.gpus[gpu] for gpu in self.gpus)

    def _holder(self, pid: int) -> occupancy.Holder:
        slot = self._means.slot
        started = processes.start_time(pid)
        return occupancy.Holder(pid, started, slot.lease_id, slot.slot_id, self.replica_id)

    def _heard(self, status: Mapping[str, Any]) -> None:
        """Take a status line of the starting replica."""
        if "phase" in status:
            self._phases[str(status["phase"])] = float(status.get("seconds", 0.0))
        if "address" in status:
            self._address = str(status["address"])
            self._incarnation = int(status.get("incarnation", 1))
            self._phases.update(status.get("phases_s", {}))
        self._means.changed(False)
        self._bell.set()

    async def _live(
        self, child: children.Child, ended: "asyncio.Task[children.Exit]"
    ) -> tuple[fleet.ReplicaState, str]:
        now = self._means.time.monotonic
        deadline = now() + self._options.start_timeout_s
        while not self._address and self._wish.up and not ended.done():
            if now() >= deadline:
                return _R.LOST, self._told(
                    f"did not start within {self._options.start_timeout_s:g} s"
                )
            await self._ring(min(1.0, deadline - now()))
        if ended.done():
            return _R.LOST, self._told(f"did not start: {ended.result()}")
        if child.pid:
            self._means.notes.take(self._on_node, self._holder(child.pid))
        if self._address:
            fault = await self._serve(ended)
            if fault is not None:
                return _R.LOST, fault
        await self._stop(child, ended)
        return (_R.ASLEEP, "parked") if self._wish.run else (_R.STOPPED, self._reason)

    async def _serve(self, ended: "asyncio.Task[children.Exit]") -> str | None:
        """Watch a listening replica until it is to stop and has drained; returns a fault, if one ends it."""
        now = self._means.time.monotonic
        remote = control.Control(
            self._means.session, self._address, private.read(self._secret_file)
        )
        self._answered = now()
        drain_since = 0.0
        while not ended.done():
            fault = await self._poll(remote)
            if fault:
                return fault
            await self._follow_role(remote)
            if not self._wish.up or self.state is _R.DRAINING:
                if self.state is not _R.DRAINING:
                    drain_since = now()
                    await self._drain(remote)
                late = self._at_once or now() - drain_since >= self._wish.drain_s
                if self._running and late:
                    await self._evict(remote)
                if self._running == 0 or late:
                    return None
            await self._ring(self._options.stats_s)
        how = ended.result()
        if self.state is _R.DRAINING or (self._may_leave and how.code == 0):
            return None
        return self._told(str(how))

    async def _follow_role(self, remote: control.Control) -> None:
        if self._role is not self._wish.role:
            wanted = self._wish.role
            try:
                await remote.role(wanted.value)
                self._role = wanted
                self._means.changed(True)
            except control.ControlError as error:
                _log.warning("replica %s: role: %s", self.replica_id, error)

    async def _drain(self, remote: control.Control) -> None:
        self._become(_R.DRAINING, "to be parked" if self._wish.run else "told to stop")
        try:
            # No GPU waits for batch: its lines go on elsewhere, from the tokens that they have.
            await remote.role(fleet.Role.INTERACTIVE.value)
            await remote.drain()
            self._running = int((await remote.state())["running"])
        except control.ControlError as error:
            _log.warning("replica %s: drain: %s", self.replica_id, error)

    async def _evict(self, remote: control.Control) -> None:
        """End what has not ended within the time to drain: its gateways go on with it elsewhere."""
        try:
            await remote.evict()
        except control.ControlError as error:
            _log.warning("replica %s: evict: %s", self.replica_id, error)

    async def _poll(self, remote: control.Control) -> str:
        """Read the replica's state; returns why it must end now, or ""."""
        now = self._means.time.monotonic()
        try:
            said = await remote.state()
        except control.ControlError as error:
            silent = now - self._answered
            if silent >= self._options.unhealthy_s:
                self._unroute(f"does not answer for {silent:.0f} s: {error}")
            return ""
        self._answered = now
        self._stats = said["stats"]
        self._work = said.get("work")
        self._running = int(said["running"])
        if said["failure"] and self._what.engine is not fleet.EngineKind.HTTP:
            return self._told(f"engine failed: {said['failure']}")
        still = self._stands_still(int(said["steps_total"]), now)
        patience = max(self._options.no_step_s, STEPS_TO_WAIT * said["stats"]["step_ms"] / 1_000)
        if still >= KILL_AFTER * patience:
            return self._told(f"engine has work and made no step for {still:.0f} s: killed")
        hangs = f"engine has work and made no step for {still:.0f} s" if still >= patience else ""
        trouble = str(said["failure"]) or hangs
        if trouble:
            self._unroute(trouble)
        elif self.state in {_R.STARTING, _R.WARM}:
            self._become(_R.SERVING, "")
        self._means.changed(False)
        return ""

    def _stands_still(self, steps: int, now: float) -> float:
        """Return seconds for which the engine has had work and made no step."""
        if steps != self._steps[0] or self._running == 0 or steps == 0:
            self._steps = (steps, now)
        return now - self._steps[1]

    def _unroute(self, reason: str) -> None:
        if self.state is _R.SERVING:
            self._become(_R.WARM, reason)

    async def _stop(self, child: children.Child, ended: "asyncio.Task[children.Exit]") -> None:
        if self.state is _R.STARTING:
            self._become(_R.DRAINING, "told to stop while it started")
        patience = min(1.0, self._options.term_s) if self._at_once else self._options.term_s
        for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 5.0)):
            if not ended.done():
                child.signal(number)
                await asyncio.wait({ended}, timeout=seconds)
        if not ended.done():
            self._reason = f"pid {child.pid} does not die: is it stuck in the driver?"

    async def _ring(self, seconds: float) -> None:
        """Wait for news, or for so long."""
        try:
            await asyncio.wait_for(self._bell.wait(), max(0.01, seconds))
        except TimeoutError:
            return
        finally:
            self._bell.clear()

    def _told(self, reason: str) -> str:
        """Return a reason with the last lines of the replica's log."""
        said = children.last_lines(self._log_file)
        return f"{reason}; log ends: {said}" if said else reason

    def _become(self, state: fleet.ReplicaState, reason: str) -> None:
        if state is not self.state or reason != self._reason:
            _log.info("replica %s: %s → %s: %s", self.replica_id, self.state, state, reason)
            self.state, self._reason = state, reason
            self._means.changed(True)

    def _clear(self) -> None:
        """Leave nothing: no process that the replica started, no secret, no note."""
        processes.kill_marked({processes.REPLICA: self.replica_id})
        for path in (self._secret_file, self._record_file):
            path.unlink(missing_ok=True)
        self._means.notes.give_back(self._on_node, self.replica_id)
        self.gpus = ()
        self._address = ""
        self._stats = self._work = None
        self._running = 0
        self._steps = (-1, 0.0)

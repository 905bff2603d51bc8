"""One replica's life in its slot: start, watch, change role, drain, stop; what is wrong is told, not mended.

A replica that ends is not started again here: a new one is the broker's decision and has a new id. One
that is parked (rung 2) and woken keeps its id and is another incarnation. Where its engine sleeps, its
process stays and gives the GPUs' memory back; else, or where that freed nothing, the process ends, all its
memory with it, and waking starts it anew (by a fork of the slot's server, which has everything imported).
"""

import asyncio
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from engines import places, private
from engines.slot import (
    children,
    control,
    dozing,
    hold,
    kept,
    loras,
    means,
    vitals,
    wanted,
)
from engines.weights import stager
from scheduler.contracts import fleet, wire
from scheduler.contracts.v1 import control_pb2 as pb

_R = fleet.ReplicaState
FINAL = frozenset({_R.STOPPED, _R.QUARANTINED, _R.LOST})
_log = logging.getLogger(__name__)


class Keeper(kept.Kept):
    """Keeps one replica, or rank 0 of one that goes over several nodes."""

    def __init__(
        self, replica_id: str, what: fleet.ReplicaSpec, wish: wanted.Wish, given: means.Means
    ) -> None:
        super().__init__(replica_id, what, wish, given)
        self._role = wish.role
        self._address = ""
        self._meet = ""
        self._phases: dict[str, float] = {}
        external = what.engine is fleet.EngineKind.HTTP
        self._vitals = vitals.Vitals(self._options, external=external)
        self._at_once = False
        self._may_leave = False
        self._loras = loras.Loras(lambda: self._disk.spec, given.stager, self._news)

    @property
    def final(self) -> bool:
        """Whether its life is over."""
        return self.state in FINAL

    @property
    def _fault(self) -> str:
        """Why this life of it must end: another rank of it has."""
        return self._wish.fault if self._wish.meet == self._meet else ""

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
            meet=self._meet,
            incarnation=self._incarnation,
            secret_file=str(self._papers.secret),
            reason=self._reason,
            phases_s=self._phases,
            staging=self._disk.staging,
            spec=wire.spec_to_pb(self._what),
        )
        self._loras.report(report)
        self._vitals.tell(report)
        return report

    async def run(self) -> None:
        """Live: from start to a final state, parked and woken in between. Cancelled, it kills its process."""
        if not self._wish.run:
            self._become(_R.STOPPED, "it was to stop before it had started")
        try:
            while not self.final:
                if self._fault:
                    self._become(_R.LOST, self._fault)
                elif self._wish.up:
                    if await self._provide():
                        await self._run_once()
                elif self._wish.run:
                    if self.state is not _R.ASLEEP:  # else it has a reason already
                        self._become(_R.ASLEEP, "parked")
                    await self._beat()
                else:
                    self._become(_R.STOPPED, "told to stop while it was parked or staged")
        finally:
            self._disk.close()

    async def _provide(self) -> bool:
        """Have the weights on this node's disk; false: not so, or not wanted now."""
        try:
            there = await self._disk.have(lambda: self._wish.up, self._beat, self._bell.set)
        except (stager.Refused, OSError) as error:
            self._become(_R.LOST, f"not started: {error}")
            return False
        self._phases = {} if self._disk.took_s is None else {"stage": self._disk.took_s}
        return there

    async def _run_once(self) -> None:
        """Live with one process: until it is parked, or for good."""
        try:
            child = self._start()
        except (children.StartError, *hold.FAULTS, OSError) as error:
            self._clear()
            self._become(_R.LOST, f"not started: {error}")
            return
        if self.state is _R.ASLEEP:
            self._become(_R.WARM, "waking")
        ended = self._watch(child)
        try:
            state, reason = await self._live(child, ended)
        except asyncio.CancelledError:
            state, reason = _R.STOPPED, "its slot was closed"
            raise
        except Exception as error:
            _log.exception("replica %s", self.replica_id)
            state, reason = _R.LOST, f"supervisor: {type(error).__name__}: {error}"
        finally:
            await self._end(child, ended)
            self._become(state, reason)

    def _start(self) -> children.Child:
        self._role = self._wish.role
        self._meet = places.meeting(self._means.host) if self._wish.nodes > 1 else ""
        child = self._begin(self._incarnation + 1, self._heard, self._meet)
        if child.pid:
            self._hold.note(child.pid)
        return child

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
        while not (self._address or ended.done() or self._fault) and self._wish.up:
            if now() >= deadline:
                return _R.LOST, self._papers.told(
                    f"did not start within {self._options.start_timeout_s:g} s"
                )
            await self._ring(min(1.0, deadline - now()))
        if self._fault:
            return _R.LOST, self._fault
        if ended.done():
            return _R.LOST, self._papers.told(f"did not start: {ended.result()}")
        if child.pid:
            self._hold.note(child.pid)
        parked = "parked"
        while self._address:
            fault = await self._serve(ended)
            if fault is not None:
                return _R.LOST, fault
            if self._at_once or not (self._vitals.sleeps and self._wish.run) or ended.done():
                break
            why = await self._doze(child, ended)
            if why:
                parked = f"parked by the end of its process: {why}"
                _log.warning("replica %s: %s", self.replica_id, parked)
                break
        if self.state is _R.ASLEEP and not self._wish.run:
            self._reason = "told to stop while it was parked"
        await self._stop(child, ended)
        return (_R.ASLEEP, parked) if self._wish.run else (_R.STOPPED, self._reason)

    async def _doze(self, child: children.Child, ended: "asyncio.Task[children.Exit]") -> str:
        """Park it with its process kept; returns "" once it is awake, or why the process has to end."""
        nap = dozing.Nap(self._remote(), ended, lambda: self._wish, self._ring, self._bell.set)
        why = await nap.sleep(self._options.sleep_timeout_s)
        if why:
            return why
        mine, address = self.gpus, self._address
        self._let_go()
        self._become(_R.ASLEEP, nap.line)
        if not await nap.until_wanted(self._options.heartbeat_s):
            return "it ended in its sleep"
        began = self._means.time.monotonic()
        if why := self._hold.again(mine, child.pid):
            return f"not woken: {why}"
        self._become(_R.WARM, "waking")
        self._role = self._wish.role
        why = await nap.wake(self._incarnation + 1, self._options.start_timeout_s)
        if why:
            return why
        self._incarnation += 1
        self._phases = {"load": round(self._means.time.monotonic() - began, 3)}
        self._address = address
        return ""

    async def _serve(self, ended: "asyncio.Task[children.Exit]") -> str | None:
        """Watch a listening replica until it is to stop and has drained; returns a fault, if one ends it."""
        now = self._means.time.monotonic
        remote = self._remote()
        self._vitals.listens(now())
        drain_since = 0.0
        while not ended.done():
            if self._fault:
                return None if self.state is _R.DRAINING else self._fault
            if not self._wish.up and self.state is not _R.DRAINING:
                drain_since = now()
                await self._drain(remote)  # before any other call: somebody waits for these GPUs
            else:
                fault = await self._poll(remote)
                if fault:
                    return fault
                await self._follow_role(remote)
                self._loras.follow(self._wish.adapters, remote)
            if self.state is _R.DRAINING:
                late = self._at_once or now() - drain_since >= self._wish.drain_s
                if self._vitals.running and late:
                    with control.lenient(
                        self.replica_id, "evict"
                    ):  # its gateways go on with it elsewhere
                        await remote.evict()
                if self._vitals.running == 0 or late:
                    return None
            await self._ring(self._options.stats_s)
        how = ended.result()
        if self.state is _R.DRAINING or (self._may_leave and how.code == 0):
            return None
        return self._papers.told(str(how))

    def _remote(self) -> control.Control:
        return control.Control(
            self._means.session, self._address, private.read(self._papers.secret)
        )

    async def _follow_role(self, remote: control.Control) -> None:
        if self._role is not self._wish.role:
            wanted = self._wish.role
            with control.lenient(self.replica_id, "role"):
                await remote.role(wanted.value)
                self._role = wanted
                self._means.changed(True)

    async def _drain(self, remote: control.Control) -> None:
        self._become(_R.DRAINING, "to be parked" if self._wish.run else "told to stop")
        with control.lenient(self.replica_id, "drain"):
            # No GPU waits for batch: its lines go on elsewhere, from the tokens that they have.
            await remote.role(fleet.Role.INTERACTIVE.value)
            self._vitals.heard(await remote.drain())

    async def _poll(self, remote: control.Control) -> str:
        """Read the replica's state; returns why it must end now, or ""."""
        now = self._means.time.monotonic()
        try:
            said = await remote.state()
        except control.ControlError as error:
            silence, dead = self._vitals.silent(now)
            if dead:
                return self._papers.told(f"{silence}: killed")
            if silence:
                self._unroute(f"{silence}: {error}")
            return ""
        self._loras.heard(said)
        fatal, trouble = self._vitals.judged(said, now)
        if fatal:
            return self._papers.told(fatal)
        if trouble:
            self._unroute(trouble)
        elif self.state in {_R.STARTING, _R.WARM}:
            self._become(_R.SERVING, "")
        self._means.changed(False)
        return ""

    def _unroute(self, reason: str) -> None:
        if self.state is _R.SERVING:
            self._become(_R.WARM, reason)

    async def _stop(self, child: children.Child, ended: "asyncio.Task[children.Exit]") -> None:
        if self.state is _R.STARTING:
            self._become(_R.DRAINING, "told to stop while it started")
        patience = min(1.0, self._options.term_s) if self._at_once else self._options.term_s
        if not await children.end(child, ended, patience):
            self._reason = f"pid {child.pid} does not die: is it stuck in the driver?"

    def _news(self) -> None:
        """There is something new of its adapters."""
        self._means.changed(True)
        self._bell.set()

    def _clear(self) -> None:
        """Leave nothing, no adapter in use either."""
        self._loras.clear()
        super()._clear()
        self._vitals.end()

    def _let_go(self) -> None:
        """Hold no GPU, and have no address where requests could go."""
        super()._let_go()
        self._address = ""
        self._meet = ""
        self._vitals.rest()

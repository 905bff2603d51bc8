"""One slot as the agent holds it: its step, what it reported last, what it should hold.

A slot gets one step in its life. If the step dies the slot is lost and the broker names a new one; only
a step that never began (Slurm away, GPUs not yet free) is tried again.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

from engines import private, processes
from engines.agent import spec
from engines.slot import spec as slot_spec
from scheduler.contracts import clock, ports, slurm
from scheduler.contracts.v1 import control_pb2 as pb

RETRY_S = (0.5, 1.0, 2.0, 5.0)
MARGIN_S = 6.0  # beyond a slot's own drain and term times, before its step is ended from outside
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Means:
    """What slots are started with.

    Attributes:
        told: the agent's spec.
        job: what Slurm says of the job.
        node: this node.
        machine: `places.machine`, by which a slot knows whether it sees the agent's process.
        address: the SlotLink server's address.
        token_file: file with its token.
        launcher: starts steps.
        time: the clock.
        changed: called when the slot's report is another one.
    """

    told: spec.AgentSpec
    job: spec.Job
    node: str
    machine: str
    address: str
    token_file: Path
    launcher: ports.StepLauncher
    time: clock.Clock
    changed: Callable[[], None]


class Slot:
    """Holds one slot; `run` is its life.

    Args:
        desired: what it should hold at first.
        means: what it is started with.
        node: on which of the lease's nodes its step goes, from 0; None: any that has the GPUs.
    """

    def __init__(self, desired: pb.SlotDesired, means: Means, node: int | None = None) -> None:
        self.slot_id = desired.slot_id
        self.desired = desired
        self._means = means
        self.places: tuple[int, ...] = () if node is None else (node,)
        self._wake = asyncio.Event()
        self._report = pb.SlotReport(
            slot_id=desired.slot_id,
            node="" if node else means.node,
            gpus=desired.gpus,
            state="starting",
        )
        self.step: ports.Step | None = None
        self._last_word = ""

    @property
    def final(self) -> bool:
        """Whether its step has ended and its GPUs are free."""
        return self._report.state in {"closed", "lost"} and self.step is None

    @property
    def report(self) -> pb.SlotReport:
        """What is to be told of it."""
        return self._report

    def part(self, slot_id: str) -> "Slot | None":
        """Return it if that is its id."""
        return self if slot_id == self.slot_id else None

    def refuse(self, reason: str) -> None:
        """Be lost, without a step."""
        self._end("lost", f"not started: {reason}")

    def want(self, desired: pb.SlotDesired) -> None:
        """Change what it should hold; a slot that was told to close stays told."""
        if not self.desired.close or desired.close:
            self.desired = desired
            self._wake.set()

    def reported(self, report: pb.SlotReport) -> None:
        """Take its supervisor's word."""
        final = report.state in {"closed", "lost"}
        self._report = report
        if final and self.step is not None:
            # Its GPUs are free once the step is gone, not when the supervisor says its last word.
            closing = pb.SlotReport()
            closing.CopyFrom(report)
            closing.state = "closing"
            self._last_word, self._report = report.state, closing
        self._means.changed()

    async def run(self) -> None:
        """Start the step, watch it, and tell how it ended."""
        try:
            self.step = await self._start()
            if self.step is None:
                self._end("closed", "closed before it had started")
                return
            code = await self._watch(self.step)
            self.step = None
            _log.info("slot %s: its step has ended with %d", self.slot_id, code)
            self._sweep()
            if self.desired.close or self._last_word == "closed":
                self._end("closed", self._report.reason)
            else:
                reason = self._report.reason or f"its step ended with exit code {code}"
                self._end("lost", reason)
        except slurm.SlurmError as error:
            self._end("lost", f"not started: {error}")
        except Exception as error:
            _log.exception("slot %s", self.slot_id)
            self._end("lost", f"agent: {type(error).__name__}: {error}")
        finally:
            if self.step is not None:
                await self._kill(self.step)
                self._sweep()

    async def _start(self) -> ports.Step | None:
        """Start the step, again and again while Slurm has no room or does not answer."""
        means = self._means
        spec_file = Path(means.told.run_dir) / f"{self.slot_id}.json"
        private.write(spec_file, json.dumps(self._slot_spec().to_json()))
        marks = {processes.LEASE: means.told.lease_id, processes.SLOT: self.slot_id}
        for attempt in itertools.count():
            if self.desired.close:
                return None
            try:
                return await means.launcher.start(
                    [*means.told.slot_argv, "--spec", str(spec_file)],
                    gpus=self.desired.gpus,
                    cpus=self.desired.cpus,
                    env=marks,
                    log=means.told.logs / f"{self.slot_id}.log",
                    node=self.places[0] if self.places else None,
                )
            except slurm.SlurmUnavailable as error:
                self._report.reason = f"step not started yet: {error}"
                means.changed()
            await self._pause(RETRY_S[min(attempt, len(RETRY_S) - 1)])
        raise AssertionError("itertools.count does not end")

    def _slot_spec(self) -> slot_spec.SlotSpec:
        means = self._means
        told = means.told
        return slot_spec.SlotSpec(
            slot_id=self.slot_id,
            lease_id=told.lease_id,
            cluster=told.cluster,
            slurm_job_id=means.job.job_id,
            agent_address=means.address,
            agent_pid=os.getpid(),
            agent_started=processes.start_time(os.getpid()),
            agent_machine=means.machine,
            token_file=str(means.token_file),
            run_dir=told.run_dir,
            log_dir=str(told.logs),
            gpus=self.desired.gpus,
            parts=told.parts,
            replica_argv=told.replica_argv,
            sink_factory=told.sink_factory,
            options=told.options,
        )

    async def _watch(self, step: ports.Step) -> int:
        """Wait for the step's end; one that was told to close and does not is ended from outside."""
        ended = asyncio.ensure_future(step.wait())
        deadline: float | None = None
        try:
            while not ended.done():
                now = self._means.time.monotonic()
                if self.desired.close and deadline is None:
                    deadline = now + self._patience()
                if deadline is not None and now >= deadline:
                    _log.warning("slot %s did not close in time: its step is ended", self.slot_id)
                    await self._end_step(step, ended)
                    break
                wake = asyncio.ensure_future(self._wake.wait())
                timeout = None if deadline is None else deadline - now
                await asyncio.wait(
                    {ended, wake}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
                )
                wake.cancel()
                self._wake.clear()
            return await ended
        finally:
            ended.cancel()

    def _patience(self) -> float:
        drains = [item.drain_s for item in self.desired.replicas]
        return max(drains, default=0.0) + self._means.told.options.term_s + MARGIN_S

    async def _end_step(self, step: ports.Step, ended: "asyncio.Future[int]") -> None:
        """TERM, then KILL."""
        with contextlib.suppress(slurm.SlurmError):
            await step.terminate()
        await asyncio.wait({ended}, timeout=2.0)
        if not ended.done():
            await self._kill(step)

    @staticmethod
    async def _kill(step: ports.Step) -> None:
        try:
            await step.kill()
        except slurm.SlurmError as error:
            _log.error("step not killed: %s", error)

    def _sweep(self) -> None:
        """End what the step's processes left behind on this node, by its mark."""
        left = processes.kill_marked({processes.SLOT: self.slot_id})
        if left:
            _log.warning("slot %s left processes behind, killed: %s", self.slot_id, left)

    def _end(self, state: str, reason: str) -> None:
        last = pb.SlotReport()
        last.CopyFrom(self._report)
        last.state, last.reason = state, reason
        for item in last.replicas:
            if item.state not in {"stopped", "lost", "quarantined"}:
                item.state = "stopped" if state == "closed" else "lost"
                item.reason = reason
                item.address = ""
        self._report = last
        self._means.changed()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), seconds)
        self._wake.clear()

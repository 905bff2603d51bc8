"""The agent itself: desired state in, steps and slots, reports out, and an end that loses nothing.

With the broker gone everything goes on as it was last told. Slurm's SIGTERM, heard here or by a slot,
any number of times, means: batch stops now, the rest drains within the grace time, rows are synced.
"""

import asyncio
import json
import logging
import os
import signal
from pathlib import Path

from engines import link, places, private
from engines.agent import ledger, ranks, server, shelf, slots, spec
from engines.replica import work as works
from scheduler.contracts import clock, fleet, ports, usage
from scheduler.contracts.v1 import control_pb2 as pb
from scheduler.contracts.v1 import control_pb2_grpc

FAREWELL_S = 1.0  # for the last report to the broker
ROOM_S = 2.0  # of the grace time, for all that is neither draining nor a replica's end
_log = logging.getLogger(__name__)


class Agent:
    """A lease's agent.

    Args:
        told: its spec.
        launcher: starts slots.
        sink: where the rows of GPU time go.
        time: the clock.
    """

    def __init__(
        self,
        told: spec.AgentSpec,
        launcher: ports.StepLauncher,
        sink: usage.UsageSink,
        time: clock.Clock,
    ) -> None:
        self._told = told
        self._launcher = launcher
        self._clock = time
        self._job = spec.Job.from_environment(os.environ)
        self._node = places.node()
        self._ledger = ledger.Ledger(told, self._job, self._node, sink, time)
        self._epoch = -1
        self._revision = -1
        self._closing = ""
        self._close = asyncio.Event()
        self._slots: dict[str, slots.Slot | ranks.Ranks] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._shelf = shelf.Shelf(told.options, self._told_of_weights)
        self._means: slots.Means | None = None
        self._waiting: pb.LeaseDesired | None = None
        token_file = private.folder(Path(told.run_dir)) / "slots.token"
        self._servicer = server.SlotLink(
            private.new_secret(token_file), self._slot_reported, self._slot_desired
        )
        self._token_file = token_file
        ends: link.Ends[pb.LeaseReport, pb.LeaseDesired] = link.Ends(
            where=self._broker,
            open_call=lambda channel: control_pb2_grpc.AgentLinkStub(channel).Connect,
            report=self.report,
            take=self.take,
        )
        pace = link.Pace(told.options.stats_s / 2, told.options.heartbeat_s)
        token = private.read(Path(told.token_file))
        self._link = link.Link(ends, token, pace, f"lease {told.lease_id}")

    def _broker(self) -> str | None:
        return broker_address(Path(self._told.broker_file))

    def report(self) -> pb.LeaseReport:
        """Return the lease's whole state."""
        return pb.LeaseReport(
            lease_id=self._told.lease_id,
            cluster=self._told.cluster,
            slurm_job_id=self._job.job_id,
            run=self._job.run,
            epoch=max(self._epoch, 0),
            revision=self._revision,
            node=self._node,
            gpus=self._told.gpus,
            started_us=self._ledger.started_us,
            at_us=self._ledger.now_us(),
            slots=[slot.report for slot in self._slots.values()],
            closing=self._closing,
            weights=self._shelf.report(),
            weights_done=self._shelf.done,
        )

    def _told_of_weights(self) -> None:
        self._link.changed()

    def take(self, desired: pb.LeaseDesired) -> None:
        """Follow a desired state, unless it is of an older leader or of another lease."""
        if desired.lease_id != self._told.lease_id:
            raise ValueError(f"desired state of lease {desired.lease_id} came here")
        if (desired.epoch, desired.revision) < (self._epoch, self._revision):
            _log.info("epoch %d revision %d is older: ignored", desired.epoch, desired.revision)
            return
        self._epoch, self._revision = desired.epoch, desired.revision
        if self._means is None:
            self._waiting = desired
        elif not self._closing:
            self._reconcile(desired, self._means)
        self._shelf.take(desired)
        if desired.close:
            self._leave("asked")
        self._changed()

    def _reconcile(self, desired: pb.LeaseDesired, means: slots.Means) -> None:
        named: set[str] = set()
        for item in desired.slots:
            named.add(item.slot_id)
            known = self._slots.get(item.slot_id)
            if known is not None:
                known.want(item)
            elif not item.close:
                slot = self._slots[item.slot_id] = self._new_slot(item, means)
                task = self._tasks[item.slot_id] = asyncio.create_task(slot.run())
                task.add_done_callback(self._slot_ended)
        for slot_id, known in list(self._slots.items()):
            if slot_id not in named:
                if known.final:
                    del self._slots[slot_id]
                else:
                    known.want(_closed(known.desired, None))

    def _new_slot(self, item: pb.SlotDesired, means: slots.Means) -> slots.Slot | ranks.Ranks:
        """Return a slot, on nodes that no other holds if it needs more than one."""
        nodes = self._told.spread(item.gpus)
        if nodes == 1:
            return slots.Slot(item, means)
        held = {place for slot in self._slots.values() if not slot.final for place in slot.places}
        every = range(self._told.nodes)
        free = [place for place in every if place not in held]
        # Where too few are free Slurm says so, and the steps wait for what still ends there.
        return ranks.Ranks(item, means, (free if len(free) >= nodes else every)[:nodes])

    def _slot_ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None:
            _log.error("slot", exc_info=task.exception())
        self._changed()

    def _part(self, slot_id: str) -> slots.Slot | None:
        parts = (slot.part(slot_id) for slot in self._slots.values())
        return next((part for part in parts if part is not None), None)

    def _slot_desired(self, slot_id: str) -> pb.SlotDesired | None:
        slot = self._part(slot_id)
        return slot.desired if slot is not None else None

    def _slot_reported(self, report: pb.SlotReport) -> None:
        slot = self._part(report.slot_id)
        if slot is None:
            return
        slot.reported(report)
        if report.state == "closing" and report.reason == "sigterm":
            self._leave("sigterm")

    def _changed(self) -> None:
        self._ledger.observe(self._held())
        self._servicer.changed()
        self._link.changed()

    def _held(self) -> dict[str, ledger.Held]:
        return {
            item.replica_id: ledger.Held(
                item.spec.model,
                item.spec.version,
                item.spec.gpus,
                fleet.ReplicaState(item.state),
                item.spec.dedicated,
                _work(item),
            )
            for slot in self._slots.values()
            for item in slot.report.replicas
        }

    def _leave(self, reason: str) -> None:
        """Begin the end, once: batch stops now, slots drain and close."""
        if self._closing:
            return
        _log.info("leaving: %s", reason)
        self._closing = reason
        options = self._told.options
        drain = None
        if reason == "sigterm":
            drain = max(0.0, options.grace_s - options.term_s - ROOM_S)
        for slot in self._slots.values():
            slot.want(_closed(slot.desired, drain))
        self._servicer.changed()
        self._link.changed(urgent=True)
        self._close.set()

    async def run(self) -> int:
        """Serve until the lease is closed; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._leave, "sigterm")
        self._told.logs.mkdir(parents=True, exist_ok=True)
        host = places.listen_host(self._told.options.host)
        listening, address = await server.listen(self._servicer, host)
        means = self._means = self._with(address)
        background = [
            asyncio.create_task(self._link.run()),
            asyncio.create_task(self._shelf.run()),
            asyncio.create_task(
                self._ledger.run(self._told.options.ledger_s, self._told.options.ledger_pulse_s)
            ),
        ]
        try:
            if self._waiting is not None and not self._closing:
                self._reconcile(self._waiting, means)
            await self._close.wait()
            await self._end_slots()
        finally:
            for task in self._tasks.values():
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks.values(), timeout=5.0)
            self._ledger.observe({})
            await self._write_down()  # before the farewell: Slurm's SIGKILL may be near
            await self._link.farewell(FAREWELL_S)
            for task in background:
                task.cancel()
            await asyncio.wait(background)
            await listening.stop(None)
            self._token_file.unlink(missing_ok=True)
            await self._write_down()
        return 0

    async def _write_down(self) -> None:
        self._ledger.cut()
        await self._ledger.sync()

    async def _end_slots(self) -> None:
        """Wait for the slots; past the grace time of a SIGTERM they are killed."""
        running = {task for task in self._tasks.values() if not task.done()}
        if not running:
            return
        grace = self._told.options.grace_s if self._closing == "sigterm" else None
        _, late = await asyncio.wait(running, timeout=grace)
        if late:
            _log.warning("%d slots did not close within the grace time", len(late))

    def _with(self, address: str) -> slots.Means:
        return slots.Means(
            told=self._told,
            job=self._job,
            node=self._node,
            machine=places.machine(),
            address=address,
            token_file=self._token_file,
            launcher=self._launcher,
            time=self._clock,
            changed=self._changed,
        )


def _work(item: pb.ReplicaReport) -> works.Work | None:
    if not item.HasField("work"):
        return None
    said = item.work
    return works.Work(said.busy_us, said.prefill_tokens, said.decode_tokens, said.steps)


def _closed(desired: pb.SlotDesired, drain_s: float | None) -> pb.SlotDesired:
    """Return a desired state that stops batch, drains the rest and closes.

    Args:
        desired: what was desired.
        drain_s: how long the replicas may drain; None leaves what the broker said.
    """
    closed = pb.SlotDesired()
    closed.CopyFrom(desired)
    closed.close = True
    for item in closed.replicas:
        item.role = fleet.Role.INTERACTIVE.value
        item.run = False
        if drain_s is not None:
            item.drain_s = drain_s
    return closed


def broker_address(path: Path) -> str | None:
    """Return the leading broker's ``host:port`` from broker.json, None if there is none now."""
    try:
        found = json.loads(path.read_text())
        return str(found["address"])
    except (OSError, ValueError, KeyError, TypeError):
        return None

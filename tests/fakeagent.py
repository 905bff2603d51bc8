"""An agent that speaks the real protocol and whose replicas are words in a dict."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from grpc import aio

from scheduler.contracts import wire
from scheduler.contracts.v1 import control_pb2 as pb
from scheduler.contracts.v1 import control_pb2_grpc
from scheduler.runtime import guard


class FakeAgent:
    """Holds a lease: does what it is told at once, and reports whenever something changes.

    Attributes:
        started: ids of replicas that it started, in order.
        broken: why every new replica fails, or "".
        slow_slots: new slots stay `starting`, without a word of their replicas.
        lingers: told to close it stays, until it is made to `disconnect`.
        told: desired states received.
    """

    def __init__(self, lease_id: str, job_id: str, node: str, gpus: int) -> None:
        self.report = pb.LeaseReport(
            lease_id=lease_id, cluster="alpha", slurm_job_id=job_id, node=node, gpus=gpus
        )
        self.started: list[str] = []
        self.broken = ""
        self.slow_slots = False
        self.lingers = False
        self.told: list[pb.LeaseDesired] = []
        self.ended = False
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def connect(self, address: str, token: str) -> None:
        """Open the link; a link that was open before is left."""
        self._task = asyncio.create_task(self._run(address, token))

    async def disconnect(self) -> None:
        """Leave the link, as a network fault or the broker's end does."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    @property
    def connected(self) -> bool:
        """Whether its link is open, as far as it knows."""
        return self._task is not None and not self._task.done()

    def replicas(self) -> dict[str, pb.ReplicaReport]:
        """Return what it runs or ran, by id."""
        return {item.replica_id: item for slot in self.report.slots for item in slot.replicas}

    def say(self) -> None:
        """Report now."""
        self._wake.set()

    def kill(self, replica_id: str, reason: str = "signal 9") -> None:
        """Let a replica die by itself."""
        item = self.replicas()[replica_id]
        item.state, item.reason = "lost", reason
        self.say()

    def load(self, replica_id: str, *, interactive: int = 0, batch: int = 0) -> None:
        """Let a replica report stats."""
        item = self.replicas()[replica_id]
        at_us = item.stats.at_us + 1
        item.stats.CopyFrom(
            pb.ReplicaStats(
                at_us=at_us, seats=item.spec.seats, interactive=interactive, batch=batch
            )
        )
        self.say()

    def catch_up(self) -> None:
        """Let slots that were starting be ready, with what they were last told to hold."""
        for slot in self.report.slots:
            if slot.state == "starting":
                slot.state = "ready"
        self._follow(self.told[-1])

    def lose_slots(self, reason: str) -> None:
        """Let every slot that is starting end."""
        for slot in self.report.slots:
            if slot.state == "starting":
                slot.state, slot.reason = "lost", reason
        self.say()

    async def _run(self, address: str, token: str) -> None:
        async with aio.insecure_channel(address, options=wire.CHANNEL_OPTIONS) as channel:
            stub = control_pb2_grpc.AgentLinkStub(channel)
            call = stub.Connect(self._reports(), metadata=guard.metadata(token))
            with contextlib.suppress(aio.AioRpcError):  # the broker has gone
                async for desired in call:
                    self._follow(desired)
                    if self.ended:
                        break
            call.cancel()

    async def _reports(self) -> AsyncIterator[pb.LeaseReport]:
        while True:
            self._wake.clear()
            self.report.at_us += 1  # counts reports
            yield self.report
            await self._wake.wait()

    def _follow(self, desired: pb.LeaseDesired) -> None:
        if (desired.epoch, desired.revision) < (self.report.epoch, self.report.revision):
            return
        self.told.append(desired)
        slots = {slot.slot_id: slot for slot in self.report.slots}
        for wanted in desired.slots:
            slot = slots.get(wanted.slot_id)
            if slot is None:
                slot = self.report.slots.add(
                    slot_id=wanted.slot_id, gpus=wanted.gpus, node=self.report.node
                )
                slot.state = "starting" if self.slow_slots else "ready"
            if wanted.close:
                slot.state = "closed"
            if slot.state == "ready":
                self._follow_slot(slot, wanted)
        self.report.epoch, self.report.revision = desired.epoch, desired.revision
        if desired.close:
            self.report.closing = "asked"
            self.ended = not self.lingers
        self.say()

    def _follow_slot(self, slot: pb.SlotReport, wanted: pb.SlotDesired) -> None:
        known = {item.replica_id: item for item in slot.replicas}
        for replica in wanted.replicas:
            item = known.get(replica.replica_id)
            if item is None:
                self.started.append(replica.replica_id)
                item = slot.replicas.add(replica_id=replica.replica_id, spec=replica.spec)
                item.state = "lost" if self.broken else "serving"
                item.reason = self.broken
                item.address, item.incarnation = f"127.0.0.1:{9000 + len(self.started)}", 1
            item.role = replica.role
            if replica.asleep and item.state == "serving":
                item.state, item.address = "asleep", ""
            elif not replica.asleep and item.state == "asleep":
                item.incarnation += 1
                item.state, item.address = "serving", f"127.0.0.1:{9100 + item.incarnation}"
            if not replica.run and item.state not in {"lost", "stopped"}:
                item.state = "stopped"
        keep = {replica.replica_id for replica in wanted.replicas}
        for item in list(slot.replicas):
            if item.replica_id not in keep and item.state in {"lost", "stopped"}:
                slot.replicas.remove(item)

"""A slot over several nodes of its lease: a part on each, one step each, one slot to the broker.

The part on the first node holds rank 0, which serves; the others hold ranks that work for it. What each part
is told follows from what was desired and from what the parts report (`split`), and what the broker is told
from the reports alone (`merged`). The end of any part is the end of all.
"""

import asyncio
import dataclasses
from collections.abc import Sequence

from engines.agent import slots
from engines.slot import keeper as keepers
from scheduler.contracts.v1 import control_pb2 as pb

_OVER = frozenset({"closed", "lost"})
_ENDED = frozenset(state.value for state in keepers.FINAL)
_IDLE = frozenset({"asleep", "stopped", "lost"})  # of a rank past the first: it has no process


def part_id(slot_id: str, rank: int) -> str:
    """Return the id of a slot's part."""
    return f"{slot_id}.{rank}" if rank else slot_id


def split(desired: pb.SlotDesired, reports: Sequence[pb.SlotReport]) -> tuple[pb.SlotDesired, ...]:
    """Return what each part should hold.

    Ranks past the first run as long as rank 0 does, from where it says that it waits for them. Where a part
    has ended, rank 0 is told why it is lost, and every part closes: the first one first.

    Args:
        desired: of the slot.
        reports: of its parts, by rank.
    """
    over = [report.state in _OVER for report in reports]
    found: list[pb.SlotDesired] = []
    for rank in range(len(reports)):
        part = pb.SlotDesired()
        part.CopyFrom(desired)
        part.slot_id = part_id(desired.slot_id, rank)
        part.gpus = desired.gpus // len(reports)
        part.cpus = -(-desired.cpus // len(reports))
        part.close = (desired.close or any(over)) and (rank == 0 or over[0])
        for item in part.replicas:
            item.nodes, item.rank = len(reports), rank
            first = _replica(reports[0], item.replica_id)
            item.meet = first.meet if first is not None else ""
            if rank == 0:
                item.fault = _fault(item.replica_id, reports)
                continue
            item.asleep = False
            if first is not None:
                item.run = first.state not in _ENDED
        found.append(part)
    return tuple(found)


def merged(
    desired: pb.SlotDesired, reports: Sequence[pb.SlotReport], before: pb.SlotReport
) -> pb.SlotReport:
    """Return what is to be told of the slot.

    Its GPUs are free once all parts have ended, and so is a replica's end, or its sleep, told only when no
    rank of it holds a GPU any more.

    Args:
        desired: of the slot.
        reports: of its parts, by rank.
        before: what was told last.
    """
    found = pb.SlotReport()
    found.CopyFrom(reports[0])
    found.slot_id, found.gpus = desired.slot_id, desired.gpus
    found.state = _state([report.state for report in reports])
    said = [
        f"{_named(rank, report)}: {report.reason}" if rank else report.reason
        for rank, report in enumerate(reports)
        if report.reason
    ]
    found.reason = "; ".join(dict.fromkeys(said))
    for item in found.replicas:
        item.ClearField("meet")
        if all(report.node for report in reports):
            item.nodes.extend(report.node for report in reports)
        others = [_replica(report, item.replica_id) for report in reports[1:]]
        item.staging = item.staging or any(other is not None and other.staging for other in others)
        fault = _fault(item.replica_id, reports)
        if item.state == "lost" and fault and fault not in item.reason:
            item.reason += f"; {fault}"
        busy = any(other is not None and other.state not in _IDLE for other in others)
        if item.state in _ENDED | {"asleep"} and busy and found.state not in _OVER:
            last = _replica(before, item.replica_id)
            starts = last is not None and last.state == "starting"
            item.state, item.address = "starting" if starts else "draining", ""
    return found


def _state(states: Sequence[str]) -> str:
    if all(state in _OVER for state in states):
        return "lost" if "lost" in states else "closed"
    if any(state == "closing" or state in _OVER for state in states):
        return "closing"
    return "ready" if all(state == "ready" for state in states) else "starting"


def _fault(replica_id: str, reports: Sequence[pb.SlotReport]) -> str:
    """Return which rank past the first has ended by itself, on which node, and why; "" if none has.

    One that ended with an earlier life of rank 0 is none: rank 0 may leave first when it is parked.
    """
    first = _replica(reports[0], replica_id)
    for rank, report in enumerate(reports[1:], start=1):
        found = _replica(report, replica_id)
        if found is not None and found.state == "lost" and _same_life(found, first):
            return f"{_named(rank, report)}: {found.reason}"
        if report.state in _OVER and reports[0].state not in _OVER:
            return f"{_named(rank, report)}: its slot has ended: {report.reason}"
    return ""


def _same_life(one: pb.ReplicaReport, first: pb.ReplicaReport | None) -> bool:
    over = first is not None and first.state in _ENDED
    return over or (first is not None and one.meet == first.meet != "")


def _named(rank: int, report: pb.SlotReport) -> str:
    return f"rank {rank} on {report.node}" if report.node else f"rank {rank}"


def _replica(report: pb.SlotReport, replica_id: str) -> pb.ReplicaReport | None:
    return next((item for item in report.replicas if item.replica_id == replica_id), None)


class Ranks:
    """Holds one slot over several nodes; what `slots.Slot` is to the agent.

    Args:
        desired: what it should hold at first.
        means: what slots are started with.
        places: the nodes of the lease that it goes over, from 0.
    """

    def __init__(self, desired: pb.SlotDesired, means: slots.Means, places: Sequence[int]) -> None:
        self.slot_id = desired.slot_id
        self.desired = desired
        self.places = tuple(places)
        self._means = means
        self._report = pb.SlotReport(slot_id=desired.slot_id, gpus=desired.gpus, state="starting")
        own = dataclasses.replace(means, changed=self._heard)
        begun = [pb.SlotReport(state="starting") for _ in places]
        parts = zip(split(desired, begun), places, strict=True)
        self._parts = tuple(slots.Slot(part, own, place) for part, place in parts)

    @property
    def final(self) -> bool:
        """Whether every step has ended and its GPUs are free."""
        return all(part.final for part in self._parts)

    @property
    def report(self) -> pb.SlotReport:
        """What is to be told of it."""
        return self._report

    def part(self, slot_id: str) -> slots.Slot | None:
        """Return the part of an id."""
        return next((part for part in self._parts if part.slot_id == slot_id), None)

    def want(self, desired: pb.SlotDesired) -> None:
        """Change what it should hold; a slot that was told to close stays told."""
        if not self.desired.close or desired.close:
            self.desired = desired
            self._follow()

    async def run(self) -> None:
        """Start a step on each node, watch them, and tell how they ended."""
        nodes = len(self._parts)
        if self.desired.gpus % nodes:
            for part in self._parts:
                part.refuse(f"{self.desired.gpus} GPUs do not spread evenly over {nodes} nodes")
        else:
            await asyncio.gather(*(part.run() for part in self._parts))
        self._heard()

    def _heard(self) -> None:
        """A part has told something else: the others follow, and the broker hears it."""
        self._follow()
        reports = [part.report for part in self._parts]
        self._report = merged(self.desired, reports, self._report)
        self._means.changed()

    def _follow(self) -> None:
        parts = split(self.desired, [part.report for part in self._parts])
        for part, wanted in zip(self._parts, parts, strict=True):
            if wanted != part.desired:
                part.want(wanted)

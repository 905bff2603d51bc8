"""A slot over several nodes: what each part is told, and what the broker is told of all. Pure."""

import dataclasses
from collections.abc import Sequence

import pytest

from engines.agent import ranks, spec
from scheduler.contracts.v1 import control_pb2 as pb


def desired(*, run: bool = True, close: bool = False) -> pb.SlotDesired:
    one = pb.ReplicaDesired(replica_id="r-1", role="shared", run=run, drain_s=5.0)
    return pb.SlotDesired(epoch=1, slot_id="l.s0", gpus=8, cpus=5, replicas=[one], close=close)


def reports(
    first: str,
    other: str,
    *,
    slots: Sequence[str] = ("ready", "ready"),
    meet: str = "h:1",
    reasons: Sequence[str] = ("", ""),
) -> list[pb.SlotReport]:
    """Return the reports of two parts; "" for a replica that a part does not know yet."""
    found = []
    for rank, (state, slot, reason) in enumerate(zip((first, other), slots, reasons, strict=True)):
        report = pb.SlotReport(slot_id=f"l.s0.{rank}", node=f"n{rank + 1}", gpus=4, state=slot)
        if state:
            known = report.replicas.add(replica_id="r-1", state=state, reason=reason)
            known.address = "h:80" if not rank else ""
            known.meet = meet if not rank or state == "lost" else ""
        found.append(report)
    return found


def told(found: pb.SlotReport) -> tuple[str, str]:
    """Return the states of the slot and of its replica."""
    return found.state, found.replicas[0].state


BEFORE = pb.SlotReport(slot_id="l.s0", state="ready")
BEFORE.replicas.add(replica_id="r-1", state="serving")


def test_each_part_has_its_share_and_its_rank() -> None:
    first, second = ranks.split(desired(), reports("", ""))
    assert [(part.slot_id, part.gpus, part.cpus) for part in (first, second)] == [
        ("l.s0", 4, 3),
        ("l.s0.1", 4, 3),
    ]
    assert [
        (one.nodes, one.rank, one.meet) for part in (first, second) for one in part.replicas
    ] == [
        (2, 0, ""),
        (2, 1, ""),
    ]
    (_, second) = ranks.split(desired(), reports("starting", "asleep"))
    assert (second.replicas[0].run, second.replicas[0].meet) == (True, "h:1")


def test_the_others_run_as_long_as_the_first_does_and_are_never_drained() -> None:
    (first, second) = ranks.split(desired(run=False), reports("draining", "warm"))
    assert (first.replicas[0].run, second.replicas[0].run) == (False, True)
    (_, second) = ranks.split(desired(run=False), reports("stopped", "warm", meet=""))
    assert not second.replicas[0].run
    (_, second) = ranks.split(desired(), reports("asleep", "warm", meet=""))
    assert (second.replicas[0].run, second.replicas[0].meet) == (True, ""), "parked, not ended"
    (_, second) = ranks.split(desired(run=False), reports("", ""))
    assert not second.replicas[0].run, "it was to stop before it had started"


def test_the_death_of_a_rank_is_the_first_ones_fault_and_names_it() -> None:
    parts = reports("serving", "lost", reasons=("", "killed by SIGKILL; log ends: x"))
    (first, _) = ranks.split(desired(), parts)
    assert first.replicas[0].fault == "rank 1 on n2: killed by SIGKILL; log ends: x"
    assert first.replicas[0].meet == "h:1", "in which life of it"
    assert not first.close, "another replica may start in this slot"


def test_a_rank_that_left_after_rank_0_is_no_fault_of_its_next_life() -> None:
    parts = reports("asleep", "lost", reasons=("parked", "exit code 1"))
    parts[0].replicas[0].meet = ""
    (first, second) = ranks.split(desired(), parts)
    assert (first.replicas[0].fault, second.replicas[0].run) == ("", True)
    parts[0].replicas[0].meet = "h:2"
    (first, second) = ranks.split(desired(), parts)
    assert (first.replicas[0].fault, second.replicas[0].meet) == ("", "h:2")


def test_the_death_of_a_part_closes_all_the_first_before_the_others() -> None:
    parts = reports("serving", "lost", slots=("ready", "lost"), reasons=("", "its step ended"))
    first, second = ranks.split(desired(), parts)
    assert (first.close, second.close) == (True, False)
    assert first.replicas[0].fault == "rank 1 on n2: its step ended"
    parts = reports("lost", "warm", slots=("lost", "ready"))
    first, second = ranks.split(desired(), parts)
    assert (first.close, second.close, second.replicas[0].run) == (True, True, False)
    unknown = reports("serving", "", slots=("ready", "closed"))
    (first, _) = ranks.split(desired(), unknown)
    assert first.replicas[0].fault.startswith("rank 1 on n2: its slot has ended")


def test_a_slot_that_closes_drains_its_first_part_before_the_others_go() -> None:
    first, second = ranks.split(desired(close=True), reports("draining", "warm"))
    assert (first.close, second.close) == (True, False)
    over = reports("stopped", "stopped", slots=("closed", "ready"))
    (_, second) = ranks.split(desired(close=True), over)
    assert second.close


def test_the_broker_sees_one_slot_and_one_replica_with_its_nodes() -> None:
    found = ranks.merged(desired(), reports("serving", "warm"), BEFORE)
    assert told(found) == ("ready", "serving")
    assert (found.slot_id, found.gpus, found.node) == ("l.s0", 8, "n1")
    (one,) = found.replicas
    assert (list(one.nodes), one.address, one.meet) == (["n1", "n2"], "h:80", "")
    early = ranks.merged(desired(), reports("", "", slots=("ready", "starting")), BEFORE)
    assert early.state == "starting"


@pytest.mark.parametrize("end", ["stopped", "lost", "asleep"])
def test_an_end_is_told_once_no_rank_holds_a_gpu(end: str) -> None:
    found = ranks.merged(desired(), reports(end, "warm"), BEFORE)
    assert (found.replicas[0].state, found.replicas[0].address) == ("draining", "")
    for idle in ("asleep", "stopped", "lost"):
        found = ranks.merged(desired(), reports(end, idle), BEFORE)
        assert found.replicas[0].state == end
    begun = pb.SlotReport()
    begun.CopyFrom(BEFORE)
    begun.replicas[0].state = "starting"
    found = ranks.merged(desired(), reports(end, "warm"), begun)
    assert found.replicas[0].state == "starting", "it has never served"


def test_a_lost_replica_tells_of_the_rank_that_ended_with_it() -> None:
    parts = reports("lost", "lost", reasons=("engine failed", "exit code 1"))
    found = ranks.merged(desired(), parts, BEFORE)
    assert found.replicas[0].reason == "engine failed; rank 1 on n2: exit code 1"
    parts = reports("lost", "lost", reasons=("rank 1 on n2: exit code 1", "exit code 1"))
    found = ranks.merged(desired(), parts, BEFORE)
    assert found.replicas[0].reason == "rank 1 on n2: exit code 1", "once is enough"


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        (("ready", "ready"), "ready"),
        (("ready", "starting"), "starting"),
        (("closing", "ready"), "closing"),
        (("lost", "ready"), "closing"),
        (("closed", "closing"), "closing"),
        (("closed", "closed"), "closed"),
        (("closed", "lost"), "lost"),
    ],
)
def test_its_gpus_are_free_once_every_part_has_ended(parts: tuple[str, str], whole: str) -> None:
    assert (
        ranks.merged(desired(), reports("stopped", "stopped", slots=parts), BEFORE).state == whole
    )


def test_a_slot_goes_over_as_many_nodes_as_it_needs() -> None:
    told = spec.AgentSpec("c", "l", "serve", "t", 16, "", "", "", (), (), "", nodes=2)
    assert [told.spread(gpus) for gpus in (0, 1, 8, 9, 16)] == [1, 1, 1, 2, 2]
    assert dataclasses.replace(told, nodes=1).spread(16) == 1
    assert spec.AgentSpec.from_json(told.to_json()) == told
    older = {key: value for key, value in told.to_json().items() if key != "nodes"}
    assert spec.AgentSpec.from_json(older).nodes == 1

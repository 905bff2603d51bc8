"""Whose work the lines of batch jobs are."""

import dataclasses
import math
import types
from typing import Any

from scheduler.contracts import clock, fleet, ports
from scheduler.core import autoscale, lending, members, rollouts, snapshot, targets
from scheduler.runtime import entries, live, settings, snapshots


def test_lines_that_name_an_adapter_are_their_models_work() -> None:
    """A model whose own name holds a colon is one all the same."""
    route = fleet.Route("chat", {"1": 100})
    picture: Any = types.SimpleNamespace(
        routes={"chat": route, "org:chat": route},
        replicas={},
        batch_work={
            "chat": ports.BatchWork(10, 4_000),
            "chat:poet": ports.BatchWork(5, 2_000, deadline_us=9_000_000),
            "org:chat": ports.BatchWork(1, 1_000),
            "org:chat:poet": ports.BatchWork(2, 1_000),
            "gone": ports.BatchWork(3, 3_000),
        },
    )
    assert snapshots._backlogs(picture, 1_000_000) == {
        "chat": lending.Backlog(6.0, 8.0, 15),
        "org:chat": lending.Backlog(2.0, math.inf, 3),
        "gone": lending.Backlog(3.0, math.inf, 3),
    }


def test_a_version_that_a_rollout_keeps_ready_is_lent_nothing() -> None:
    """For as long as the old version was kept, GPUs were lent to it, and no line of a batch could come."""
    picture = live.Live(1, "alpha", entries.Pauses(1, 60), 0.0)
    spec = fleet.ReplicaSpec("chat", "v1", fleet.EngineKind.SIMULATED)
    old = snapshot.Deployment(spec, 0, scaling=autoscale.Scaling(floor=1))
    new = dataclasses.replace(old, spec=dataclasses.replace(spec, version="v2"))
    picture.deployments = (old, new)
    rollout = rollouts.Rollout("chat", "v2", {"v1": 100}, (5, 100), 60, "ada")
    options = settings.Settings(fleet_gpus=40)

    def lent(percent: int) -> tuple[int, int]:
        picture.routes = {"chat": fleet.Route("chat", {"v1": 100 - percent, "v2": percent})}
        snap = snapshots.collect(picture, clock.FakeClock(), options)
        snap = dataclasses.replace(snap, backlogs={"chat": lending.Backlog(1e6)})
        assert all(each.scaling and each.scaling.share == 1.0 for each in snap.deployments)
        found = targets.decide(snap, options, members.counted(snap)).of
        assert [found["chat", name].need for name in ("v1", "v2")] == [1, 1]
        return found["chat", "v1"].lent, found["chat", "v2"].lent

    picture.rollouts = (rollout,)
    assert lent(0) == (38, 0), "nothing of it comes to what only warms"
    assert lent(100) == (0, 38), "nor to what is only kept"
    few, most = lent(95)
    assert 0 < few < most

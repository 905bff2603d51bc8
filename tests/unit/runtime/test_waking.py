"""What gateways are told of models at zero: which versions a request that waits brings back."""

import dataclasses

from scheduler.contracts import clock, fleet
from scheduler.core import autoscale, snapshot
from scheduler.runtime import entries, live, settings, snapshots


def test_only_versions_that_may_start_wake(fake_clock: clock.FakeClock) -> None:
    """One that may start spoke for all: a request pinned to one in quarantine waited in vain."""
    one = snapshot.Deployment(
        fleet.ReplicaSpec("chat", "v1", fleet.EngineKind.SIMULATED, "/w"),
        0,
        scaling=autoscale.Scaling(),
    )
    resting = fake_clock.wall_us() + 60_000_000
    picture = live.Live(1, "alpha", entries.Pauses(1, 60), fake_clock.monotonic())
    picture.deployments = (
        one,
        dataclasses.replace(
            one, spec=dataclasses.replace(one.spec, version="v2"), quarantined_until_us=resting
        ),
        dataclasses.replace(one, spec=dataclasses.replace(one.spec, version="v3")),
    )
    picture.routes = {"chat": fleet.Route("chat", {"v1": 50, "v2": 50, "v3": 0})}
    view = snapshots.view(picture, fake_clock, settings.Settings())
    assert view.routes["chat"].wakes == ("v1",)

"""A model at zero: gateways hear that waiting brings it back, one waiting request does, and calm ends it."""

import dataclasses
from pathlib import Path

from scheduler.contracts import observed, requests
from scheduler.runtime import settings, snapshots
from tests import brokersite

ZERO = dataclasses.replace(
    brokersite.CHAT, runner=requests.Runner.EMBED, scaling={"maximum": 1, "idle_to_zero_s": 10.0}
)
QUICK = settings.Settings(scale_down_s=5.0, idle_lease_s=2.0, lease_backoff_s=0.0)


def waiting(count: int) -> dict[str, observed.Demand]:
    tier = requests.Tier.INTERACTIVE.value
    return {"chat": observed.Demand("chat", {tier: count}, {tier: 0}, 1.0 if count else 0.0, (), 1)}


async def test_one_waiting_request_brings_it_back_and_the_next_hear_how_long_it_took(
    tmp_path: Path,
) -> None:
    site = brokersite.Site(tmp_path, ZERO, options=QUICK)
    async with site.lead() as leader:
        for _ in range(5):
            await site.step(leader)
        assert site.running() == {}
        (route,) = snapshots.view(leader.live, site.clock, QUICK).routes.values()
        assert (route.runner, route.wakes, route.start_s) == ("embed", ("v1",), 0)
        for _ in range(20):
            leader.live.absorb_demand("g1", waiting(1), site.clock.monotonic())
            await site.step(leader, 1.0)
        assert list(site.running().values()) == ["serving"]
        for _ in range(3):  # the one of this test took no time at all: the median counts
            leader.live.starts.note(("chat", "v1"), {"load": 41.2}, woken=False)
        (route,) = snapshots.view(leader.live, site.clock, QUICK).routes.values()
        assert route.start_s == 42
        for _ in range(60):
            leader.live.absorb_demand("g1", waiting(0), site.clock.monotonic())
            await site.step(leader, 1.0)
        assert site.running() == {}
        assert not leader.live.leases


async def test_gateways_hear_when_a_model_at_zero_may_be_started_again(tmp_path: Path) -> None:
    """Nothing else changes when a quarantine ends: they went on to refuse each request, and none waited."""
    site = brokersite.Site(tmp_path, ZERO, options=QUICK)
    async with site.lead() as leader:
        await site.step(leader)
        until_us = site.clock.wall_us() + 60_000_000
        site.registry.catalog.quarantine(leader.live.epoch, "chat", "v1", until_us, "it failed")
        for _ in range(10):
            await site.step(leader, 1.0)
        (route,) = snapshots.view(leader.live, site.clock, QUICK).routes.values()
        assert not route.wakes
        told = leader.live.revision
        for _ in range(60):
            await site.step(leader, 1.0)
        (route,) = snapshots.view(leader.live, site.clock, QUICK).routes.values()
        assert route.wakes
        assert leader.live.revision > told


async def test_an_admins_zero_wakes_for_nobody(tmp_path: Path) -> None:
    site = brokersite.Site(tmp_path, ZERO, options=QUICK)
    async with site.lead() as leader:
        site.registry.catalog.scale("chat", 0)
        for _ in range(5):
            await site.step(leader, 1.0)
        (route,) = snapshots.view(leader.live, site.clock, QUICK).routes.values()
        assert not route.wakes

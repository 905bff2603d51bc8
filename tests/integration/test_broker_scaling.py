"""The autoscaler at the broker: bounds from the configuration, demand from gateways, an admin's number."""

import dataclasses
import datetime
from pathlib import Path

from scheduler.contracts import fleet, observed, ports, requests
from scheduler.runtime import schedules, settings
from scheduler.runtime.registry import cordons
from tests import brokersite

ELASTIC = dataclasses.replace(brokersite.CHAT, scaling={"floor": 1, "maximum": 3})
QUICK = settings.Settings(scale_down_s=10.0, idle_lease_s=5.0, lease_backoff_s=0.0)


def demand(
    waiting: int, in_flight: int, arrived: int, tier: str = requests.Tier.INTERACTIVE.value
) -> dict[str, observed.Demand]:
    return {
        "chat": observed.Demand(
            "chat", {tier: waiting}, {tier: in_flight}, 2.0 if waiting else 0.0, (), arrived
        )
    }


async def test_a_spike_grows_to_the_maximum_and_calm_goes_back_to_the_floor(tmp_path: Path) -> None:
    site = brokersite.Site(tmp_path, ELASTIC, options=QUICK)
    async with site.lead() as leader:
        await site.settle(leader)
        assert len(site.running()) == 1
        for tick in range(40):
            now = site.clock.monotonic()
            leader.live.absorb_demand("g1", demand(40, 4, 100 * tick), now)
            await site.step(leader)
        assert sorted(site.running().values()) == ["serving"] * 3
        assert len(site.slurm.submitted) == 3
        for _ in range(200):
            now = site.clock.monotonic()
            leader.live.absorb_demand("g1", demand(0, 0, 4_000), now)
            await site.step(leader, 1.0)
        assert len(site.running()) == 1
        assert len(leader.live.leases) == 1


async def test_tier_standard_grows_to_its_own_maximum_and_interactive_beyond(
    tmp_path: Path,
) -> None:
    bounds = {"standard_floor": 1, "standard_maximum": 2, "maximum": 3}
    chat = dataclasses.replace(brokersite.CHAT, scaling=bounds)
    site = brokersite.Site(tmp_path, chat, options=QUICK)
    async with site.lead() as leader:
        await site.settle(leader)
        assert len(site.running()) == 1
        for tier, grown in ((requests.Tier.STANDARD, 2), (requests.Tier.INTERACTIVE, 3)):
            for tick in range(40):
                asked = demand(0, 44, 100 * tick, tier.value)
                leader.live.absorb_demand("g1", asked, site.clock.monotonic())
                await site.step(leader)
            assert sorted(site.running().values()) == ["serving"] * grown
        for _ in range(200):
            leader.live.absorb_demand("g1", demand(0, 0, 4_000), site.clock.monotonic())
            await site.step(leader, 1.0)
        assert len(site.running()) == 1


async def test_an_admins_number_goes_before_the_bounds_until_auto(tmp_path: Path) -> None:
    site = brokersite.Site(tmp_path, ELASTIC, options=QUICK)
    async with site.lead() as leader:
        await site.settle(leader)
        site.registry.catalog.scale("chat", 2)
        for _ in range(12):
            await site.step(leader, 1.0)
        assert len(site.running()) == 2
        assert leader.live.deployments[0].scaling is None
        site.registry.catalog.scale("chat", None)
        for _ in range(60):
            await site.step(leader, 1.0)
        assert leader.live.deployments[0].scaling is not None
        assert len(site.running()) == 1


async def test_a_schedule_keeps_its_floor_warm_from_before_it_begins(tmp_path: Path) -> None:
    """14 November 2023 22:13 UTC on the fake clock; the floor begins at 23:00, and starts take 2 minutes."""
    site = brokersite.Site(tmp_path, ELASTIC, options=QUICK)
    async with site.lead() as leader:
        await site.settle(leader)
        night = schedules.Schedule("night", "chat", 2, "0 23 * * *", "23:30")
        site.registry.timetable.add(night, "root", "", 1)
        leader.live.starts.note(("chat", "v1"), {"load": 120.0}, woken=False)
        found: list[int] = []
        for _ in range(16):
            await site.step(leader, 60.0)
            await site.step(leader)
            found.append(len(site.running()))
        assert found[0] == 1  # 45 minutes before
        for _ in range(30):
            await site.step(leader, 60.0)
            await site.step(leader)
            found.append(len(site.running()))
        assert found[-1] == 2  # before it begins
        assert found.index(2) >= 38


async def test_what_callers_do_not_need_is_lent_to_batch_and_taken_back(tmp_path: Path) -> None:
    """Batch gets a backfill lease of its own; without work it is given back."""
    site = brokersite.Site(
        tmp_path,
        ELASTIC,
        options=dataclasses.replace(QUICK, fleet_gpus=8, lend_every_s=0.0, min_run_s=0.0),
    )
    work = {"chat": ports.BatchWork(10_000, 2_560_000)}
    site.parts = dataclasses.replace(site.parts, batch_work=lambda: work)
    async with site.lead() as leader:
        for _ in range(20):
            await site.step(leader, 1.0)
        kinds = sorted(entry.lease.kind for entry in leader.live.leases.values())
        assert kinds == ["backfill", "serve"], leader.notes
        roles = sorted(known.wanted_role for known in leader.live.replicas.values())
        assert roles == ["batch", "shared"]
        work.clear()
        for _ in range(30):
            await site.step(leader, 1.0)
        assert [entry.lease.kind for entry in leader.live.leases.values()] == ["serve"]


async def test_a_spike_takes_the_backfill_lease_back_and_asks_at_the_same_time(
    tmp_path: Path,
) -> None:
    """Rung 3, within two ticks: the lease is closed and the new one asked for in one plan.

    Without rung 1, which would turn the role of the replica in it.
    """
    site = brokersite.Site(
        tmp_path,
        ELASTIC,
        options=dataclasses.replace(
            QUICK, fleet_gpus=8, lend_every_s=0.0, min_run_s=0.0, rungs=(0, 3)
        ),
    )
    work = {"chat": ports.BatchWork(10_000, 2_560_000)}
    site.parts = dataclasses.replace(site.parts, batch_work=lambda: work)
    async with site.lead() as leader:
        for _ in range(20):
            await site.step(leader, 1.0)
        done: list[tuple[int, str, str]] = []
        for tick in range(10):
            now = site.clock.monotonic()
            leader.live.absorb_demand("g1", demand(40, 4, 100 * tick), now)
            made = await site.step(leader)
            done += [(tick, type(each).__name__, each.reason) for each in made.actions]
        closed = [tick for tick, name, why in done if name == "CloseLease" and "rung 3" in why]
        asked = [tick for tick, name, _ in done if name == "RequestLease"]
        assert closed == asked == [closed[0]]
        assert closed[0] <= 2
        running = [
            entry.lease.kind
            for entry in leader.live.leases.values()
            if entry.lease.state is fleet.LeaseState.RUNNING
        ]
        assert running == ["serve", "serve"]


async def test_a_lease_knows_the_walltime_that_slurm_gave_it(tmp_path: Path) -> None:
    """A partition's limit or --time-min shortens it, and its successor comes by what is left."""
    site = brokersite.Site(tmp_path, brokersite.CHAT, options=QUICK)
    async with site.lead() as leader:
        await site.step(leader)
        (lease_id,) = leader.live.leases
        job = site.slurm.job_of(lease_id)
        site.slurm.update(job.job_id, time_limit_s=7_200)
        await site.settle(leader)
        (entry,) = leader.live.leases.values()
        assert entry.lease.walltime_s == 7_200


class TwoWeeks:
    """A ledger of two weeks: 100 requests/s from 8 to 18 UTC on working days, 1/s else; each stays 0.1 s."""

    def quarters(self, first_us: int, last_us: int) -> dict[str, dict[int, ports.Arrived]]:
        found: dict[int, ports.Arrived] = {}
        for at_us in range(first_us, last_us, 900_000_000):
            at = datetime.datetime.fromtimestamp(at_us / 1e6, datetime.UTC)
            rate = 100 if at.weekday() < 5 and 8 <= at.hour < 18 else 1
            found[at_us] = ports.Arrived(rate * 900, 0.1)
        return {"chat": found}


async def test_capacity_is_warm_when_the_morning_comes(tmp_path: Path) -> None:
    """Nobody asks for anything all night; by eight three replicas serve, and not long before.

    Ten sequences at once, four seats a replica, planned to be full to six tenths: five would be asked for,
    the maximum is three. Starts take ten minutes.
    """
    site = brokersite.Site(tmp_path, ELASTIC, options=QUICK)
    site.parts = dataclasses.replace(site.parts, ledger=TwoWeeks())
    async with site.lead() as leader:
        await leader.look_back()
        await site.settle(leader)
        leader.live.starts.note(("chat", "v1"), {"load": 600.0}, woken=False)
        found: dict[str, int] = {}
        for _ in range(60):
            await site.step(leader, 600.0)
            for _ in range(4):
                await site.step(leader)
            at = datetime.datetime.fromtimestamp(site.clock.wall_us() / 1e6, datetime.UTC)
            found[at.strftime("%H:%M")] = len(site.running())
            if at.hour == 8:
                break
        nights = [count for at, count in found.items() if at < "07:00"]
        assert set(nights) == {1}
        assert found[max(at for at in found if at < "08:00")] == 3
        (target,) = leader.wanted.values()
        assert "maximum 3" in target.reason
        fact = site.registry.journal.fact("forecast")
        assert fact is not None
        (chat,) = fact.body["models"]
        assert (chat["model"], chat["days"] >= 14, chat["held_s"]) == ("chat", True, 0.1)


async def test_a_ledger_that_can_not_be_read_is_tried_again_soon_and_else_only_when_due(
    tmp_path: Path,
) -> None:
    class Held(TwoWeeks):
        asked = 0

        def quarters(self, first_us: int, last_us: int) -> dict[str, dict[int, ports.Arrived]]:
            self.asked += 1
            if self.asked == 1:
                raise OSError("accounting.duckdb: another process holds it open")
            return super().quarters(first_us, last_us)

    ledger = Held()
    site = brokersite.Site(tmp_path, ELASTIC, options=QUICK)
    site.parts = dataclasses.replace(site.parts, ledger=ledger)
    async with site.lead() as leader:
        await leader.look_back()
        assert "another process" in leader.live.learned.error
        for _ in range(3):
            await site.clock.advance(30.0)
            await leader.look_back()
        assert ledger.asked == 2
        assert leader.live.learned.curves
        await site.clock.advance(QUICK.forecast_every_s)
        await leader.look_back()
        assert ledger.asked == 3


async def test_without_a_ledger_nothing_is_foreseen_and_the_floor_holds(tmp_path: Path) -> None:
    site = brokersite.Site(tmp_path, ELASTIC, options=QUICK)
    async with site.lead() as leader:
        await leader.look_back()
        await site.settle(leader)
        assert leader.live.learned.curves == {}
        assert len(site.running()) == 1


async def test_a_new_leader_knows_what_a_waiting_lease_was_asked_with(tmp_path: Path) -> None:
    """Else it would take one that is kept off a node for one that may start anywhere, and not ask again."""
    site = brokersite.Site(tmp_path, options=dataclasses.replace(QUICK, lease_time_min_s=600))
    site.registry.cordons.add(cordons.Cordon("n1", "broken", "ada", site.clock.wall_us()))
    async with site.lead() as leader:
        await site.clock.advance(0.2)
        await leader.poller.poll()
        await leader.tick()
        await leader.applier.settle()
        await leader.applier.flush()
        (before,) = (entry.lease for entry in leader.live.leases.values())
    async with site.lead() as leader:
        (after,) = (entry.lease for entry in leader.live.leases.values())
    assert after.state is fleet.LeaseState.PENDING
    assert after == before
    assert (after.exclude, after.time_min_s) == (("n1",), 600)


async def test_a_start_that_takes_far_longer_than_those_before_gets_company(tmp_path: Path) -> None:
    """A missed budget escalates: budgets are learned from earlier starts, time in Slurm's queue left out."""
    site = brokersite.Site(tmp_path, ELASTIC, options=QUICK)
    site.slow_slots = True
    async with site.lead() as leader:
        for _ in range(5):
            leader.live.starts.note(("chat", "v1"), {"queue": 900.0, "load": 20.0}, woken=False)
        while not leader.live.replicas:
            await site.step(leader)
        (first,) = leader.live.replicas
        (agent,) = site.agents.values()
        for _ in range(39):  # twice what nine of ten took is 40 s
            await site.step(leader, 1.0)
        assert list(leader.live.replicas) == [first]
        assert len(site.slurm.submitted) == 1
        site.slow_slots = False
        for _ in range(3):
            await site.step(leader, 1.0)
        (second,) = site.running()
        assert second != first
        told = [
            action for entry in site.registry.journal.plans(20) for action in entry.body["actions"]
        ]
        assert any("missed their budget of 40 s" in action["what"] for action in told)
        # The one that is ready first stays; the late one would be one too many, whenever it came.
        await site.settle(leader)
        assert not leader.live.replicas[first].run
        agent.catch_up()
        await site.settle(leader)
        assert list(leader.live.replicas) == [second]

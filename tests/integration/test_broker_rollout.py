"""Rollouts by a whole broker: fake Slurm, fake agents, fake time, real registry and links."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from scheduler.contracts import clock, errors, observed
from scheduler.core import rollouts
from scheduler.runtime import broker, client
from scheduler.runtime.models import rolls, service
from tests import brokersite

V2 = {"engine": "simulated", "seats": 4, "gpus": 4}
WISH = service.Wish("ada")
TERMS = rolls.Terms((5, 100), hold_s=1.0, least=10, keep_s=5.0)


@pytest.fixture
def site(tmp_path: Path) -> brokersite.Site:
    return brokersite.Site(tmp_path)


def declared(site: brokersite.Site) -> service.Site:
    return service.Site(site.registry, site.clock)


def trials(version: str, count: int, **changes: object) -> list[observed.Trial]:
    found = observed.Trial("chat", version, False, 50.0, 5.0)
    return [dataclasses.replace(found, **changes)] * count  # type: ignore[arg-type]


def weights(leader: broker.Leader) -> dict[str, int]:
    return {name: share for name, share in leader.view().routes["chat"].weights.items() if share}


async def stepping(site: brokersite.Site, leader: broker.Leader) -> None:
    """Begin a rollout of v2 and step until its replica is warm and has 5 percent."""
    service.add(declared(site), ("version", "chat", "v2"), V2, WISH)
    await site.settle(leader)
    assert list(site.running().values()) == ["serving"]  # nothing of v2 before it is rolled out
    rolls.begin(declared(site), "chat", "v2", TERMS, WISH)
    seen = []
    for _ in range(20):
        await site.step(leader)
        up = sorted(item.spec.version for item in leader.view().replicas if item.state == "serving")
        seen.append((up, weights(leader)))
        if weights(leader) != {"v1": 100}:
            break
    assert seen[-1] == (["v1", "v2"], {"v1": 95, "v2": 5})
    assert all(shares == {"v1": 100} for up, shares in seen[:-1] if "v2" not in up)


async def test_a_good_version_takes_over_and_the_old_one_stays_until_it_has_held(
    site: brokersite.Site,
) -> None:
    async with site.lead() as leader:
        await site.settle(leader)
        await stepping(site, leader)
        for _ in range(10):
            leader.live.trials.extend(trials("v1", 10) + trials("v2", 5))
            await site.step(leader)
        assert weights(leader) == {"v2": 100}
        kept = {item.spec.version for item in leader.view().replicas if item.state == "serving"}
        assert kept == {"v1", "v2"}
        assert leader.live.rollouts[0].state is rollouts.State.KEEPING
        for _ in range(40):
            await site.step(leader)
        found = site.registry.rollouts.get("chat")
        assert found is not None
        assert (found.outcome, weights(leader)) == ("done", {"v2": 100})
        left = {item.spec.version for item in leader.view().replicas if item.state == "serving"}
        assert left == {"v2"}
        told = [one.author for one in site.registry.declared.history(3)]
        assert told == ["rollout (ada)", "rollout (ada)", "ada"]


@pytest.mark.parametrize(
    ("bad", "said"),
    [({"failed": True, "ttft_ms": 0.0, "itl_ms": 0.0}, "error rate"), ({"ttft_ms": 500.0}, "TTFT")],
)
async def test_a_bad_version_goes_back_by_itself(
    site: brokersite.Site, bad: dict[str, object], said: str
) -> None:
    async with site.lead() as leader:
        await site.settle(leader)
        await stepping(site, leader)
        leader.live.trials.extend(trials("v1", 60) + trials("v2", 40, **bad))
        await site.step(leader)
        await site.step(leader)
        assert weights(leader) == {"v1": 100}
        found = site.registry.rollouts.get("chat")
        assert found is not None
        assert (found.outcome, found.reason.partition(" is worse")[0]) == ("rolled back", said)


async def test_a_rollback_is_seen_by_gateways_at_once_and_nothing_of_v1_was_stopped(
    site: brokersite.Site, ends: contextlib.AsyncExitStack
) -> None:
    async with site.lead() as leader:
        await site.settle(leader)
        await stepping(site, leader)
        source = client.FleetClient(site.folder, "g1", clock.SystemClock())
        ends.push_async_callback(source.close)
        source.start()
        async with asyncio.timeout(10):
            while source.view() is None:
                await source.changed(-1)
        rolls.back(declared(site), "chat", WISH)
        await site.step(leader)
        async with asyncio.timeout(10):
            while (view := source.view()) is None or view.routes["chat"].weights.get("v2"):
                await source.changed(-1 if view is None else view.revision)
        await source.close()
        assert "serving" in site.running().values()


async def test_trials_come_from_gateways_over_the_link(
    site: brokersite.Site, ends: contextlib.AsyncExitStack
) -> None:
    async with site.lead() as leader:
        await site.settle(leader)
        source = client.FleetClient(site.folder, "g1", clock.SystemClock())
        ends.push_async_callback(source.close)
        source.tell(trials("v1", 3))
        source.start()
        async with asyncio.timeout(10):
            rung = leader.live.heard.current()
            while len(leader.live.trials) < 3:
                await rung.wait()
                rung = leader.live.heard.current()
        await source.close()
        assert list(leader.live.trials) == trials("v1", 3)


async def test_what_copies_found_comes_over_the_link_and_is_left_for_all(
    site: brokersite.Site, ends: contextlib.AsyncExitStack
) -> None:
    async with site.lead() as leader:
        await site.settle(leader)
        here = declared(site)
        service.add(here, ("version", "chat", "v2"), V2, WISH)
        shadow = {"shadow": {"version": "v2", "percent": 5}}
        service.update(here, ("route", "chat", ""), shadow, WISH)
        for _ in range(20):
            await site.step(leader)
        assert sorted(item.spec.version for item in leader.view().replicas) == ["v1", "v2"]
        assert leader.view().routes["chat"].shadow == "v2"
        good = observed.Fared(False, 50.0, 5.0, 100.0, 11)
        source = client.FleetClient(site.folder, "g1", clock.SystemClock())
        ends.push_async_callback(source.close)
        source.compared(
            [observed.Copied("chat", "v1", "v2", good, good, observed.Match.SAME)],
            [observed.CopiesDropped("chat", "v2", "busy", 2)] * 2,
        )
        source.start()
        async with asyncio.timeout(30):
            rung = leader.live.heard.current()
            while not leader.live.shadows.told(leader.live.routes)[0]["copies"]:
                await rung.wait()
                rung = leader.live.heard.current()
        await source.close()
        for _ in range(15):
            await site.step(leader)
        fact = site.registry.journal.fact("shadows")
        assert fact is not None
        (told,) = fact.body["shadows"]
        assert (told["version"], told["copies"], told["same"]) == ("v2", 1, 1)
        assert told["dropped"] == {"busy": 4}


async def test_a_new_leader_goes_on_with_a_rollout(site: brokersite.Site) -> None:
    async with site.lead() as leader:
        await site.settle(leader)
        await stepping(site, leader)
    async with site.lead() as leader:
        for _ in range(40):
            leader.live.trials.extend(trials("v1", 10) + trials("v2", 5))
            await site.step(leader)
        assert weights(leader) == {"v2": 100}


async def test_what_is_refused(site: brokersite.Site) -> None:
    async with site.lead() as leader:
        await site.settle(leader)
        here = declared(site)
        service.add(here, ("version", "chat", "v2"), V2, WISH)
        service.add(here, ("version", "chat", "v3"), {**V2, "replicas": 0}, WISH)
        cases = [
            ("nope", "v2", (5,), "model nope: not declared; known are: chat"),
            ("chat", "v9", (5,), "version chat v9: not declared; known are: v1, v2, v3"),
            ("chat", "v3", (5,), "v3 has no replicas and may have none"),
            ("chat", "v1", (5,), "v1 answers all requests already"),
            ("chat", "v2", (5, 5), "must be percents that rise, from 1 to 100"),
            ("chat", "v2", (50, 101), "must be percents that rise, from 1 to 100"),
            ("chat", "v2", (), "steps none"),
        ]
        for model, version, steps, said in cases:
            with pytest.raises(errors.ForebayError, match=said):
                rolls.begin(here, model, version, rolls.Terms(steps), WISH)
        with pytest.raises(errors.NotFound, match="no rollout is under way"):
            rolls.back(here, "chat", WISH)
        rolls.begin(here, "chat", "v2", TERMS, WISH)
        service.update(here, ("version", "chat", "v3"), {"replicas": 1}, WISH)
        with pytest.raises(errors.BadRequest, match="a rollout of v2 is under way"):
            rolls.begin(here, "chat", "v3", TERMS, WISH)
        changes: tuple[Callable[[], object], ...] = (
            lambda: service.update(here, ("route", "chat", ""), {"versions": {"v3": 100}}, WISH),
            lambda: service.update(here, ("version", "chat", "v2"), {"seats": 5}, WISH),
            lambda: service.remove(here, ("model", "chat", ""), WISH),
        )
        for change in changes:
            with pytest.raises(errors.BadRequest, match="its rollout of v2 moves that now"):
                change()
        with contextlib.suppress(errors.NotFound):
            rolls.back(here, "chat", WISH)
        found = site.registry.rollouts.get("chat")
        assert found is not None
        assert found.outcome == "rolled back"

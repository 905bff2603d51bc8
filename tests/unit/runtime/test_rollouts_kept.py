"""Rollouts in the registry, when what is declared changes under them."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.contracts import clock, errors, fleet
from scheduler.core import rollouts
from scheduler.runtime import config
from scheduler.runtime.models import rolls, service
from scheduler.runtime.registry import declared, tables
from tests import registries

CHAT = config.ModelSettings(name="chat", engine=fleet.EngineKind.SIMULATED, seats=4)
CODE = config.ModelSettings(name="code", engine=fleet.EngineKind.SIMULATED, seats=4)
WISH = service.Wish("ada", "because")
SIGNED = declared.Signed("rollout (ada)", "moves", 9)
V1 = CHAT.version


@pytest.fixture
def site(tmp_path: Path, fake_clock: clock.FakeClock) -> Iterator[service.Site]:
    registry = registries.opened(tmp_path)
    registry.catalog.declare([CHAT, CODE], 1)
    made = service.Site(registry, fake_clock)
    service.add(made, ("version", "chat", "v2"), {"engine": "simulated"}, WISH)
    yield made
    registry.close()


def at(site: service.Site, step: int) -> rollouts.Rollout:
    """Begin a rollout of v2 and take it to a step."""
    rolls.begin(site, "chat", "v2", rolls.Terms((25, 100)), WISH)
    while (now := current(site)).step < step:
        state = rollouts.State.KEEPING if now.step + 1 == 1 else rollouts.State.STEPPING
        after = dataclasses.replace(now, step=now.step + 1, state=state)
        assert site.registry.rollouts.advance(now, after, SIGNED)
    return now


def current(site: service.Site) -> rollouts.Rollout:
    found = site.registry.rollouts.get("chat")
    assert found is not None
    return found


def shares(site: service.Site) -> dict[str, int]:
    return dict(site.registry.catalog.routes()["chat"].weights)


def test_the_version_that_a_rollback_needs_cannot_be_taken_away(site: service.Site) -> None:
    at(site, 1)
    assert shares(site) == {"v2": 100}
    with pytest.raises(errors.BadRequest, match="rollback chat"):
        service.remove(site, ("version", "chat", V1), WISH)
    rolls.back(site, "chat", WISH)
    assert shares(site) == {V1: 100}


@pytest.mark.parametrize("models", [(CODE,), (dataclasses.replace(CHAT, seats=8), CODE)])
def test_a_file_that_says_something_else_of_the_model_ends_its_rollout(
    site: service.Site, models: tuple[config.ModelSettings, ...]
) -> None:
    was = at(site, 0)
    assert shares(site) == {V1: 75, "v2": 25}
    site.registry.catalog.declare(models, 2)
    now = current(site)
    assert (now.state, now.outcome) == (rollouts.State.OVER, "rolled back")
    assert "forebay.toml" in now.reason
    assert not site.registry.rollouts.all(under_way=True)
    assert not site.registry.rollouts.advance(was, rollouts.back(was, "late", 9), SIGNED)
    _, document = site.registry.declared.read()
    assert set(document.models) == {model.name for model in models}
    if CHAT.name in document.models:
        assert shares(site) == {V1: 100}


def test_a_file_that_says_the_same_leaves_a_rollout_alone(site: service.Site) -> None:
    at(site, 0)
    site.registry.catalog.declare([CHAT, dataclasses.replace(CODE, seats=8)], 2)
    assert current(site).state is rollouts.State.STEPPING
    assert shares(site) == {V1: 75, "v2": 25}


def test_a_step_to_versions_that_are_gone_ends_the_rollout_and_leaves_the_route(
    site: service.Site,
) -> None:
    now = at(site, 0)
    lost = dataclasses.replace(now, before={"v0": 100})
    with site.registry.database.write() as session:
        row = session.get(tables.Rollout, "chat")
        assert row is not None
        row.body = {**row.body, "before": {"v0": 100}}
    assert site.registry.rollouts.advance(lost, rollouts.back(lost, "worse", 9), SIGNED)
    assert (current(site).state, current(site).outcome) == (rollouts.State.OVER, "failed")
    assert "v0" in current(site).reason
    assert shares(site) == {V1: 75, "v2": 25}


def test_a_rollout_begins_from_the_route_that_is_in_force(site: service.Site) -> None:
    old = rollouts.Rollout("chat", "v2", {V1: 50, "v2": 50}, (100,), 1.0, "ada")
    with pytest.raises(errors.Busy):
        site.registry.rollouts.begin(old, 3)
    gone = rollouts.Rollout("chat", "v9", {V1: 100}, (100,), 1.0, "ada")
    with pytest.raises(errors.Busy):
        site.registry.rollouts.begin(gone, 3)
    assert site.registry.rollouts.get("chat") is None


def test_a_shadow_that_takes_over_is_none_any_more(site: service.Site) -> None:
    key = ("route", "chat", "")
    service.update(site, key, {"shadow": {"version": "v2", "percent": 10}}, WISH)
    at(site, 0)
    assert site.registry.catalog.routes()["chat"].shadow == "v2"
    site.registry.rollouts.advance(current(site), rollouts.back(current(site), "worse", 9), SIGNED)
    assert site.registry.catalog.routes()["chat"].shadow == "v2"
    at(site, 1)
    assert site.registry.catalog.routes()["chat"].shadow == ""
    # Else no change of any model would be taken while its rollout lasts.
    service.update(site, ("model", "code", ""), {"replicas": 2}, WISH)


def test_further_steps_come_after_the_one_that_holds_by_then(
    site: service.Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    at(site, 0)
    real = site.registry.rollouts.advance
    raced: list[bool] = []

    def advance(before: rollouts.Rollout, after: rollouts.Rollout, *more: object) -> bool:
        if not raced:
            raced.append(True)
            keeping = rollouts.State.KEEPING
            real(before, dataclasses.replace(before, step=1, state=keeping), SIGNED)
        return real(before, after, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(site.registry.rollouts, "advance", advance)
    with pytest.raises(errors.BadRequest, match="100 percent already"):
        rolls.begin(site, "chat", "v2", rolls.Terms((50, 75)), WISH)
    assert current(site).percent == 100


def test_who_goes_on_may_ask_for_the_gate_only_then(site: service.Site) -> None:
    """It was dropped without a word: the next steps went on without any verdict."""
    at(site, 0)
    rolls.judge(site, "chat", WISH, passed=True)
    rolls.begin(site, "chat", "v2", rolls.Terms((50, 75), warm_s=60.0, gate=True), WISH)
    now = current(site)
    assert (now.gate, now.gate_passed, now.warm_s) == (True, None, 60.0)
    waits = dataclasses.replace(now, hold_s=0.0, least=0)
    assert rollouts.after(waits, rollouts.Seen(1 << 50, 1, 1)).percent == 25
    rolls.judge(site, "chat", WISH, passed=True)
    rolls.begin(site, "chat", "v2", rolls.Terms((60, 75)), WISH)
    assert (current(site).gate, current(site).gate_passed) == (True, True)


def test_an_item_of_what_is_no_table_is_refused(site: service.Site) -> None:
    service.update(site, ("version", "chat", "v2"), {"seats": 5}, WISH)
    with pytest.raises(errors.BadRequest, match="seats"):
        service.update(site, ("version", "chat", "v2"), {"seats.x": 1}, WISH)

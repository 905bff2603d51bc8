"""Words of a newer release in the registry: the rest is read, what bears them is neither used nor changed."""

import dataclasses

import pytest

from scheduler.contracts import errors, fleet, ids, requests
from scheduler.core import rollouts
from scheduler.runtime.models import document
from scheduler.runtime.registry import keys, tables
from tests.unit.runtime import adminsite
from tests.unit.runtime.declaring import done, fctl

site = adminsite.site  # the fixture
LEASE = fleet.Lease(
    ids.LeaseId("l-1"), "alpha", fleet.LeaseKind.BACKFILL, "t", fleet.LeaseState.RUNNING, 4
)


@pytest.fixture
def newer(site: adminsite.Site) -> adminsite.Site:
    """A site where a newer release has declared `chat` on an engine of its own."""
    with site.registry.database.write() as session:
        version = session.get_one(tables.Version, ("chat", "v1"))
        version.spec = {**version.spec, "engine": "tensorrt"}
        row = session.get_one(tables.Declared, ("version", "chat", "v1"))
        row.body = {**row.body, "engine": "tensorrt"}
    return site


def test_people_are_told_what_is_left_alone_and_what_to_do(newer: adminsite.Site) -> None:
    shown = done(newer, "show models chat -o")
    assert "engine 'tensorrt' is not known here: a newer release declared it" in shown
    assert "upgrade this broker" in shown
    assert "newer release" not in done(newer, "show models code -o")
    done(newer, "resume chat")
    assert "upgrade this broker" in done(newer, "show models chat -o")
    assert '"engine": "tensorrt"' in done(newer, "show models --json")


@pytest.mark.parametrize(
    "line",
    [
        "version update chat v1 seats=2",
        "version rm chat v1",
        "model rm chat",
        "model update chat replicas=3",
        "version add chat v2 engine=simulated",
    ],
)
def test_it_is_changed_by_who_can_read_it_alone(newer: adminsite.Site, line: str) -> None:
    before = newer.registry.declared.entries()
    code, said = fctl(newer, line)
    assert code == 1
    assert "tensorrt" in said
    assert newer.registry.declared.entries() == before


def test_everything_else_is_changed_as_ever(newer: adminsite.Site) -> None:
    before = newer.registry.declared.entries()[1]
    done(newer, "version update code v1 seats=2")
    done(newer, "profile add small gpus=2")
    after = newer.registry.declared.entries()[1]
    changed = {key for key in after if after[key] != before.get(key)}
    assert changed == {("version", "code", "v1"), ("profile", "", "small")}
    (chat,) = (one for one in newer.registry.catalog.deployments() if one.spec.model == "chat")
    assert chat.spec.engine == fleet.UnknownEngine("tensorrt")


def test_a_model_goes_with_its_profile() -> None:
    found: dict[document.Key, dict[str, object]] = {
        ("profile", "", "tape"): {"gpus": "a reel"},
        ("profile", "", "of_next_year"): {"gpus": 1, "reels": 3},
        ("model", "old", ""): {"profile": "tape"},
        ("model", "new", ""): {"profile": "of_next_year"},
        ("policy", "new", "p"): {"any": "thing"},
    }
    whole = document.whole(found)
    assert list(whole.models) == ["new"]
    assert list(whole.profiles) == ["of_next_year"]
    unread = document.unread(found)
    assert unread.keys() == {("profile", "tape"), ("model", "old")}
    assert unread["model", "old"].startswith("profile tape.gpus: ")


def test_a_rollout_of_it_or_in_a_state_of_theirs_stays_as_it_is(newer: adminsite.Site) -> None:
    registry = newer.registry

    def written(model: str, state: str) -> None:
        made = rollouts.Rollout(model, "v2", {"v1": 100}, (50, 100), 5.0, "ada")
        body = {**dataclasses.asdict(made), "state": state}
        with registry.database.write() as session:
            session.add(tables.Rollout(model=model, state=state, body=body))

    written("code", "rolling")
    state = next(each for each in rollouts.State if each is not rollouts.State.OVER)
    written("chat", state.value)
    assert registry.rollouts.all(under_way=True) == ()
    assert [each.model for each in registry.rollouts.all()] == ["chat"]
    with pytest.raises(errors.BadRequest, match="'rolling', which a newer release has begun"):
        registry.rollouts.get("code")


def test_a_tier_and_a_lease_of_theirs(site: adminsite.Site) -> None:
    registry = site.registry
    registry.keys.put(keys.Key("", "t", "u", tuple(requests.Tier)), keys.new_token(), 1)
    epoch = registry.lead.take("me", 0, 1 << 50)
    assert epoch is not None
    registry.holdings.save_lease(epoch, LEASE, 1)
    with registry.database.write() as session:
        row = session.query(tables.ApiKey).one()
        row.tiers = ["interactive", "of_next_year"]
        lease = session.get_one(tables.Lease, "l-1")
        lease.kind, lease.state = "spot", "hibernating"
    (key,) = registry.keys.list()
    assert key.tiers == (requests.Tier.INTERACTIVE,)
    (held,) = registry.holdings.load().leases
    assert (held.kind, held.state) == (fleet.LeaseKind.SERVE, fleet.LeaseState.UNKNOWN)
    registry.holdings.save_lease(epoch, dataclasses.replace(held, reason="x"), 2)
    with registry.database.read() as session:
        assert session.get_one(tables.Lease, "l-1").kind == "spot"

"""fctl model, version, route, adapter, profile, history, rollout: what is kept, refused and shown."""

import dataclasses
import json

import pytest

from scheduler.contracts import fleet
from scheduler.core import rollouts, snapshot, trials
from scheduler.runtime import rolling
from scheduler.runtime.registry import declared, holdings
from tests.unit.runtime import adminsite, declaring

site = adminsite.site  # the fixture
V1 = "version add talk v1 engine=simulated seats=4"


def test_a_model_is_declared_piece_by_piece_and_runs(site: adminsite.Site) -> None:
    declaring.done(site, "profile add big gres_type=H100 gpus=4 --reason 'new nodes'")
    declaring.done(
        site, "model add talk tiers=[interactive] profile=big replicas=2 callers=[physics]"
    )
    declaring.done(site, V1)
    declaring.done(site, "version add talk v2 engine=simulated seats=8 engine_args.step-ms=3")
    declaring.done(site, "adapter add talk law path=/adapters/law rank=8 team=legal")
    wanted = {deployment.key: deployment for deployment in site.registry.catalog.deployments()}
    assert (wanted["talk", "v1"].replicas, wanted["talk", "v1"].spec.gpus) == (2, 4)
    assert wanted["talk", "v2"].replicas == 0  # it answers nothing yet
    assert wanted["talk", "v2"].spec.engine_args == {"step-ms": 3}
    assert wanted["talk", "v1"].spec.adapters == {"law": "/adapters/law"}
    route = site.registry.catalog.routes()["talk"]
    assert (route.weights, route.adapters) == ({"v1": 100}, ("law",))
    assert declaring.done(site, "route update talk v1=95 v2=5").splitlines()[0] == (
        "~ route talk: versions.v1 100 → 95, versions.v2 default → 5"
    )
    assert site.registry.catalog.routes()["talk"].weights == {"v1": 95, "v2": 5}
    assert "v1=95 v2=5" in declaring.done(site, "route list")
    declaring.done(site, "version update talk v2 engine_args.step-ms= seats=6")
    shown = json.loads(declaring.done(site, "version show talk v2 --json"))
    assert shown == {"engine": "simulated", "seats": 6}
    assert "law" in declaring.done(site, "adapter list talk")
    assert "H100:4" in declaring.done(site, "profile list")
    declaring.done(site, "model rm talk")
    assert "talk" not in site.registry.catalog.routes()
    left = {each.key: each.replicas for each in site.registry.catalog.deployments()}
    assert (left["talk", "v1"], left["talk", "v2"]) == (0, 0)
    told = declaring.done(site, "history talk")
    assert told.splitlines()[0].endswith("  root")
    assert "- model talk" in told


def test_versions_are_listed_with_how_they_are(site: adminsite.Site) -> None:
    declaring.done(site, "version add chat v2 engine=simulated")
    declaring.done(site, "version add code v3 engine=simulated replicas=2")
    view = site.source.view()
    assert view is not None
    spec = view.replicas[0].spec
    listed = {
        (one["model"], one["version"]): one["status"]
        for one in json.loads(declaring.done(site, "version list --json"))
    }
    assert "2 serving" in listed[spec.model, spec.version]
    assert listed["chat", "v2"] == "off"
    assert listed["code", "v3"] == "2 wanted"
    epoch = site.registry.lead.take("me", 0, 10_000_000)
    assert epoch is not None
    site.registry.catalog.quarantine(epoch, "code", "v3", 2**53, "it does not start")
    assert "quarantined: it does not start" in declaring.done(site, "version list code")


def test_replicas_that_keep_what_they_were_started_with_are_told_of(site: adminsite.Site) -> None:
    epoch = site.registry.lead.take("me", 0, 10_000_000)
    assert epoch is not None
    view = site.source.view()
    assert view is not None
    declared = {one.key: one.spec for one in site.registry.catalog.deployments()}
    seen = view.replicas[0]
    one = dataclasses.replace(seen, spec=declared[seen.spec.model, seen.spec.version])
    lease = fleet.Lease(
        one.lease_id, "c", fleet.LeaseKind.SERVE, "t", fleet.LeaseState.RUNNING, gpus=4
    )
    slot = snapshot.Slot(one.slot_id, one.lease_id, 4)
    row = holdings.ReplicaRow(one, True, one.role, 30.0, False, 6)
    site.registry.holdings.save_lease(epoch, lease, 5)
    site.registry.holdings.save_wishes(epoch, one.lease_id, 1, slots=[slot], wishes=[row])
    assert "note" not in declaring.done(site, "adapter add chat law path=/adapters/law")
    assert "note" not in declaring.done(site, "version update chat v1 seats=7 --dry-run")
    told = declaring.done(site, "version update chat v1 seats=7 engine_args.step-base-ms=9")
    assert "note: 1 of chat v1 keep the engine_args, seats that they were started with" in told
    assert "note" not in declaring.done(site, "model update code itl_slo_ms=30")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (V1.replace("talk", "nope"), "model nope: not declared; known are: chat, code"),
        (V1.replace("talk v1", "chat v1"), "version chat v1: is there; `fctl version update`"),
        (V1.replace("talk", "chat").replace("v1", "'v 1'"), "a name is letters, digits"),
        ("route update chat v1=50", "percentages add up to 50: make it 100"),
        ("route update chat v1=99 v2=1", "v2: unknown version; known are: v1"),
        ("route update chat shadow=v1", "write shadow=VERSION:PERCENT"),
        ("route update chat shadow=[v1]", "write shadow=VERSION:PERCENT"),
        ("route update chat pools={}", "write pools=TOKENS:VERSION"),
        ("model update chat replicas=.inf", "replicas=.inf: Out of range"),
        ("route update chat shadow=v1:5", "answers all requests itself"),
        ("version rm chat v2", "version chat v2: not declared; known are: v1"),
        ("profile rm big", "profile big: not declared; known are: none"),
        ("model update chat replicas=many", "model chat.replicas: Input should be a valid integer"),
        ("model update chat versions.v9={}", "model chat.versions: has a command of its own"),
        ("adapter add chat law path=/adapters/law rank=-1", "rank: Input should be greater"),
        ("adapter add chat law path=law", "must be absolute"),
        ("model update chat replicas", "replicas: write KEY=VALUE"),
        ("revert 99", "revision 99: unknown"),
        ("apply -f /nowhere.yaml", "/nowhere.yaml: No such file"),
        ("version show chat v9", "version chat v9: not declared"),
    ],
)
def test_what_is_refused(site: adminsite.Site, line: str, said: str) -> None:
    code, told = declaring.fctl(site, line)
    assert code == 1
    assert said in told
    assert told.count("\n") == 1
    assert site.registry.declared.read()[0] == 1


def test_only_admins_change_and_nobody_sees_anothers_adapter(site: adminsite.Site) -> None:
    declaring.done(site, "apply -f -", declaring.FILE)
    site.caller = adminsite.USER
    for line in (V1, "apply -f -", "revert 1", "history", "model rm talk"):
        code, told = declaring.fctl(site, line, declaring.FILE)
        assert (code, "is no admin" in told) == (1, True)
    assert "law" not in declaring.done(site, "adapter list talk")
    assert "v2" in declaring.done(site, "version list talk")


def test_rollouts_are_begun_shown_and_taken_back(site: adminsite.Site) -> None:
    assert declaring.done(site, "rollout") == "no rollouts\n"
    declaring.done(site, "version add chat v2 engine=simulated")
    assert declaring.done(site, "rollout chat v2 --steps 1,25,100 --hold 10m") == (
        "chat v2: warming, steps 1,25,100\n"
    )
    assert "chat v2: 0 %, warming" in declaring.done(site, "rollout chat")
    wanted = {one.key: one.replicas for one in site.registry.catalog.deployments()}
    assert wanted["chat", "v2"] == 1  # warmed before anything moves
    declaring.done(site, "gate chat fail --reason '0.71 < 0.80'")
    found = site.registry.rollouts.get("chat")
    assert found is not None
    assert (found.gate_passed, found.hold_s) == (False, 600)
    assert declaring.done(site, "rollback chat --reason bad") == "chat: v2 is taken back\n"
    assert "rolled back" in declaring.done(site, "rollout")
    wanted = {one.key: one.replicas for one in site.registry.catalog.deployments()}
    assert wanted["chat", "v2"] == 0
    for line, said in (
        ("rollout chat v2", "give --steps 1,5,25,50,100 or --percent N"),
        ("rollout chat v2 --steps 5,x", "whole percents"),
        ("rollout chat v2 --percent 5 --hold soon", "--hold soon: write 30s, 10m, 1h or 1d"),
        ("rollback chat", "no rollout is under way"),
        ("gate chat pass", "no rollout is under way"),
    ):
        code, told = declaring.fctl(site, line)
        assert (code, said in told, told.count("\n")) == (1, True, 1)


def test_who_waits_for_a_rollout_that_stays_is_not_kept_for_ever(site: adminsite.Site) -> None:
    declaring.done(site, "version add chat v2 engine=simulated")
    epoch = site.registry.lead.take("me", 0, 10_000_000)
    assert epoch is not None
    declaring.done(site, "rollout chat v2 --percent 5")
    begun = site.registry.rollouts.get("chat")
    assert begun is not None
    at = dataclasses.replace(begun, state=rollouts.State.STEPPING, step=0)
    assert site.registry.rollouts.advance(begun, at, declared.Signed("rollout", "5 percent", 2))
    seen = rollouts.Seen(1 << 60, 1, 1)
    told = rolling.told(at, seen, trials.Comparison("v2"))
    assert told["stays"]

    def tell(**changes: object) -> None:
        fact = {"rollouts": [{**told, **changes}]}
        site.registry.journal.set_facts(epoch, 1, {"rollouts": fact})

    tell(percent=1)
    assert '"stays"' not in declaring.done(site, "rollout --json"), "it was told of the step before"
    tell(steps=[5, 6])
    assert "5 %: stepping" in declaring.done(site, "rollout chat v2 --percent 6 --wait")


def test_a_models_name_may_hold_slashes_everywhere(site: adminsite.Site) -> None:
    declaring.done(site, "model add meta/talk")
    declaring.done(site, "version add meta/talk v1 engine=simulated")
    for line in ("scale meta/talk 2", "hold meta/talk", "release meta/talk", "resume meta/talk"):
        declaring.done(site, line)
    wanted = {one.key: one.replicas for one in site.registry.catalog.deployments()}
    assert wanted["meta/talk", "v1"] == 2


@pytest.mark.parametrize("reason", ["two\nlines", "\x1b[2J", "\x00"])
async def test_a_reason_is_one_line_of_a_terminal(site: adminsite.Site, reason: str) -> None:
    body = {"model": "talk", "reason": reason}
    told = json.dumps(body)
    head = {"content-type": "application/json"}
    for path in ("/admin/catalog/model", "/admin/models/chat/rollback"):
        answer = await site.call("POST", path, content=told, headers=head)
        assert answer.status_code == 422, (path, answer.text)
    answer = await site.call("DELETE", "/admin/catalog/model?model=chat", params={"reason": reason})
    assert answer.status_code == 422, answer.text


async def test_what_is_another_teams_is_not_shown_beside_what_runs(site: adminsite.Site) -> None:
    declaring.done(site, "model add talk callers=[legal]")
    declaring.done(site, "version add talk v1 engine=simulated")
    declaring.done(site, "adapter add chat law path=/adapters/law team=legal")
    declaring.done(site, "adapter add chat all path=/adapters/all")
    view = site.source.view()
    assert view is not None
    spec = dataclasses.replace(
        view.replicas[0].spec, adapters={"law": "/adapters/law", "all": "/adapters/all"}
    )
    held = dataclasses.replace(view.replicas[0], spec=spec)
    site.source.set(dataclasses.replace(view, replicas=(held,)))
    for team, models, adapters in (
        ("physics", {"chat", "code"}, ["all"]),
        ("legal", {"chat", "code", "talk"}, ["all", "law"]),
    ):
        site.caller = dataclasses.replace(adminsite.ADMIN, team=team, admin=False)
        for path in ("/admin/models", "/admin/explain"):
            told = {one["model"]: one for one in (await site.call("GET", path)).json()["models"]}
            assert (set(told), told["chat"]["adapters"]) == (models, adapters)
        (one,) = (await site.call("GET", "/admin/replicas")).json()["replicas"]
        assert sorted(one["spec"]["adapters"]) == adapters
        path = f"/admin/replicas/{held.replica_id}"
        one = (await site.call("GET", path)).json()["replica"]
        assert sorted(one["spec"]["adapters"]) == adapters


def test_openapi_describes_what_admins_may_ask(site: adminsite.Site) -> None:
    described = adminsite.fastapi_client(site).get("/openapi.json").json()
    paths = described["paths"]
    for path, verbs in (
        ("/admin/catalog", {"get"}),
        ("/admin/catalog/{kind}", {"post", "patch", "delete"}),
        ("/admin/catalog/apply", {"post"}),
        ("/admin/catalog/revert", {"post"}),
        ("/admin/catalog/history", {"get"}),
        ("/admin/models/{model}/rollout", {"post"}),
        ("/admin/models/{model}/rollback", {"post"}),
        ("/admin/models/{model}/gate", {"post"}),
    ):
        assert verbs <= paths[path].keys(), path
    wish = described["components"]["schemas"]["NewRollout"]["properties"]
    assert {"version", "percent", "steps", "hold_s", "gate"} <= wish.keys()

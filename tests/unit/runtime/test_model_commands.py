"""fctl model, version, route, adapter, profile, apply, history, revert: what is kept, refused and shown."""

import dataclasses
import io
import json
import shlex
from pathlib import Path

import pytest

from scheduler.contracts import fleet
from scheduler.core import rollouts, snapshot, trials
from scheduler.runtime import commands, rolling
from scheduler.runtime.registry import declared, holdings
from tests.unit.runtime import test_admin

site = test_admin.site  # the fixture
V1 = "version add talk v1 engine=simulated seats=4"
FILE = """
profiles:
  big: {gres_type: H100, gpus: 4}
models:
  talk:
    tiers: [interactive]
    profile: big
    scaling: {floor: 1}
    versions:
      v1: {engine: simulated, seats: 4}
      v2:
        engine: simulated
        seats: 8
    route:
      versions: {v1: 90, v2: 10}
    adapters:
      law: {path: /adapters/law, rank: 8, team: legal}
"""


def fctl(site: test_admin.Site, line: str, stdin: str = "") -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    code = commands.fctl(
        shlex.split(line),
        api=test_admin.SiteApi(site),
        out=out,
        err=err,
        stdin=io.StringIO(stdin),
    )
    return code, out.getvalue() + err.getvalue()


def done(site: test_admin.Site, line: str, stdin: str = "") -> str:
    code, told = fctl(site, line, stdin)
    assert code == 0, told
    return told


def test_a_model_is_declared_piece_by_piece_and_runs(site: test_admin.Site) -> None:
    done(site, "profile add big gres_type=H100 gpus=4 --reason 'new nodes'")
    done(site, "model add talk tiers=[interactive] profile=big replicas=2 callers=[physics]")
    done(site, V1)
    done(site, "version add talk v2 engine=simulated seats=8 engine_args.step-ms=3")
    done(site, "adapter add talk law path=/adapters/law rank=8 team=legal")
    wanted = {deployment.key: deployment for deployment in site.registry.catalog.deployments()}
    assert (wanted["talk", "v1"].replicas, wanted["talk", "v1"].spec.gpus) == (2, 4)
    assert wanted["talk", "v2"].replicas == 0  # it answers nothing yet
    assert wanted["talk", "v2"].spec.engine_args == {"step-ms": 3}
    assert wanted["talk", "v1"].spec.adapters == {"law": "/adapters/law"}
    route = site.registry.catalog.routes()["talk"]
    assert (route.weights, route.adapters) == ({"v1": 100}, ("law",))
    assert done(site, "route update talk v1=95 v2=5").splitlines()[0] == (
        "~ route talk: versions.v1 100 → 95, versions.v2 default → 5"
    )
    assert site.registry.catalog.routes()["talk"].weights == {"v1": 95, "v2": 5}
    assert "v1=95 v2=5" in done(site, "route list")
    done(site, "version update talk v2 engine_args.step-ms= seats=6")
    shown = json.loads(done(site, "version show talk v2 --json"))
    assert shown == {"engine": "simulated", "seats": 6}
    assert "law" in done(site, "adapter list talk")
    assert "H100:4" in done(site, "profile list")
    done(site, "model rm talk")
    assert "talk" not in site.registry.catalog.routes()
    left = {each.key: each.replicas for each in site.registry.catalog.deployments()}
    assert (left["talk", "v1"], left["talk", "v2"]) == (0, 0)
    told = done(site, "history talk")
    assert told.splitlines()[0].endswith("  root")
    assert "- model talk" in told


def test_versions_are_listed_with_how_they_are(site: test_admin.Site) -> None:
    done(site, "version add chat v2 engine=simulated")
    done(site, "version add code v3 engine=simulated replicas=2")
    view = site.source.view()
    assert view is not None
    spec = view.replicas[0].spec
    listed = {
        (one["model"], one["version"]): one["status"]
        for one in json.loads(done(site, "version list --json"))
    }
    assert "2 serving" in listed[spec.model, spec.version]
    assert listed["chat", "v2"] == "off"
    assert listed["code", "v3"] == "2 wanted"
    epoch = site.registry.lead.take("me", 0, 10_000_000)
    assert epoch is not None
    site.registry.catalog.quarantine(epoch, "code", "v3", 2**53, "it does not start")
    assert "quarantined: it does not start" in done(site, "version list code")


def test_replicas_that_keep_what_they_were_started_with_are_told_of(site: test_admin.Site) -> None:
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
    assert "note" not in done(site, "adapter add chat law path=/adapters/law")
    assert "note" not in done(site, "version update chat v1 seats=7 --dry-run")
    told = done(site, "version update chat v1 seats=7 engine_args.step-base-ms=9")
    assert "note: 1 of chat v1 keep the engine_args, seats that they were started with" in told
    assert "note" not in done(site, "model update code itl_slo_ms=30")


def test_a_file_is_applied_once_shown_first_and_taken_back(
    site: test_admin.Site, tmp_path: Path
) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(FILE)
    told = done(site, f"apply -f {path} --dry-run")
    assert "+ version talk v2: engine=simulated" in told
    assert told.endswith("dry run: nothing was changed\n")
    assert "talk" not in site.registry.catalog.routes()
    assert "revision 2" in done(site, f"apply -f {path} --reason launch")
    assert done(site, f"apply -f {path}") == "nothing changes\n"
    assert site.registry.declared.read()[0] == 2
    route = json.loads(done(site, "route show talk --json"))
    assert route == {"versions": {"v1": 90, "v2": 10}}
    changed = FILE.replace("v1: 90, v2: 10", "v1: 50, v2: 50")
    assert "~ route talk: versions.v1 90 → 50" in done(site, "apply -f -", changed)
    assert json.loads(done(site, "history --json"))["history"][1]["reason"] == "launch"
    done(site, "revert 2")
    assert site.registry.catalog.routes()["talk"].weights == {"v1": 90, "v2": 10}
    done(site, "revert 1 --reason 'not yet'")
    assert "talk" not in site.registry.catalog.routes()
    assert sorted(site.registry.catalog.routes()) == ["chat", "code"]


def test_prune_takes_away_what_the_file_does_not_name(site: test_admin.Site) -> None:
    told = done(site, "apply -f - --prune --dry-run", FILE)
    assert "- model chat" in told
    assert "- model chat" not in done(site, "apply -f - --dry-run", FILE)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("v1: 90, v2: 10", "v1: 90, v2: 11"), ":14: models.talk.route: percentages add up to 101"),
        (
            ("v1: 90, v2: 10", "v1: 90, v3: 10"),
            ":15: models.talk.route.versions.v3: unknown version",
        ),
        (("profile: big", "profile: small"), ":7: models.talk.profile: small is unknown"),
        (("/adapters/law", "/etc/law"), "is outside the allowed folders (/adapters)"),
        (("/adapters/law", "/adapters/../etc"), "must be absolute and without `..`"),
        (("seats: 8", "seats: 0"), ":13: models.talk.versions.v2.seats: Input should be greater"),
        (("seats: 8", "sets: 8"), ":13: models.talk.versions.v2.sets: Extra inputs"),
        (("seats: 8", "engine: vllm"), ":13: not valid YAML: engine stands there twice"),
        (("engine: simulated\n        seats: 8", "seats: 8"), "weights missing"),
        (("seats: 8", "seats: 8\n        tensor_parallel: 8"), "is 8, and a replica has 4 GPUs"),
        (("seats: 8", "quantization: fp8"), "quantization fp8 without quantization_approval"),
        (("{floor: 1}", "{flor: 1}"), "scaling.flor is unknown"),
    ],
)
def test_a_wrong_file_is_refused_whole_with_its_line(
    site: test_admin.Site, change: tuple[str, str], said: str
) -> None:
    code, told = fctl(site, "apply -f -", FILE.replace(*change))
    assert code == 1
    assert said in told
    assert told.startswith("fctl: error: -:")
    assert told.count("\n") == 1
    assert site.registry.declared.read()[0] == 1


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
def test_what_is_refused(site: test_admin.Site, line: str, said: str) -> None:
    code, told = fctl(site, line)
    assert code == 1
    assert said in told
    assert told.count("\n") == 1
    assert site.registry.declared.read()[0] == 1


def test_names_in_a_file_stay_as_they_are_written_and_merges_are_merged(
    site: test_admin.Site,
) -> None:
    """YAML makes 1.1 of version 1.10, a day of 2026-11-30, a truth of `on`."""
    file = """
    models:
      on:
        versions:
          1.10: &old {engine: simulated, seats: 4}
          2026-11-30: {<<: *old, seats: 8}
        route: {versions: {1.10: 100, 2026-11-30: 0}}
    """
    done(site, "apply -f - --reason 2026-11-30", file)
    declared = site.registry.declared.read()[1].models["on"]
    assert {name: one.seats for name, one in declared.versions.items()} == {
        "1.10": 4, "2026-11-30": 8
    }  # fmt: skip
    done(site, "version add on 2 engine=simulated weights=2026-11-30")
    done(site, "route update on shadow=2:10")
    route = json.loads(done(site, "route show on --json"))
    assert route["shadow"] == {"version": "2", "percent": 10}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models: {? [a] : 1}", ":1: not valid YAML: a key must be a name"),
        ("models: {a: {seats: .nan}}", "Out of range float"),
        ("models: &a {b: *a}", "Circular reference"),
        ("models: !!set {a, b}", "no text, number, list or mapping"),
        pytest.param("[" * 5_000, "nested too deeply", id="deep"),
        ("[1]", "must hold `models:`"),
    ],
)
def test_odd_files_are_refused_in_one_line(site: test_admin.Site, text: str, said: str) -> None:
    code, told = fctl(site, "apply -f -", text)
    assert (code, said in told, told.count("\n")) == (1, True, 1), told


def test_prune_asks_before_several_go(site: test_admin.Site) -> None:
    code, told = fctl(site, "apply -f - --prune", "models: {}")
    assert (code, "Remove 2 (model chat, model code)?" in told) == (1, True), told
    assert site.registry.declared.read()[0] == 1
    assert "- model chat" in done(site, "apply -f - --prune -y", "models: {}")


def test_only_admins_change_and_nobody_sees_anothers_adapter(site: test_admin.Site) -> None:
    done(site, "apply -f -", FILE)
    site.caller = test_admin.USER
    for line in (V1, "apply -f -", "revert 1", "history", "model rm talk"):
        code, told = fctl(site, line, FILE)
        assert (code, "is no admin" in told) == (1, True)
    assert "law" not in done(site, "adapter list talk")
    assert "v2" in done(site, "version list talk")


def test_forebay_toml_declares_anew_only_what_has_changed_in_it(site: test_admin.Site) -> None:
    catalog = site.registry.catalog
    done(site, "version add chat v2 engine=simulated")
    done(site, "route update chat v1=40 v2=60")
    catalog.declare([test_admin.CHAT, test_admin.CODE], 5)  # a broker takes the lead again
    assert catalog.routes()["chat"].weights == {"v1": 40, "v2": 60}
    catalog.declare([dataclasses.replace(test_admin.CHAT, seats=5), test_admin.CODE], 6)
    assert catalog.routes()["chat"].weights == {"v1": 100}
    told = done(site, "history chat -n 1")
    assert "forebay.toml: forebay.toml has changed" in told
    assert "- version chat v2" in told


def test_rollouts_are_begun_shown_and_taken_back(site: test_admin.Site) -> None:
    assert done(site, "rollout") == "no rollouts\n"
    done(site, "version add chat v2 engine=simulated")
    assert done(site, "rollout chat v2 --steps 1,25,100 --hold 10m") == (
        "chat v2: warming, steps 1,25,100\n"
    )
    assert "chat v2: 0 %, warming" in done(site, "rollout chat")
    wanted = {one.key: one.replicas for one in site.registry.catalog.deployments()}
    assert wanted["chat", "v2"] == 1  # warmed before anything moves
    done(site, "gate chat fail --reason '0.71 < 0.80'")
    found = site.registry.rollouts.get("chat")
    assert found is not None
    assert (found.gate_passed, found.hold_s) == (False, 600)
    assert done(site, "rollback chat --reason bad") == "chat: v2 is taken back\n"
    assert "rolled back" in done(site, "rollout")
    wanted = {one.key: one.replicas for one in site.registry.catalog.deployments()}
    assert wanted["chat", "v2"] == 0
    for line, said in (
        ("rollout chat v2", "give --steps 1,5,25,50,100 or --percent N"),
        ("rollout chat v2 --steps 5,x", "whole percents"),
        ("rollout chat v2 --percent 5 --hold soon", "--hold soon: write 30s, 10m, 1h or 1d"),
        ("rollback chat", "no rollout is under way"),
        ("gate chat pass", "no rollout is under way"),
    ):
        code, told = fctl(site, line)
        assert (code, said in told, told.count("\n")) == (1, True, 1)


def test_who_waits_for_a_rollout_that_stays_is_not_kept_for_ever(site: test_admin.Site) -> None:
    done(site, "version add chat v2 engine=simulated")
    epoch = site.registry.lead.take("me", 0, 10_000_000)
    assert epoch is not None
    done(site, "rollout chat v2 --percent 5")
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
    assert '"stays"' not in done(site, "rollout --json"), "it was told of the step before"
    tell(steps=[5, 6])
    assert "5 %: stepping" in done(site, "rollout chat v2 --percent 6 --wait")


def test_a_models_name_may_hold_slashes_everywhere(site: test_admin.Site) -> None:
    done(site, "model add meta/talk")
    done(site, "version add meta/talk v1 engine=simulated")
    for line in ("scale meta/talk 2", "hold meta/talk", "release meta/talk", "resume meta/talk"):
        done(site, line)
    wanted = {one.key: one.replicas for one in site.registry.catalog.deployments()}
    assert wanted["meta/talk", "v1"] == 2


@pytest.mark.parametrize("reason", ["two\nlines", "\x1b[2J", "\x00"])
async def test_a_reason_is_one_line_of_a_terminal(site: test_admin.Site, reason: str) -> None:
    body = {"model": "talk", "reason": reason}
    told = json.dumps(body)
    head = {"content-type": "application/json"}
    for path in ("/admin/catalog/model", "/admin/models/chat/rollback"):
        answer = await site.call("POST", path, content=told, headers=head)
        assert answer.status_code == 422, (path, answer.text)
    answer = await site.call("DELETE", "/admin/catalog/model?model=chat", params={"reason": reason})
    assert answer.status_code == 422, answer.text


async def test_what_is_another_teams_is_not_shown_beside_what_runs(site: test_admin.Site) -> None:
    done(site, "model add talk callers=[legal]")
    done(site, "version add talk v1 engine=simulated")
    done(site, "adapter add chat law path=/adapters/law team=legal")
    done(site, "adapter add chat all path=/adapters/all")
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
        site.caller = dataclasses.replace(test_admin.ADMIN, team=team, admin=False)
        for path in ("/admin/models", "/admin/explain"):
            told = {one["model"]: one for one in (await site.call("GET", path)).json()["models"]}
            assert (set(told), told["chat"]["adapters"]) == (models, adapters)
        (one,) = (await site.call("GET", "/admin/replicas")).json()["replicas"]
        assert sorted(one["spec"]["adapters"]) == adapters
        path = f"/admin/replicas/{held.replica_id}"
        one = (await site.call("GET", path)).json()["replica"]
        assert sorted(one["spec"]["adapters"]) == adapters


def test_openapi_describes_what_admins_may_ask(site: test_admin.Site) -> None:
    described = test_admin.fastapi_client(site).get("/openapi.json").json()
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

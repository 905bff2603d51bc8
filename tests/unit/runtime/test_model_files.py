"""fctl apply: files of models, applied once, shown first, pruned, refused whole, taken back."""

import dataclasses
import json
from pathlib import Path

import pytest

from tests.unit.runtime import adminsite, declaring

site = adminsite.site  # the fixture


def test_a_file_is_applied_once_shown_first_and_taken_back(
    site: adminsite.Site, tmp_path: Path
) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(declaring.FILE)
    told = declaring.done(site, f"apply -f {path} --dry-run")
    assert "+ version talk v2: engine=simulated" in told
    assert told.endswith("dry run: nothing was changed\n")
    assert "talk" not in site.registry.catalog.routes()
    assert "revision 2" in declaring.done(site, f"apply -f {path} --reason launch")
    assert declaring.done(site, f"apply -f {path}") == "nothing changes\n"
    assert site.registry.declared.read()[0] == 2
    route = json.loads(declaring.done(site, "route show talk --json"))
    assert route == {"versions": {"v1": 90, "v2": 10}}
    changed = declaring.FILE.replace("v1: 90, v2: 10", "v1: 50, v2: 50")
    assert "~ route talk: versions.v1 90 → 50" in declaring.done(site, "apply -f -", changed)
    assert json.loads(declaring.done(site, "history --json"))["history"][1]["reason"] == "launch"
    declaring.done(site, "revert 2")
    assert site.registry.catalog.routes()["talk"].weights == {"v1": 90, "v2": 10}
    declaring.done(site, "revert 1 --reason 'not yet'")
    assert "talk" not in site.registry.catalog.routes()
    assert sorted(site.registry.catalog.routes()) == ["chat", "code"]


def test_prune_takes_away_what_the_file_does_not_name(site: adminsite.Site) -> None:
    told = declaring.done(site, "apply -f - --prune --dry-run", declaring.FILE)
    assert "- model chat" in told
    assert "- model chat" not in declaring.done(site, "apply -f - --dry-run", declaring.FILE)


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
    site: adminsite.Site, change: tuple[str, str], said: str
) -> None:
    code, told = declaring.fctl(site, "apply -f -", declaring.FILE.replace(*change))
    assert code == 1
    assert said in told
    assert told.startswith("fctl: error: -:")
    assert told.count("\n") == 1
    assert site.registry.declared.read()[0] == 1


def test_names_in_a_file_stay_as_they_are_written_and_merges_are_merged(
    site: adminsite.Site,
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
    declaring.done(site, "apply -f - --reason 2026-11-30", file)
    declared = site.registry.declared.read()[1].models["on"]
    assert {name: one.seats for name, one in declared.versions.items()} == {
        "1.10": 4, "2026-11-30": 8
    }  # fmt: skip
    declaring.done(site, "version add on 2 engine=simulated weights=2026-11-30")
    declaring.done(site, "route update on shadow=2:10")
    route = json.loads(declaring.done(site, "route show on --json"))
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
def test_odd_files_are_refused_in_one_line(site: adminsite.Site, text: str, said: str) -> None:
    code, told = declaring.fctl(site, "apply -f -", text)
    assert (code, said in told, told.count("\n")) == (1, True, 1), told


def test_prune_asks_before_several_go(site: adminsite.Site) -> None:
    code, told = declaring.fctl(site, "apply -f - --prune", "models: {}")
    assert (code, "Remove 2 (model chat, model code)?" in told) == (1, True), told
    assert site.registry.declared.read()[0] == 1
    assert "- model chat" in declaring.done(site, "apply -f - --prune -y", "models: {}")


def test_forebay_toml_declares_anew_only_what_has_changed_in_it(site: adminsite.Site) -> None:
    catalog = site.registry.catalog
    declaring.done(site, "version add chat v2 engine=simulated")
    declaring.done(site, "route update chat v1=40 v2=60")
    catalog.declare([adminsite.CHAT, adminsite.CODE], 5)  # a broker takes the lead again
    assert catalog.routes()["chat"].weights == {"v1": 40, "v2": 60}
    catalog.declare([dataclasses.replace(adminsite.CHAT, seats=5), adminsite.CODE], 6)
    assert catalog.routes()["chat"].weights == {"v1": 100}
    told = declaring.done(site, "history chat -n 1")
    assert "forebay.toml: forebay.toml has changed" in told
    assert "- version chat v2" in told

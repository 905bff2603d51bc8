"""A route's shadow: what is refused at registration, what is kept for it, and how what it found is shown."""

import json
from typing import Any

import pytest

from scheduler.contracts import observed
from scheduler.core import copies
from tests.unit.runtime import adminsite
from tests.unit.runtime.declaring import done, fctl

site = adminsite.site  # the fixture
SPEC = "engine=simulated seats=4"
FILE = """
models:
  talk:
    replicas: 3
    versions:
      v1: {engine: simulated, seats: 4}
      v2: {engine: simulated, seats: 4}
    route:
      versions: {v1: 100}
      shadow: {version: v2, percent: 10}
"""


def wanted(site: adminsite.Site) -> dict[tuple[str, str], int]:
    return {one.key: one.replicas for one in site.registry.catalog.deployments()}


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (
            f"{SPEC} replicas=0",
            "v2 has no endpoint (replicas = 0 and no scaling): give it replicas",
        ),
        (f"{SPEC} role=interactive", "v2 takes interactive requests alone, and copies are none"),
        (f"{SPEC} reserved_seats=4", "v2 keeps all of its seats for interactive requests"),
    ],
)
def test_a_shadow_that_could_take_no_copy_is_refused(
    site: adminsite.Site, version: str, said: str
) -> None:
    done(site, f"version add chat v2 {version}")
    code, told = fctl(site, "route update chat shadow=v2:5")
    assert (code, told.count("\n")) == (1, 1)
    assert f"models.chat.route.shadow: {said}" in told
    assert site.registry.catalog.routes()["chat"].shadow == ""


def test_an_unknown_shadow_is_refused(site: adminsite.Site) -> None:
    code, told = fctl(site, "route update chat shadow=v9:5")
    assert (code, "models.chat.route.shadow: v9 is unknown; known are: v1" in told) == (1, True)


def test_one_replica_is_kept_for_a_shadow_and_given_up_with_it(site: adminsite.Site) -> None:
    assert "shadow.version=v2, shadow.percent=10" in done(site, "apply -f -", FILE)
    assert (wanted(site)["talk", "v1"], wanted(site)["talk", "v2"]) == (3, 1)
    route = site.registry.catalog.routes()["talk"]
    assert (route.shadow, route.shadow_percent) == ("v2", 10)
    done(site, "version update talk v2 replicas=2")  # it says itself how many
    assert wanted(site)["talk", "v2"] == 2
    done(site, "version update talk v2 replicas=null")
    done(site, "route update talk v1=50 v2=50")  # it answers callers too
    assert wanted(site)["talk", "v2"] == 3
    done(site, "route update talk v1=100 shadow=none")
    assert wanted(site)["talk", "v2"] == 0


@pytest.mark.parametrize("floor", [0, 2])
def test_a_models_scaling_takes_the_last_replica_of_no_shadow(
    site: adminsite.Site, floor: int
) -> None:
    file = FILE.replace("replicas: 3", f"scaling: {{floor: {floor}, maximum: 8}}")
    done(site, "apply -f -", file)
    (shadow,) = (one for one in site.registry.catalog.deployments() if one.key == ("talk", "v2"))
    assert (shadow.replicas, shadow.scaling) == (1, None)
    done(site, "version update talk v2 'scaling={minimum: 0, maximum: 4}'")
    (shadow,) = (one for one in site.registry.catalog.deployments() if one.key == ("talk", "v2"))
    assert shadow.scaling is not None
    assert shadow.scaling.floor == 1


def test_the_same_file_twice_changes_nothing(site: adminsite.Site) -> None:
    assert "revision" in done(site, "apply -f -", FILE)
    before = site.registry.declared.read()
    serial = site.registry.declared.serial()
    assert done(site, "apply -f -", FILE) == "nothing changes\n"
    assert done(site, "apply -f - --dry-run", FILE) == "nothing changes\n"
    assert site.registry.declared.read() == before
    assert site.registry.declared.serial() == serial  # no broker looks up for it


def test_what_copies_found_is_shown(site: adminsite.Site) -> None:
    done(site, "apply -f -", FILE)
    assert "COPIES" in done(site, "route show talk")  # none yet
    found = copies.Shadows()
    caller = observed.Fared(failed=False, ttft_ms=50.0, itl_ms=5.0, total_ms=100.0, tokens=11)
    slow = observed.Fared(failed=False, ttft_ms=500.0, itl_ms=5.0, total_ms=550.0, tokens=11)
    found.note(
        site.registry.catalog.routes(),
        [observed.Copied("talk", "v1", "v2", caller, slow, observed.Match.SAME)] * 20,
        [observed.CopiesDropped("talk", "v2", "busy", 7)],
    )
    epoch = site.registry.lead.take("me", 0, 10)
    assert epoch is not None
    body: dict[str, Any] = {"shadows": found.told(site.registry.catalog.routes())}
    site.registry.journal.set_facts(epoch, 6, {"shadows": body})
    told = done(site, "route show talk")
    assert "percent: 10" in told
    for word in ("20", "busy:7", "50/500", "TTFT is worse in "):
        assert word in told
    assert "busy:7" in done(site, "show shadows")
    assert json.loads(done(site, "route show talk --json"))["copies"]["same"] == 20

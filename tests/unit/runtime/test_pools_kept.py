"""A route's pools of long prompts: what is refused at registration, and what is kept of them."""

import pytest

from scheduler.contracts import fleet, wire
from tests.unit.runtime import adminsite
from tests.unit.runtime.declaring import done, fctl

site = adminsite.site  # the fixture
FILE = """
models:
  talk:
    replicas: 3
    versions:
      v1: {engine: simulated, seats: 4, max_context: 8192}
      long: {engine: simulated, seats: 4, max_context: 32768}
    route:
      versions: {v1: 100}
      pools: [{from_tokens: 4096, version: long}]
"""


def test_a_pool_has_a_replica_and_lengthens_the_models_context(site: adminsite.Site) -> None:
    done(site, "apply -f -", FILE)
    route = site.registry.catalog.routes()["talk"]
    assert route.pools == (fleet.Pool(4096, "long", 32768),)
    assert (route.max_context, route.base_context) == (32768, 8192)
    wanted = {one.key: one.replicas for one in site.registry.catalog.deployments()}
    assert (wanted["talk", "v1"], wanted["talk", "long"]) == (3, 1)
    view = fleet.FleetView(1, 1, {"talk": route}, ())
    assert wire.view_from_pb(wire.view_to_pb(view), 0.0).routes["talk"] == route
    assert done(site, "apply -f -", FILE) == "nothing changes\n"
    assert "4096:long" in done(site, "route list")
    done(site, "route update talk pools=none")
    route = site.registry.catalog.routes()["talk"]
    assert (route.pools, route.max_context, route.base_context) == ((), 8192, 0)
    done(site, "route update talk pools=2048:long")
    assert site.registry.catalog.routes()["talk"].pools[0].from_tokens == 2048


@pytest.mark.parametrize(
    ("pools", "said"),
    [
        ("4096:nope", "nope from 4096 tokens: is unknown; known are: long, none, v1"),
        ("16384:long", "prompts of 8192 to 16384 tokens fit no version: begin at 8192"),
        ("4096:long,4096:long", "another pool begins there too: name one"),
        ("4096:long,65536:v1", "prompts of 32768 to 65536 tokens fit no version"),
        ("8192:v1", "its context is 8192: raise its max_context, or begin earlier"),
        ("4096:none", "has no endpoint (replicas = 0 and no scaling): give it replicas"),
        ("4096", "write pools=TOKENS:VERSION,... or none"),
    ],
)
def test_a_pool_that_no_prompt_would_fit_is_refused(
    site: adminsite.Site, pools: str, said: str
) -> None:
    done(site, "apply -f -", FILE)
    done(site, "version add talk none engine=simulated max_context=32768 replicas=0")
    code, told = fctl(site, f"route update talk pools={pools}")
    assert (code, said in told, told.count("\n")) == (1, True, 1), told


def test_a_version_that_is_a_pool_is_not_taken_away(site: adminsite.Site) -> None:
    done(site, "apply -f -", FILE)
    code, told = fctl(site, "version rm talk long")
    assert (code, "models.talk.route.pools: long from 4096 tokens: is unknown" in told) == (1, True)

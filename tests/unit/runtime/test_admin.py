"""/admin: who may do what, and what is refused."""

import dataclasses
import json
from typing import Any

import pytest

from scheduler.contracts import fleet, ids, requests
from scheduler.runtime import (
    admin,
    overlap,
)
from tests.unit.runtime import adminsite

site = adminsite.site  # the fixture
CHANGES = [
    ("GET", "/admin/keys", None),
    ("POST", "/admin/keys", {"team": "physics", "user": "ada"}),
    ("DELETE", "/admin/keys/abc", None),
    ("POST", "/admin/models/chat/scale", {"replicas": 2}),
    ("POST", "/admin/models/chat/hold", None),
    ("POST", "/admin/models/chat/release", None),
    ("POST", "/admin/models/chat/resume", None),
    ("POST", "/admin/replicas/r-1/drain", None),
    ("POST", "/admin/schedules/day/pause", None),
    ("DELETE", "/admin/schedules/day", None),
]
READS = ["schedules", "models", "replicas", "leases", "nodes", "queue", "plan", "events", "explain"]


@pytest.mark.parametrize(("method", "path", "body"), CHANGES)
async def test_changes_and_keys_need_an_admin(
    site: adminsite.Site, method: str, path: str, body: dict[str, Any] | None
) -> None:
    site.caller = adminsite.USER
    answer = await site.call(method, path, json=body)
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "forbidden"
    assert site.registry.keys.list() == ()
    assert [item.replicas for item in site.registry.catalog.deployments()] == [1, 0]


@pytest.mark.parametrize("what", READS)
async def test_reads_need_a_credential_and_hold_no_secret(site: adminsite.Site, what: str) -> None:
    site.caller = None
    assert (await site.call("GET", f"/admin/{what}")).status_code == 401
    site.caller = adminsite.USER
    answer = await site.call("GET", f"/admin/{what}")
    assert answer.status_code == 200
    assert "/secret/path" not in answer.text


async def test_a_key_is_made_listed_without_its_secret_and_revoked(site: adminsite.Site) -> None:
    body = {"team": "physics", "user": "ada", "tiers": ["batch"], "models": ["chat"]}
    made = await site.call("POST", "/admin/keys", json=body)
    assert made.status_code == 201
    token = made.json()["token"]
    assert site.registry.keys.find(token).tiers == (requests.Tier.BATCH,)
    listed = await site.call("GET", "/admin/keys")
    assert token not in listed.text
    assert token.rsplit("_", 1)[1] not in listed.text
    key_id = listed.json()["keys"][0]["key_id"]
    assert (await site.call("DELETE", f"/admin/keys/{key_id}")).status_code == 200
    assert site.registry.keys.find(token).revoked_us == site.time.wall_us()
    assert (await site.call("DELETE", "/admin/keys/nope")).status_code == 404


@pytest.mark.parametrize(
    "body",
    [
        {"team": "physics"},
        {"team": "p", "user": "a", "tiers": ["gold"]},
        {"team": "p", "user": "a", "x": 1},
    ],
)
async def test_a_bad_wish_makes_no_key(site: adminsite.Site, body: dict[str, Any]) -> None:
    assert (await site.call("POST", "/admin/keys", json=body)).status_code == 422
    assert site.registry.keys.list() == ()


async def test_models_say_what_is_wanted_and_what_is_there(site: adminsite.Site) -> None:
    answer = (await site.call("GET", "/admin/models")).json()
    chat, code = answer["models"]
    assert chat["versions"][0]["states"] == {"serving": 2, "starting": 1}
    assert (chat["versions"][0]["wanted"], chat["versions"][0]["weight"]) == (1, 100)
    assert (code["model"], code["versions"][0]["states"]) == ("code", {})


async def test_explain_of_an_unknown_model_is_404(site: adminsite.Site) -> None:
    assert (await site.call("GET", "/admin/explain", params={"model": "x"})).status_code == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("keys", {"team": "physics\n", "user": "ada"}),
        ("keys", {"team": "physics", "user": "\x1b[2J"}),
        ("keys", {"team": "physics", "user": "ada", "comment": "x" * 300}),
        ("keys", {"team": "physics", "user": "ada", "expires_us": 10**30}),
        ("keys", {"team": "physics", "user": "ada", "expires_us": -1}),
        ("models/chat/scale", {"replicas": 10**30}),
        ("models/chat/scale", {"replicas": admin.MAX_REPLICAS + 1}),
        ("models/chat/scale", {"replicas": 1, "version": "v\0"}),
    ],
)
async def test_wishes_that_no_registry_or_terminal_could_hold(
    site: adminsite.Site, path: str, body: dict[str, Any]
) -> None:
    answer = await site.call(
        "POST",
        f"/admin/{path}",
        content=json.dumps(body),
        headers={"Content-Type": "application/json"},
    )
    assert 400 <= answer.status_code < 500, answer.text
    assert site.registry.keys.list() == ()
    assert [item.replicas for item in site.registry.catalog.deployments()] == [1, 0]


def test_half_a_surrogate_pair_is_no_name() -> None:
    with pytest.raises(ValueError, match="unicode"):
        admin.NewKey.model_validate({"team": "physics", "user": "\ud800"})


def test_nodes_are_cordoned_and_used_again(site: adminsite.Site) -> None:
    epoch = site.registry.lead.take("me", 0, 10)
    assert epoch is not None
    node = {"name": "n1", "state": "idle", "flags": [], "gpus": 4, "gpus_free": 4, "reason": ""}
    node |= {"gres_type": "", "partitions": ["serve"], "unknown_flags": []}
    site.registry.journal.set_facts(epoch, 5, {"nodes": {"nodes": [node], "error": ""}})
    code, out, err = adminsite.fctl(site, "cordon", "n[1-2]", "fan", "noise")
    assert (code, out) == (0, "n1: cordoned\nn2: cordoned\n"), err
    assert {c.reason for c in site.registry.cordons.all().values()} == {"fan noise"}
    (line,) = (
        text for text in adminsite.fctl(site, "show", "nodes")[1].splitlines() if "n1" in text
    )
    assert "idle+cordoned" in line
    assert "fan noise" in line
    assert adminsite.fctl(site, "uncordon", "n1")[0] == 0
    assert "cordoned" not in adminsite.fctl(site, "show", "nodes")[1]
    code, _, err = adminsite.fctl(site, "uncordon", "n1")
    assert (code, "n1: not cordoned" in err) == (1, True)
    code, _, err = adminsite.fctl(site, "cordon", "n[1-", "why")
    assert (code, len(err.splitlines())) == (1, 1)
    site.caller = adminsite.USER
    assert adminsite.fctl(site, "cordon", "n1", "why")[0] == 1


async def test_prometheus_may_ask_for_the_fleet_and_for_what_rollovers_held_twice(
    site: adminsite.Site,
) -> None:
    epoch = site.registry.lead.take("me", 0, 10_000_000)
    assert epoch is not None
    lease = fleet.Lease(
        ids.LeaseId("l-000000000001"), "alpha", fleet.LeaseKind.SERVE, "forebay",
        fleet.LeaseState.RUNNING, 4,
    )  # fmt: skip
    site.registry.holdings.save_lease(epoch, lease, 1)
    told = {"leases": 3, "overlap_gpu_s": 12.5, "since_us": 7}
    site.registry.journal.set_facts(
        epoch, 1, {overlap.FACT: told, "broker": {"reports_refused": 2}}
    )
    lines = (await site.call("GET", "/admin/fleet-metrics")).text.splitlines()
    assert 'forebay_lease_gpus{kind="serve",state="running"} 4.0' in lines
    assert "forebay_rollover_overlap_gpu_seconds_total 12.5" in lines
    assert "forebay_rollover_leases_total 3.0" in lines
    assert "forebay_gateway_reports_refused_total 2.0" in lines
    site.caller = dataclasses.replace(adminsite.ADMIN, admin=False)
    assert (await site.call("GET", "/admin/fleet-metrics")).status_code == 403

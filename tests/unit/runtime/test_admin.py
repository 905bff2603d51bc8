"""/admin and the commands that use it: who may do what, and what they say."""

import dataclasses
import functools
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fastapi
import httpx
import pytest
from starlette import responses

from scheduler.contracts import clock, command_line, errors, fleet, ids, ports, requests
from scheduler.runtime import (
    admin,
    commands,
    config,
    finfo,
    fleet_routes,
    model_routes,
    overlap,
    quota_routes,
    rollout_routes,
    schedule_routes,
    show_commands,
    weights_routes,
)
from scheduler.runtime.models import service
from scheduler.runtime.registry import store
from tests import registries

ADMIN = requests.Caller("ops", "root", "k1", tuple(requests.Tier), admin=True)
USER = requests.Caller("physics", "ada", "k2")
CHAT = config.ModelSettings(name="chat", engine=fleet.EngineKind.SIMULATED, gpus=4, seats=4)
CODE = config.ModelSettings(name="code", engine=fleet.EngineKind.SIMULATED, gpus=2, replicas=0)


def replica(number: int, state: fleet.ReplicaState, role: fleet.Role) -> fleet.Replica:
    return fleet.Replica(
        replica_id=ids.ReplicaId(f"r-{number:012x}"),
        cluster="alpha",
        lease_id=ids.LeaseId("l-000000000001"),
        slot_id=ids.SlotId("l-000000000001.s0"),
        slurm_job_id="7",
        node=f"n{number}",
        spec=CHAT.spec(),
        state=state,
        role=role,
        secret_file="/secret/path",
        stats=fleet.ReplicaStats(1, 4, interactive=1, batch=2),
    )


@dataclasses.dataclass
class Site:
    registry: store.Registry
    source: ports.StaticFleet
    time: clock.FakeClock
    caller: requests.Caller | None = ADMIN

    @functools.cached_property
    def app(self) -> fastapi.FastAPI:
        app = fastapi.FastAPI()
        app.include_router(admin.router(self.registry, self.source, self.time))
        known = quota_routes.Site(self.registry, self.time, tuple, frozenset({"forebay"}))
        app.include_router(quota_routes.router(known))
        app.include_router(schedule_routes.router(self.registry, self.time))
        app.include_router(fleet_routes.router(self.registry, self.source, self.time))
        app.include_router(weights_routes.router(self.registry, self.time))
        declared = service.Site(self.registry, self.time, adapter_folders=("/adapters",))
        app.include_router(model_routes.router(declared))
        app.include_router(rollout_routes.router(declared))

        @app.exception_handler(errors.ForebayError)
        async def told(request: fastapi.Request, error: errors.ForebayError) -> Any:
            return responses.JSONResponse(error.openai(), error.status)

        @app.middleware("http")
        async def who(request: fastapi.Request, rest: Any) -> Any:
            request.state.caller = self.caller
            return await rest(request)

        return app

    async def call(self, method: str, path: str, **more: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://gateway", trust_env=False
        ) as http:
            return await http.request(method, path, **more)


@functools.cache
def standing(registry: store.Registry) -> Site:
    """Return the site of a registry that stays: most tests take less time than its application."""
    return Site(registry, ports.StaticFleet(), clock.FakeClock())


@pytest.fixture
def site(standing_registry: store.Registry) -> Site:
    registry = standing_registry
    registries.renew(registry)
    registry.catalog.declare([CHAT, CODE], 1)
    view = fleet.FleetView(
        1,
        5,
        registry.catalog.routes(),
        (
            replica(1, fleet.ReplicaState.SERVING, fleet.Role.SHARED),
            replica(2, fleet.ReplicaState.SERVING, fleet.Role.INTERACTIVE),
            replica(3, fleet.ReplicaState.STARTING, fleet.Role.SHARED),
        ),
    )
    found = standing(registry)
    # The application holds them: they stay, and are as new.
    vars(found.source).update(vars(ports.StaticFleet(view)))
    vars(found.time).update(vars(clock.FakeClock()))
    found.caller = ADMIN
    return found


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
    site: Site, method: str, path: str, body: dict[str, Any] | None
) -> None:
    site.caller = USER
    answer = await site.call(method, path, json=body)
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "forbidden"
    assert site.registry.keys.list() == ()
    assert [item.replicas for item in site.registry.catalog.deployments()] == [1, 0]


@pytest.mark.parametrize("what", READS)
async def test_reads_need_a_credential_and_hold_no_secret(site: Site, what: str) -> None:
    site.caller = None
    assert (await site.call("GET", f"/admin/{what}")).status_code == 401
    site.caller = USER
    answer = await site.call("GET", f"/admin/{what}")
    assert answer.status_code == 200
    assert "/secret/path" not in answer.text


async def test_a_key_is_made_listed_without_its_secret_and_revoked(site: Site) -> None:
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
async def test_a_bad_wish_makes_no_key(site: Site, body: dict[str, Any]) -> None:
    assert (await site.call("POST", "/admin/keys", json=body)).status_code == 422
    assert site.registry.keys.list() == ()


async def test_models_say_what_is_wanted_and_what_is_there(site: Site) -> None:
    answer = (await site.call("GET", "/admin/models")).json()
    chat, code = answer["models"]
    assert chat["versions"][0]["states"] == {"serving": 2, "starting": 1}
    assert (chat["versions"][0]["wanted"], chat["versions"][0]["weight"]) == (1, 100)
    assert (code["model"], code["versions"][0]["states"]) == ("code", {})


async def test_explain_of_an_unknown_model_is_404(site: Site) -> None:
    assert (await site.call("GET", "/admin/explain", params={"model": "x"})).status_code == 404


class SiteApi:
    """`ports.Api` onto the routes, as the real client words refusals."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.calls: list[str] = []

    def call(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: Mapping[str, str] | None = None,
        upload: Path | None = None,
        download: Path | None = None,
    ) -> ports.ApiResponse:
        self.calls.append(f"{method} {path}")
        with fastapi_client(self.site) as http:
            answer = http.request(method, path, json=json, params=params)
        if answer.status_code >= 400:
            told = answer.json()
            fault = told["error"]["message"] if "error" in told else str(told)
            raise command_line.CommandError(fault)
        return ports.ApiResponse(answer.status_code, answer.json(), answer.content)


def fastapi_client(site: Site) -> Any:
    from fastapi import testclient

    return testclient.TestClient(site.app)


def fctl(site: Site, *argv: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = commands.fctl(argv, api=SiteApi(site), out=out, err=err)
    return code, out.getvalue(), err.getvalue()


def info(site: Site, *argv: str) -> tuple[int, list[str], str]:
    out, err = io.StringIO(), io.StringIO()
    code = finfo.finfo(argv, api=SiteApi(site), out=out, err=err)
    return code, out.getvalue().splitlines(), err.getvalue()


def test_fctl_key_create_shows_a_working_token_once(site: Site) -> None:
    code, out, err = fctl(
        site, "key", "create", "--team", "physics", "--user", "ada", "--expires", "now+30days"
    )
    assert (code, err) == (0, "")
    token = out.splitlines()[0]
    key = site.registry.keys.find(token)
    assert key.expires_us > 0
    assert "shown once" in out
    code, out, err = fctl(site, "key", "list")
    assert key.key_id in out
    assert token not in out
    code, out, err = fctl(site, "key", "revoke", key.key_id)
    assert (code, out) == (0, f"{key.key_id}: revoked\n")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["key", "create", "--team", "p", "--user", "u", "--tiers", "gold"], "no such tier"),
        (["key", "create", "--team", "p", "--user", "u", "--expires", "9pm"], "--expires"),
        (["key", "create", "--team", "p"], "--user"),
        (["show", "cows"], "invalid choice"),
        (["update", "replicas=3"], "write model=NAME"),
        (["update", "model=chat", "replicas=many"], "not a number"),
        (["update", "model=chat", "color=red"], "unknown key color"),
        (["update", "model=chat", "batch=maybe"], "hold or release"),
        (["scale", "nope", "1"], "not deployed here"),
        (["doctor"], "run it on a host that reaches Slurm"),
        (["drain", "r-1,r-2"], "Nobody to ask here"),
    ],
)
def test_fctl_errors_are_one_line(site: Site, argv: list[str], message: str) -> None:
    code, out, err = fctl(site, *argv)
    assert code == 1
    assert out == ""
    assert err.startswith("fctl: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_fctl_changes_become_wishes(site: Site) -> None:
    assert fctl(site, "scale", "chat", "3") == (0, "chat: 3 replicas wanted\n", "")
    assert fctl(site, "hold", "chat")[0] == 0
    chat = site.registry.catalog.deployments()[0]
    assert (chat.replicas, chat.hold_batch) == (3, True)
    code, _, _ = fctl(site, "update", "model=chat", "replicas=1", "batch=release")
    chat = site.registry.catalog.deployments()[0]
    assert (code, chat.replicas, chat.hold_batch) == (0, 1, False)


def test_fctl_show_prints_tables_lines_and_json(site: Site) -> None:
    code, out, _ = fctl(site, "show", "replicas")
    assert code == 0
    assert out.splitlines()[0].split() == [
        *(
            "REPLICA",
            "MODEL",
            "VERSION",
            "STATE",
            "ROLE",
            "SEATS",
            "GPUS",
            "LEASE",
            "NODE",
            "REASON",
        )
    ]
    assert "1+2/4" in out
    code, out, _ = fctl(site, "show", "models", "-o")
    assert out.splitlines()[0].startswith("model=chat version=v1 wanted=1 lent=0 serving=2")
    code, out, _ = fctl(site, "show", "models", "--json")
    assert json.loads(out)["models"][0]["model"] == "chat"
    code, out, _ = fctl(site, "show", "replicas", "r-000000000002")
    assert len(out.splitlines()) == 2
    code, out, err = fctl(site, "show", "replicas", "nope")
    assert (code, "no such thing" in err) == (1, True)
    for kind in show_commands.KINDS:
        assert fctl(site, "show", kind)[0] == 0


def test_fctl_explain_tells_the_last_plan_and_why(site: Site) -> None:
    epoch = site.registry.lead.take("me", 0, 10)
    assert epoch is not None
    plan = {"actions": [{"act": "SetRole", "what": "r-1: rung 1", "outcome": "done"}], "notes": []}
    site.registry.journal.add_plan(epoch, 5, plan, keep=3)
    told: dict[str, Any] = {"epoch": 1, "address": "h:1", "slurm": "answers"}
    told["notes"] = ["chat: waiting"]
    told["targets"] = [
        {"model": "chat", "version": "v1", "need": 3, "lent": 1, "reason": "14.0 requests/s"},
        {"model": "code", "version": "v1", "need": 2, "lent": 0, "reason": "floor 2"},
    ]
    rolled = {"leases": 3, "overlap_gpu_s": 5400.0, "since_us": 0}
    site.registry.journal.set_facts(epoch, 6, {"broker": told, "rollover": rolled})
    code, out, _ = fctl(site, "explain", "chat")
    assert code == 0
    assert "rollover: 3 leases replaced since" in out
    assert "1.50 GPU-hours of overlap" in out
    assert "  3 needed, 1 lent to batch: 14.0 requests/s" in out
    assert "code v1" not in out
    wants = fctl(site, "show", "plan")[1].splitlines()[1]
    assert "wants" in wants
    assert "chat v1: 3 needed, 1 lent to batch" in wants
    assert "14.0 requests/s" in wants
    assert "broker: epoch 1 at h:1, Slurm answers" in out
    assert "chat v1: 1 wanted, 2 serving, 1 starting" in out
    assert "note: chat: waiting" in out
    assert "SetRole r-1: rung 1 [done]" in out


def test_fctl_doctor_is_the_one_that_was_given(site: Site) -> None:
    out, err = io.StringIO(), io.StringIO()

    def doctor(stream: Any, as_json: bool) -> int:
        assert not as_json
        print("KillWait=30: fine", file=stream)
        return 3

    code = commands.fctl(
        ["doctor"], api=SiteApi(site), out=out, err=err, here=commands.Here(doctor=doctor)
    )
    assert (code, out.getvalue()) == (3, "KillWait=30: fine\n")


def test_finfo_has_sinfos_shape_with_tiers(site: Site) -> None:
    code, lines, _ = info(site)
    assert code == 0
    assert lines[0].split() == [
        "TIER",
        "MODEL",
        "AVAIL",
        "REPLICAS",
        "SEATS",
        "GPUS",
        "STATE",
        "NODELIST",
    ]
    rows = [line.split() for line in lines[1:]]
    assert ["interactive", "chat", "up", "2", "8", "8", "serving", "n[1-2]"] in rows
    assert ["batch", "chat", "up", "1", "4", "4", "serving", "n1"] in rows  # n2 is interactive now
    assert ["standard", "code", "down", "0", "0", "0", "absent"] in rows


def test_finfo_options(site: Site) -> None:
    _, lines, _ = info(site, "-s", "-p", "interactive", "-n")
    assert lines[0].split() == ["interactive", "chat", "up", "2/1/0/3", "12", "n[1-3]"]
    _, lines, _ = info(site, "-N", "-t", "starting", "-p", "batch", "-n")
    assert [line.split()[0] for line in lines] == ["n3"]
    _, lines, _ = info(site, "-o", "%P|%5m|%.4D", "-t", "starting", "-p", "batch")
    assert lines == ["TIER|MODEL|REPL", "batch|chat |   1"]
    code, _, err = info(site, "-o", "%Q")
    assert (code, "no such column" in err) == (1, True)
    code, lines, err = info(site, "-t", "bogus")
    assert (code, lines) == (1, [])
    assert "-t bogus: no such thing; known are starting, warm" in err
    assert info(site, "-p", "interactive,gold")[0] == 1
    _, lines, _ = info(site, "--json")
    assert len(json.loads("\n".join(lines))["replicas"]) == 3 + 3 + 2 + 3


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
    site: Site, path: str, body: dict[str, Any]
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


def test_nodes_are_cordoned_and_used_again(site: Site) -> None:
    epoch = site.registry.lead.take("me", 0, 10)
    assert epoch is not None
    node = {"name": "n1", "state": "idle", "flags": [], "gpus": 4, "gpus_free": 4, "reason": ""}
    node |= {"gres_type": "", "partitions": ["serve"], "unknown_flags": []}
    site.registry.journal.set_facts(epoch, 5, {"nodes": {"nodes": [node], "error": ""}})
    code, out, err = fctl(site, "cordon", "n[1-2]", "fan", "noise")
    assert (code, out) == (0, "n1: cordoned\nn2: cordoned\n"), err
    assert {c.reason for c in site.registry.cordons.all().values()} == {"fan noise"}
    (line,) = (text for text in fctl(site, "show", "nodes")[1].splitlines() if "n1" in text)
    assert "idle+cordoned" in line
    assert "fan noise" in line
    assert fctl(site, "uncordon", "n1")[0] == 0
    assert "cordoned" not in fctl(site, "show", "nodes")[1]
    code, _, err = fctl(site, "uncordon", "n1")
    assert (code, "n1: not cordoned" in err) == (1, True)
    code, _, err = fctl(site, "cordon", "n[1-", "why")
    assert (code, len(err.splitlines())) == (1, 1)
    site.caller = USER
    assert fctl(site, "cordon", "n1", "why")[0] == 1


async def test_prometheus_may_ask_for_the_fleet_and_for_what_rollovers_held_twice(
    site: Site,
) -> None:
    epoch = site.registry.lead.take("me", 0, 10_000_000)
    assert epoch is not None
    lease = fleet.Lease(
        ids.LeaseId("l-000000000001"), "alpha", fleet.LeaseKind.SERVE, "forebay",
        fleet.LeaseState.RUNNING, 4,
    )  # fmt: skip
    site.registry.holdings.save_lease(epoch, lease, 1)
    told = {"leases": 3, "overlap_gpu_s": 12.5, "since_us": 7}
    site.registry.journal.set_facts(epoch, 1, {overlap.FACT: told})
    lines = (await site.call("GET", "/admin/fleet-metrics")).text.splitlines()
    assert 'forebay_lease_gpus{kind="serve",state="running"} 4.0' in lines
    assert "forebay_rollover_overlap_gpu_seconds_total 12.5" in lines
    assert "forebay_rollover_leases_total 3.0" in lines
    site.caller = dataclasses.replace(ADMIN, admin=False)
    assert (await site.call("GET", "/admin/fleet-metrics")).status_code == 403

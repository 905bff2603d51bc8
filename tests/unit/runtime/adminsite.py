"""A site's /admin routes over a registry, a fleet and a clock, and the commands that speak to them."""

import dataclasses
import functools
import io
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
    quota_routes,
    rollout_routes,
    schedule_routes,
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


def _declare(registry: store.Registry) -> None:
    registry.catalog.declare([CHAT, CODE], 1)


@pytest.fixture
def site(standing_registry: store.Registry) -> Site:
    registry = standing_registry
    registries.renew(registry, registries.filled(_declare))
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

"""What the tests of facct and freport have in common: their way to the routes, and a world to ask about."""

import datetime
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fastapi
import pytest
from fastapi import testclient

from accounting import (
    billing,
    billing_routes,
    facct,
    freport,
    rates,
    routes,
    settings,
)
from scheduler.contracts import clock, ports, requests
from scheduler.contracts.command_line import CommandError
from tests.unit.accounting import world

NOW = datetime.datetime(2026, 11, 27, 12, 30, tzinfo=datetime.UTC)
JOB = {"job_id": 12, "state": "RUNNING", "name": "nightly", "reason": "", "lines": {"total": 9}}
WAITING = {  # whose lines nobody has sent anywhere yet
    "job_id": 13, "team": "blue", "user": "bob", "model": "chat", "state": "PENDING", "name": "later",
    "reason": "Priority", "lines": {"total": 4}, "ended_us": 0, "submitted_us": world.NOON,
}  # fmt: skip


class Gateway:
    """The commands' way to a real router, as one caller."""

    def __init__(self, state: Path, caller: requests.Caller) -> None:
        app = fastapi.FastAPI()
        port: Any = world.Books()
        app.include_router(routes.router(state, port=port, accounts=world.AccountBooks()))
        table = settings.Accounting()
        app.include_router(billing_routes.router(state, table=table, time=clock.FakeClock()))

        @app.middleware("http")
        async def _who(request: fastapi.Request, forward: Any) -> Any:
            request.state.caller = caller
            return await forward(request)

        @app.get("/forebay/v1/jobs")
        async def _jobs(ids: str) -> dict[str, Any]:
            return {"jobs": [job for job in (JOB, WAITING) if str(job["job_id"]) in ids.split(",")]}

        self.client = testclient.TestClient(app)

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
        answer = self.client.request(method, path, params=params)
        if answer.status_code >= 400:
            raise CommandError(answer.json()["error"]["message"])
        return ports.ApiResponse(answer.status_code, answer.json(), answer.content)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


Run = Callable[..., str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    state = tmp_path_factory.mktemp("state")
    world.write(state)
    prices = {
        rates.Use.UNCACHED: 500_000,
        rates.Use.OUTPUT: 1_500_000,
        rates.Use.GPU: 3_600_000_000,
    }
    billing.Billing(state, settings.Accounting()).add_rates(
        rates.body("*", "*", prices, 1), author="ops", reason="first list", now_us=world.NOON
    )
    ways: dict[requests.Caller, Gateway] = {}

    def call(
        line: str,
        *,
        who: requests.Caller = world.ADMIN,
        code: int = 0,
        terminal: bool = False,
        **env: str,
    ) -> str:
        prog, *argv = line.split()
        out, err = Terminal() if terminal else io.StringIO(), io.StringIO()
        main = {"facct": facct.facct, "freport": freport.freport}[prog]
        if who not in ways:
            ways[who] = Gateway(state, who)
        way = ways[who]
        done = main(argv, api=way, out=out, err=err, env=env, now=NOW, tz=datetime.UTC)
        text = out.getvalue() + err.getvalue()
        assert done == code, text
        return text

    return call

"""fctl rate, adjust and close-month: what an admin types, and what nobody else may."""

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fastapi
import pytest
from fastapi import testclient

from accounting import billing_routes, routes, settings, ship
from scheduler.contracts import clock, ports, requests
from scheduler.contracts.command_line import CommandError
from scheduler.runtime import commands
from tests.unit.accounting import world

Run = Callable[..., str]
DAY_US = 86_400_000_000


class Gateway:
    """The commands' way to the real routers, as one caller."""

    def __init__(self, state: Path, time: clock.FakeClock, caller: requests.Caller) -> None:
        app = fastapi.FastAPI()
        table = settings.Accounting()
        app.include_router(routes.router(state, table=table))
        app.include_router(billing_routes.router(state, table=table, time=time))

        @app.middleware("http")
        async def _who(request: fastapi.Request, forward: Any) -> Any:
            request.state.caller = caller
            return await forward(request)

        self.client = testclient.TestClient(app)

    def call(
        self, method: str, path: str, *, json: Any = None,
        params: Mapping[str, str] | None = None, **_: Any,
    ) -> ports.ApiResponse:  # fmt: skip
        answer = self.client.request(method, path, json=json, params=params)
        if answer.status_code >= 400:
            body = answer.json()
            raise CommandError(body["error"]["message"] if "error" in body else str(body["detail"]))
        return ports.ApiResponse(answer.status_code, answer.json(), answer.content)


@pytest.fixture
def time() -> clock.FakeClock:
    return clock.FakeClock(world.NOON)


@pytest.fixture
def run(tmp_path: Path, time: clock.FakeClock, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("TZ", "UTC")
    world.write(tmp_path)

    def call(
        line: str, *more: str, who: requests.Caller = world.ADMIN, code: int = 0, answer: str = ""
    ) -> str:
        out, err = io.StringIO(), io.StringIO()
        api = Gateway(tmp_path, time, who)
        done = commands.fctl(
            [*line.split(), *more], api=api, out=out, err=err, stdin=io.StringIO(answer)
        )
        text = out.getvalue() + err.getvalue()
        assert done == code, text
        return text

    return call


def test_rates_are_added_and_shown(run: Run) -> None:
    assert run(
        "rate add uncached=0.5 OUT=1.5 from=2026-11-27T12:00:00", "reason=the first list"
    ) == (
        "model *, tier *: output 1.50 from 2026-11-27T12:00:00\n"
        "model *, tier *: uncached 0.50 from 2026-11-27T12:00:00\n"
    )
    run("rate add set model=chat tier=batch output=0.75 from=2098-01-01 --reason cheaper")
    assert run("rate show -P -n -o model,tier,what,price,for,from,state,author,reason") == (
        "*|*|uncached|0.50|1000 tokens|2026-11-27T12:00:00|now|root|the first list\n"
        "*|*|output|1.50|1000 tokens|2026-11-27T12:00:00|now|root|the first list\n"
        "chat|batch|output|0.75|1000 tokens|2098-01-01T00:00:00|future|root|cheaper\n"
    )
    assert run("rate show other -P -n -o model") == "*\n*\n"
    assert len(json.loads(run("rate show --json", who=world.ANN))["rates"]) == 3


def test_adjustments_and_closed_months(run: Run, time: clock.FakeClock, tmp_path: Path) -> None:
    run("rate add output=1000 from=2026-11-01 -r x")
    done = run("adjust red -2.50 --month 2026-11 -r", "outage of the 3rd")
    assert done == "red: -2.50 on the bill of 2026-11\n"
    assert "has not ended" in run("close-month 2026-11 -y", code=1)
    time.step_wall(5 * DAY_US)
    assert "spool segments that began before its end are not shipped" in run(
        "close-month 2026-11 -y", code=1
    )
    ship.ship(tmp_path, time)
    assert run("close-month 2026-11", code=1).startswith("fctl: error: Close 2026-11 for good?")
    # red pays 10 output tokens and blue 14, at one a token
    assert run("close-month 2026-11 -y") == "2026-11 is closed: 8 lines, 21.50\n"
    assert "closed already" in run("close-month 2026-11 -y", code=1)
    assert run("adjust red 1 --month 2026-11 -r late") == (
        "red: 1.00 on the bill of 2026-12, since 2026-11 is closed\n"
    )


@pytest.mark.parametrize(
    "line",
    ["rate add output=1 -r x", "adjust red 5 --month 2026-11 -r x", "close-month 2026-10 -y"],
)
@pytest.mark.parametrize("who", [world.ANN, world.BOB])
def test_only_admins_decide_about_money(run: Run, line: str, who: requests.Caller) -> None:
    assert "is no admin: ask one to do this" in run(line, who=who, code=1)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("rate add output=1", "say why"),
        ("rate add -r x model=chat", "no price given"),
        ("rate add -r x output=1,5", "output: invalid amount '1,5'"),
        ("rate add -r x output=-1", "output: a price can't be negative"),
        ("rate add -r x colour=1", "colour=1: write KEY=VALUE"),
        ("rate add -r x output=1 from=9pm", "from: invalid time '9pm'"),
        ("rate add -r x output=1 tier=gold", "tier=gold: no such tier"),
        ("adjust red five -r x", "amount: invalid amount 'five'"),
        ("adjust rde 5 --month 2026-11 -r x", "team rde: nothing is recorded of it"),
        ("rate add output=1000000.01 -r x", "is more than 1000000 for 1,000 tokens"),
        ("rate add gpuhour=9999999999 -r x", "more than 1000000"),
        ("adjust red 0 --month 2026-11 -r x", "an adjustment of nothing"),
        ("adjust red 1 --month 2026-13 -r x", "invalid month '2026-13'"),
        ("adjust red 1 --month 2026-11", "required: -r/--reason"),
        ("close-month november -y", "invalid month 'november'"),
        ("close-month 1969-12 -y", "nothing is recorded before 1970"),
    ],
)
def test_bad_words_are_one_line(run: Run, line: str, words: str) -> None:
    text = run(line, code=1)
    assert text.startswith("fctl: error: ")
    assert words in text
    assert text.count("\n") == 1

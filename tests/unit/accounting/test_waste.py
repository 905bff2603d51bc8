"""freport waste: GPU time that answered nobody, by cause, and what rollovers held twice beside it."""

import datetime
import io
from pathlib import Path
from typing import Any

import fastapi
import httpx

from accounting import freport, routes, settings, ship, spool
from scheduler.contracts import clock, ports, requests
from tests.unit.accounting import samples, world

HOUR = 3_600_000_000
SECOND = 1_000_000
NOON = samples.NOON - samples.NOON % HOUR


def write(state: Path) -> None:
    writer = spool.Spool(state / "spool" / "agent", "agent", clock=clock.FakeClock())
    for minute in range(2):
        begin = NOON + minute * 60 * SECOND
        state_word = "starting" if minute == 0 else "serving"
        writer.append(samples.gpu(minute, 60, start_us=begin))
        writer.append(
            samples.replica(state_word, begin, begin + 60 * SECOND, seq=minute, gpus=3, measured=1)
        )
    writer.append(samples.gpu(10**9, 150, start_us=NOON, lost=1))
    writer.close()
    ship.ship(state, clock.FakeClock(NOON + HOUR))


async def ask(state: Path, caller: requests.Caller, **params: Any) -> httpx.Response:
    app = fastapi.FastAPI()
    overlaps = {NOON: 7 * SECOND, NOON - 5 * HOUR: 99 * SECOND}
    app.include_router(routes.router(state, table=settings.Accounting(), overlaps=lambda: overlaps))

    @app.middleware("http")
    async def _who(request: fastapi.Request, forward: Any) -> Any:
        request.state.caller = caller
        return await forward(request)

    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://forebay", trust_env=False
    ) as client:
        span = {"start_us": NOON, "end_us": NOON + HOUR}
        return await client.get("/forebay/v1/usage/waste", params=span | params)


async def test_every_cause_has_a_row_and_with_what_was_attributed_they_are_all(
    tmp_path: Path,
) -> None:
    write(tmp_path)
    answer = (await ask(tmp_path, world.ADMIN, unit="hour")).json()
    assert answer["problems"] == []
    found = {(row["kind"], row["why"]): row["gpu_us"] for row in answer["rows"]}
    assert found == {
        ("idle", ""): 3 * 60 * SECOND,
        ("idle", "unassigned"): 2 * 60 * SECOND,
        ("start-up", ""): 3 * 60 * SECOND,
        ("waste", "lost"): 4 * 30 * SECOND,
        ("overlap", "rollover"): 7 * SECOND,
    }
    assert answer["rows"][-1]["kind"] == "overlap"
    parts = sum(us for (kind, _), us in found.items() if kind != "overlap")
    assert {row["allocated_us"] for row in answer["rows"]} == {parts}
    assert parts == 4 * 150 * SECOND


async def test_it_is_for_admins_and_without_filters(tmp_path: Path) -> None:
    write(tmp_path)
    assert (await ask(tmp_path, world.ANN)).status_code == 403
    assert (await ask(tmp_path, world.ADMIN, team="red")).status_code == 403
    assert (await ask(tmp_path, world.ADMIN, unit="week")).status_code == 400


def test_freport_prints_it() -> None:
    rows = [
        {
            "start_us": NOON,
            "kind": "waste",
            "why": "lost",
            "gpu_us": 2 * HOUR,
            "allocated_us": 8 * HOUR,
        }
    ]

    class Api:
        def call(self, method: str, path: str, **more: Any) -> ports.ApiResponse:
            assert path == "/forebay/v1/usage/waste"
            assert more["params"]["unit"] == "hour"
            return ports.ApiResponse(200, {"rows": rows, "problems": [], "truncated": False}, b"")

    def run(*argv: str) -> str:
        out, err = io.StringIO(), io.StringIO()
        now = datetime.datetime.fromtimestamp(NOON / 1e6, datetime.UTC)
        code = freport.freport(
            argv, api=Api(), out=out, err=err, env={}, now=now, tz=datetime.UTC
        )  # fmt: skip
        assert code == 0, err.getvalue()
        return out.getvalue()

    assert run("waste", "by", "hour", "-S", "today", "-t", "Hours", "-P", "-n").endswith(
        "|waste|lost|2.00\n"
    )
    assert run("waste", "by", "hour", "-S", "today", "-t", "Percent", "-P", "-n").endswith(
        "|25.00\n"
    )
    assert "by hour and cause" in run("waste", "by", "hour", "-S", "today")

"""The usage API: who sees what, sums that add up, and clear refusals."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastapi
import httpx
import pytest

from accounting import routes, settings, ship, spool
from scheduler.contracts import clock, errors, requests
from tests.unit.accounting import samples, world

SECOND, NOON = world.SECOND, world.NOON
ADMIN, ANN, BOB = world.ADMIN, world.ANN, world.BOB


@pytest.fixture(scope="module", params=["live", "shipped"])
def state(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp_path = tmp_path_factory.mktemp("state")
    world.write(tmp_path)
    if request.param == "shipped":
        ship.ship(tmp_path, clock.FakeClock())
    return tmp_path


Get = Callable[..., Any]


async def ask(
    state: Path, path: str, caller: requests.Caller = ADMIN, *, code: int = 200, **params: Any
) -> Any:
    app = fastapi.FastAPI()
    table = settings.Accounting(rows_at_most=params.pop("rows_at_most", 1000))
    port: Any = params.pop("port", None)
    app.include_router(routes.router(state, table=table, port=port))

    @app.middleware("http")
    async def _who(request: fastapi.Request, forward: Any) -> Any:
        request.state.caller = caller
        return await forward(request)

    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://forebay", trust_env=False
    ) as client:
        answer = await client.get(f"/forebay/v1/usage/{path}", params=params)
    assert answer.status_code == code, answer.text
    return answer.json()


@pytest.fixture
def get(state: Path) -> Get:
    return functools.partial(ask, state)


async def test_a_request_is_one_row_with_all_its_attempts(get: Get) -> None:
    answer = await get("requests", ANN)
    assert len(answer["rows"]) == 1
    row = answer["rows"][0]
    assert (row["request_id"], row["outcome"], row["attempts"]) == ("q1", "ok", 2)
    assert (row["output_tokens"], row["uncached_prompt_tokens"], row["platform_tokens"]) == (
        14,
        8,
        4,
    )
    assert (row["started_us"], row["ended_us"]) == (NOON, NOON + SECOND)
    assert answer["problems"] == []
    assert answer["truncated"] is False


async def test_every_attempt_on_demand(get: Get) -> None:
    rows = (await get("requests", ANN, attempts="1"))["rows"]
    assert [(row["attempt"], row["outcome"], row["output_tokens"]) for row in rows] == [
        (1, "replica_lost", 4),
        (2, "ok", 10),
    ]


async def test_own_rows_team_rows_all_rows(get: Get) -> None:
    async def seen(caller: requests.Caller, **params: str) -> set[str]:
        return {row["request_id"] for row in (await get("requests", caller, **params))["rows"]}

    assert await seen(ANN) == {"q1"}
    assert await seen(ANN, team="blue", user="bob") == set()
    assert await seen(BOB) == {"b2", "b3"}
    assert await seen(ADMIN) == {"q1", "b2", "b3", "r1"}
    assert await seen(ADMIN, team="red", outcome="refused") == {"r1"}
    assert await seen(ADMIN, job="12") == {"b2", "b3"}
    assert await seen(ADMIN, job="q1,b3") == {"q1", "b3"}
    assert await seen(ADMIN, job="x' OR '1'='1") == set()
    assert await seen(ADMIN, lines="0") == {"q1", "r1"}


async def test_a_batch_job_counts_each_line_once(get: Get) -> None:
    (row,) = (await get("jobs", BOB))["rows"]
    assert (row["lines"], row["ok"], row["open"], row["preempted"], row["attempts"]) == (
        2,
        2,
        0,
        1,
        3,
    )
    assert (row["output_tokens"], row["platform_tokens"]) == (17, 9)
    assert (await get("jobs", ANN))["rows"] == []


async def test_leases_are_the_teams_business(get: Get) -> None:
    (row,) = (await get("leases"))["rows"]
    assert (row["lease_id"], row["gpu_us"]) == ("l-1", 40 * SECOND)
    assert (await get("leases", BOB))["rows"] == []
    refusal = await get("leases", ANN, code=403)
    assert "coordinator" in refusal["error"]["message"]
    clipped = await get("leases", start_us=NOON + 2 * SECOND, end_us=NOON + 3 * SECOND)
    assert clipped["rows"][0]["gpu_us"] == 4 * SECOND


async def test_idle_time_is_shared_out_if_asked_for(get: Get) -> None:
    window = {"by": "team", "start_us": NOON, "end_us": NOON + 10 * SECOND}
    plain = {(row["what"], row["team"]): row for row in (await get("rollup", **window))["rows"]}
    rows = (await get("rollup", **window, idle="use"))["rows"]
    shared = {(row["what"], row["team"]): row["gpu_us"] for row in rows}
    assert ("idle", "") not in shared
    assert sum(shared.values()) == 40 * SECOND
    idle, used = plain["idle", ""]["gpu_us"], plain["used", "red"]["gpu_us"]
    both = used + plain["used", "blue"]["gpu_us"]
    assert abs(shared["used", "red"] - used - idle * used / both) <= 1
    assert shared["waste", ""] == plain["waste", ""]["gpu_us"]


async def test_a_rollup_adds_up_to_what_was_allocated(get: Get) -> None:
    rows = (await get("rollup", by="team", start_us=NOON, end_us=NOON + 10 * SECOND))["rows"]
    by = {(row["what"], row["team"]): row for row in rows}
    assert sum(row["gpu_us"] for row in rows) == 40 * SECOND
    assert by["used", "blue"]["output_tokens"] == 14
    assert by["used", "blue"]["platform_tokens"] == 9
    assert (by["used", "red"]["requests"], by["used", "red"]["attempts"]) == (2, 3)
    assert by["used", "red"]["refused"] == 1
    assert by["used", "red"]["gpu_us"] == 4 * (SECOND - 10)
    assert by["used", "blue"]["gpu_us"] == 4 * SECOND
    assert by["waste", ""]["gpu_us"] == 4 * SECOND + 4 * 9
    assert by["idle", ""]["gpu_us"] == 28 * SECOND + 4


async def test_names_like_numbers_or_null_are_teams_of_their_own_a7(tmp_path: Path) -> None:
    """Case A7: strings in JSON; team `a:b` with key `c` is not team `a` with key `b:c`."""
    names = ["007", "7", "1e3", "NULL", "a:b", "a"]
    sink = spool.Spool(tmp_path / "spool" / "gateway", "gateway", clock=clock.FakeClock())
    for number, team in enumerate(names):
        key = "b:c" if team == "a" else "c"
        more: dict[str, Any] = {
            "team": team,
            "user": team,
            "key_id": key,
            "output_tokens": number + 1,
        }
        sink.append(samples.row("close", f"q{number}", **more))
    sink.close()
    span: dict[str, Any] = {"start_us": NOON, "end_us": NOON + 10 * SECOND}
    for _ in range(2):
        for by in ("team", "user"):
            rows = (await ask(tmp_path, "rollup", by=by, **span))["rows"]
            used = {row["team"]: row["output_tokens"] for row in rows if row["what"] == "used"}
            assert used == {team: number + 1 for number, team in enumerate(names)}
        rows = (await ask(tmp_path, "requests", **span))["rows"]
        assert sorted((row["team"], row["key_id"]) for row in rows) == sorted(
            (team, "b:c" if team == "a" else "c") for team in names
        )
        for team in names:
            one = requests.Caller(team, team, "k", coordinator=True)
            mine = (await ask(tmp_path, "requests", one, **span))["rows"]
            assert [row["team"] for row in mine] == [team]
        ship.ship(tmp_path, clock.FakeClock())


async def test_a_coordinators_rollup_holds_their_team_only(get: Get) -> None:
    rows = (await get("rollup", BOB, by="user", start_us=NOON, end_us=NOON + 10 * SECOND))["rows"]
    assert [(row["team"], row["user"], row["what"]) for row in rows] == [("blue", "bob", "used")]


@pytest.mark.parametrize("by", ["cluster", "model", "tier"])
async def test_other_groups_have_the_same_sum(get: Get, by: str) -> None:
    rows = (await get("rollup", by=by, unit="hour", start_us=NOON, end_us=NOON + 3600 * SECOND))[
        "rows"
    ]
    assert sum(row["gpu_us"] for row in rows) == 40 * SECOND
    assert sum(row["output_tokens"] for row in rows) == 24


async def test_reconcile_shows_both_books(get: Get) -> None:
    (row,) = (await get("reconcile", port=world.Books()))["rows"]
    assert (row["forebay_us"], row["sacct_us"], row["agrees"]) == (40 * SECOND, 40 * SECOND, True)
    await get("reconcile", code=404)


async def test_more_rows_than_allowed_are_told(get: Get) -> None:
    answer = await get("requests", rows_at_most=2)
    assert (len(answer["rows"]), answer["truncated"]) == (2, True)


@pytest.mark.parametrize(
    ("path", "params"),
    [
        ("requests", {"start_us": "yesterday"}),
        ("requests", {"start_us": "5", "end_us": "5"}),
        ("requests", {"end_us": str(2**64)}),
        ("rollup", {"by": "planet", "start_us": NOON, "end_us": NOON + 1}),
        ("rollup", {"unit": "week", "start_us": NOON, "end_us": NOON + 1}),
        ("rollup", {"tz": "Mars/Olympus", "start_us": NOON, "end_us": NOON + 1}),
    ],
)
async def test_bad_parameters_are_one_clear_line(
    get: Get, path: str, params: dict[str, Any]
) -> None:
    error = (await get(path, code=400, **params))["error"]
    assert error["code"] == errors.BadRequest.code
    assert "\n" not in error["message"]


async def test_what_was_computed_again_is_the_platforms_and_costs_nothing(tmp_path: Path) -> None:
    """A resumed attempt's waste is told beside the team's own tokens, by request and in reports."""
    sink = spool.Spool(tmp_path / "spool" / "gateway", "gateway", clock=clock.FakeClock())
    sink.append(samples.row("close", "q1", 1, outcome="replica_lost", output_tokens=4))
    sink.append(samples.row("close", "q1", 2, output_tokens=6, waste_tokens=12))
    sink.close()
    span: dict[str, Any] = {"start_us": NOON, "end_us": NOON + 10 * SECOND}
    (row,) = (await ask(tmp_path, "requests", **span))["rows"]
    assert (row["output_tokens"], row["platform_tokens"]) == (10, 12)
    (row,) = (await ask(tmp_path, "rollup", by="team", **span))["rows"]
    assert (row["requests"], row["attempts"]) == (1, 2)
    assert (row["output_tokens"], row["platform_tokens"]) == (10, 12)

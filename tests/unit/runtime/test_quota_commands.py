"""`fctl quota` against /admin/quotas: who may set, see and remove what, and every slip in one line."""

import asyncio
import datetime
import functools
import io
import json
from typing import Any

import fastapi
import httpx
import pytest
from starlette import responses

from scheduler.contracts import clock, command_line, errors, fleet, ports, requests, slurm
from scheduler.core import quota_limits as limits
from scheduler.runtime import commands, config, quota_routes
from scheduler.runtime.registry import keys, quotas, store
from tests import registries

ADMIN = requests.Caller("ops", "root", "k0", admin=True)
CARL = requests.Caller("physics", "carl", "k8", coordinator=True)
ADA = requests.Caller("physics", "ada", "k1")
NOON = round(datetime.datetime(2026, 11, 30, 12, tzinfo=datetime.UTC).timestamp() * 1_000_000)
DAY, MONTH = (limits.window(period, NOON)[0] for period in (limits.Period.DAY, limits.Period.MONTH))
PEOPLE = (
    slurm.Association("", "physics"),
    slurm.Association("ada", "physics"),
    slurm.Association("bob", "chem"),
)


class Site:
    """A registry, the routes on it, and fctl as some caller."""

    def __init__(self, registry: store.Registry) -> None:
        self.registry = registry
        self.people: Any = PEOPLE
        self.caller = ADMIN
        known = quota_routes.Site(
            registry, clock.FakeClock(wall_us=NOON), self._associations, frozenset({"forebay"})
        )
        self.app = fastapi.FastAPI()
        self.app.include_router(quota_routes.router(known))

        @self.app.exception_handler(errors.ForebayError)
        async def told(request: fastapi.Request, error: errors.ForebayError) -> Any:
            return responses.JSONResponse(error.openai(), error.status)

        @self.app.middleware("http")
        async def who(request: fastapi.Request, rest: Any) -> Any:
            request.state.caller = self.caller
            return await rest(request)

    def _associations(self) -> tuple[slurm.Association, ...]:
        if isinstance(self.people, Exception):
            raise self.people
        found: tuple[slurm.Association, ...] = self.people
        return found

    def call(self, method: str, path: str, **more: Any) -> ports.ApiResponse:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://g", trust_env=False
            ) as http:
                return await http.request(method, path, **more)

        answer = asyncio.run(ask())
        if answer.status_code >= 400:
            fault = answer.json()
            raise command_line.CommandError(
                fault["error"]["message"] if "error" in fault else str(fault["detail"])
            )
        return ports.ApiResponse(answer.status_code, answer.json(), answer.content)

    def fctl(self, line: str) -> tuple[int, str]:
        out, err = io.StringIO(), io.StringIO()
        code = commands.fctl(line.split(), api=self, out=out, err=err)
        return code, out.getvalue() + err.getvalue()

    def rules(self) -> dict[str, int]:
        return {str(rule.limit.key): rule.limit.amount for rule in self.registry.quotas.rules()}


standing = functools.cache(Site)


def _people(registry: store.Registry) -> None:
    registry.catalog.declare(
        [config.ModelSettings(name="chat", engine=fleet.EngineKind.SIMULATED)], 0
    )
    registry.keys.put(keys.Key("", "physics", "ada", (requests.Tier.BATCH,)), "fbk_k1_s", 0)
    registry.keys.put(keys.Key("", "chem", "bob", (requests.Tier.BATCH,)), "fbk_k2_s", 0)


@pytest.fixture
def site(standing_registry: store.Registry) -> Site:
    registry = standing_registry
    registries.renew(registry, registries.filled(_people))
    found = standing(registry)
    found.people, found.caller = PEOPLE, ADMIN
    return found


def test_set_show_and_remove(site: Site) -> None:
    code, said = site.fctl(
        "quota set team=physics tokens_per_day=20M cost_per_month=12.5 --reason why"
    )
    assert (code, said) == (
        0,
        "team physics: tokens_per_day 20000000\nteam physics: cost_per_month 12.50\n",
    )
    assert (
        site.fctl("budget set account=physics user=ada model=chat tier=batch concurrent=8")[0] == 0
    )
    day = limits.Key(limits.Scope.TEAM, "physics", "", "", "", limits.Kind.TOKENS_PER_DAY)
    money = day._replace(kind=limits.Kind.COST_PER_MONTH)
    told = quotas.Report("o", 1, {(day, DAY): 17_000_000, (money, MONTH): 1_250_000})
    site.registry.quotas.exchange(told, (0, 0), NOON)
    site.registry.quotas.correct({(day, DAY): -5}, {}, NOON)
    _, shown = site.fctl("quota show team=physics")
    assert site.fctl("show quotas")[1] == shown
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert lines[0].startswith("TEAM FOR MODEL TIER KIND LIMIT USED SHARE STATE")
    assert lines[1].startswith("physics team all all cost_per_month 12.50 1.25 10% ok")
    assert lines[2].startswith("physics team all all tokens_per_day 20000000 16999995 84% warning")
    assert lines[2].endswith("-5 root why")
    assert lines[3].startswith("physics user ada chat batch concurrent 8 0")
    assert site.fctl("quota rm team=physics user=ada model=chat tier=batch concurrent")[0] == 0
    assert site.fctl("quota rm team=physics all")[0] == 0
    assert site.rules() == {}
    assert site.fctl("quota show") == (0, "no quotas\n")
    _, told_back = site.fctl("quota history")
    assert len(told_back.splitlines()) == 1 + 6
    assert "removed" in told_back


def test_minus_one_clears_and_json_is_whole(site: Site) -> None:
    site.fctl("quota set team=physics tokens_per_day=5 concurrent=2 --soft")
    site.fctl("quota set team=physics tokens_per_day=-1")
    row = json.loads(site.fctl("quota show --json")[1])["quotas"][0]
    assert row == {
        "scope": "team", "team": "physics", "name": "", "model": "", "tier": "", "kind": "concurrent",
        "of": "", "amount": 2, "hard": False, "author": "root", "reason": "", "created_us": NOON,
        "used": 0, "state": "ok", "drift": 0, "checked_us": 0, "resets_us": 0,
    }  # fmt: skip


def test_each_user_under_a_common_limit_has_a_row(site: Site) -> None:
    site.fctl("quota set team=physics user=* tokens_per_day=100")
    ada = limits.Key(limits.Scope.USER, "physics", "ada", "", "", limits.Kind.TOKENS_PER_DAY)
    site.registry.quotas.exchange(quotas.Report("o", 1, {(ada, DAY): 100}), (0, 0), NOON)
    rows = json.loads(site.fctl("quota show --json")[1])["quotas"]
    assert [(row["name"], row["used"], row["state"], row["of"]) for row in rows] == [
        ("*", None, "", ""),
        ("ada", 100, "full", "each user"),
    ]


@pytest.mark.parametrize("names", [("007", "7"), ("1e3", "1000"), ("NULL", "null"), ("a:b", "a")])
def test_teams_are_strings_in_json(site: Site, names: tuple[str, str]) -> None:
    """A7."""
    for amount, team in enumerate(names, 1):
        assert site.fctl(f"quota set team={team} concurrent={amount} --force")[0] == 0
    rows = json.loads(site.fctl("quota show --json")[1])["quotas"]
    assert sorted((row["team"], row["amount"]) for row in rows) == sorted(
        (team, amount) for amount, team in enumerate(names, 1)
    )
    assert (
        json.loads(site.fctl(f"quota show team={names[0]} --json")[1])["quotas"][0]["amount"] == 1
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("set team=physics tokens_per_day=-5", "write a whole number of 0 or more"),
        ("set team=physics tokens_per_day=1.5", "write a whole number of 0 or more"),
        ("set team=physics tokens_per_day=nan", "write a whole number"),
        (
            "set team=physics tokens_per_day=1e400",
            "at most 1000000000000000",
        ),
        ("set team=physics cost_per_day=1000.1T", "at most 1000000000.00"),
        ("set team=physics cost_per_day=0.0000001", "write an amount of money"),
        ("set team=physics cost_per_day=12,50", "write an amount of money"),
        ("set team=physics tokens_per_week=5", "tokens_per_week: no such kind of quota; known are"),
        ("set team=physics", "write what to limit"),
        ("set tokens_per_day=5", "set: write team=NAME"),
        ("set team=physics tokens_per_day", "tokens_per_day: write KEY=VALUE"),
        ("set team=physics concurrent=5 concurrent=6", "concurrent is given twice"),
        ("set team=physics user=ada key=k1 concurrent=5", "a user or a key, not both"),
        ("set team=* user=ada concurrent=5", "ada of every team"),
        ("set team=phisics concurrent=5", "team phisics: no such account in Slurm"),
        ("set team=physics user=eve concurrent=5", "team physics has no user eve"),
        ("set team=physics key=k2 concurrent=5", "team physics has no API key k2"),
        ("set team=physics model=chatt concurrent=5", "model chatt: not known here"),
        ("set team=physics tier=slow concurrent=5", "tier=slow: no such tier"),
        ("rm team=physics concurrent", "no such limit"),
        ("rm team=physics all", "no such limit"),
        ("show sponsor=me", "unknown key sponsor"),
    ],
)
def test_slips_are_one_line_and_change_nothing(site: Site, line: str, said: str) -> None:
    code, told = site.fctl(f"quota {line}")
    assert code == 1
    assert len(told.splitlines()) == 1
    assert told.startswith("fctl: error: ")
    assert said in told
    assert site.rules() == {}


def test_unknown_owners_are_taken_with_force_and_when_slurm_is_silent_not_without(
    site: Site,
) -> None:
    assert site.fctl("quota set team=new concurrent=5 --force")[0] == 0
    site.people = slurm.SlurmUnavailable("no answer")
    assert "can't be checked" in site.fctl("quota set team=physics concurrent=5")[1]
    site.people = slurm.AccountingOff("none")
    assert site.fctl("quota set team=forebay user=anybody concurrent=5")[0] == 0
    assert "no such account" in site.fctl("quota set team=phisics concurrent=5")[1]


def test_a_coordinator_sets_users_of_the_team_up_to_what_the_team_has(site: Site) -> None:
    site.fctl("quota set team=physics tokens_per_day=100")
    site.caller = CARL
    assert site.fctl("quota set team=physics user=ada tokens_per_day=100")[0] == 0
    assert site.fctl("quota rm team=physics user=ada tokens_per_day")[0] == 0
    for line, said in (
        ("team=physics user=ada tokens_per_day=101", "more than the team's 100"),
        ("team=physics user=ada model=chat tokens_per_day=101", "more than the team's 100"),
        ("team=physics tokens_per_day=1", "carl may not set this"),
        ("team=physics key=k1 tokens_per_day=1", "carl may not set this"),
        ("team=chem user=bob tokens_per_day=1", "carl may not set this"),
        ("team=* user=* tokens_per_day=1", "carl may not set this"),
    ):
        code, told = site.fctl(f"quota set {line}")
        assert (code, said in told) == (1, True), told
    site.caller = ADA
    assert "ada may not set this" in site.fctl("quota set team=physics user=ada concurrent=1")[1]


def test_members_see_their_own_coordinators_the_team_admins_all(site: Site) -> None:
    for owner in ("team=physics", "team=physics user=*", "team=physics user=ada", "team=physics key=k1",
                  "team=physics user=eve", "team=physics key=k9", "team=chem", "team=*"):  # fmt: skip
        assert site.fctl(f"quota set {owner} concurrent=5 --force")[0] == 0
    seen = {}
    for name, caller in (("admin", ADMIN), ("coordinator", CARL), ("member", ADA)):
        site.caller = caller
        rows = json.loads(site.fctl("quota show --json")[1])["quotas"]
        changes = json.loads(site.fctl("quota history --json")[1])["changes"]
        seen[name] = {(row["team"], row["name"]) for row in rows}
        assert seen[name] == {(row["team"], row["name"]) for row in changes}
    everybody = {("*", ""), ("physics", ""), ("physics", "*")}
    assert seen["member"] == {*everybody, ("physics", "ada"), ("physics", "k1")}
    assert seen["coordinator"] == {*seen["member"], ("physics", "eve"), ("physics", "k9")}
    assert seen["admin"] == {*seen["coordinator"], ("chem", "")}

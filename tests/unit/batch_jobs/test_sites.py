"""Models, teams and prices that a submission is checked against, at fbatch's door."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from batch_jobs import routes, sites
from scheduler.contracts import errors, requests
from tests.unit.batch_jobs import world

ADMIN = dataclasses.replace(world.ALICE, team="ops", user="root", admin=True)
MODELS = {
    "chat": sites.Served(frozenset({"formal"}), prompt_gpu_s=0.001, output_gpu_s=0.01),
    "a:b": sites.Served(),
}


def price(tokens: Mapping[str, tuple[int, int]]) -> str:
    return f"{sum(map(sum, tokens.values()))} EUR"


class Site:
    """A site whose answers a test may change."""

    def __init__(self) -> None:
        self.models: dict[str, sites.Served] | None = dict(MODELS)
        self.down = False

    def teams(self) -> frozenset[str]:
        if self.down:
            raise errors.NoReplica("Slurm does not answer, so the team can't be checked: --force")
        return frozenset({"physics", "ops"})

    def ports(self) -> sites.Site:
        return sites.Site(models=lambda: self.models, teams=self.teams, price=price)


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.fixture
def api(tmp_path: Path, site: Site) -> Iterator[world.AppApi]:
    store = world.open_store(tmp_path)
    yield world.AppApi(store, tmp_path, site=site.ports())
    store.close()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("chat", ""),
        ("chat:formal", ""),
        ("a:b", ""),
        ("cht", "there is no model 'cht': there are a:b, chat"),
        ("chat:rude", "model chat has no adapter 'rude': there are formal"),
        ("a:b:c", "model a:b has no adapter 'c': there is none"),
    ],
)
def test_a_line_that_names_no_model_of_the_site_is_bad(
    tmp_path: Path, api: world.AppApi, name: str, words: str
) -> None:
    (tmp_path / "r.jsonl").write_bytes(world.many(1) + world.line("x", model=name))
    said = world.run_command("fbatch", ["--test-only", "r.jsonl"], api, tmp_path)
    assert said.code == (1 if words else 0)
    assert said.err == (f"line 2: {words}\n" if words else "")


def test_a_model_for_the_whole_job_that_is_none_is_refused_in_one_line(
    tmp_path: Path, api: world.AppApi
) -> None:
    (tmp_path / "r.jsonl").write_bytes(world.many(1))
    for options in ([], ["--test-only"]):
        argv = [*options, "--model=chatt", "r.jsonl"]
        said = world.run_command("fbatch", argv, api, tmp_path)
        why = "model: there is no model 'chatt': did you mean chat?"
        assert (said.code, said.out, said.err) == (1, "", f"fbatch: error: {why}\n")


def test_what_nobody_can_tell_refuses_nothing(api: world.AppApi, site: Site) -> None:
    site.models = None
    assert api.submit(world.line("x", model="later"), model="later") == 1


def test_a_team_that_does_not_exist_is_not_billed(
    tmp_path: Path, api: world.AppApi, site: Site
) -> None:
    api.caller = ADMIN
    (tmp_path / "r.jsonl").write_bytes(world.many(1))
    good = world.run_command("fbatch", ["-A", "physics", "r.jsonl"], api, tmp_path)
    assert good.out == "Submitted batch job 1\n"
    for options in ([], ["--test-only"]):
        argv = [*options, "-A", "nosuchteam", "r.jsonl"]
        said = world.run_command("fbatch", argv, api, tmp_path)
        assert (said.code, said.out) == (1, "")
        assert said.err == (
            "fbatch: error: account 'nosuchteam': it has no account in Slurm and no API key: "
            "check the name\n"
        )
    site.down = True
    said = world.run_command("fbatch", ["-A", "nosuchteam", "r.jsonl"], api, tmp_path)
    assert (said.code, "can't be checked" in said.err, "--force" in said.err) == (1, True, False)
    own = world.run_command("fbatch", ["-A", "ops", "r.jsonl"], api, tmp_path)
    assert own.code == 0  # one's own needs no look


def test_test_only_tells_gpu_seconds_and_cost(tmp_path: Path, api: world.AppApi) -> None:
    (tmp_path / "r.jsonl").write_bytes(world.line("x", max_tokens=1_000))
    said = world.run_command("fbatch", ["--test-only", "r.jsonl"], api, tmp_path)
    size = len(world.line("x", max_tokens=1_000)) - 1
    assert f"about {round(size // 4 * 0.001 + 10.0, 1):g} GPU-seconds" in said.out
    assert f"about {size // 4 + 1_000} EUR" in said.out


def test_a_model_whose_replicas_say_nothing_has_no_estimate(api: world.AppApi) -> None:
    answer = api.client.post(
        routes.PREFIX,
        params={"options": json.dumps({"test_only": True})},
        content=world.line("x", model="a:b"),
    ).json()
    assert answer["estimate"]["gpu_seconds"] is None
    assert requests.Tier.BATCH in api.caller.tiers

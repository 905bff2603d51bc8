"""Who may call which model, in which tier, with whose adapter; and what is told of versions."""

import dataclasses
from typing import Any

import pytest

from gateway import comparing, resolve
from scheduler.contracts import errors, fleet, ids, observed, requests, usage

ROUTE = fleet.Route(
    "chat",
    {"v1": 90, "v2": 10},
    adapters=("law", "open"),
    callers=("physics", "legal"),
    tiers=("standard", "batch"),
    adapter_teams={"law": "legal"},
)
VIEW = fleet.FleetView(1, 1, {"chat": ROUTE, "free": fleet.Route("free", {"v1": 100})}, ())


def asked(team: str, model: str = "chat", **wishes: Any) -> requests.InferenceRequest:
    caller = requests.Caller(team, "ada", "k", (requests.Tier.INTERACTIVE, requests.Tier.STANDARD))
    source = resolve.Source(
        requests.Endpoint.CHAT, {"model": model}, caller, resolve.Wishes(**wishes), 1
    )
    return resolve.request(source, VIEW, ids.RequestId("r"))


def test_a_model_is_there_for_its_callers_alone() -> None:
    assert asked("physics").model == "chat"
    assert asked("biology", "free").model == "free"
    with pytest.raises(errors.ModelNotFound, match="'chat' is not known here"):
        asked("biology")


def test_an_adapter_of_another_team_is_not_there() -> None:
    assert asked("legal", "chat:law").adapter == "law"
    assert asked("physics", "chat:open").adapter == "open"
    with pytest.raises(errors.ModelNotFound, match="has no adapter 'law'"):
        asked("physics", "chat:law")
    one = requests.Caller("physics", "ada", "k")
    assert resolve.adapters_of(one, ROUTE) == ("open",)
    assert resolve.adapters_of(dataclasses.replace(one, team="legal"), ROUTE) == ("law", "open")


def test_the_first_tier_that_a_model_offers_is_taken_and_others_are_refused() -> None:
    assert asked("physics").tier is requests.Tier.STANDARD
    assert asked("physics", "free").tier is requests.Tier.INTERACTIVE
    with pytest.raises(
        errors.Forbidden, match="not offered in tier interactive: use standard, batch"
    ):
        asked("physics", priority="interactive")


def row(version: str, outcome: usage.Outcome, **changes: Any) -> usage.UsageRow:
    identity = usage.Identity(
        request_id="r",
        attempt=1,
        cluster="alpha",
        team="physics",
        user="ada",
        key_id="k",
        model=changes.pop("model", "chat"),
        version=version,
        adapter="",
        endpoint="/v1/chat/completions",
        tier=changes.pop("tier", "standard"),
        replica_id=changes.pop("replica_id", "r1"),
        lease_id="l",
        slurm_job_id="7",
        arrived_us=1_000,
        started_us=2_000,
    )
    values: dict[str, Any] = {"first_token_us": 52_000, "ended_us": 92_000, "output_tokens": 5}
    return usage.UsageRow(usage.RowKind.CLOSE, identity, outcome=outcome, **{**values, **changes})


def test_what_versions_are_compared_by() -> None:
    found = comparing.Comparing()
    found.note(row("v1", usage.Outcome.OK))
    assert found.take() == []  # no route yet
    found.follow(VIEW.routes.values())
    found.note(row("v2", usage.Outcome.OK))
    found.note(row("v2", usage.Outcome.ERROR, first_token_us=0, output_tokens=0))
    for each in (
        row("v1", usage.Outcome.CLIENT_GONE),
        row("v1", usage.Outcome.REFUSED),
        row("v1", usage.Outcome.OK, tier="batch"),
        row("v1", usage.Outcome.OK, model="free"),
        row("v1", usage.Outcome.ERROR, replica_id=""),
    ):
        found.note(each)
    assert found.take() == [
        observed.Trial("chat", "v2", False, 50.0, 10.0),
        observed.Trial("chat", "v2", True),
    ]
    assert found.take() == []


def test_a_flood_keeps_its_failures() -> None:
    found = comparing.Comparing()
    found.follow(VIEW.routes.values())
    for _ in range(comparing.MOST + 10):
        found.note(row("v1", usage.Outcome.OK))
    found.note(row("v2", usage.Outcome.REPLICA_LOST))
    taken = found.take()
    assert len(taken) == comparing.MOST + 1
    assert taken[-1].failed

"""A broker of an older release takes the lead after a newer one: what it can't read it leaves alone."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from scheduler.contracts import fleet
from scheduler.runtime.registry import store, tables
from tests import brokersite

TALK = dataclasses.replace(brokersite.CHAT, name="talk", replicas=2)
Change = Callable[[store.Registry], None]


def _rewrite(registry: store.Registry, kind: type[Any], **values: Any) -> None:
    """Write into talk's rows of a table as a newer release would."""
    with registry.database.write() as session:
        for row in session.scalars(sa.select(kind).where(kind.model == "talk")):
            for name, value in values.items():
                old = getattr(row, name)
                setattr(row, name, {**old, **value} if isinstance(value, dict) else value)


def engine(registry: store.Registry) -> None:
    for kind in (tables.Version, tables.Replica):
        _rewrite(registry, kind, spec={"engine": "tensorrt"})
    with registry.database.write() as session:
        session.get_one(tables.Declared, ("version", "talk", "v1")).body = {"engine": "tensorrt"}


def role(registry: store.Registry) -> None:
    for kind in (tables.Deployment, tables.Replica):
        _rewrite(registry, kind, role="standard")


def spec(registry: store.Registry) -> None:
    for kind in (tables.Version, tables.Replica):
        _rewrite(registry, kind, spec={"hardware": ["rack", 7]})


def scaling(registry: store.Registry) -> None:
    _rewrite(registry, tables.Deployment, scaling={"minimum": "a third"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (engine, "engine 'tensorrt' is not known here"),
        (role, "role 'standard' is not known here"),
        (spec, "it cannot be read (TypeError("),
        (scaling, "it cannot be read (ValueError("),
    ],
)
async def test_it_leads_and_leaves_that_model_alone(
    tmp_path: Path, change: Change, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    site = brokersite.Site(tmp_path, brokersite.CHAT, TALK)
    async with site.lead() as leader:
        await site.settle(leader)
    before = site.running()
    assert len(before) == 3
    change(site.registry)
    async with site.lead() as leader:
        await site.settle(leader)
        assert site.running() == before
        (wanted,) = (one for key, one in leader.wanted.items() if key[0] == "talk")
        assert wanted.total == 2
        told = [line for line in caplog.messages if "a newer release declared it" in line]
        assert len(told) == 1
        assert told[0].startswith(f"talk v1: {words}")
        assert told[0].endswith("upgrade this broker")
        (talk,) = (one for one in leader.live.deployments if one.spec.model == "talk")
        assert talk.quarantine_reason in told[0]
        known = [each.replica for each in leader.live.replicas.values()]
        for model in ("talk", "chat"):  # both lose one
            lost = next(replica for replica in known if replica.spec.model == model)
            site.agents[lost.lease_id].kill(lost.replica_id)
        for _ in range(20):
            await site.step(leader, 1.0)
        models = [each.replica.spec.model for each in leader.live.replicas.values()]
        assert sorted(models) == ["chat", "talk"], "who can't tell how starts no other"


async def test_what_is_written_of_it_stays_for_the_newer_one(tmp_path: Path) -> None:
    site = brokersite.Site(tmp_path, brokersite.CHAT, TALK)
    async with site.lead() as leader:
        await site.settle(leader)
    engine(site.registry)

    def written() -> list[tuple[Any, ...]]:
        kinds = (tables.Version, tables.Deployment, tables.Route, tables.Declared, tables.Replica)
        with site.registry.database.read() as session:
            rows = [
                row for kind in kinds
                for row in session.scalars(sa.select(kind).where(kind.model == "talk"))
            ]  # fmt: skip
            return [
                tuple(getattr(row, column.key) for column in sa.inspect(type(row)).columns)
                for row in rows
            ]

    before = written()
    # Its forebay.toml says another thing of the other model, so that all of the catalog is written anew.
    more = dataclasses.replace(brokersite.CHAT, replicas=2)
    site.parts = dataclasses.replace(site.parts, models=(more, TALK))
    async with site.lead() as leader:
        await site.settle(leader)
        assert len(site.running()) == 4
    assert written() == before
    held = {row.replica.spec.engine for row in site.registry.holdings.load().replicas}
    assert held == {fleet.EngineKind.SIMULATED, fleet.UnknownEngine("tensorrt")}

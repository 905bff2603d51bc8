"""Long prompts go to the version that the route has for them, and are not lost while that is away."""

import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from scheduler.contracts import fleet
from tests.unit.gateway import fleets, harness
from tests.unit.gateway.asking import code, http

COMPLETIONS = "/v1/completions"


@contextlib.asynccontextmanager
async def pooled(
    state: fleet.ReplicaState = fleet.ReplicaState.SERVING, **options: Any
) -> AsyncIterator[tuple[harness.Served, harness.FakeReplica, harness.FakeReplica]]:
    """Serve version 1, and version `long` for prompts of 100 tokens and more; 1 takes 200."""
    with tempfile.TemporaryDirectory() as name:
        async with (
            harness.FakeReplica(harness.hello, "r1").listening() as one,
            harness.FakeReplica(harness.hello, "r2").listening() as other,
        ):
            long = other.replica(Path(name), version="long", max_context=2048, state=state)
            view = fleets.make_view(
                [one.replica(Path(name), max_context=200), long],
                pools=(fleet.Pool(100, "long", 2048),),
                base_context=200,
            )
            async with harness.gateway(view, **options) as served:
                yield served, one, other


def prompt(tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": "chat", "prompt": [7] * tokens, "max_tokens": 8, **more}


@pytest.mark.parametrize(
    ("body", "long"),
    [
        (prompt(99), False),
        (prompt(100), True),
        (prompt(50, max_tokens=180), True),
        (prompt(1000), True),
        ({"model": "chat", "prompt": "word " * 400, "max_tokens": 8}, True),
        (prompt(100, forebay_version="1"), False),  # who names a version gets it
    ],
)
async def test_length_decides(body: dict[str, Any], long: bool) -> None:
    async with pooled() as (served, one, other), http(served) as session:
        assert (await session.post(COMPLETIONS, json=body)).status_code == 200
        assert (len(one.received), len(other.received)) == ((0, 1) if long else (1, 0))
        (row,) = await served.rows(1)
        assert row.identity.version == ("long" if long else "1")


async def test_while_a_pool_is_away_what_fits_elsewhere_goes_there() -> None:
    away = fleet.ReplicaState.STOPPED
    async with pooled(away, no_replica_grace_s=0) as (served, one, _), http(served) as session:
        assert (await session.post(COMPLETIONS, json=prompt(150))).status_code == 200
        assert len(one.received) == 1
        answer = await session.post(COMPLETIONS, json=prompt(1000))
        assert (answer.status_code, code(answer)) == (503, "no_replica")
        assert len(one.received) == 1


async def test_what_is_too_long_for_every_version_is_refused() -> None:
    async with pooled() as (served, _, _), http(served) as session:
        answer = await session.post(COMPLETIONS, json=prompt(2048))
        assert (answer.status_code, code(answer)) == (400, "context_length_exceeded")

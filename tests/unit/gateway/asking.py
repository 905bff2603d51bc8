"""A client of the gateway under test, and two replicas, one after the other."""

import contextlib
import dataclasses
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from scheduler.contracts import fleet
from tests.unit.gateway import fleets, harness


@contextlib.asynccontextmanager
async def http(served: harness.Served) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=served.http, headers=harness.ANN_AUTH, trust_env=False, verify=False, timeout=20
    ) as session:
        yield session


def code(response: httpx.Response) -> str:
    return str(response.json()["error"]["code"])


@contextlib.asynccontextmanager
async def two(
    first: harness.Script, second: harness.Script, **options: Any
) -> AsyncIterator[tuple[harness.Served, harness.FakeReplica, harness.FakeReplica]]:
    """Serve two replicas; the second starts to serve only when the first has been asked."""
    second_view: list[fleet.FleetView] = []
    holder: list[harness.Served] = []

    async def then_second(received: harness.Received, out: harness.Out) -> None:
        holder[0].fleet.set(second_view[0])
        await first(received, out)

    with tempfile.TemporaryDirectory() as name:
        async with (
            harness.FakeReplica(then_second, "r1").listening() as one,
            harness.FakeReplica(second, "r2").listening() as other,
        ):
            r1, r2 = one.replica(Path(name)), other.replica(Path(name))
            waiting = dataclasses.replace(r2, state=fleet.ReplicaState.WARM)
            second_view.append(fleets.make_view([r1, r2], revision=2))
            async with harness.gateway(fleets.make_view([r1, waiting]), **options) as served:
                holder.append(served)
                yield served, one, other

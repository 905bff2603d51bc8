"""A replica's end: answers first, then rows on disk, then it may be gone at once."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engines.replica import child, engine, launch, server, spans
from scheduler.contracts import fleet, tracing, usage
from tests.unit.engines import scripted


class Sink:
    """Notes when rows go to disk."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def ready(self) -> None:
        return

    def append(self, row: usage.Row) -> None:
        self._events.append("row")

    async def sync(self) -> None:
        self._events.append("sync")

    def close(self) -> None:
        self._events.append("close")


class Reporter:
    """Sends SIGTERM as soon as the replica listens."""

    def phase(self, name: str, seconds: float) -> None:
        return

    def listening(self, address: str, incarnation: int, phases_s: Any) -> None:
        asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), signal.SIGTERM)

    def failed(self, reason: str) -> None:
        return


class Tracer(tracing.NoTracer):
    """Notes when spans are sent."""

    events: list[str]

    def flush(self, seconds: float) -> None:
        assert seconds < 1
        self.events.append("spans")


def tracer(service: str) -> tracing.Tracer:
    """Return what `spans.FACTORY` names."""
    assert service == "forebay-replica"
    return Tracer()


async def _never(inner: Any, key: str, tap: engine.Tap, send: Any) -> None:
    raise AssertionError("nobody asks")


async def test_it_leaves_when_its_rows_are_on_disk_and_before_its_engine_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    monkeypatch.setattr(Tracer, "events", events, raising=False)
    monkeypatch.setenv(spans.FACTORY, f"{__name__}:tracer")

    @contextlib.asynccontextmanager
    async def opened(*_: Any) -> AsyncIterator[scripted.Scripted]:
        yield scripted.Scripted(_never)
        events.append("engine ended")

    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("x" * 32)
    record = launch.Launch(
        replica_id="r-1",
        cluster="c",
        lease_id="l-1",
        slot_id="l-1.s0",
        slurm_job_id="7",
        node="n1",
        spec=fleet.ReplicaSpec("m", "1", fleet.EngineKind.SIMULATED),
        role=fleet.Role.SHARED,
        secret_file=str(secret),
    )
    await server.run(record, opened, Sink(events), Reporter(), leave=lambda: events.append("left"))
    order = ("close", "spans", "left", "engine ended")
    assert sorted(order, key=events.index) == list(order)
    assert "sync" in events[: events.index("close")]


def test_only_vllm_ends_there_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    child.leaving(fleet.EngineKind.SIMULATED)()
    assert not codes
    child.leaving(fleet.EngineKind.VLLM)()
    assert codes == [0]

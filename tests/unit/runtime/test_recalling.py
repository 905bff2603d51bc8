"""What a new leader takes up of those before it, and that nothing there keeps it from leading."""

from pathlib import Path
from typing import Any

import pytest

from scheduler.contracts import clock
from scheduler.runtime import adapter_pools, entries, live, overlap, recalling
from scheduler.runtime.registry import store
from tests import registries

START = {"model": "chat", "version": "v1", "cold": [{"load": 7.0}], "woken": []}
BAD_ADAPTER = ["chat", "v1", "law", "/a", "rank 128", 1, 2]


@pytest.fixture
def registry(tmp_path: Path) -> store.Registry:
    return registries.opened(tmp_path)


async def recalled(
    registry: store.Registry, time: clock.FakeClock, facts: dict[str, dict[str, Any]]
) -> tuple[live.Live, dict[str, Any]]:
    """Return what a leader knows after the one before has left ``facts``."""
    epoch = registry.lead.take("before", 0, 10_000_000)
    assert epoch is not None
    registry.journal.set_facts(epoch, 1, facts)
    picture = live.Live(epoch + 1, "alpha", entries.Pauses(1, 60), time.monotonic())
    await recalling.held(registry, picture, time.monotonic())
    return picture, (await recalling.overlapped(registry, time)).facts(time.monotonic())


async def test_it_goes_on_from_there(registry: store.Registry, fake_clock: clock.FakeClock) -> None:
    facts: dict[str, dict[str, Any]] = {
        "starts": {"chat v1": START},
        # A later release may tell more of each.
        adapter_pools.FACT: {
            "quarantine": [[*BAD_ADAPTER, "more"]],
            "popular": {"chat": {"law": 3}},
        },
        overlap.FACT: {"overlap_gpu_s": 12.5, "leases": 3, "since_us": 7, "more": 1},
    }
    picture, told = await recalled(registry, fake_clock, facts)
    assert picture.starts.cold() == {("chat", "v1"): 7.0}
    assert picture.adapters.fact()["quarantine"] == [BAD_ADAPTER]
    assert told[overlap.FACT]["overlap_gpu_s"] == 12.5
    registry.close()


async def test_what_can_not_be_read_begins_anew_and_is_told(
    registry: store.Registry, fake_clock: clock.FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    facts: dict[str, dict[str, Any]] = {
        "starts": {"chat v1": {"model": "chat"}},
        adapter_pools.FACT: {"quarantine": [["chat"]]},
        overlap.FACT: {"overlap_gpu_s": "half of it"},
    }
    picture, told = await recalled(registry, fake_clock, facts)
    assert picture.starts.cold() == {}
    assert told[overlap.FACT]["overlap_gpu_s"] == 0.0
    assert [line for line in caplog.messages if "begins anew" in line] == caplog.messages
    assert len(caplog.messages) == 3
    registry.close()

"""A lease with a real vLLM replica: forked by the slot, served, preempted, and gone with its agent."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from engines import processes
from scheduler.contracts import frames
from tests.contract import engine_vllm
from tests.integration import lease_site

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


async def test_a_forked_replica_serves_gives_way_and_dies_with_its_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_vllm.require(engine_vllm.NEWEST)
    monkeypatch.setattr(lease_site, "PATIENCE_S", engine_vllm.READY_S + engine_vllm.START_S)
    weights = engine_vllm.spec(tmp_path).weights
    python = str(engine_vllm.python(engine_vllm.NEWEST))
    async with lease_site.opened(tmp_path, vllm_python=python, fork_server="on") as site:
        wish = {"weights": weights, "parking": "level-1", **engine_vllm.ARGUMENTS}
        site.want(lease_site.desired(**wish))
        replica = await site.serving()
        assert {"fork server", "engine"} <= set(replica.phases_s)
        found = await site.ask(replica, "q1")
        assert found[0].kind is frames.Kind.PROMPT
        assert frames.End.parse(found[-1].payload).output_tokens == 8

        batch = asyncio.create_task(site.ask(replica, "b1", "batch", 2000))
        await site.broker.until(lambda r: r.slots[0].replicas[0].stats.batch == 1)
        site.want(lease_site.desired(role="interactive", **wish))
        began = time.monotonic()
        assert frames.Error.parse((await batch)[-1].payload).code == "preempted"
        assert time.monotonic() - began < 1.0, "rung 1"

        await site.broker.until(lambda r: r.slots[0].replicas[0].role == "interactive")
        await _parked_and_woken(site, wish, found)

        began = time.monotonic()
        site.want(lease_site.desired(run=False, **wish), lease_site.desired("r-2", gpus=0, **wish))
        await site.serving("r-2")
        await site.broker.until(lambda r: lease_site.state(r, "r-1") == "stopped")
        assert time.monotonic() - began < 30.0, "no second import"

        os.kill(site.agent.pid, signal.SIGKILL)
        await site.until_dead(5.0)
        assert not list(processes.marked({processes.SLOT: f"{site.lease_id}.s0"}))


async def test_an_engine_that_hangs_is_found_out_and_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's engine core is stopped in the middle of an answer: its web server goes on answering."""
    engine_vllm.require(engine_vllm.NEWEST)
    monkeypatch.setattr(lease_site, "PATIENCE_S", engine_vllm.READY_S + engine_vllm.START_S)
    weights = engine_vllm.spec(tmp_path).weights
    python = str(engine_vllm.python(engine_vllm.NEWEST))
    async with lease_site.opened(
        tmp_path, vllm_python=python, fork_server="on", no_step_s=4.0
    ) as site:
        wish = {"weights": weights, **engine_vllm.ARGUMENTS}
        site.want(lease_site.desired(**wish))
        replica = await site.serving()
        await site.ask(replica, "q1")
        stream = asyncio.create_task(site.ask(replica, "q2", tokens=2000))
        await site.broker.until(lambda r: r.slots[0].replicas[0].stats.interactive == 1)
        (core,) = [pid for pid in site.alive() if "EngineCore" in _title(pid)]
        os.kill(core, signal.SIGSTOP)
        began = time.monotonic()

        report = await site.broker.until(lambda r: lease_site.state(r, "r-1") == "warm")
        assert "engine has work and made no step for" in report.slots[0].replicas[0].reason
        assert time.monotonic() - began >= 3.0, "as slow as a step may be"
        report = await site.broker.until(lambda r: lease_site.state(r, "r-1") == "lost")
        assert ": killed; log ends: " in report.slots[0].replicas[0].reason
        assert frames.Kind.END not in {frame.kind for frame in await stream}, "no end is made up"
        await site.until_dead(5.0, spare=frozenset(site.alive()) - {core})

        site.want(lease_site.desired("r-2", **wish))  # in the same slot, on the same GPUs
        assert len(_ids(await site.ask(await site.serving("r-2"), "q3"))) == 8


def _title(pid: int) -> str:
    """Return what a process calls itself; "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


async def _parked_and_woken(
    site: lease_site.Site, wish: dict[str, Any], alone: list[frames.Frame]
) -> None:
    """Rung 2 on CPUs: vLLM's own sleep frees nothing, is found out, and the process ends instead."""
    site.want(lease_site.desired(**wish))
    await site.broker.until(lambda r: r.slots[0].replicas[0].role == "shared")
    batch = asyncio.create_task(site.ask(await site.serving(), "b2", "batch", 2000))
    await site.broker.until(lambda r: r.slots[0].replicas[0].stats.batch == 1)
    before, whole = _memory(site, "Private_Dirty:"), _memory(site, "Pss:")

    site.want(lease_site.desired(asleep=True, **wish))
    report = await site.broker.until(lambda r: lease_site.state(r, "r-1") == "asleep")
    assert (
        report.slots[0]
        .replicas[0]
        .reason.startswith("parked by the end of its process: nothing was freed")
    )
    assert frames.Error.parse((await batch)[-1].payload).code == "preempted"
    left = _memory(site, "Pss:")
    own = sum(before[pid] for pid in before.keys() - left.keys())
    assert own > 50 << 20, "what a vLLM replica has for itself"
    assert sum(whole.values()) - sum(left.values()) > 0.8 * own

    site.want(lease_site.desired(asleep=True, **wish), lease_site.desired("r-b", **wish))
    await site.serving("r-b")
    site.want(lease_site.desired(asleep=True, **wish), lease_site.desired("r-b", run=False, **wish))
    await site.broker.until(lambda r: lease_site.state(r, "r-b") == "stopped")
    site.want(lease_site.desired(**wish))
    woken = await site.serving()
    assert woken.incarnation == 2
    assert _ids(await site.ask(woken, "q2")) == _ids(alone)


def _memory(site: lease_site.Site, kind: str) -> dict[int, int]:
    """Return the bytes of a kind that each process of the lease has."""
    found: dict[int, int] = {}
    for pid in site.alive():
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        (line,) = (each for each in lines if each.startswith(kind))
        found[pid] = int(line.split()[1]) * 1024
    return found


def _ids(found: list[frames.Frame]) -> list[int]:
    return [token for each in found if each.kind is frames.Kind.DATA for token in each.token_ids]

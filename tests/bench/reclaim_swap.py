"""Rung 2's control path on CPUs: a real agent and slot, real vLLM, and a broker that the bench plays.

Batch runs on the GPUs of a slot in which an interactive replica is parked. The order: the batch replica
stops, and when it is said to have, the parked one is told to wake (the planner does so one tick, 0.2 s at
most, later). On GPUs vLLM's sleep and wake take the place of a process that ends and one that is forked.
"""

import asyncio
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scheduler.contracts import frames
from tests.bench import reclaim_trials
from tests.contract import engine_vllm
from tests.integration import lease_site

_DRAIN_S = 5.0


def measure(trials: int) -> reclaim_trials.Times:
    """Swap so many times."""
    lease_site.PATIENCE_S = engine_vllm.READY_S
    return asyncio.run(_measure(trials))


async def _measure(trials: int) -> reclaim_trials.Times:
    found = reclaim_trials.Times()
    with tempfile.TemporaryDirectory(prefix="reclaim-swap-") as name:
        folder = Path(name)
        weights = engine_vllm.spec(folder).weights
        python = str(engine_vllm.python(engine_vllm.NEWEST))
        wish: dict[str, Any] = {"weights": weights, **engine_vllm.ARGUMENTS}
        async with lease_site.opened(folder, vllm_python=python, fork_server="on") as site:
            site.want(lease_site.desired(**wish))
            await site.serving()
            for trial in range(trials):
                await _trial(site, wish, trial, found)
                reclaim_trials.say(f"rung 2: {found.ready_s[-1]:.2f} s until it serves")
    return found


async def _trial(
    site: lease_site.Site, wish: Mapping[str, Any], trial: int, found: reclaim_trials.Times
) -> None:
    """Park, let batch run on the GPUs, swap back."""
    parked = lease_site.desired(asleep=True, **wish)
    batch_id = f"r-b{trial}"
    site.want(parked)
    await site.broker.until(lambda r: lease_site.state(r, "r-1") == "asleep")
    site.want(parked, lease_site.desired(batch_id, role="batch", model="night", **wish))
    batch = await site.serving(batch_id)
    line = asyncio.create_task(site.ask(batch, f"b{trial}", "batch", 1500))
    await site.broker.until(lambda r: _batch(r, batch_id) == 1)

    ordered = time.monotonic()
    stopped = lease_site.desired(batch_id, role="batch", model="night", run=False, **wish)
    site.want(parked, stopped)
    await site.broker.until(lambda r: lease_site.state(r, batch_id) == "stopped")
    awake = lease_site.desired(role="interactive", **wish)
    site.want(awake, stopped)
    woken = await site.serving()
    found.ready_s.append(time.monotonic() - ordered)
    answer = await site.ask(woken, f"q{trial}", tokens=1)
    found.first_token_s.append(time.monotonic() - ordered)
    assert any(frame.kind is frames.Kind.DATA for frame in answer), answer
    assert frames.Error.parse((await line)[-1].payload).code == "preempted"
    found.trials += 1
    site.want(lease_site.desired(**wish))
    await site.broker.until(lambda r: lease_site.state(r, "r-1") == "serving")


def _batch(report: Any, replica_id: str) -> int:
    found = lease_site.replica(report, replica_id)
    return int(found.stats.batch) if found is not None else 0

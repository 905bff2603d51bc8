"""From order to first token of the tiny model on real vLLM on CPUs: out of a parked process, or without.

``python -m tests.bench.warm_start [--trials 20] [--compiled]``; JSON on the last line. A real agent and a
real slot, the broker and the caller played by this process; the clock starts when the wish is sent and
stops at the first frame with a token. Ways, interleaved:

- parked: the replica was told to sleep (its process has ended) and is woken; its slot's fork server has vLLM
  imported;
- next: another replica of the same slot, whose fork server has vLLM imported already;
- new slot: nothing is imported yet: the slot, the fork server, the import, the fork;
- plain (once): a new slot that starts the replica as a process of its own, as slots with real GPUs do;
- compiled (with --compiled, once each): without eager mode, with an empty compile cache and with the one that
  the first start left beside the weights.
"""

import argparse
import asyncio
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from engines import tinymodel
from scheduler.contracts import frames
from tests.bench import gateway_report, warm_start_report
from tests.contract import engine_vllm
from tests.integration import lease_site

Arguments = dict[str, Any]
EAGER: Arguments = {"enforce-eager": True, "kv-cache-memory-bytes": "16M"}
COMPILED: Arguments = {"kv-cache-memory-bytes": "16M"}


async def first_token(site: lease_site.Site, replica_id: str, order: Callable[[], None]) -> float:
    """Give the order and return seconds until the first token of an answer."""
    began = time.monotonic()
    order()
    replica = await site.serving(replica_id)
    asked = asyncio.ensure_future(site.ask(replica, f"q-{time.monotonic_ns()}", tokens=1))
    found = await asked
    took = time.monotonic() - began
    if not any(each.kind is frames.Kind.DATA for each in found):
        raise RuntimeError(f"no token came: {found}")
    return took


async def _state(site: lease_site.Site, replica_id: str, state: str) -> None:
    await site.broker.until(lambda report: lease_site.state(report, replica_id) == state)


class Bench:
    """The measurements; each method does one trial of one way and returns its seconds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._place = f"file://{folder / 'tiny'}"
        self._count = 0
        tinymodel.make(folder / "tiny")

    def _options(self, fork_server: str) -> dict[str, Any]:
        return {
            "vllm_python": str(engine_vllm.python(engine_vllm.NEWEST)),
            "fork_server": fork_server,
            "weights_dir": str(self._folder / "disk"),
            "weights_reserve_gb": 0.0,
        }

    def _wish(self, arguments: Arguments) -> dict[str, Any]:
        return {"weights": self._place, "gpus": 1, **arguments}

    async def new_slot(
        self, arguments: Arguments, fork_server: str
    ) -> tuple[float, dict[str, float]]:
        """Return seconds from order to first token where nothing is imported yet, and the phases."""
        self._count += 1
        folder = self._folder / f"site{self._count}"
        folder.mkdir()
        async with lease_site.opened(folder, **self._options(fork_server)) as site:
            await site.broker.until(lambda report: True)
            wish = lease_site.desired("r-1", **self._wish(arguments))
            took = await first_token(site, "r-1", lambda: site.want(wish))
            found = lease_site.replica(site.broker.last, "r-1")
            return took, dict(found.phases_s) if found is not None else {}

    async def warm(self, trials: int) -> dict[str, list[float]]:
        """Return seconds of `parked` and `next`, in turns within one slot."""
        found: dict[str, list[float]] = {"parked": [], "next": []}
        folder = self._folder / "warm"
        folder.mkdir()
        wish = self._wish(EAGER)
        async with lease_site.opened(folder, **self._options("on")) as site:
            awake, asleep = (
                lease_site.desired("r-p", **wish),
                lease_site.desired("r-p", asleep=True, **wish),
            )
            await first_token(site, "r-p", lambda: site.want(awake))
            for n in range(trials):
                site.want(asleep)
                await _state(site, "r-p", "asleep")
                found["parked"].append(await first_token(site, "r-p", lambda: site.want(awake)))
                other = lease_site.desired(f"r-{n}", **wish)
                order = functools.partial(site.want, awake, other)
                took = await first_token(site, f"r-{n}", order)
                found["next"].append(took)
                site.want(awake, lease_site.desired(f"r-{n}", run=False, **wish))
                await _state(site, f"r-{n}", "stopped")
        return found


async def figures(trials: int = 20, cold: int = 3, *, compiled: bool = False) -> dict[str, Any]:
    """Measure; see the module."""
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as name:
        bench = Bench(Path(name))
        times = await bench.warm(trials)
        phases: dict[str, dict[str, float]] = {}

        async def once(way: str, arguments: Arguments, fork_server: str) -> None:
            took, phases[way] = await bench.new_slot(arguments, fork_server)
            times.setdefault(way, []).append(took)

        for _ in range(cold):
            await once("new_slot", EAGER, "on")
        await once("plain", EAGER, "off")
        if compiled:
            await once("compiled_first", COMPILED, "off")
            await once("compiled_cached", COMPILED, "off")
    return {
        "order_to_first_token_s": {way: _spread(found) for way, found in times.items()},
        "phases_s": phases,
    }


def _spread(found: list[float]) -> dict[str, float]:
    return {
        "p50": round(statistics.median(found), 2),
        "least": round(min(found), 2),
        "most": round(max(found), 2),
        "trials": len(found),
    }


def run(body: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    """Run the measurement with patience for a busy machine."""
    lease_site.PATIENCE_S = 600.0

    async def inner() -> dict[str, Any]:
        return await body()

    return asyncio.run(inner())


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--cold", type=int, default=3)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--report", type=Path, help="write the report there")
    asked = parser.parse_args()
    machine = gateway_report.machine()
    found = run(lambda: figures(asked.trials, asked.cold, compiled=asked.compiled))
    found = {"machine": machine, **found}
    if asked.report:
        asked.report.write_text(warm_start_report.page(found), encoding="utf-8")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

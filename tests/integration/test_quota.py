"""Quotas of a whole gateway process before the simulated engine: races, kill -9, and the ledger."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from accounting import spool, totals
from scheduler.contracts import clock, quota, usage
from scheduler.core import quota_limits as limits
from scheduler.runtime import quota_check
from scheduler.runtime.registry import quotas, store
from tests import registries
from tests.integration import simulated_replica
from tests.unit.gateway import harness

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
DAY = limits.Key(limits.Scope.TEAM, "physics", "", "", "", limits.Kind.TOKENS_PER_DAY)
QUICK: dict[str, Any] = {"time-scale": 0.05}
SLOW: dict[str, Any] = {"step-base-ms": 30.0}
SEATS = 4


class Gateway:
    """A running gateway process and a client of it."""

    def __init__(self, process: asyncio.subprocess.Process, http: str) -> None:
        self.process = process
        # A pool without bounds: two hundred requests really are under way at once.
        self.client = httpx.AsyncClient(
            base_url=f"http://{http}",
            headers=harness.ANN_AUTH,
            trust_env=False,
            timeout=60.0,
            limits=httpx.Limits(max_connections=None),
        )

    async def ask(self, max_tokens: int) -> httpx.Response:
        return await self.client.post(
            CHAT, json=harness.chat_body(max_tokens=max_tokens, ignore_eos=True)
        )

    async def kill(self) -> None:
        """Kill it as the kernel does."""
        self.process.kill()
        await self.process.wait()


@contextlib.asynccontextmanager
async def gateway(
    state: Path, replica: simulated_replica.Running, **settings: Any
) -> AsyncIterator[Gateway]:
    told = {
        "state": str(state),
        "address": replica.replica.address,
        "secret_file": replica.replica.secret_file,
        "seats": SEATS,
        "settings": settings,
    }
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.integration.quota_gateway",
        json.dumps(told),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    assert started.stdout is not None
    try:
        line = await asyncio.wait_for(started.stdout.readline(), 60)
        running = Gateway(started, json.loads(line)["http"])
        async with running.client:
            yield running
    finally:
        if started.returncode is None:
            started.terminate()
            await asyncio.wait_for(started.wait(), 60)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[store.Registry]:
    opened = registries.opened(tmp_path)
    yield opened
    opened.close()


def allow(registry: store.Registry, amount: int) -> None:
    registry.quotas.change({DAY: amount}, hard=True, author="root", reason="", now_us=now())


def now() -> int:
    return clock.SystemClock().wall_us()


def counter(registry: store.Registry) -> int:
    place = DAY, limits.window(limits.Period.DAY, now())[0]
    return registry.quotas.sums([place[1]]).get(place, quotas.Counted(0, 0, 0)).amount


def ledger(state: Path, replicas: list[simulated_replica.Running]) -> totals.Totals:
    """Put the replicas' rows beside the gateway's and return what both come to."""
    sink = spool.Spool(state / "spool", "replicas", clock=clock.SystemClock())
    names = set(usage.Identity.__dataclass_fields__)
    for row in (row for one in replicas for row in one.rows()):
        identity = usage.Identity(**{name: row.pop(name) for name in names})
        row["kind"], row["outcome"] = usage.RowKind(row["kind"]), usage.Outcome(row["outcome"])
        row["payer"] = usage.Payer(row["payer"])
        sink.append(usage.UsageRow(identity=identity, **row))
    sink.close()
    return totals.Totals(state)


def tokens(books: totals.Totals) -> int:
    start, end = limits.window(limits.Period.DAY, now())
    return sum(row.spent.tokens for row in books.consumed(start, end) if row.team == "physics")


async def test_two_hundred_at_once_spend_what_they_may_and_a_restart_forgets_nothing(
    tmp_path: Path, registry: store.Registry
) -> None:
    allow(registry, 1000)
    async with simulated_replica.running(tmp_path, "r1", **QUICK) as replica:
        async with gateway(tmp_path, replica) as served:
            answers = await asyncio.gather(*[served.ask(16) for _ in range(200)])
            good = [answer.json()["usage"] for answer in answers if answer.status_code == 200]
            refused = [answer for answer in answers if answer.status_code != 200]
            spent = sum(used["total_tokens"] for used in good)
            assert good
            assert refused
            assert spent <= 1000 + max(used["total_tokens"] for used in good)
            for answer in refused:
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (429, "quota_exceeded")
                assert error["type"] == "insufficient_quota"
                assert 0 < int(answer.headers["retry-after"]) <= 86_400
            # Told within a second, so the kill forgets nothing of this.
            await harness.until(lambda: counter(registry) == spent)
            await served.kill()
        assert tokens(totals.Totals(tmp_path)) == spent
        allow(registry, spent)
        async with gateway(tmp_path, replica) as served:
            assert (await served.ask(16)).status_code == 429
            allow(registry, spent + 10_000)

            async def let_in() -> bool:
                return (await served.ask(16)).status_code == 200

            began = asyncio.get_running_loop().time()
            while not await let_in():
                assert asyncio.get_running_loop().time() - began < 30
    rows = totals.Totals(tmp_path)
    assert tokens(rows) == counter(registry)  # the last use was told at SIGTERM
    refusals = {usage.Outcome.REFUSED.value}
    with rows._books.reading() as reading:
        found = reading.query("SELECT DISTINCT outcome FROM usage WHERE reason LIKE '%used up%'")
    assert {row["outcome"] for row in found} == refusals


async def test_a_counter_never_drifts_from_the_ledger(
    tmp_path: Path, registry: store.Registry
) -> None:
    """A6: a third cancelled in the queue, a third shed, a third in a gateway that is killed."""
    third, size = 100, 500
    allow(registry, 10_000_000)
    async with simulated_replica.running(tmp_path, "r1", **SLOW) as replica:
        options = {"queue_interactive": third, "deadline_interactive_s": 600.0}
        async with gateway(tmp_path, replica, **options) as served:
            running = [asyncio.create_task(served.ask(size)) for _ in range(SEATS)]
            await seated(replica, SEATS)
            waiting = [asyncio.create_task(served.ask(size)) for _ in range(third)]
            await open_at(served, SEATS + third)
            shed = await asyncio.gather(*[served.ask(size) for _ in range(third)])
            assert {answer.json()["error"]["code"] for answer in shed} == {"overloaded"}
            for task in waiting:
                task.cancel()
            await open_at(served, SEATS)
            waiting += [asyncio.create_task(served.ask(size)) for _ in range(third - SEATS)]
            await open_at(served, third)
            await served.kill()
            await asyncio.gather(*running, *waiting, return_exceptions=True)
        await harness.until(lambda: len(replica.rows()) == SEATS)
        books = ledger(tmp_path, [replica])
        lost = tokens(books)
        assert lost > 0
        assert counter(registry) == 0  # nothing had ended when it was killed
        drifts = await quota_check.check(
            registry.quotas, books, quota.NoPrices(), clock.SystemClock(), settle_s=0, quiet_s=0
        )
        assert list(drifts.values()) == [lost]
        assert counter(registry) == lost
        allow(registry, lost + 2 * size)  # a single claim that is still held would leave no room
        async with gateway(tmp_path, replica) as served:
            assert (await served.ask(8)).status_code == 200
            refused = await served.ask(2 * size)
            assert refused.json()["error"]["code"] == "quota_exceeded"


async def seated(replica: simulated_replica.Running, count: int) -> None:
    async with httpx.AsyncClient(
        trust_env=False, headers={"Authorization": f"Bearer {replica.secret}"}
    ) as http:
        while True:
            found = (await http.get(f"http://{replica.replica.address}/forebay/state")).json()
            if dict(found.get("stats", found))["interactive"] == count:
                return
            await asyncio.sleep(0.02)


async def open_at(served: Gateway, count: int) -> None:
    """Return when so many requests wait or run in the gateway; by its own metric."""
    name = "forebay_requests_open "
    while True:
        lines = (await served.client.get("/metrics")).text.splitlines()
        if any(line == f"{name}{count:.1f}" for line in lines):
            return
        await asyncio.sleep(0.05)

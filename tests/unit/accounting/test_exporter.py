"""The ledger's counters for Prometheus: right, and never going back."""

from pathlib import Path
from typing import Any

import fastapi
import httpx
from prometheus_client import parser

from accounting import billing_routes, exporter, settings, spool
from scheduler.contracts import clock, requests
from tests.unit.accounting import samples, world


def write(state: Path, name: str, *rows: Any) -> None:
    sink = spool.Spool(state / "spool" / name, name, clock=clock.FakeClock())
    for row in rows:
        sink.append(row)
    sink.close()


def counts(text: str) -> dict[tuple[str, str, str], float]:
    return {
        (sample.labels["team"], sample.labels["model"], sample.labels["kind"]): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "forebay_usage_tokens_total"
    }


async def test_tokens_by_team_model_and_kind(tmp_path: Path) -> None:
    world.write(tmp_path)
    time = clock.FakeClock()
    counters = exporter.UsageCounters(tmp_path, settings.Accounting(), time)
    assert counts(counters.text()) == {
        ("blue", "chat", "cached_prompt"): 2,
        ("blue", "chat", "output"): 14,
        ("blue", "chat", "uncached_prompt"): 10,
        ("red", "chat", "output"): 10,
        ("red", "chat", "uncached_prompt"): 8,
    }
    write(tmp_path, "more", samples.row("close", "q7", team='a"b\\', output_tokens=5))
    assert len(counts(counters.text())) == 5  # the books are not read for every scrape
    await time.advance(exporter.KEPT_S)
    assert counts(counters.text())['a"b\\', "chat", "output"] == 5


async def test_a_counter_never_goes_back(tmp_path: Path) -> None:
    write(tmp_path, "replica", samples.row("replica", "q1", output_tokens=9))
    time = clock.FakeClock()
    counters = exporter.UsageCounters(tmp_path, settings.Accounting(), time)
    assert counts(counters.text()) == {("red", "chat", "output"): 9}
    fault: dict[str, Any] = {"outcome": "replica_lost", "payer": "platform", "output_tokens": 9}
    write(tmp_path, "gateway", samples.row("close", "q1", **fault))
    await time.advance(exporter.KEPT_S)
    assert counts(counters.text()) == {("red", "chat", "output"): 9}


async def test_only_an_admin_may_scrape_it(tmp_path: Path) -> None:
    world.write(tmp_path)
    seen: list[requests.Caller] = [world.ADMIN]
    app = fastapi.FastAPI()
    app.include_router(
        billing_routes.router(tmp_path, table=settings.Accounting(), time=clock.FakeClock())
    )

    @app.middleware("http")
    async def _who(request: fastapi.Request, forward: Any) -> Any:
        request.state.caller = seen[-1]
        return await forward(request)

    way = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=way, base_url="http://f", trust_env=False) as client:
        answer = await client.get("/admin/usage-metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert (
            'forebay_usage_tokens_total{kind="output",model="chat",team="red"} 10.0' in answer.text
        )
        seen.append(world.BOB)
        assert (await client.get("/admin/usage-metrics")).status_code == 403

"""A replica that must leave while it streams: a drain past its limit, and a lease whose walltime is up."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from scheduler.contracts import usage
from tests.integration import lease_site, simulated_replica
from tests.unit.gateway import fleets, harness

CHAT = "/v1/chat/completions"
TOKENS = 700  # of 5 ms: a stream lasts for 3.5 s at least, the limit is far below
STEP: dict[str, Any] = {"step-base-ms": 5.0}


def body(name: str) -> dict[str, Any]:
    return {
        "model": "chat",
        "messages": [{"role": "user", "content": f"stream {name}"}],
        "max_tokens": TOKENS,
        "ignore_eos": True,
    }


async def stream(http: httpx.AsyncClient, name: str) -> str:
    """Return the text of a stream, which must be whole."""
    response = await http.post(CHAT, json={**body(name), "stream": True})
    lines = response.text.splitlines()
    assert lines[-2:] == ["data: [DONE]", ""], lines[-3:]
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(c["delta"].get("content", "") for e in chunks for c in e["choices"])


@pytest.mark.parametrize("how", ["drain", "sigterm"])
async def test_streams_outlive_their_replicas_time_s6(tmp_path: Path, how: str) -> None:
    """S6: nothing new goes there, no stream is cut, and what remains goes on elsewhere.

    SIGTERM to the agent is what Slurm sends at a walltime's end.
    """
    lease = tmp_path / "lease"
    lease.mkdir()
    async with (
        lease_site.opened(lease, term_s=1.0, grace_s=4.0) as site,
        simulated_replica.running(tmp_path, "heir", **STEP) as heir,
    ):
        site.want(lease_site.desired(model="chat", **STEP))
        report = await site.serving()
        old = fleets.make_replica(
            "r-1", address=report.address, secret_file=report.secret_file, seats=4
        )
        async with (
            harness.gateway(fleets.make_view([old], adapters=())) as served,
            httpx.AsyncClient(
                base_url=served.http, headers=harness.ANN_AUTH, trust_env=False, timeout=60
            ) as http,
        ):
            streams = [asyncio.create_task(stream(http, str(n))) for n in range(3)]
            await site.broker.until(lambda r: r.slots[0].replicas[0].stats.interactive == 3)
            # The gateway may hear of it late: to a replica that drains it is told to go elsewhere.
            both = fleets.make_view([old, heir.replica], revision=2, adapters=())
            served.fleet.set(both)
            if how == "drain":
                site.want(lease_site.desired(model="chat", run=False, drain_s=1.0, **STEP))
            else:
                site.agent.send_signal(signal.SIGTERM)
            await site.broker.until(lambda r: lease_site.state(r, "r-1") == "draining")
            late = await http.post(CHAT, json={**body("late"), "max_tokens": 3})
            texts = await asyncio.gather(*streams)
            served.fleet.set(fleets.make_view([heir.replica], revision=3, adapters=()))
            alone = [http.post(CHAT, json=body(str(n))) for n in range(3)]
            whole = [answer.json() for answer in await asyncio.gather(*alone)]
            await site.broker.until(lambda r: lease_site.state(r, "r-1") == "stopped")
            await served.idle()
    assert late.status_code == 200
    assert list(texts) == [answer["choices"][0]["message"]["content"] for answer in whole]
    rows = served.closed()
    lost = [row for row in rows if "time to drain is up" in row.reason]
    assert len(lost) == 3
    assert {row.outcome for row in lost} == {usage.Outcome.REPLICA_LOST}
    assert {row.payer for row in lost} == {usage.Payer.TEAM}
    done = [row for row in rows if row.outcome is usage.Outcome.OK]
    assert {row.identity.replica_id for row in done} == {"heir"}
    for row in lost:
        rest = next(r for r in done if r.identity.request_id == row.identity.request_id)
        assert row.output_tokens + rest.output_tokens == TOKENS
        assert 0 < row.output_tokens < TOKENS

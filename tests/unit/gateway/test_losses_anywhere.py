"""Many streams at once whose replicas die or leave at any byte: each client has its whole answer, once."""

import asyncio
import random
import tempfile
from pathlib import Path

import pytest

from scheduler.contracts import errors, frames, resume
from tests.unit.gateway import asking, fleets, harness
from tests.unit.gateway.test_survival import AGAIN, BEGIN, CHAT, text, token

SEEDS = [(0, 25), *(pytest.param(seed, 1_000, marks=pytest.mark.long) for seed in range(1, 21))]
CLIENTS = 8


class Unreliable:
    """A replica that cuts its bytes anywhere, and breaks most of what it begins."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    async def send(self, out: harness.Out, *items: frames.Frame) -> None:
        """Send frames in pieces of any size, sometimes with a turn of the loop between."""
        raw = b"".join(item.encode() for item in items)
        while raw:
            cut = self._chance.randint(1, len(raw))
            await out.raw(raw[:cut])
            raw = raw[cut:]
            if self._chance.random() < 0.3:
                await asyncio.sleep(0)

    async def answer(self, received: harness.Received, out: harness.Out) -> None:
        """Go on with what another began, begin and die, or begin and leave as planned."""
        if resume.FIELD in received.body:
            if self._chance.random() < 0.3:
                full = {"error": {"code": "replica_full", "message": "draining"}, "stats": {}}
                await out.json(429, full)
                return
            await self.send(out, AGAIN, token(" world", 9, 10))
            await self.send(out, harness.data(harness.chat_event({}, "stop"), 11), harness.DONE)
            await out.finish(prompt=5, cached=2, output=5)
            return
        ahead = (9,) if self._chance.random() < 0.5 else ()
        await self.send(out, BEGIN, token("Hel", 7), token("lo", 8, ahead=ahead))
        if self._chance.random() < 0.5:
            await out.reset()
            return
        told = errors.Draining("its time to drain is up")
        await self.send(out, token("", ahead=(9,)))
        await out.error(frames.Error(told.code, told.message, told.status, 5, 2, 4))


@pytest.mark.parametrize(("seed", "answers"), SEEDS)
async def test_no_token_is_lost_or_doubled(
    seed: int, answers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.placing.SUSPECT_S", 0.01)
    for name in (
        "PATIENCE_S",
        "NEW_PATIENCE_S",
    ):  # half of all streams here are suspects: seconds each
        monkeypatch.setattr(f"gateway.local_waiter.{name}", 0.0)
    script = Unreliable(random.Random(seed)).answer
    with tempfile.TemporaryDirectory() as name:
        async with (
            harness.FakeReplica(script, "r1").listening() as one,
            harness.FakeReplica(script, "r2").listening() as other,
        ):
            view = fleets.make_view([one.replica(Path(name)), other.replica(Path(name))])
            async with harness.gateway(view) as served, asking.http(served) as session:

                async def client() -> None:
                    for _ in range(answers // CLIENTS + 1):
                        body = harness.chat_body(stream=True)
                        answer = (await session.post(CHAT, json=body)).text
                        assert text(answer) == "Hello world", answer
                        assert answer.endswith("data: [DONE]\n\n")

                async with asyncio.TaskGroup() as group:
                    for _ in range(CLIENTS):
                        group.create_task(client())
                await served.idle()
                served.closed()

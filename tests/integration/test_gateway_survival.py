"""A gateway before real vLLM replicas that are killed −9 in the middle of their streams, under load.

Greedy answers must be the undisturbed ones, byte for byte. A first difference passes only where the two
best tokens were so close (`seams.TIE`) that the size of a batch decides between them; such ties are counted.
"""

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import grpc
import httpx
import pytest

from scheduler.contracts import usage
from scheduler.contracts.v1 import forebay_pb2, forebay_pb2_grpc
from tests.contract import engine_vllm, seams
from tests.unit.gateway import fleets, harness

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOKENS = 48
SEATS = 8
ENOUGH = 4  # chunks of a stream before the kill; a busy engine may say a whole answer in fewer
PROMPTS = (
    "Tell me a short story about a river.",
    "naïve 漢字 🦀: what does the crab say?",
    "Übung macht den Meister, żółw ελιά 水",
    "Count the locks between here and the sea.",
)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One request, and the answer that it has undisturbed: text, ids, and the prompt's ids."""

    path: str
    body: dict[str, Any]
    text: str
    ids: tuple[int, ...]
    prompt: tuple[int, ...]

    @property
    def over_grpc(self) -> forebay_pb2.GenerateRequest:
        """The same request over gRPC."""
        message = forebay_pb2.GenerateRequest(
            model="chat", max_tokens=self.body["max_tokens"], stop=self.body.get("stop", ())
        )
        message.temperature = 0.0
        if self.path == CHAT:
            message.messages.add(role="user", content=self.body["messages"][0]["content"])
        else:
            message.prompt = self.body["prompt"]
        return message


def cases(replica: engine_vllm.Replica) -> list[Case]:
    """Return chat and completions of each prompt, plain and with stop strings, answered undisturbed."""
    found: list[Case] = []
    for prompt, path in itertools.product(PROMPTS, (CHAT, COMPLETIONS)):
        what = (
            {"messages": [{"role": "user", "content": prompt}]}
            if path == CHAT
            else {"prompt": prompt}
        )
        body = {"model": "chat", "temperature": 0, "max_tokens": TOKENS, "stream": True, **what}
        plain = _undisturbed(replica, path, body)
        found.append(plain)
        middle = len(plain.text) * 3 // 4
        stop = [plain.text[middle : middle + 6], "z" * 20]
        found.append(_undisturbed(replica, path, {**body, "stop": stop}))
    return found


def _undisturbed(replica: engine_vllm.Replica, path: str, body: dict[str, Any]) -> Case:
    answer, _ = engine_vllm.ask(replica, path, body)
    return Case(path, body, seams.text(answer), tuple(seams.ids(answer)), answer[0].token_ids)


@dataclasses.dataclass
class Fleet:
    """A gateway before real replicas."""

    served: harness.Served
    server: engine_vllm.ForkServer
    replicas: dict[str, engine_vllm.Replica]
    chunks: collections.Counter[Case] = dataclasses.field(default_factory=collections.Counter)

    async def kill(self, victim: str) -> None:
        """Kill a replica's main process; its engine core dies with it."""
        await asyncio.to_thread(engine_vllm.stop, self.server, self.replicas.pop(victim).id, 9)

    async def grow(self) -> str:
        """Start another replica and tell the gateway."""
        wanted = engine_vllm.spec(self.server.folder, seats=SEATS)
        begun = engine_vllm.begin(self.server, wanted)
        started = await asyncio.to_thread(engine_vllm.listening, self.server, begun)
        self.replicas[started.id] = started
        self.tell()
        return started.id

    def tell(self) -> None:
        """Give the gateway the view of those that live."""
        view = fleets.make_view(
            [
                fleets.make_replica(
                    one.id,
                    address=one.address,
                    secret_file=str(self.server.folder / "secret"),
                    seats=SEATS,
                )
                for one in self.replicas.values()
            ],
            revision=(self.served.fleet.view() or fleets.make_view([])).revision + 1,
            adapters=(),
        )
        self.served.fleet.set(view)

    async def over_http(self, case: Case, http: httpx.AsyncClient) -> str:
        """Return the text of one streamed answer, which must be whole."""
        lines: list[str] = []
        async with http.stream("POST", case.path, json=case.body) as response:
            async for line in response.aiter_lines():
                lines.append(line)
                self.chunks[case] += line.startswith("data: {")
        self.chunks[case] += ENOUGH
        assert lines[-2:] == ["data: [DONE]", ""], lines[-3:]
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert len([c for c in choices if c["finish_reason"]]) == 1
        assert len([c for c in choices if "role" in c.get("delta", {})]) == (case.path == CHAT)
        return "".join(
            (c["delta"].get("content") if "delta" in c else c["text"]) or "" for c in choices
        )

    async def over_grpc(self, case: Case, api: Any) -> str:
        """Return the text of one answer over gRPC; its ids must be those of the usage."""
        text, ids, used = "", 0, 0
        call = api.Generate(case.over_grpc, metadata=(("authorization", "Bearer ann"),))
        async for chunk in call:
            text += chunk.text
            ids += len(chunk.token_ids)
            used += chunk.usage.completion_tokens
            self.chunks[case] += bool(chunk.text)
        self.chunks[case] += ENOUGH
        assert ids <= used
        return text


@contextlib.asynccontextmanager
async def fleet(
    request: pytest.FixtureRequest, make: pytest.TempPathFactory, count: int
) -> AsyncIterator[Fleet]:
    """Run a gateway with ``count`` replicas."""
    server = engine_vllm.shared(request, engine_vllm.NEWEST, make)
    async with harness.gateway(None, queue_interactive=512) as served:
        found = Fleet(served, server, {})
        for _ in range(count):
            await found.grow()
        try:
            yield found
        finally:
            for one in found.replicas.values():
                await asyncio.to_thread(engine_vllm.stop, server, one.id, 9)


def tie(
    replica: engine_vllm.Replica, case: Case, got: str, spelling: engine_vllm.Spelling
) -> float:
    """Return the gap of the two best tokens where a text begins to differ from the undisturbed one."""
    same = next(
        (n for n, (a, b) in enumerate(zip(got, case.text, strict=False)) if a != b),
        min(len(got), len(case.text)),
    )
    at = next(n for n in range(len(case.ids) + 1) if len(spelling.text(case.ids[: n + 1])) > same)
    # A token may end inside a character.
    gaps = [
        seams.gap(
            lambda path, body: engine_vllm.ask(replica, path, {"model": "chat", **body})[0],
            [*case.prompt, *case.ids[:k]],
        )
        for k in range(max(0, at - 1), at + 1)
    ]
    return min(gaps, default=math.inf)


def compare(
    replica: engine_vllm.Replica, asked: Iterable[Case], got: Iterable[str], weights: str
) -> int:
    """Check every text against the undisturbed one; returns how many ties there were."""
    spelling, ties = engine_vllm.Spelling(weights), 0
    for case, text in zip(asked, got, strict=True):
        if text != case.text:
            gap = tie(replica, case, text, spelling)
            assert gap < seams.TIE, (gap, case.body, text, case.text)
            ties += 1
    return ties


async def round_of_kills(
    found: Fleet, asked: list[Case], after: Callable[[], Awaitable[None]]
) -> list[str]:
    """Ask for all cases at once, HTTP and gRPC in turn, while ``after`` kills; returns the texts."""
    options = [("grpc.enable_http_proxy", 0)]
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(
            base_url=found.served.http,
            headers=harness.ANN_AUTH,
            trust_env=False,
            timeout=120,
            limits=limits,
        ) as http,
        grpc.aio.insecure_channel(found.served.grpc, options=options) as channel,
    ):
        api: Any = forebay_pb2_grpc.InferenceStub(channel)
        work = [
            found.over_grpc(case, api) if number % 3 == 2 else found.over_http(case, http)
            for number, case in enumerate(asked)
        ]
        *texts, _ = await asyncio.gather(*work, after())
    return [text for text in texts if text is not None]


def ledger_adds_up(served: harness.Served, asked: list[Case]) -> tuple[int, int]:
    """Check that the rows of each request add up to one answer; returns resumed requests and waste."""
    by_request: dict[str, list[usage.UsageRow]] = {}
    for row in served.closed():
        by_request.setdefault(row.identity.request_id, []).append(row)
    resumed = waste = 0
    for rows in by_request.values():
        team = [row for row in rows if row.payer is usage.Payer.TEAM and row.identity.replica_id]
        prompts = [r.uncached_prompt_tokens + r.cached_prompt_tokens for r in team]
        assert len([p for p in prompts if p]) == 1, rows
        assert rows[-1].outcome is usage.Outcome.OK
        resumed += len(team) > 1
        waste += sum(row.waste_tokens for row in rows)
    assert len(by_request) == len(asked)
    tokens = sum(
        r.output_tokens for rows in by_request.values() for r in rows if r.payer is usage.Payer.TEAM
    )
    assert abs(tokens - sum(len(case.ids) for case in asked)) <= 8 * len(asked)  # stop strings' ids
    return resumed, waste


async def test_streams_survive_a_killed_replica(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """G4, G6 and all: sixteen streams, one of two replicas killed −9; nobody notices."""
    async with fleet(request, tmp_path_factory, 2) as found:
        victim, heir = list(found.replicas)
        asked = await asyncio.to_thread(cases, found.replicas[heir])

        async def kill() -> None:
            await harness.until(lambda: len(found.chunks) == len(asked), 120)
            await harness.until(lambda: min(found.chunks.values()) >= ENOUGH, 120)
            await found.kill(victim)

        texts = await round_of_kills(found, asked, kill)
        weights = str(found.server.folder / "tiny")
        ties = await asyncio.to_thread(compare, found.replicas[heir], asked, texts, weights)
        await found.served.idle()
        resumed, waste = ledger_adds_up(found.served, asked)
    print(f"{len(asked)} streams, {resumed} resumed, {waste} tokens of waste, {ties} ties")
    assert resumed > 0
    assert waste > 0


@pytest.mark.long
async def test_streams_survive_a_night_of_kills(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The same, again and again: a replica is killed and another started, twelve times."""
    async with fleet(request, tmp_path_factory, 2) as found:
        asked = await asyncio.to_thread(cases, next(iter(found.replicas.values())))
        weights = str(found.server.folder / "tiny")
        ties = streams = 0
        for turn in range(12):
            victim = next(iter(found.replicas))
            goal = 20 + 37 * turn % 400
            found.chunks.clear()

            async def kill(victim: str = victim, goal: int = goal) -> None:
                await harness.until(lambda: found.chunks.total() >= goal, 120)
                await found.kill(victim)
                await found.grow()

            texts = await round_of_kills(found, asked, kill)
            last = list(found.replicas.values())[-1]
            ties += await asyncio.to_thread(compare, last, asked, texts, weights)
            streams += len(asked)
        await found.served.idle()
    resumed = sum(row.outcome is usage.Outcome.REPLICA_LOST for row in found.served.closed())
    print(f"{streams} streams, {resumed} lost and resumed, {ties} ties")
    assert resumed > 0

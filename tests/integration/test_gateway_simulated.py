"""Gateway and replica server together, over the simulated engine: tokens, cuts, seats, one row each."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai

from scheduler.contracts import usage
from scheduler.contracts.v1 import forebay_pb2, forebay_pb2_grpc
from tests.integration import simulated_replica
from tests.unit.gateway import fleets, harness

CHAT = "/v1/chat/completions"
QUICK = {"time-scale": 0.05}
SLOW = {"step-base-ms": 20.0}


@contextlib.asynccontextmanager
async def system(
    tmp: Path, *names: str, args: dict[str, Any], **options: Any
) -> AsyncIterator[tuple[harness.Served, list[simulated_replica.Running]]]:
    """Serve a gateway before simulated replicas."""
    async with contextlib.AsyncExitStack() as stack:
        replicas = [
            await stack.enter_async_context(simulated_replica.running(tmp, name, **args))
            for name in names
        ]
        view = fleets.make_view([one.replica for one in replicas], adapters=())
        served = await stack.enter_async_context(harness.gateway(view, **options))
        yield served, replicas


def session(served: harness.Served, **headers: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=served.http, headers={**harness.ANN_AUTH, **headers}, trust_env=False, timeout=30
    )


def client(served: harness.Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{served.http}/v1",
        api_key="ann",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False, verify=False, timeout=30),
    )


def merged(
    served: harness.Served, replicas: list[simulated_replica.Running]
) -> dict[tuple[str, int], dict[str, Any]]:
    """Merge the rows of both sides as readers do: CLOSE over REPLICA over OPEN."""
    rank = [usage.RowKind.OPEN, usage.RowKind.REPLICA, usage.RowKind.CLOSE]
    rows = [row.flat() for row in served.sink.rows if isinstance(row, usage.UsageRow)]
    rows += [row for one in replicas for row in one.rows()]
    best: dict[tuple[str, int], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: rank.index(row["kind"])):
        best[row["request_id"], row["attempt"]] = row
    return best


async def state(one: simulated_replica.Running) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {one.secret}"}
    async with httpx.AsyncClient(trust_env=False, verify=False, headers=headers) as http:
        found = (await http.get(f"http://{one.replica.address}/forebay/state")).json()
    return dict(found.get("stats", found))


async def test_streamed_whole_and_grpc_say_the_same(tmp_path: Path) -> None:
    messages: Any = [{"role": "user", "content": "Tell me of rivers"}]
    async with system(tmp_path, "r1", args=QUICK) as (served, replicas), client(served) as api:
        whole = await api.chat.completions.create(model="chat", messages=messages, max_tokens=20)
        stream = await api.chat.completions.create(
            model="chat",
            messages=messages,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content != ""
        async with grpc.aio.insecure_channel(
            served.grpc, options=[("grpc.enable_http_proxy", 0)]
        ) as channel:
            stub: Any = forebay_pb2_grpc.InferenceStub(channel)
            asked = forebay_pb2.GenerateRequest(
                model="chat",
                max_tokens=20,
                messages=[forebay_pb2.Message(role="user", content="Tell me of rivers")],
            )
            pieces = [
                piece
                async for piece in stub.Generate(asked, metadata=(("authorization", "Bearer ann"),))
            ]
        assert "".join(piece.text for piece in pieces) == text
        assert sum(len(piece.token_ids) for piece in pieces) == pieces[-1].usage.completion_tokens
        rows = merged(served, replicas)
        assert len(rows) == 3
        assert {row["outcome"] for row in rows.values()} == {"ok"}
        assert whole.usage is not None
        assert {row["output_tokens"] for row in rows.values()} == {whole.usage.completion_tokens}
        # Both sides counted the same, so either may be lost.
        assert [row["output_tokens"] for row in replicas[0].rows()] == [
            row.output_tokens for row in served.closed()
        ]


async def test_choices_with_logprobs_each_end_once_g5(tmp_path: Path) -> None:
    async with system(tmp_path, "r1", args=QUICK) as (served, _), client(served) as api:
        stream = await api.chat.completions.create(
            model="chat",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=6,
            n=2,
            logprobs=True,
            top_logprobs=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        choices = [choice for chunk in chunks for choice in chunk.choices]
        assert sorted(c.index for c in choices if c.finish_reason) == [0, 1]
        entries = sum(len(c.logprobs.content or ()) for c in choices if c.logprobs)
        used = chunks[-1].usage
        assert used is not None
        assert chunks[-1].choices == []
        assert entries == used.completion_tokens == served.closed()[0].output_tokens


async def test_stop_string_is_never_half_sent_g4(tmp_path: Path) -> None:
    """Case G4 through both hops: what is streamed equals the whole answer, cut before the stop."""
    async with system(tmp_path, "r1", args=QUICK) as (served, _), client(served) as api:
        messages: Any = [{"role": "user", "content": "hi"}]
        whole = await api.chat.completions.create(model="chat", messages=messages, max_tokens=30)
        said = whole.choices[0].message.content or ""
        stop = said[len(said) // 2 : len(said) // 2 + 5]
        stream = await api.chat.completions.create(
            model="chat", messages=messages, max_tokens=30, stop=[stop], stream=True
        )
        text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
        assert text == said[: said.index(stop)]
        async with grpc.aio.insecure_channel(
            served.grpc, options=[("grpc.enable_http_proxy", 0)]
        ) as channel:
            stub: Any = forebay_pb2_grpc.InferenceStub(channel)
            asked = forebay_pb2.GenerateRequest(
                model="chat",
                max_tokens=30,
                stop=[stop],
                messages=[forebay_pb2.Message(role="user", content="hi")],
            )
            call = stub.Generate(asked, metadata=(("authorization", "Bearer ann"),))
            assert "".join([piece.text async for piece in call]) == text


async def test_embeddings_in_three_shapes_g10(tmp_path: Path) -> None:
    async with system(tmp_path, "r1", args=QUICK) as (served, replicas), client(served) as api:
        coded = await api.embeddings.create(model="chat", input=["abc", "xyz"])
        floats = await api.embeddings.create(
            model="chat", input=["abc", "xyz"], encoding_format="float"
        )
        tokens = await api.embeddings.create(model="chat", input=[[1, 2, 3], [4, 5]])
        assert [[round(x, 5) for x in item.embedding] for item in coded.data] == [
            [round(x, 5) for x in item.embedding] for item in floats.data
        ]
        assert tokens.usage.prompt_tokens == 5
        assert len(merged(served, replicas)) == 3


async def test_leaving_frees_the_seat_and_leaves_one_row_g2(tmp_path: Path) -> None:
    """Case G2: stream false, 4,000 tokens wanted, gone after 0.2 s."""
    async with system(tmp_path, "r1", args=SLOW) as (served, replicas):
        async with session(served) as http:
            body = harness.chat_body(max_tokens=1500, ignore_eos=True)
            asked = asyncio.create_task(http.post(CHAT, json=body))
            async with asyncio.timeout(10):
                while not (await state(replicas[0]))["interactive"]:
                    pass
            asked.cancel()
            await asyncio.wait({asked})
            async with asyncio.timeout(20):
                while (await state(replicas[0]))["interactive"]:
                    pass
        await served.rows(1)
        await served.idle()
        await harness.until(lambda: len(replicas[0].rows()) == 1)
        (row,) = merged(served, replicas).values()
        assert row["outcome"] == "client_gone"


async def test_killed_replica_mid_stream_g1(tmp_path: Path) -> None:
    """What can't be resumed ends in an error, the next request is answered, nothing counts twice."""
    async with system(tmp_path, "r1", "r2", args=SLOW) as (served, replicas):
        async with session(served) as http:
            body = harness.chat_body(stream=True, max_tokens=1500, ignore_eos=True, seed=3)
            lines = await _killed(served, replicas, http, body)
            last = json.loads([line for line in lines if line][-1].removeprefix("data: "))
            assert last["error"]["code"] == "replica_lost"
            assert "seeded" in last["error"]["message"]
            assert "data: [DONE]" not in lines
            assert '"finish_reason": "' not in "".join(lines)
            after = await http.post(CHAT, json=harness.chat_body(max_tokens=3))
            assert after.status_code == 200
        await served.idle()
        rows = list(merged(served, replicas).values())
        outcomes = sorted(row["outcome"] for row in rows)
        assert outcomes.count("ok") == 1
        assert set(outcomes) == {"ok", "replica_lost"}
        lost = [row for row in rows if row["outcome"] == "replica_lost"]
        assert {row["payer"] for row in lost} == {"platform"}
        assert max(row["output_tokens"] for row in lost) > 0


async def test_killed_replica_is_replaced_and_the_client_notices_nothing(tmp_path: Path) -> None:
    """The whole text is the undisturbed one, and what the attempts cost adds up to it."""
    async with system(tmp_path, "r1", "r2", args=SLOW) as (served, replicas):
        async with session(served) as http:
            body = harness.chat_body(
                stream=True, max_tokens=150, ignore_eos=True, stream_options={"include_usage": True}
            )
            lines = await _killed(served, replicas, http, body)
            whole = await http.post(CHAT, json=harness.chat_body(max_tokens=150, ignore_eos=True))
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        text = "".join(c["delta"].get("content", "") for e in chunks for c in e["choices"])
        assert text == whole.json()["choices"][0]["message"]["content"]
        assert lines[-2:] == ["data: [DONE]", ""]
        assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
        assert [c["usage"]["completion_tokens"] for c in chunks if c.get("usage")] == [150]
        await served.idle()
        rows = [r for r in merged(served, replicas).values() if r["output_tokens"] != 150]
        assert {row["outcome"] for row in rows} == {"replica_lost", "ok"}
        assert {row["payer"] for row in rows if row["output_tokens"]} == {"team"}
        assert sum(row["output_tokens"] for row in rows) == 150
        prompt = sum(row["uncached_prompt_tokens"] + row["cached_prompt_tokens"] for row in rows)
        assert prompt == whole.json()["usage"]["prompt_tokens"]
        assert sum(row["waste_tokens"] for row in rows) >= prompt


async def _killed(
    served: harness.Served,
    replicas: list[simulated_replica.Running],
    http: httpx.AsyncClient,
    body: dict[str, Any],
) -> list[str]:
    """Return a stream's lines; its replica is killed when a few have come."""
    lines: list[str] = []
    async with http.stream("POST", CHAT, json=body) as response:
        async for line in response.aiter_lines():
            lines.append(line)
            if len(lines) == 6:
                victim = served.sink.rows[0].flat()["replica_id"]  # type: ignore[union-attr]  # OPEN
                next(r for r in replicas if r.replica.replica_id == victim).process.kill()
    return lines


async def test_spike_takes_the_seats_of_batch(tmp_path: Path) -> None:
    """Rung 0 from the gateway's side: batch is told `preempted`, every interactive request is answered."""
    async with system(tmp_path, "r1", args=SLOW) as (served, replicas):
        lines_of = {
            "Authorization": "Bearer svc",
            "X-Forebay-Priority": "batch",
            "X-Forebay-Batch-Job": "1",
        }
        async with session(served) as http:
            body = harness.chat_body(max_tokens=1500, ignore_eos=True)
            batch = [
                asyncio.create_task(
                    http.post(CHAT, json=body, headers={**lines_of, "X-Forebay-Custom-Id": str(n)})
                )
                for n in range(5)
            ]
            async with asyncio.timeout(10):
                while (await state(replicas[0]))["batch"] < 3:
                    pass
            assert (await state(replicas[0]))["batch"] == 3  # one seat of four stays reserved
            spike = await asyncio.gather(
                *[http.post(CHAT, json=harness.chat_body(max_tokens=5)) for _ in range(8)]
            )
            assert [answer.status_code for answer in spike] == [200] * 8
            for task in batch:
                task.cancel()
            done = await asyncio.gather(*batch, return_exceptions=True)
        refused = [answer for answer in done if isinstance(answer, httpx.Response)]
        assert refused
        assert {answer.json()["error"]["code"] for answer in refused} == {"preempted"}
        await served.idle()
        await harness.until(
            lambda: all(row["outcome"] != "open" for row in merged(served, replicas).values())
        )
        outcomes = [row["outcome"] for row in merged(served, replicas).values()]
        assert outcomes.count("ok") == 8
        assert outcomes.count("preempted") == len(refused)

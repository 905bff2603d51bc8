"""The simulated engine: tokens, stop strings, KV blocks, batching, its OpenAI surface."""

import asyncio
import base64
import dataclasses
import json
import struct
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies

from engines.replica import app, state
from engines.simulated import batching, blocks, core, replica, shapes, stops, tokens
from scheduler.contracts import clock, fleet, usage
from tests.unit.engines import asgi


@hypothesis.given(strategies.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    text = text.encode(errors="replace").decode()
    assert tokens.decode(tokens.encode(text)) == text


def test_words_are_single_tokens_and_bad_ids_are_refused() -> None:
    assert len(tokens.encode(" baba 🦀")) == 2
    assert len(tokens.encode("baba🦀")) == 8  # no leading space: bytes
    assert tokens.encode(" 🦀") == [tokens.BYTES + 3]
    with pytest.raises(ValueError, match="token id"):
        tokens.token_bytes(tokens.SIZE)


def feed(pieces: list[str], stop: list[str]) -> tuple[str, list[int], bool]:
    held = stops.StopFilter(stop)
    text, ids = "", list[int]()
    for index, piece in enumerate(pieces):
        released = held.feed(index, piece.encode())
        text += released.text
        ids += released.token_ids
        if released.stopped:
            return text, ids, True
    return text, ids, False


def test_a_stop_string_never_leaks_and_its_beginning_is_not_lost() -> None:
    assert feed(["JK", "LM", "N", "OP"], ["LMNOP"]) == ("JK", [0], True)
    assert feed(["JK", "LM", "N", "Q"], ["LMNOP"]) == ("JKLMNQ", [0, 1, 2, 3], False)
    # Killed after LM: what was released ends with JK, so a resumed run makes LM again.
    assert feed(["JK", "LM"], ["LMNOP"]) == ("JK", [0], False)
    held = stops.StopFilter(["LMNOP"])
    held.feed(0, b"LM")
    assert held.finish() == stops.Released("LM", (0,))


def test_a_character_cut_between_tokens_is_whole_or_held() -> None:
    held = stops.StopFilter([])
    crab = "🦀".encode()
    assert held.feed(1, b"a" + crab[:1]) == stops.Released("a", ())
    assert held.feed(2, crab[1:3]) == stops.Released("", ())
    assert held.feed(3, crab[3:]) == stops.Released("🦀", (1, 2, 3))


@hypothesis.given(
    strategies.lists(strategies.text("LMNOPX", max_size=3), max_size=12),
    strategies.lists(strategies.text("LMNOP", min_size=1, max_size=4), max_size=2),
)
def test_the_filter_agrees_with_a_search_of_the_whole_text(
    pieces: list[str], stop: list[str]
) -> None:
    held = stops.StopFilter(stop)
    text = ""
    stopped = False
    for index, piece in enumerate(pieces):
        released = held.feed(index, piece.encode())
        text += released.text
        if released.stopped:
            stopped = True
            break
    if not stopped:
        text += held.finish().text
        assert text == "".join(pieces)
    assert not any(s in text for s in stop)
    assert "".join(pieces).startswith(text)


def test_blocks_are_shared_by_prefix_kept_when_idle_and_evicted_from_the_tail() -> None:
    pool = blocks.BlockPool(4, 2)
    ids = [1, 2, 3, 4, 5]
    held = pool.allocate(3)
    assert held is not None
    name = b""
    for index in range(2):
        name = blocks.chain(name, ids[2 * index : 2 * index + 2])
        pool.seal(held[index], name)
    assert pool.match(ids) == held[:2]
    pool.release(held[:2])
    pool.release(held)
    assert pool.free == 4
    assert pool.allocate(5) is None
    taken = pool.allocate(3)
    assert taken is not None
    assert pool.match(ids) == held[:1], "the tail went first"


def sequence(key: str, prompt: int, out: int, band: int = 0) -> batching.Sequence:
    ids = tuple((prompt + i) % 200 for i in range(prompt))
    return batching.Sequence(key, ids, out, band, ignore_eos=True)


def run(batch: batching.Batch) -> dict[str, list[batching.Output]]:
    found: dict[str, list[batching.Output]] = {}
    for _ in range(10_000):
        if not batch.busy:
            return found
        for output in batch.step().outputs:
            found.setdefault(output.key, []).append(output)
    raise AssertionError("the batch does not end")


def make(kv_blocks: int = 64, seats: int = 4, budget: int = 64) -> batching.Batch:
    return batching.Batch(seats, blocks.BlockPool(kv_blocks, 4), budget, batching.StepTime())


def test_batching_chunks_prefill_and_gives_every_block_back() -> None:
    batch = make(budget=16)
    for index in range(6):
        batch.add(sequence(f"s{index}", 20 + index, 5))
    found = run(batch)
    assert {key: len(outputs) for key, outputs in found.items()} == {f"s{i}": 5 for i in range(6)}
    assert all(outputs[-1].finish_reason == "length" for outputs in found.values())
    assert batch.pool.free == batch.pool.count


def test_the_prefix_cache_counts_and_does_not_change_the_answer() -> None:
    batch = make()
    batch.add(sequence("a", 20, 5))
    first = run(batch)["a"]
    batch.add(sequence("b", 20, 5))
    second = run(batch)["b"]
    assert (first[0].cached, second[0].cached) == (0, 16)
    assert [o.token for o in first] == [o.token for o in second]


def test_kv_shortage_preempts_the_lowest_tier_youngest_first_and_recomputes() -> None:
    alone = make(kv_blocks=12)
    alone.add(sequence("b2", 12, 20, band=2))
    wanted = [o.token for o in run(alone)["b2"]]
    batch = make(kv_blocks=12)
    for key, band in (("b1", 2), ("b2", 2), ("i", 0)):
        batch.add(sequence(key, 12, 20, band))
    order: list[str] = []
    found: dict[str, list[int | None]] = {}
    while batch.busy:
        for output in batch.step().outputs:
            found.setdefault(output.key, []).append(output.token)
            if output.finish_reason:
                order.append(output.key)
    assert batch.preemptions > 0
    assert order == ["i", "b1", "b2"]
    assert found["b2"] == wanted
    assert batch.pool.free == batch.pool.count


def test_a_step_costs_what_the_model_says() -> None:
    times = batching.StepTime(1.0, 0.1, 0.01, 0.001)
    batch = batching.Batch(4, blocks.BlockPool(64, 4), 64, times)
    batch.add(sequence("a", 10, 3))
    assert batch.step().ms == pytest.approx(1.0 + 1.0 + 0.010)
    assert batch.step().ms == pytest.approx(1.0 + 0.01 + 0.011)


def simulated(**changes: Any) -> replica.Simulated:
    fields = {"model": "m", "time_scale": 0.0, **changes}
    return replica.Simulated(core.Options(**fields), clock.SystemClock())


def stack(engine: replica.Simulated, sink: usage.MemorySink) -> Any:
    about = state.About(replica_id="r-1", model="m", version="1")
    options = app.Options(asgi.SECRET, fleet.Role.SHARED, engine.core.options.seats, 0, about)
    return app.build(engine, options, sink=sink, time=clock.SystemClock())


async def ask(
    engine: replica.Simulated, path: str, body: dict[str, Any], sink: usage.MemorySink
) -> asgi.Call:
    who = asgi.identity()
    return await asgi.run(stack(engine, sink), "POST", path, asgi.headers(who), body)


CHAT, COMPLETIONS, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
HELLO = [{"role": "user", "content": "hello there"}]


def chunks(raw: bytes) -> list[Any]:
    lines = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_an_endpoint_that_it_has_not_computes_nothing(sink: usage.MemorySink) -> None:
    engine = simulated()
    async with engine.running():
        call = await ask(engine, "/v1/responses", {"model": "m", "input": "hello"}, sink)
    assert call.status == 404
    (row,) = sink.rows
    assert isinstance(row, usage.UsageRow)
    assert (row.outcome, row.output_tokens) == ("refused", 0)


async def test_an_answer_resumed_from_its_ids_goes_on_as_it_would_have(
    sink: usage.MemorySink,
) -> None:
    engine = simulated()
    async with engine.running():
        body = {"messages": HELLO, "max_tokens": 20, "ignore_eos": True}
        whole = await ask(engine, CHAT, body, sink)
        prompt = list(whole.all[0].token_ids)
        ids = whole.token_ids()
        assert len(ids) == 20
        resumed = {"prompt": prompt + ids[:7], "max_tokens": 13, "ignore_eos": True}
        rest = await ask(engine, COMPLETIONS, resumed, sink)
    assert rest.token_ids() == ids[7:]
    text = json.loads(whole.client_bytes)["choices"][0]["message"]["content"]
    assert text == tokens.decode(ids)
    assert text.endswith(json.loads(rest.client_bytes)["choices"][0]["text"])
    assert rest.end.cached_tokens == (len(prompt) + 7 - 1) // 16 * 16


async def test_streams_end_each_choice_once_with_logprobs_and_usage(
    sink: usage.MemorySink,
) -> None:
    engine = simulated()
    body = {
        "messages": HELLO,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "stream": True,
        "max_tokens": 9,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    async with engine.running():
        call = await ask(engine, CHAT, body, sink)
    found = chunks(call.client_bytes)
    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["completion_tokens"] == 18
    choices = [choice for chunk in found for choice in chunk["choices"]]
    for index in (0, 1):
        mine = [c for c in choices if c["index"] == index]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]
        entries = [e for c in mine if c["logprobs"] for e in c["logprobs"]["content"]]
        assert len(entries) == 9
        assert all(len(e["top_logprobs"]) == 2 for e in entries)
        text = "".join(c["delta"].get("content", "") for c in mine)
        assert text == tokens.decode(call.token_ids(index))
    assert call.token_ids(0) != call.token_ids(1)
    assert call.end.finish_reasons == ("length", "length")


async def test_a_stop_string_ends_the_sequence_and_frees_the_engine(
    sink: usage.MemorySink,
) -> None:
    engine = simulated()
    async with engine.running():
        body = {"prompt": "tell", "max_tokens": 30, "ignore_eos": True}
        free = json.loads((await ask(engine, COMPLETIONS, body, sink)).client_bytes)
        text = free["choices"][0]["text"]
        stop = text[20:26]
        call = await ask(engine, COMPLETIONS, {**body, "stop": stop, "stream": True}, sink)
        assert not engine.core.batch.busy
    said = "".join(c["choices"][0]["text"] for c in chunks(call.client_bytes))
    assert said == text[: text.index(stop)]
    assert call.end.finish_reasons == ("stop",)
    assert call.end.output_tokens > len(call.token_ids())


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens must be at least 1"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": "9"}, "max_tokens must be an integer"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 64}, "maximum context length is 64 tokens"),
        (COMPLETIONS, {"prompt": "x" * 99}, "your prompt contains 99 input tokens"),
        (COMPLETIONS, {"prompt": []}, "prompt must not be empty"),
        (COMPLETIONS, {"prompt": [9_999_999]}, "token ids go from 0"),
        (CHAT, {"messages": []}, "at least one message"),
        (CHAT, {"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        (EMBED, {"input": {"a": 1}}, "input must be text"),
    ],
)
async def test_bad_bodies_are_refused_as_the_engine_would(
    sink: usage.MemorySink, path: str, body: dict[str, Any], words: str
) -> None:
    engine = simulated(max_context=64)
    async with engine.running():
        call = await ask(engine, path, body, sink)
    assert call.status == 400
    assert words in call.json["error"]["message"]
    assert call.json["error"]["code"] == 400


async def test_unknown_models_are_404(sink: usage.MemorySink) -> None:
    engine = simulated(adapters=("m-law",))
    async with engine.running():
        call = await ask(engine, COMPLETIONS, {"model": "other", "prompt": "x"}, sink)
        assert call.status == 404
        known = await ask(engine, COMPLETIONS, {"model": "m-law", "prompt": "x"}, sink)
        assert known.status == 200


async def test_embeddings_in_every_form_agree(sink: usage.MemorySink) -> None:
    engine = simulated()
    async with engine.running():
        texts: dict[str, Any] = {"input": ["one", "two"]}
        plain = await ask(engine, EMBED, texts, sink)
        coded = await ask(engine, EMBED, {**texts, "encoding_format": "base64"}, sink)
        ids = {"input": [tokens.encode("one"), tokens.encode("two")]}
        by_ids = await ask(engine, EMBED, ids, sink)
    floats = [row["embedding"] for row in json.loads(plain.client_bytes)["data"]]
    raw = [base64.b64decode(r["embedding"]) for r in json.loads(coded.client_bytes)["data"]]
    assert [list(struct.unpack(f"<{shapes.DIMENSIONS}f", r)) for r in raw] == floats
    assert json.loads(by_ids.client_bytes)["data"] == json.loads(plain.client_bytes)["data"]
    assert json.loads(plain.client_bytes)["usage"]["prompt_tokens"] == 6
    assert plain.end.prompt_tokens == 6


async def test_a_dead_engine_fails_streams_and_new_requests(sink: usage.MemorySink) -> None:
    engine = simulated()
    served = stack(engine, sink)
    call = asgi.Call()
    body = {"prompt": "x", "stream": True, "max_tokens": 2000, "ignore_eos": True}
    async with engine.running():
        task = asyncio.create_task(asgi.post(served, asgi.identity(), body, call=call))
        await call.arrived.wait()
        engine.core.die("killed")
        await task
        assert (call.error.code, call.error.output_tokens > 0) == ("replica_lost", True)
        assert b"[DONE]" not in call.client_bytes
        again = await asgi.post(served, asgi.identity("r2"), body)
        assert again.error.code == "replica_lost"
        health = await asgi.run(served, "GET", "/health", asgi.headers())
        assert health.status == 503


async def test_a_fault_in_the_loop_is_told_and_does_not_hang(
    sink: usage.MemorySink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = simulated()

    def fault() -> batching.Step:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(engine.core.batch, "step", fault)
    async with engine.running():
        call = await ask(engine, COMPLETIONS, {"prompt": "x"}, sink)
    assert (call.status, "a fault" in call.json["error"]["message"]) == (500, True)
    assert "simulated engine" in caplog.text


async def test_client_gone_frees_the_engine_at_once(sink: usage.MemorySink) -> None:
    engine = simulated(time_scale=0.05)
    served = stack(engine, sink)
    call = asgi.Call()
    body = {"prompt": "x", "stream": False, "max_tokens": 2000, "ignore_eos": True}
    async with engine.running():
        task = asyncio.create_task(asgi.post(served, asgi.identity(), body, call=call))
        while engine.core.stats().output_tokens_total < 3:  # noqa: ASYNC110 - no event tells of a step
            await asyncio.sleep(0)
        call.left.set()
        await task
        assert not engine.core.batch.busy
        assert engine.core.batch.pool.free == engine.core.batch.pool.count
    (row,) = sink.rows
    assert isinstance(row, usage.UsageRow)
    assert (row.outcome, row.output_tokens >= 3) == ("client_gone", True)


def test_engine_arguments_are_checked() -> None:
    spec = fleet.ReplicaSpec("m", "1", fleet.EngineKind.SIMULATED)
    good = dataclasses.replace(spec, engine_args={"step-base-ms": 2, "kv-blocks": 10})
    options = core.Options.from_spec(good)
    assert (options.times.base, options.kv_blocks) == (2.0, 10)
    for args, words in (({"warp": 1}, "unknown argument 'warp'"), ({"kv-blocks": "x"}, "number")):
        with pytest.raises(core.ArgumentError, match=words):
            core.Options.from_spec(dataclasses.replace(spec, engine_args=args))

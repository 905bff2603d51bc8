"""A real vLLM replica, seen from its HTTP port: bytes as clients expect, and the token ids beside them.

Every test runs on each vLLM version that has an environment here (`.ci/setup all` makes both).
"""

import base64
import concurrent.futures
import json
import math
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import httpx
import openai
import pytest

from scheduler.contracts import fleet, frames
from tests.contract import engine_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASK = [{"role": "user", "content": "Tell me a short story about a river."}]
UNICODE = "naïve 漢字 🦀"


@pytest.fixture(scope="module", params=[engine_vllm.NEWEST, engine_vllm.BEFORE])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> engine_vllm.ForkServer:
    return engine_vllm.shared(request, request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def replica(server: engine_vllm.ForkServer) -> Iterator[engine_vllm.Replica]:
    models = server.folder
    adapters = {name: str(models / f"tiny-{name}") for name in ("formal", "rhyme")}
    begun = engine_vllm.begin(server, engine_vllm.spec(models, adapters=adapters))
    yield engine_vllm.listening(server, begun)
    engine_vllm.stop(server, begun)


@pytest.fixture(scope="module")
def spelling(replica: engine_vllm.Replica, server: engine_vllm.ForkServer) -> engine_vllm.Spelling:
    return engine_vllm.Spelling(str(server.folder / "tiny"))


@pytest.fixture
def client(replica: engine_vllm.Replica) -> Iterator[openai.OpenAI]:
    with (
        openai.DefaultHttpxClient(trust_env=False, timeout=60) as http,
        openai.OpenAI(
            base_url=f"{replica.url}/v1",
            api_key=engine_vllm.SECRET,
            http_client=http,
            max_retries=0,
        ) as found,
    ):
        yield found


def data(found: list[frames.Frame]) -> list[frames.Frame]:
    return [frame for frame in found if frame.kind is frames.Kind.DATA]


def payload(found: list[frames.Frame]) -> bytes:
    return b"".join(frame.payload for frame in data(found))


def token_ids(found: list[frames.Frame], choice: int = 0) -> list[int]:
    return [n for frame in data(found) if frame.choice == choice for n in frame.token_ids]


def end(found: list[frames.Frame]) -> frames.End:
    assert found[-1].kind is frames.Kind.END, found[-1]
    return frames.End.parse(found[-1].payload)


def text(found: list[frames.Frame]) -> str:
    """Return a streamed completion's text."""
    return "".join(
        choice["text"]
        for event in engine_vllm.events(payload(found))
        for choice in event["choices"]
    )


def exactly(words: str, **more: Any) -> dict[str, Any]:
    """Return a completion request that must answer ``words``."""
    return {
        "model": "chat",
        "prompt": "Say:",
        "max_tokens": 100,
        "temperature": 0,
        "structured_outputs": {"choice": [words]},
        **more,
    }


class TestOpenAiClient:
    """The official client reads plain answers, as an admin's curl gets them."""

    def test_chat_streamed_and_whole_are_equal(self, client: openai.OpenAI) -> None:
        asked: dict[str, Any] = {"model": "chat", "messages": ASK, "max_tokens": 12}
        whole = client.chat.completions.create(temperature=0, **asked)
        options: Any = {"include_usage": True}
        stream: Any = client.chat.completions.create(
            temperature=0, stream=True, stream_options=options, **asked
        )
        parts = list(stream)

        assert whole.choices[0].finish_reason == "length"
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 12
        streamed = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        assert streamed == whole.choices[0].message.content
        assert parts[-1].choices == []
        assert parts[-1].usage is not None
        assert parts[-1].usage.completion_tokens == 12

    def test_completions_streamed_and_whole_are_equal(self, client: openai.OpenAI) -> None:
        asked: dict[str, Any] = {"model": "chat", "prompt": "The water", "max_tokens": 9}
        whole = client.completions.create(temperature=0, **asked)
        parts = list(client.completions.create(temperature=0, stream=True, **asked))

        assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
        assert parts[-1].choices[0].finish_reason == "length"

    def test_models_are_the_base_and_its_adapters(self, client: openai.OpenAI) -> None:
        names = [model.id for model in client.models.list()]

        assert sorted(names) == ["chat", "chat:formal", "chat:rhyme"]

    @pytest.mark.parametrize(
        ("change", "status"),
        [
            ({"model": "nobody"}, 404),
            ({"max_tokens": 0}, 400),
            ({"prompt": [7] * 2100}, 400),
            ({"temperature": -3}, 400),
            ({"n": "many"}, 400),
        ],
    )
    def test_a_bad_request_is_refused_and_costs_nothing(
        self, replica: engine_vllm.Replica, change: dict[str, Any], status: int
    ) -> None:
        who = engine_vllm.identity(replica, COMPLETIONS)
        body = {"model": "chat", "prompt": "The", "max_tokens": 4, **change}
        with replica.client() as http:
            answer = http.post(COMPLETIONS, json=body, headers=engine_vllm.headers(who))

        assert answer.status_code == status
        assert engine_vllm.strict(answer.content)["error"]["message"]
        row = replica.row(who.request_id)
        assert (row["outcome"], row["output_tokens"]) == ("refused", 0)


class TestFrames:
    """What a gateway gets: ready bytes, and which tokens they stand for."""

    @pytest.mark.parametrize("stream", [True, False])
    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
    def test_ids_are_the_ones_that_vllm_returns(
        self, replica: engine_vllm.Replica, path: str, stream: bool
    ) -> None:
        what = {"messages": ASK} if path == CHAT else {"prompt": "The keeper"}
        body = {"model": "chat", "max_tokens": 16, "temperature": 0, "stream": stream, **what}
        found, who = engine_vllm.ask(replica, path, {**body, "return_token_ids": True})

        answers = (
            list(engine_vllm.events(payload(found)))
            if stream
            else [engine_vllm.strict(payload(found))]
        )
        choices = [choice for answer in answers for choice in answer["choices"]]
        said = [n for choice in choices for n in choice.get("token_ids") or []]
        holders = choices if path == COMPLETIONS else answers
        prompts = [h["prompt_token_ids"] for h in holders if h.get("prompt_token_ids")]
        assert token_ids(found) == said
        assert len(said) == 16
        assert found[0].kind is frames.Kind.PROMPT
        assert list(found[0].token_ids) == prompts[0]
        assert end(found) == frames.End(("length",), len(prompts[0]), end(found).cached_tokens, 16)
        row = replica.row(who.request_id)
        assert (row["outcome"], row["output_tokens"]) == ("ok", 16)
        assert row["uncached_prompt_tokens"] + row["cached_prompt_tokens"] == len(prompts[0])
        assert row["first_token_us"] > 0

    def test_ids_never_run_ahead_of_the_text(
        self, replica: engine_vllm.Replica, spelling: engine_vllm.Spelling
    ) -> None:
        body = exactly(f"{UNICODE} {UNICODE}", stream=True)
        found, _ = engine_vllm.ask(replica, COMPLETIONS, body)

        sent: str = ""
        ids: list[int] = []
        for frame in data(found):
            sent += "".join(e["choices"][0]["text"] for e in engine_vllm.events(frame.payload))
            ids += frame.token_ids
            assert spelling.text(ids) == sent
        assert sent == f"{UNICODE} {UNICODE}"

    def test_the_role_chunk_stands_for_no_token(self, replica: engine_vllm.Replica) -> None:
        body = {"model": "chat", "messages": ASK, "max_tokens": 3, "temperature": 0, "stream": True}
        found, _ = engine_vllm.ask(replica, CHAT, body)

        first = data(found)[0]
        role, token = engine_vllm.events(first.payload)  # they come together, so they go together
        assert role["choices"][0]["delta"]["role"] == "assistant"
        assert len(first.token_ids) == 1
        assert first.chars == len(token["choices"][0]["delta"]["content"])

    def test_cached_prompt_tokens_are_told_apart(self, replica: engine_vllm.Replica) -> None:
        body = {
            "model": "chat",
            "prompt": list(range(100, 250)),
            "max_tokens": 2,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        first, _ = engine_vllm.ask(replica, COMPLETIONS, body)
        again, who = engine_vllm.ask(replica, COMPLETIONS, body)

        assert end(first).cached_tokens == 0
        assert end(again).cached_tokens == 128  # whole blocks of 32
        usage = list(engine_vllm.events(payload(again)))[-1]["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 128
        row = replica.row(who.request_id)
        assert (row["cached_prompt_tokens"], row["uncached_prompt_tokens"]) == (128, 22)

    @pytest.mark.parametrize("stream", [True, False])
    def test_two_choices_with_logprobs(self, replica: engine_vllm.Replica, stream: bool) -> None:
        """G5: each choice ends once with a reason, and has as many logprobs as tokens."""
        body = {
            "model": "chat",
            "messages": ASK,
            "max_tokens": 7,
            "n": 2,
            "seed": 5,
            "logprobs": True,
            "top_logprobs": 2,
            "stream": stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        }
        found, _ = engine_vllm.ask(replica, CHAT, body)

        events = (
            list(engine_vllm.events(payload(found)))
            if stream
            else [engine_vllm.strict(payload(found))]
        )
        choices = [choice for event in events for choice in event["choices"]]
        for index in (0, 1):
            mine = [choice for choice in choices if choice["index"] == index]
            assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]
            assert sum(len(c["logprobs"]["content"]) for c in mine if c.get("logprobs")) == 7
            assert len(token_ids(found, index)) == 7
        assert end(found).output_tokens == 14
        assert end(found).finish_reasons == ("length", "length")
        assert events[-1]["usage"]["completion_tokens"] == 14
        if stream:
            assert events[-1]["choices"] == []

    @pytest.mark.parametrize("stream", [True, False])
    def test_ids_go_with_their_own_choice(self, replica: engine_vllm.Replica, stream: bool) -> None:
        prompts = [[101, 102, 103], [201, 202, 203, 204]]
        body = {"model": "chat", "prompt": prompts, "max_tokens": 6, "temperature": 0}
        both, _ = engine_vllm.ask(replica, COMPLETIONS, {**body, "stream": stream})
        alone = [
            engine_vllm.ask(replica, COMPLETIONS, {**body, "prompt": p, "stream": stream})[0]
            for p in prompts
        ]

        assert [token_ids(both, n) for n in (0, 1)] == [token_ids(found) for found in alone]
        assert end(both).prompt_tokens == 7
        # Of several prompts none can be resumed, so none is told.
        assert not [frame for frame in both if frame.kind is frames.Kind.PROMPT]


class TestText:
    """Stop strings, characters of several tokens, impossible tokens."""

    def test_a_stop_string_is_never_sent(self, replica: engine_vllm.Replica) -> None:
        """G4: nothing of it, though it comes in pieces; ids of held-back text are held back too."""
        body = exactly("JKLMNOPQ", stop=["LMNOP"], stream=True)
        found, _ = engine_vllm.ask(replica, COMPLETIONS, body)

        assert text(found) == "JK"
        assert end(found).finish_reasons == ("stop",)

    def test_what_only_looks_like_a_stop_string_is_sent(self, replica: engine_vllm.Replica) -> None:
        body = exactly("JKLMNQ", stop=["LMNOP"], stream=True)
        found, _ = engine_vllm.ask(replica, COMPLETIONS, body)

        assert text(found) == "JKLMNQ"

    def test_ids_wait_for_text_that_a_stop_string_holds_back(
        self, replica: engine_vllm.Replica, spelling: engine_vllm.Spelling
    ) -> None:
        body = exactly("abcdefghij", stop=["LMNOP"], stream=True)
        found, _ = engine_vllm.ask(replica, COMPLETIONS, body)

        sent: str = ""
        ids: list[int] = []
        for frame in data(found):
            sent += "".join(e["choices"][0]["text"] for e in engine_vllm.events(frame.payload))
            ids += frame.token_ids
            assert sent.startswith(spelling.text(ids))
        assert sent == spelling.text(ids) == "abcdefghij"

    @pytest.mark.parametrize("stream", [True, False])
    def test_any_character_comes_whole(self, replica: engine_vllm.Replica, stream: bool) -> None:
        """G6, on the engine's side: no half character, no U+FFFD."""
        found, _ = engine_vllm.ask(replica, COMPLETIONS, exactly(UNICODE, stream=stream))

        said = text(found) if stream else engine_vllm.strict(payload(found))["choices"][0]["text"]
        assert said == UNICODE

    @pytest.mark.parametrize("stream", [True, False])
    def test_impossible_tokens_are_strict_json(
        self, replica: engine_vllm.Replica, stream: bool
    ) -> None:
        """G11: null for a masked token (vLLM writes -9999.0); no -inf, no 500."""
        body = {
            "model": "chat",
            "messages": ASK,
            "max_tokens": 20,
            "temperature": 0,
            "structured_outputs": {"choice": ["yes"]},
            "logprobs": True,
            "top_logprobs": 5,
            "stream": stream,
        }
        found, _ = engine_vllm.ask(replica, CHAT, body)

        answers = (
            list(engine_vllm.events(payload(found)))
            if stream
            else [engine_vllm.strict(payload(found))]
        )
        entries = [
            entry
            for answer in answers
            for choice in answer["choices"]
            for entry in (choice.get("logprobs") or {}).get("content") or []
        ]
        tops = [top["logprob"] for entry in entries for top in entry["top_logprobs"]]
        assert len(entries) == end(found).output_tokens
        assert None in tops
        assert all(-9999.0 < value <= 0.0 for value in tops if value is not None)


class TestResumeAndAdapters:
    """What failover and LoRA build on."""

    @pytest.mark.parametrize("cut", [1, 7, 19])
    def test_the_rest_from_prompt_and_sent_ids_is_identical(
        self, replica: engine_vllm.Replica, cut: int
    ) -> None:
        body = {
            "model": "chat",
            "messages": ASK,
            "max_tokens": 24,
            "temperature": 0,
            "stream": True,
        }
        whole, _ = engine_vllm.ask(replica, CHAT, body)
        ids = token_ids(whole)
        rest, _ = engine_vllm.ask(
            replica,
            COMPLETIONS,
            {
                "model": "chat",
                "prompt": [*whole[0].token_ids, *ids[:cut]],
                "max_tokens": 24 - cut,
                "temperature": 0,
                "stream": True,
            },
        )

        assert token_ids(rest) == ids[cut:]

    def test_base_and_adapters_in_one_batch_answer_as_alone(
        self, replica: engine_vllm.Replica
    ) -> None:
        """vLLM 0.32 gave base requests an adapter's weights when every slot was filled."""

        def answer(model: str) -> list[int]:
            body = {"model": model, "messages": ASK, "max_tokens": 12, "temperature": 0}
            return token_ids(engine_vllm.ask(replica, CHAT, body)[0])

        names = ["chat", "chat:formal", "chat:rhyme"]
        alone = {name: answer(name) for name in names}
        assert len({tuple(ids) for ids in alone.values()}) == 3
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            mixed = list(pool.map(answer, [*names, *names]))

        assert mixed == [alone[name] for name in [*names, *names]]

    def test_an_adapter_answers_to_both_of_its_names(self, replica: engine_vllm.Replica) -> None:
        body = {"messages": ASK, "max_tokens": 8, "temperature": 0}
        long, _ = engine_vllm.ask(replica, CHAT, {"model": "chat:formal", **body})
        short, _ = engine_vllm.ask(replica, CHAT, {"model": "formal", **body})

        assert token_ids(long) == token_ids(short)
        for found in (long, short):
            assert engine_vllm.strict(payload(found))["model"] == "chat:formal"

    @pytest.mark.parametrize("tier", ["interactive", "standard", "batch"])
    def test_every_tier_is_served(self, replica: engine_vllm.Replica, tier: str) -> None:
        body = {"model": "chat", "prompt": "The", "max_tokens": 3, "priority": 2}
        found, who = engine_vllm.ask(replica, COMPLETIONS, body, tier=tier)

        assert end(found).output_tokens == 3
        assert replica.row(who.request_id)["tier"] == tier


class TestAbort:
    """A client that leaves frees its sequence; what was computed is on the row."""

    LONG: ClassVar[dict[str, Any]] = {
        "model": "chat",
        "prompt": list(range(100, 900)),  # 25 blocks
        "max_tokens": 1200,
        "temperature": 0,
        "ignore_eos": True,
    }

    def probe(self, replica: engine_vllm.Replica) -> int:
        """Return how many KV blocks are in use while a one-block request runs its second step."""
        who = engine_vllm.identity(replica, COMPLETIONS)
        body = {
            "model": "chat",
            "prompt": "Go",
            "max_tokens": 30,
            "ignore_eos": True,
            "stream": True,
        }
        with (
            replica.client() as http,
            http.stream("POST", COMPLETIONS, json=body, headers=engine_vllm.headers(who)) as answer,
        ):
            decoder, seen = frames.Decoder(), 0
            for chunk in answer.iter_raw():
                seen += sum(frame.kind is frames.Kind.DATA for frame in decoder.feed(chunk))
                if seen >= 2:
                    break
            stats = replica.state()["stats"]
        return int(stats["kv_blocks"] - stats["kv_free"])

    def test_leaving_a_stream(self, replica: engine_vllm.Replica) -> None:
        """G2, streamed."""
        who = engine_vllm.identity(replica, COMPLETIONS)
        with (
            replica.client() as http,
            http.stream(
                "POST",
                COMPLETIONS,
                json={**self.LONG, "stream": True},
                headers=engine_vllm.headers(who),
            ) as answer,
        ):
            decoder, seen = frames.Decoder(), 0
            for chunk in answer.iter_raw():
                seen += len(token_ids(list(decoder.feed(chunk))))
                if seen >= 5:
                    break
        replica.until(lambda state: state["running"] == 0, 2)

        assert self.probe(replica) <= 3
        row = replica.row(who.request_id)
        assert row["outcome"] == "client_gone"
        assert 5 <= row["output_tokens"] < 200

    def test_leaving_before_a_whole_answer(self, replica: engine_vllm.Replica) -> None:
        """G2, not streamed: the row still says what was sampled."""
        who = engine_vllm.identity(replica, COMPLETIONS)
        before = replica.state()["stats"]["output_tokens_total"]
        with (
            httpx.Client(base_url=replica.url, trust_env=False, timeout=0.3) as http,
            pytest.raises(httpx.ReadTimeout),
        ):
            http.post(
                COMPLETIONS,
                json=self.LONG,
                headers={
                    **engine_vllm.headers(who),
                    "Authorization": f"Bearer {engine_vllm.SECRET}",
                },
            )
        state = replica.until(lambda state: state["running"] == 0, 2)

        assert self.probe(replica) <= 3
        row = replica.row(who.request_id)
        sampled = state["stats"]["output_tokens_total"] - before
        assert row["outcome"] == "client_gone"
        assert 0 < row["output_tokens"] <= sampled + 2

    def test_a_batch_sequence_gives_its_seat_and_its_ids(
        self, server: engine_vllm.ForkServer
    ) -> None:
        """Rung 0: the only seat is taken by batch; an interactive request gets it at once."""
        spec = engine_vllm.spec(server.folder, seats=1, reserved_seats=0)
        begun = engine_vllm.begin(server, spec)
        small = engine_vllm.listening(server, begun)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            line = pool.submit(
                engine_vllm.ask, small, COMPLETIONS, {**self.LONG, "stream": True}, tier="batch"
            )
            small.until(lambda state: state["stats"]["output_tokens_total"] >= 5)
            quick = {"model": "chat", "prompt": "Go", "max_tokens": 2}
            urgent, _ = engine_vllm.ask(small, COMPLETIONS, quick)
            found, who = line.result(30)
        reclaim_ms = small.state()["stats"]["reclaim_ms"]
        engine_vllm.stop(server, begun)

        assert end(urgent).output_tokens == 2
        error = frames.Error.parse(found[-1].payload)
        assert (found[-1].kind, error.code) == (frames.Kind.ERROR, "preempted")
        assert error.output_tokens >= len(token_ids(found)) >= 4
        assert small.row(who.request_id)["outcome"] == "preempted"
        assert len(reclaim_ms) == 1
        assert reclaim_ms[0] < 2_000


class TestEmbeddings:
    """The same weights, converted: `--convert embed`."""

    @pytest.fixture
    def embedder(self, server: engine_vllm.ForkServer) -> Iterator[engine_vllm.Replica]:
        arguments = {**engine_vllm.ARGUMENTS, "runner": "pooling", "convert": "embed"}
        spec = engine_vllm.spec(server.folder, model="embed", engine_args=arguments)
        begun = engine_vllm.begin(server, spec)
        yield engine_vllm.listening(server, begun)
        engine_vllm.stop(server, begun)

    def test_base64_and_floats_are_equal(self, embedder: engine_vllm.Replica) -> None:
        """G10: base64 is what SDKs ask for by default; token ids are taken too."""
        inputs: list[Any] = [["The water", "the wheel"], [[101, 102, 103], [104, 105]]]
        for given in inputs:
            body = {"model": "embed", "input": given}
            packed, who = engine_vllm.ask(
                embedder, "/v1/embeddings", {**body, "encoding_format": "base64"}, model="embed"
            )
            plain, _ = engine_vllm.ask(
                embedder, "/v1/embeddings", {**body, "encoding_format": "float"}, model="embed"
            )
            one, other = (engine_vllm.strict(payload(found)) for found in (packed, plain))
            for left, right in zip(one["data"], other["data"], strict=True):
                raw = base64.b64decode(left["embedding"])
                assert struct.unpack(f"<{len(raw) // 4}f", raw) == pytest.approx(right["embedding"])
            tokens = one["usage"]["prompt_tokens"]
            assert end(packed).prompt_tokens == tokens > 0
            row = embedder.row(who.request_id)
            assert (row["outcome"], row["output_tokens"]) == ("ok", 0)
            assert row["uncached_prompt_tokens"] + row["cached_prompt_tokens"] == tokens

    def test_nan_fails_its_own_input_only(self, server: engine_vllm.ForkServer) -> None:
        """G11: one token's embedding is NaN; whoever has it in their input gets null and the reason."""
        weights = shutil.copytree(engine_vllm.spec(server.folder).weights, server.folder / "nan")
        _spoil(Path(weights) / "model.safetensors", token_id=7)
        arguments = {**engine_vllm.ARGUMENTS, "runner": "pooling", "convert": "embed"}
        spec = engine_vllm.spec(
            server.folder, model="embed", engine_args=arguments, weights=str(weights)
        )
        begun = engine_vllm.begin(server, spec)
        replica = engine_vllm.listening(server, begun)
        for form in ("float", "base64"):
            body = {
                "model": "embed",
                "input": [[101, 102], [103, 7], [104, 105]],
                "encoding_format": form,
            }
            found, _ = engine_vllm.ask(replica, "/v1/embeddings", body, model="embed")
            rows = engine_vllm.strict(payload(found))["data"]
            assert [row["embedding"] is None for row in rows] == [False, True, False]
            assert rows[1]["error"]["code"] == "not_finite"
            alone, _ = engine_vllm.ask(
                replica, "/v1/embeddings", {**body, "input": [[7, 101]]}, model="embed"
            )
            assert frames.Error.parse(alone[-1].payload).status == 400
        engine_vllm.stop(server, begun)


def _spoil(file: Path, token_id: int) -> None:
    """Make a token's embedding NaN."""
    raw = bytearray(file.read_bytes())
    size = int.from_bytes(raw[:8], "little")
    about = json.loads(raw[8 : 8 + size])["model.embed_tokens.weight"]
    start, end = about["data_offsets"]
    width = (end - start) // about["shape"][0]
    at = 8 + size + start + token_id * width
    raw[at : at + 4] = struct.pack("<f", math.nan)
    file.write_bytes(raw)


def test_the_stats_move_with_the_work(replica: engine_vllm.Replica) -> None:
    before = replica.state()
    engine_vllm.ask(replica, COMPLETIONS, {"model": "chat", "prompt": "The", "max_tokens": 40})
    after = replica.until(lambda state: state["running"] == 0)

    assert after["stats"]["output_tokens_total"] - before["stats"]["output_tokens_total"] == 40
    assert after["steps_total"] - before["steps_total"] >= 40
    assert 0 < after["stats"]["step_ms"] < 1_000
    assert after["stats"]["kv_free"] == after["stats"]["kv_blocks"] > 0
    assert after["stats"]["kv_block_tokens"] == 32
    assert after["stats"]["queued"] == 0
    assert 0 < after["stats"]["ttft_ms"] < 60_000


def test_no_path_answers_without_the_secret(replica: engine_vllm.Replica) -> None:
    with httpx.Client(base_url=replica.url, trust_env=False) as http:
        for path in ("/health", "/v1/models", "/metrics", "/forebay/state", "/version", "/docs"):
            assert http.get(path).status_code == 401, path
    with replica.client() as http:
        assert http.get("/health").status_code == 200
        # What vLLM would run without a seat and without a row is not there.
        for path in ("/invocations", "/v1/load_lora_adapter", "/tokenize", "/v1/messages"):
            assert http.post(path, json={}).status_code == 404, path


def test_the_model_folder_is_what_the_tests_think(server: engine_vllm.ForkServer) -> None:
    spec = engine_vllm.spec(server.folder)

    assert spec.engine is fleet.EngineKind.VLLM
    assert Path(spec.weights, "config.json").exists()

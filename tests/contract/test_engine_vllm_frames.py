"""A real vLLM replica's frames: bytes as clients expect, and the token ids beside them."""

import pytest

from scheduler.contracts import frames
from tests.contract import engine_vllm
from tests.contract.vllm_answers import (
    ASK,
    CHAT,
    COMPLETIONS,
    UNICODE,
    data,
    end,
    exactly,
    payload,
    token_ids,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


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

    def test_the_role_chunk_stands_for_no_token(
        self, replica: engine_vllm.Replica, spelling: engine_vllm.Spelling
    ) -> None:
        """On a busy machine vLLM may tell two tokens at once; the ids are those of the text in any case."""
        body = {"model": "chat", "messages": ASK, "max_tokens": 3, "temperature": 0, "stream": True}
        found, _ = engine_vllm.ask(replica, CHAT, body)

        first = data(found)[0]
        role, token = engine_vllm.events(first.payload)  # they come together, so they go together
        assert role["choices"][0]["delta"]["role"] == "assistant"
        content = token["choices"][0]["delta"]["content"]
        assert spelling.text(list(first.token_ids)) == content != ""
        assert first.chars == len(content)

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

"""A real vLLM replica's text: stop strings, characters, strict JSON, the rest of a cut answer, adapters."""

import concurrent.futures

import pytest

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
    text,
    token_ids,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


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

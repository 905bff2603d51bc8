"""A real vLLM replica whose clients leave, and whose batch sequences give their seats."""

import concurrent.futures
import contextlib
import http.client
import json
from typing import Any, ClassVar

import pytest

from scheduler.contracts import frames
from tests.contract import engine_vllm
from tests.contract.vllm_answers import (
    COMPLETIONS,
    end,
    token_ids,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


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
            replica.client() as client,
            client.stream(
                "POST", COMPLETIONS, json=body, headers=engine_vllm.headers(who)
            ) as answer,
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
            replica.client() as client,
            client.stream(
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
        replica.until(lambda state: state["running"] == 0)

        assert self.probe(replica) <= 3
        row = replica.row(who.request_id)
        assert row["outcome"] == "client_gone"
        assert 5 <= row["output_tokens"] < 200

    def test_leaving_before_a_whole_answer(self, replica: engine_vllm.Replica) -> None:
        """G2, not streamed: the row still says what was sampled."""
        who = engine_vllm.identity(replica, COMPLETIONS)
        before = replica.state()["stats"]["output_tokens_total"]
        held = {"Authorization": f"Bearer {engine_vllm.SECRET}", "Content-Type": "application/json"}
        with contextlib.closing(http.client.HTTPConnection(replica.address)) as leaving:
            body = json.dumps(self.LONG)
            leaving.request("POST", COMPLETIONS, body, {**engine_vllm.headers(who), **held})
            replica.until(lambda state: state["stats"]["output_tokens_total"] > before)
        state = replica.until(lambda state: state["running"] == 0)

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
        # What vLLM had not told yet comes with the abort: all that was sampled goes on elsewhere.
        ahead = frames.unpack(found[-2].ahead)
        assert len(token_ids(found)) + len(ahead) == error.output_tokens >= 5
        assert small.row(who.request_id)["outcome"] == "preempted"
        assert len(reclaim_ms) == 1
        assert reclaim_ms[0] < 2_000

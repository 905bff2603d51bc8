"""A real vLLM replica that embeds."""

import base64
import json
import math
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler.contracts import frames
from tests.contract import engine_vllm
from tests.contract.vllm_answers import (
    end,
    payload,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


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

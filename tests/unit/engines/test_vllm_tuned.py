"""Typed engine settings: what they become, what is refused, and that each is documented."""

import json
from pathlib import Path
from typing import Any

import pytest

from engines.replica import launch
from engines.vllm import arguments, check
from scheduler.contracts import fleet, tuning

ROOT = Path(__file__).parents[3]


def line(tuned: dict[str, Any], **args: Any) -> list[str]:
    spec = fleet.ReplicaSpec(
        "m", "v1", fleet.EngineKind.VLLM, "/m", engine_args=args, seats=8, tuning=tuned
    )
    return arguments.command_line(spec)


def option(words: list[str], name: str) -> str:
    (found,) = (word for word in words if word.partition("=")[0] == f"--{name}")
    return found.partition("=")[2]


def test_chunks_and_the_prefix_cache_are_on_unless_the_version_says_otherwise() -> None:
    plain = line({})
    assert option(plain, "max-num-batched-tokens") == "2048"
    assert "--enable-chunked-prefill" in plain
    assert "--enable-prefix-caching" in plain
    assert option(line({"chunk_tokens": 512}), "max-num-batched-tokens") == "512"
    assert "--no-enable-prefix-caching" in line({"prefix_caching": False})
    own = line({}, **{"max-num-batched-tokens": 4096, "enable_prefix_caching": False})
    assert option(own, "max-num-batched-tokens") == "4096"
    assert own.count("--no-enable-prefix-caching") == 1
    assert "--enable-prefix-caching" not in own
    assert "--enable-chunked-prefill" not in line({}, runner="pooling")


def test_the_replicas_throttle_knows_the_chunk() -> None:
    spec = fleet.ReplicaSpec("m", "v1", fleet.EngineKind.VLLM, tuning={"chunk_tokens": 512})
    assert launch._chunk(spec) == 512


def test_host_memory_is_given_in_the_engines_unit() -> None:
    assert option(line({"kv_offload_gb": 8.589934592}), "kv-offloading-size") == "8.0"


def test_nothing_is_guessed_above_the_threshold() -> None:
    given = {"speculative": {"method": "ngram", "tokens": 3, "most_batch": 2}}
    said = json.loads(option(line(given), "speculative-config"))
    assert said == {
        "method": "ngram",
        "prompt_lookup_max": 4,
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 8, 0]],
    }
    draft = {"speculative": {"method": "draft", "model": "/d", "most_batch": 99}}
    said = json.loads(option(line(draft), "speculative-config"))
    assert (said["method"], said["model"]) == ("draft_model", "/d")
    assert said["num_speculative_tokens_per_batch_size"] == [[1, 8, 4]]


@pytest.mark.parametrize(
    ("tuned", "args", "why"),
    [
        ({"chunk_tokens": 256}, {}, "tuning.chunk_tokens: .*greater than or equal to 512"),
        ({"chunk_tokens": "1024x"}, {}, "tuning.chunk_tokens: .*integer"),
        ({"chunks": 1024}, {}, "tuning.chunks: Extra inputs are not permitted"),
        ({"speculative": {"method": "draft"}}, {}, "needs `model`, the draft's folder"),
        ({"speculative": {"method": "ngram", "model": "/d"}}, {}, "takes no `model`"),
        ({"speculative": {"method": "eagle"}}, {}, "tuning.speculative.method"),
        (
            {"chunk_tokens": 512},
            {"max-num-batched-tokens": 512},
            "say the same: keep tuning.chunk_tokens",
        ),
        (
            {},
            {"speculative-config": {"method": "ngram"}},
            "at any batch size; set tuning.speculative",
        ),
        ({}, {"speculative_config.method": "ngram"}, "at any batch size; set tuning.speculative"),
        ({}, {"quantization": "fp8"}, "fp8 needs tuning.quantization_approval: name who"),
        ({}, {"kv_cache_dtype": "fp8_e5m2"}, "needs tuning.quantization_approval"),
        ({}, {"trust-remote-code": True}, "could run code"),
        ({}, {"port": 80}, "a replica has one port"),
        ({}, {"api-key": "x"}, "a replica has one port"),
    ],
)
def test_what_is_refused(tuned: dict[str, Any], args: dict[str, Any], why: str) -> None:
    with pytest.raises(arguments.ArgumentError, match=why) as caught:
        line(tuned, **args)
    assert "\n" not in str(caught.value)


def test_fp8_passes_with_the_name_of_who_allowed_it() -> None:
    tuned = {"quantization_approval": "Ada, evaluation 2026-11"}
    assert option(line(tuned, **{"kv-cache-dtype": "fp8"}), "kv-cache-dtype") == "fp8"


def test_each_setting_is_documented() -> None:
    told = (ROOT / "docs/engine-settings.md").read_text()
    for name in tuning.Tuning.model_fields:
        assert f"`{name}" in told, name


def test_the_parsers_fault_is_one_line() -> None:
    text = json.dumps({"model": "m", "version": "v1", "engine": "vllm", "weights": "/m"})

    def parse(spec: fleet.ReplicaSpec) -> None:
        raise arguments.ArgumentError(f"model {spec.model}:\n unknown option")

    assert check.fault(text, parse) == "model m: unknown option"
    assert check.fault(text, lambda spec: None) == ""

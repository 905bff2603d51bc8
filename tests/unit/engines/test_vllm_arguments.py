"""A spec as vLLM's command line: what it says, what it refuses."""

from typing import Any

import pytest

from engines.vllm import arguments, process
from scheduler.contracts import fleet


def spec(**changes: Any) -> fleet.ReplicaSpec:
    fields: dict[str, Any] = {
        "model": "chat",
        "version": "1",
        "engine": fleet.EngineKind.VLLM,
        "weights": "/models/chat",
        "seats": 6,
        "max_context": 512,
        **changes,
    }
    return fleet.ReplicaSpec(**fields)


def test_the_spec_is_said_once() -> None:
    line = arguments.command_line(spec())

    assert "--model=/models/chat" in line
    assert "--served-model-name=chat" in line
    assert "--max-num-seqs=6" in line
    assert "--max-model-len=512" in line
    assert "--scheduling-policy=priority" in line
    assert not [word for word in line if "lora" in word]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"enforce-eager": True}, ["--enforce-eager"]),
        ({"enforce_eager": True}, ["--enforce-eager"]),
        ({"--enforce-eager": True}, ["--enforce-eager"]),
        ({"enable-prefix-caching": False}, ["--no-enable-prefix-caching"]),
        ({"block-size": 32}, ["--block-size=32"]),
        ({"kv-cache-memory-bytes": "32M"}, ["--kv-cache-memory-bytes=32M"]),
        ({"hf-overrides": {"a": 1}}, ['--hf-overrides={"a": 1}']),
        ({"compilation-config.mode": 0}, ["--compilation-config.mode=0"]),
        ({"limits": ["a", "b"]}, ["--limits", "a", "b"]),
        ({"chat-template": "--host"}, ["--chat-template=--host"]),  # a value stays a value
    ],
)
def test_options_are_written_as_vllm_reads_them(given: dict[str, Any], words: list[str]) -> None:
    line = arguments.command_line(spec(engine_args=given))

    assert line[-len(words) :] == words


@pytest.mark.parametrize(
    "name",
    [
        "host", "port", "--port", "uds", "api-key", "api_key", "ssl-keyfile", "grpc", "headless",
        "data-parallel-size", "kv-events-config", "kv-transfer-config", "kv-transfer-config.kv_port",
        "tool-server", "tokens-only", "enable-scale-out",
    ],
)  # fmt: skip
def test_nothing_that_opens_a_port(name: str) -> None:
    with pytest.raises(arguments.ArgumentError, match="one port"):
        arguments.command_line(spec(engine_args={name: "x"}))


@pytest.mark.parametrize(
    "name",
    [
        "trust-remote-code", "trust_remote_code", "no-trust-remote-code", "middleware",
        "scheduler-cls", "worker-cls", "logits-processors", "tool-parser-plugin", "config",
        "trust-request-chat-template", "allowed-local-media-path",
    ],
)  # fmt: skip
def test_nothing_that_runs_code_or_reads_files(name: str) -> None:
    with pytest.raises(arguments.ArgumentError, match="could run code"):
        arguments.command_line(spec(engine_args={name: True}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("structured-outputs-config", {"reasoning_parser_plugin": "/tmp/x.py"}),
        ("structured-outputs-config", '{"reasoning_parser_plugin": "/tmp/x.py"}'),
        ("structured_outputs_config.reasoning_parser_plugin", "/tmp/x.py"),
        ("structured-outputs-config", {"a": [{"reasoning-parser-plugin": "/tmp/x.py"}]}),
        ("compilation-config.backend", "somebodys.module.compiler"),
        ("compilation-config", {"backend": "somebodys.module.compiler"}),
        ("ec-manager-config", {"cls_path": "somebodys.module.Manager"}),
        ("logging-config", {"handlers": {"x": {"()": "os.system"}}}),
        ("enable-prompt-embeds", True),
    ],
)
def test_nothing_that_runs_code_inside_of_what_looks_harmless(name: str, value: object) -> None:
    with pytest.raises(arguments.ArgumentError, match="could run code") as caught:
        arguments.command_line(spec(engine_args={name: value}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("compilation-config", {"backend": "inductor", "cudagraph_mode": "PIECEWISE"}),
        ("structured-outputs-config.backend", "xgrammar"),
        ("hf-overrides", {"config": {"rope_theta": 10000.5}}),
        ("load-format", "runai_streamer"),
    ],
)
def test_what_is_harmless_inside_passes(name: str, value: object) -> None:
    assert arguments.command_line(spec(engine_args={name: value}))


@pytest.mark.parametrize("name", ["pt", "PT", "npcache", "tensorizer", "somebodys-own"])
def test_weights_are_loaded_as_safetensors(name: str) -> None:
    with pytest.raises(arguments.ArgumentError, match=f"load-format {name} is refused: .*convert"):
        arguments.command_line(spec(engine_args={"load-format": name}))


@pytest.mark.parametrize(
    ("name", "field"),
    [("max-num-seqs", "seats"), ("max_model_len", "max_context"), ("model", "weights"),
     ("max-loras", "adapter_slots"), ("served-model-name", "model")],
)  # fmt: skip
def test_what_the_spec_says_is_not_said_again(name: str, field: str) -> None:
    with pytest.raises(arguments.ArgumentError, match=f"`{field}`"):
        arguments.command_line(spec(engine_args={name: 3}))


@pytest.mark.parametrize("name", ["disable-log-stats", "no-enable-prompt-tokens-details"])
def test_what_forebay_measures_by_stays_on(name: str) -> None:
    with pytest.raises(arguments.ArgumentError, match="set by Forebay"):
        arguments.command_line(spec(engine_args={name: True}))


@pytest.mark.parametrize("name", ["-q", "-tp", "a b", "a=b", "", "Ü", "--"])
def test_only_long_names_are_options(name: str) -> None:
    with pytest.raises(arguments.ArgumentError, match="no long option's name"):
        arguments.command_line(spec(engine_args={name: 1}))


@pytest.mark.parametrize("value", [None, object(), [], ["--host"]])
def test_values_that_a_command_line_cannot_hold(value: object) -> None:
    with pytest.raises(arguments.ArgumentError, match="model chat: engine_args limits"):
        arguments.command_line(spec(engine_args={"limits": value}))


def test_one_slot_more_than_adapters() -> None:
    line = arguments.command_line(spec(adapters={"formal": "/a", "rhyme": "/b"}))

    assert "--enable-lora" in line
    assert "--max-loras=3" in line
    at = line.index("--lora-modules")
    assert line[at + 1 :] == [
        '{"name": "chat:formal", "path": "/a"}',
        '{"name": "chat:rhyme", "path": "/b"}',
    ]


def test_weights_are_needed() -> None:
    with pytest.raises(arguments.ArgumentError, match="weights"):
        arguments.command_line(spec(weights=""))


@pytest.mark.parametrize("found", ["0.31.0+cpu", "0.32.0+cpu", "0.33.1", "0.33.0rc1"])
def test_supported_versions(found: str) -> None:
    process.check_version(found)


@pytest.mark.parametrize("found", ["0.30.2", "0.34.0", "1.0.0"])
def test_other_versions_are_refused_by_name(found: str) -> None:
    with pytest.raises(RuntimeError, match=r"install vllm>=0\.31,<0\.34"):
        process.check_version(found)

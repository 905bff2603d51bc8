"""vLLM's own parser, in its own environment: it has the last word on a version's arguments, of every kind."""

import dataclasses
import json
import subprocess
from typing import Any

import pytest

from engines.replica import launch
from engines.slot import children
from engines.vllm import multinode
from scheduler.contracts import fleet
from tests.contract import engine_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]
SPEC = fleet.ReplicaSpec("m", "v1", fleet.EngineKind.VLLM, "/m")
_LINES = """
import json, sys
from engines.vllm import process
process.prepare()
from engines.vllm import configure
parser = configure.cli_args.make_arg_parser(configure._Parser(prog="vllm", add_help=False))
for line in json.loads(sys.stdin.readline()):
    print(json.dumps({"rank": parser.parse_args(line).node_rank}))
"""


def ask(version: str, arguments: list[str], text: str) -> list[dict[str, Any]]:
    engine_vllm.require(version)
    told = subprocess.run(
        [str(engine_vllm.python(version)), "-P", *arguments],
        input=text,
        env=children.environment({}),
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in told.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("version", [engine_vllm.NEWEST, engine_vllm.BEFORE])
def test_what_forebay_says_is_understood_and_slips_are_told(version: str) -> None:
    every = {
        "chunk_tokens": 512,
        "prefix_caching": False,
        "kv_offload_gb": 2.0,
        "speculative": {"method": "ngram", "tokens": 3, "most_batch": 2},
    }
    draft = {"speculative": {"method": "draft", "model": "/d"}, "quantization_approval": "Ada"}
    specs = [
        SPEC,
        dataclasses.replace(SPEC, tuning=every),
        dataclasses.replace(SPEC, tuning=draft, engine_args={"quantization": "fp8"}),
        dataclasses.replace(SPEC, engine_args={"runner": "pooling", "convert": "embed"}),
        dataclasses.replace(SPEC, engine_args={"no-such-option": 1}),
        dataclasses.replace(SPEC, engine_args={"dtype": "float7"}),
    ]
    lines = [json.dumps({**dataclasses.asdict(one), "engine": "vllm"}) for one in specs]
    found = [
        one["fault"] for one in ask(version, ["-m", "engines.vllm.check"], "\n".join(lines) + "\n")
    ]
    assert found[:4] == [""] * 4
    assert "no-such-option" in found[4]
    assert "float7" in found[5]
    sizes = {"tensor-parallel-size": 4, "pipeline-parallel-size": 2}
    big = dataclasses.replace(SPEC, gpus=8, engine_args=sizes)
    ranks = [multinode.command_line(big, launch.Rank(n, 2, "10.0.0.1:4711")) for n in range(2)]
    assert ask(version, ["-c", _LINES], json.dumps(ranks) + "\n") == [{"rank": 0}, {"rank": 1}]

"""A replica over several nodes: each node's command line, and what does not fit."""

import pytest

from engines.vllm import arguments, multinode
from scheduler.contracts import fleet


def spec(gpus: int = 16, tensor: int = 8, stages: int = 2) -> fleet.ReplicaSpec:
    sizes = {"tensor-parallel-size": tensor, "pipeline_parallel_size": stages}
    return fleet.ReplicaSpec("big", "v1", fleet.EngineKind.VLLM, "/m", engine_args=sizes, gpus=gpus)


def test_each_node_knows_its_rank_and_only_the_first_serves() -> None:
    first, second = multinode.ranks(spec(), ["n1", "n2"])
    assert (first.node, second.node) == ("n1", "n2")
    assert {"--nnodes=2", "--node-rank=0", "--master-addr=n1"} <= set(first.line)
    assert "--headless" not in first.line
    assert {"--node-rank=1", "--master-addr=n1", "--headless"} <= set(second.line)
    shared = [word for word in first.line if word not in {"--node-rank=0"}]
    assert [word for word in second.line if word not in {"--node-rank=1", "--headless"}] == shared
    assert "--tensor-parallel-size=8" in first.line


@pytest.mark.parametrize(
    ("given", "nodes", "why"),
    [
        (spec(), ["n1"], "two different nodes"),
        (spec(), ["n1", "n1"], "two different nodes"),
        (spec(gpus=15, tensor=5, stages=3), ["n1", "n2"], "do not spread evenly over 2 nodes"),
        (spec(tensor=4), ["n1", "n2"], "is 8, and there are 16 GPUs: make them equal"),
        (spec(tensor=16, stages=1), ["n1", "n2"], "set it to 8 and pipeline parallel to 2"),
    ],
)
def test_what_does_not_fit_is_refused(given: fleet.ReplicaSpec, nodes: list[str], why: str) -> None:
    with pytest.raises(arguments.ArgumentError, match=why):
        multinode.ranks(given, nodes)

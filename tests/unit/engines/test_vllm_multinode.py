"""A replica over several nodes: each rank's command line, and what does not fit."""

import pytest

from engines.replica import launch
from engines.vllm import arguments, multinode
from scheduler.contracts import fleet


def spec(gpus: int = 16, tensor: int | str = 8, stages: int = 2) -> fleet.ReplicaSpec:
    sizes = {"tensor-parallel-size": tensor, "pipeline_parallel_size": stages}
    return fleet.ReplicaSpec("big", "v1", fleet.EngineKind.VLLM, "/m", engine_args=sizes, gpus=gpus)


def line(given: fleet.ReplicaSpec, number: int, nodes: int = 2) -> list[str]:
    return multinode.command_line(given, launch.Rank(number, nodes, "10.0.0.1:4711"))


def test_each_node_knows_its_rank_and_only_the_first_serves() -> None:
    first, second = (line(spec(), number) for number in range(2))
    master = {"--master-addr=10.0.0.1", "--master-port=4711"}
    assert {"--nnodes=2", "--node-rank=0", *master} <= set(first)
    assert "--headless" not in first
    assert {"--node-rank=1", "--headless", *master} <= set(second)
    shared = [word for word in first if word != "--node-rank=0"]
    assert [word for word in second if word not in {"--node-rank=1", "--headless"}] == shared
    assert "--tensor-parallel-size=8" in first
    assert launch.Rank(1, 2, "fd00::1:80").place == ("fd00::1", 80)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (spec(gpus=15, tensor=5, stages=3), "do not spread evenly over 2 nodes"),
        (spec(tensor=4), "is 8, and there are 16 GPUs: make them equal"),
        (spec(tensor=16, stages=1), "set it to 8 and pipeline parallel to 2"),
        (spec(gpus=12, tensor=4, stages=3), "4 would cross nodes of 6 GPUs: set it to 6"),
        (spec(tensor="auto"), "sizes are numbers, not auto and 2"),
    ],
)
def test_what_does_not_fit_is_refused(given: fleet.ReplicaSpec, why: str) -> None:
    with pytest.raises(arguments.ArgumentError, match=why):
        line(given, 0)

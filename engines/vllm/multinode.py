"""A replica over several nodes: what each rank's vLLM is told, and what does not fit. Pure.

vLLM's own way since 0.11: the same options on every node with the number of nodes, its rank and where rank 0
listens; ranks past the first serve no requests. Each node is given whole, by a lease of whole nodes, and
tensor-parallel ranks share a node: across nodes only pipeline stages pass, whose traffic is small.
"""

from engines.replica import launch
from engines.vllm import arguments
from scheduler.contracts import fleet


def command_line(spec: fleet.ReplicaSpec, rank: launch.Rank) -> list[str]:
    """Return the options of `vllm serve` for one rank.

    Args:
        spec: the replica; `gpus` over all nodes, with its parallel sizes among the engine's arguments.
        rank: which.

    Raises:
        arguments.ArgumentError: the sizes do not fit the nodes; one line with the fix.
    """
    if fault := misfit(spec, rank.nodes):
        raise arguments.ArgumentError(f"model {spec.model}: {fault}")
    host, port = rank.place
    line = [
        *arguments.command_line(spec),
        f"--nnodes={rank.nodes}",
        f"--node-rank={rank.number}",
        f"--master-addr={host}",
        f"--master-port={port}",
    ]
    return [*line, "--headless"] if rank.number else line


def misfit(spec: fleet.ReplicaSpec, nodes: int) -> str:
    """Return why a replica can't go over so many nodes, as one line with the fix; "" if it can."""
    said = {
        name.removeprefix("--").replace("_", "-"): value for name, value in spec.engine_args.items()
    }
    sizes = [str(said.get(f"{kind}-parallel-size", 1)) for kind in ("tensor", "pipeline")]
    if not all(size.isdecimal() for size in sizes):
        return f"tensor and pipeline parallel sizes are numbers, not {' and '.join(sizes)}"
    tensor, stages = map(int, sizes)
    each = spec.gpus // nodes
    if spec.gpus % nodes:
        return uneven(spec.gpus, nodes)
    if tensor * stages != spec.gpus:
        return (
            f"tensor × pipeline parallel is {tensor * stages}, and there are {spec.gpus} GPUs: make "
            "them equal"
        )
    if each % tensor:
        return (
            f"tensor parallel {tensor} would cross nodes of {each} GPUs: set it to {each} and pipeline "
            f"parallel to {nodes}"
        )
    return ""


def uneven(gpus: int, nodes: int) -> str:
    """Return what is said of GPUs that do not spread evenly."""
    return f"{gpus} GPUs do not spread evenly over {nodes} nodes: take a multiple"

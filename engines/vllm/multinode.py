"""A replica over several nodes: what each node runs, rendered and checked. Pure; not started by slots yet.

vLLM's own way since 0.11: the same command on every node with the number of nodes, its rank and where rank 0
listens; nodes past the first serve no requests (`--headless`). Each node is given whole, by a lease of whole
nodes, and tensor-parallel ranks share a node: across nodes only pipeline stages pass, whose traffic is small.
"""

import dataclasses
from collections.abc import Sequence

from engines.vllm import arguments
from scheduler.contracts import fleet

PORT = 29_501  # beside the rendezvous ports that other frameworks take by default


@dataclasses.dataclass(frozen=True, slots=True)
class Rank:
    """What one node runs: options of `vllm serve`."""

    node: str
    line: tuple[str, ...]


def ranks(spec: fleet.ReplicaSpec, nodes: Sequence[str], port: int = PORT) -> tuple[Rank, ...]:
    """Return each node's command line.

    Args:
        spec: the replica; `gpus` over all nodes, with its parallel sizes among the engine's arguments.
        nodes: the lease's, in Slurm's order.
        port: where rank 0 listens for the others, on the cluster's inner network.

    Raises:
        arguments.ArgumentError: the sizes do not fit the nodes; one line with the fix.
    """
    said = {
        name.removeprefix("--").replace("_", "-"): value for name, value in spec.engine_args.items()
    }
    tensor, stages = (int(said.get(f"{kind}-parallel-size", 1)) for kind in ("tensor", "pipeline"))
    count = len(nodes)
    if count < 2 or len(set(nodes)) < count:
        raise arguments.ArgumentError(
            f"model {spec.model}: needs two different nodes or more, got {list(nodes)}"
        )
    if spec.gpus % count:
        raise arguments.ArgumentError(
            f"model {spec.model}: {spec.gpus} GPUs do not spread evenly over {count} nodes: take "
            "a multiple"
        )
    if tensor * stages != spec.gpus:
        raise arguments.ArgumentError(
            f"model {spec.model}: tensor × pipeline parallel is {tensor * stages}, and there are "
            f"{spec.gpus} GPUs: make "
            "them equal"
        )
    if tensor > spec.gpus // count:
        raise arguments.ArgumentError(
            f"model {spec.model}: tensor parallel {tensor} would cross nodes of "
            f"{spec.gpus // count} GPUs: set it to "
            f"{spec.gpus // count} and pipeline parallel to {count}"
        )
    line = arguments.command_line(spec)
    shared = [f"--nnodes={count}", f"--master-addr={nodes[0]}", f"--master-port={port}"]
    return tuple(
        Rank(node, (*line, *shared, f"--node-rank={rank}", *(["--headless"] if rank else [])))
        for rank, node in enumerate(nodes)
    )

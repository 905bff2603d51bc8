"""`vllm run-batch` as it is, in vLLM's own environment, with the moments of its first and last answer told.

Usage: ``python -m tests.bench.batch_peer FOLDER`` with the arguments of run-batch behind it; writes
``FOLDER/peer.json``.
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any


def main(folder: Path) -> None:
    """Run it."""
    import torch
    from vllm.entrypoints.launchers import run_batch

    assert torch.__version__
    moments: list[float] = []
    completed = run_batch.BatchProgressTracker.completed

    def telling(self: Any) -> None:
        moments.append(time.perf_counter())
        completed(self)

    run_batch.BatchProgressTracker.completed = telling
    import asyncio

    asyncio.run(run_batch.main(run_batch.parse_args()))
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said = {
        "seconds": moments[-1] - moments[0],
        "answers": len(moments),
        "rss_mb": (own + children) / 1024,
    }
    (folder / "peer.json").write_text(json.dumps(said))


if __name__ == "__main__":
    where = Path(sys.argv.pop(1))
    main(where)

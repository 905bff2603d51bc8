"""A rank past the first of a replica over several nodes: vLLM's workers of this node, which serve nobody.

They take their orders from rank 0's engine core, over vLLM's own queues. Nothing tells them that it is gone:
the slot ends this process when rank 0 has ended.
"""

import time as timing

from vllm.v1.executor import multiproc_executor

from engines.replica import launch
from engines.vllm import configure


def follow(record: launch.Launch, reporter: launch.Reporter) -> None:
    """Run this node's workers; returns only by an error.

    Raises:
        arguments.ArgumentError: the spec's arguments can't be used.
        RuntimeError: a worker has ended.
        Exception: whatever vLLM raises when the ranks do not meet, or the model can't be loaded.
    """
    began = timing.monotonic()
    _, config = configure.configured(record, headless=True)
    reporter.phase("configure", round(timing.monotonic() - began, 3))
    began = timing.monotonic()
    executor = multiproc_executor.MultiprocExecutor(config, monitor_workers=False)
    reporter.phase("join", round(timing.monotonic() - began, 3))
    executor.start_worker_monitor(inline=True)
    raise RuntimeError("a worker of vLLM's has ended; its log says why")

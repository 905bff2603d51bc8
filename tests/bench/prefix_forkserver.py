"""The fork server of the prefix bench's replicas: `engines.vllm.forkserver`, with two doors opened.

`/health` answers without the secret, because vllm-router asks so; and with ``FOREBAY_BENCH_EVENTS`` set to a
folder each replica publishes its KV events at ``<folder>/<pid>``, which a real replica refuses to, and
writes what its engine's own clock says of each request to ``<folder>/<pid>.times``.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines.replica import secret
from engines.vllm import arguments, forkserver, steps
from scheduler.contracts import fleet

_NICE = 10  # routers and callers share no cores with engines on a cluster


def _open_health() -> None:
    permits = secret.SecretCheck._permits

    def permitting(self: secret.SecretCheck, scope: Any) -> bool:
        return scope.get("path") == "/health" or permits(self, scope)

    secret.SecretCheck._permits = permitting  # type: ignore[method-assign]


def _tell(folder: str, inner: Callable[[fleet.ReplicaSpec], list[str]]) -> None:
    def command_line(spec: fleet.ReplicaSpec) -> list[str]:
        _time(folder)
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"ipc://{folder}/{os.getpid()}",
        }
        return [*inner(spec), f"--kv-events-config={json.dumps(config)}"]

    arguments.command_line = command_line


def _time(folder: str) -> None:
    """Write a line of JSON for each request's first token and end, in the engine's own milliseconds."""

    record = steps.StepLog.record

    def recording(
        self: steps.StepLog, scheduler: Any, iteration: Any, *rest: Any, **more: Any
    ) -> None:
        record(self, scheduler, iteration, *rest, **more)
        lines = [
            {"first_ms": seconds * 1000}
            for seconds in getattr(iteration, "time_to_first_tokens_iter", ())
        ] + [
            {"queued_ms": one.queued_time * 1000, "prefill_ms": one.prefill_time * 1000}
            for one in getattr(iteration, "finished_requests", ())
        ]
        if lines:
            with (Path(folder) / f"{os.getpid()}.times").open("a", encoding="ascii") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))

    steps.StepLog.record = recording  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    os.nice(_NICE)
    _open_health()
    if os.environ.get("FOREBAY_BENCH_EVENTS"):
        _tell(os.environ["FOREBAY_BENCH_EVENTS"], arguments.command_line)
    sys.exit(forkserver.main())

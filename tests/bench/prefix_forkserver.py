"""The fork server of the prefix bench's replicas: `engines.vllm.forkserver`, with two doors opened.

`/health` answers without the secret, because vllm-router asks so; and with ``FOREBAY_BENCH_EVENTS`` set to a
folder each replica publishes its KV events at ``<folder>/<pid>``, which a real replica refuses to.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from engines.replica import secret
from engines.vllm import arguments, forkserver
from scheduler.contracts import fleet


def _open_health() -> None:
    permits = secret.SecretCheck._permits

    def permitting(self: secret.SecretCheck, scope: Any) -> bool:
        return scope.get("path") == "/health" or permits(self, scope)

    secret.SecretCheck._permits = permitting  # type: ignore[method-assign]


def _publish(folder: str, inner: Callable[[fleet.ReplicaSpec], list[str]]) -> None:
    def command_line(spec: fleet.ReplicaSpec) -> list[str]:
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"ipc://{folder}/{os.getpid()}",
        }
        return [*inner(spec), f"--kv-events-config={json.dumps(config)}"]

    arguments.command_line = command_line


if __name__ == "__main__":
    _open_health()
    if os.environ.get("FOREBAY_BENCH_EVENTS"):
        _publish(os.environ["FOREBAY_BENCH_EVENTS"], arguments.command_line)
    sys.exit(forkserver.main())

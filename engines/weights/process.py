"""A staging as a process: ``python -P -m engines.weights``, a `Task` on stdin, JSON lines on stdout.

Its own process, because hashing and copying would hold up whoever watches replicas, and because killing it
at any point is how it is stopped. Lines: ``{"got": bytes, "of": bytes}`` as it goes, ``{"waiting": why}``
while the place or the disk does not let it, then ``{"done": …}`` or ``{"failed": why}``.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engines import processes
from engines.weights import sources, staging, store, task
from scheduler.contracts import weights

TELL_S = 0.5
RETRY_S = (1.0, 2.0, 5.0, 10.0, 30.0)


Tell = Callable[[Mapping[str, Any]], None]


def run(asked: task.Task, tell: Tell, pause: Callable[[float], None] = time.sleep) -> int:
    """Stage until it is done, or can never be; returns the exit code."""
    if asked.verify:
        return verify(asked, tell)
    attempt = 0
    while True:
        try:
            source = sources.of(weights.parse(asked.order.uri), asked.options)
            where = store.Store(Path(asked.root))
            done = staging.Staging(asked.order, source, where, _now_and_then(tell)).run()
        except weights.WeightsError as error:
            tell({"failed": _line(error)})
            return 1
        except (sources.SourceDown, staging.NoRoom, OSError) as error:
            if attempt == asked.patience:
                tell({"failed": f"weights: {_line(error)}"})
                return 1
            tell({"waiting": _line(error)})
            pause(RETRY_S[min(attempt, len(RETRY_S) - 1)])
            attempt += 1
            continue
        tell({"done": dataclasses.asdict(done)})
        return 0


def verify(asked: task.Task, tell: Tell) -> int:
    """Compare staged weights with their manifest; damaged ones leave, so that they are staged anew."""
    try:
        where = store.Store(Path(asked.root))
        size, wrong = staging.compared(where, asked.order.key)
    except (weights.WeightsError, OSError) as error:
        tell({"failed": _line(error)})
        return 1
    if wrong:
        gone = where.evict(asked.order.key)
        then = (
            "removed, and staged anew when it is wanted"
            if gone
            else "in use: drain its replicas, then remove it"
        )
        tell({"failed": f"{asked.order.uri}: {wrong} is damaged on this disk: {then}"})
        return 1
    tell({"done": {"size": size}})
    return 0


def _now_and_then(tell: Tell) -> Callable[[int, int], None]:
    last = [0.0]

    def told(got: int, of: int) -> None:
        now = time.monotonic()
        if now - last[0] >= TELL_S or got == of:
            last[0] = now
            tell({"got": got, "of": of})

    return told


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def main() -> int:
    """Run the task that stands on stdin."""
    processes.die_with_parent()

    def tell(news: Mapping[str, Any]) -> None:
        sys.stdout.write(json.dumps(news) + "\n")
        sys.stdout.flush()

    return run(task.Task.from_json(sys.stdin.readline()), tell)

"""A replica as a child process of its slot: ties its life to the parent, opens the engine, serves."""

import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import uvloop

from engines import processes
from engines.replica import launch, server
from scheduler.contracts import fleet, usage

_OPENERS: Mapping[fleet.Engine, str] = {
    fleet.EngineKind.SIMULATED: "engines.simulated",
    fleet.EngineKind.HTTP: "engines.http",
    fleet.EngineKind.VLLM: "engines.vllm",
}
Follow = Callable[[launch.Launch, launch.Reporter], None]
_log = logging.getLogger(__name__)


def opener(kind: fleet.Engine) -> server.OpenEngine:
    """Return ``open_engine`` of the engine's package; loaded here, since each needs its own environment."""
    found: server.OpenEngine = importlib.import_module(_OPENERS[kind]).open_engine
    return found


def follower(kind: fleet.Engine) -> Follow:
    """Return ``follow`` of the engine's package: what a rank past the first does until it is killed."""
    found: Follow = importlib.import_module(_OPENERS[kind]).follow
    return found


def leaving(kind: fleet.Engine) -> Callable[[], None]:
    """Return how a process of this engine leaves once its rows are on disk.

    vLLM's is ended there and then: its core and workers die with their parent (`process.bind_workers`), and
    a driver frees a dead process's memory sooner than vLLM does in good order (0.2 to 3 s).
    """
    if kind is not fleet.EngineKind.VLLM:
        return lambda: None

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    return leave


def live(
    record: launch.Launch,
    open_sink: Callable[[], usage.UsageSink],
    reporter: launch.Reporter,
) -> None:
    """Be the replica that ``record`` describes, or its rank on this node, until it is to end.

    Args:
        record: which, and how.
        open_sink: opens where its usage rows go; a rank that serves nobody has none.
        reporter: the supervisor's ear.

    Raises:
        Exception: whatever kept it from starting, or ended it.
    """
    kind = record.spec.engine
    if record.rank is not None and record.rank.number:
        # Slurm sends SIGTERM to every process of a step: rank 0 drains, and the slot kills this one after it.
        # Masked, it would come to another thread, which an import may have begun.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        follower(kind)(record, reporter)
        return
    uvloop.run(server.run(record, opener(kind), open_sink(), reporter, leave=leaving(kind)))


def run(spec_path: Path, sink_factory: launch.SinkFactory) -> int:
    """Run the replica that ``spec_path`` describes; returns the exit code."""
    processes.die_with_parent(int(os.environ.get(processes.PARENT, "0")))
    reporter = launch.PipeReporter.from_environment()
    try:
        record = launch.Launch.read(spec_path)
        live(record, lambda: sink_factory(record.writer), reporter)
    except KeyboardInterrupt:
        return 0  # uvicorn raises the signal again once it has stopped
    except launch.LaunchError as error:
        _log.error("replica: %s", error)
        reporter.failed(str(error))
        return 1
    except Exception as error:
        _log.exception("replica")
        reporter.failed(f"{type(error).__name__}: {error}")
        return 1
    return 0

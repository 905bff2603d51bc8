"""A replica as a child process of its slot: ties its life to the parent, opens the engine, serves."""

import importlib
import logging
import os
from pathlib import Path

import uvloop

from engines import processes
from engines.replica import launch, server
from scheduler.contracts import fleet

_OPENERS = {
    fleet.EngineKind.SIMULATED: "engines.simulated",
    fleet.EngineKind.HTTP: "engines.http",
    fleet.EngineKind.VLLM: "engines.vllm",
}
_log = logging.getLogger(__name__)


def opener(kind: fleet.EngineKind) -> server.OpenEngine:
    """Return ``open_engine`` of the engine's package; loaded here, since each needs its own environment."""
    found: server.OpenEngine = importlib.import_module(_OPENERS[kind]).open_engine
    return found


def run(spec_path: Path, sink_factory: launch.SinkFactory) -> int:
    """Run the replica that ``spec_path`` describes; returns the exit code."""
    processes.die_with_parent(int(os.environ.get(processes.PARENT, "0")))
    reporter = launch.PipeReporter.from_environment()
    try:
        record = launch.Launch.read(spec_path)
        sink = sink_factory(record.writer)
        uvloop.run(server.run(record, opener(record.spec.engine), sink, reporter))
    except KeyboardInterrupt:
        return 0  # uvicorn raises the signal again once it has stopped
    except Exception as error:
        _log.exception("replica")
        reporter.failed(f"{type(error).__name__}: {error}")
        return 1
    return 0

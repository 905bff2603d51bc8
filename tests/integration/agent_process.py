"""An agent as a process of its own, with local slots: what `forebay agent` is without Slurm."""

import asyncio
import logging
import sys
from pathlib import Path

from engines import agent
from engines.agent import spec
from scheduler.contracts import clock
from slurm_plugins import steps
from tests.integration import file_sink

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    told = spec.AgentSpec.read(Path(sys.argv[1]))
    launcher = steps.LocalLauncher()
    work = agent.serve(
        told, launcher=launcher, sink=file_sink.factory("agent"), clock=clock.SystemClock()
    )
    sys.exit(asyncio.run(work))

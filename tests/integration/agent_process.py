"""An agent as a process of its own, with local slots: what `forebay agent` is without Slurm."""

import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from engines import agent
from engines.agent import spec
from scheduler.contracts import clock, ports
from slurm_plugins import children, steps
from tests.integration import file_sink

FREE = "FOREBAY_TEST_FREE_STEPS"  # environment: steps are no children that die with the agent


class FreeLauncher(steps.LocalLauncher):
    """Starts slots as Slurm does: their parent is not the agent, and its death does not end them."""

    async def start(
        self,
        argv: Sequence[str],
        *,
        gpus: int,
        cpus: int,
        env: Mapping[str, str],
        log: Path,
        node: int | None = None,
    ) -> steps.LocalStep:
        return steps.LocalStep(children.spawn(argv, env={**os.environ, **env}, log=log), self)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    told = spec.AgentSpec.read(Path(sys.argv[1]))
    launcher: ports.StepLauncher = FreeLauncher() if FREE in os.environ else steps.LocalLauncher()
    work = agent.serve(
        told, launcher=launcher, sink=file_sink.factory("agent"), clock=clock.SystemClock()
    )
    sys.exit(asyncio.run(work))

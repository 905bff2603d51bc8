"""What runs inside a lease: each function is the body of one process, given its specification file."""

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path

from forebay import sinks
from scheduler.contracts import clock, command_line, ports, stored
from slurm_plugins import steps

LAUNCHER = "FOREBAY_LAUNCHER"  # environment: `steps.Wanted`, as JSON


def agent(told: Path) -> int:
    """Run the lease's agent."""
    from engines import agent as agents
    from engines import told as tellings
    from engines.agent import spec

    try:
        read = spec.AgentSpec.read(told)
    except tellings.SpecError as error:
        raise command_line.CommandError(str(error)) from error
    how = launcher(os.environ)
    sink = sinks.open_spool(f"agent-{read.lease_id}")
    try:
        return asyncio.run(agents.serve(read, launcher=how, sink=sink, clock=clock.SystemClock()))
    finally:
        sink.close()


def slot(told: Path) -> int:
    """Run a slot's supervisor."""
    from engines import slot as slots

    return slots.main(told)


def replica(told: Path) -> int:
    """Run one simulated or HTTP replica."""
    from engines import replica as replicas

    return replicas.main(told, sinks.open_spool)


def launcher(env: Mapping[str, str]) -> ports.StepLauncher:
    """Return what the lease's environment asks for: srun in a real job, local processes elsewhere.

    Raises:
        command_line.CommandError: it is not the environment of a lease.
    """
    try:
        wanted = stored.read(steps.Wanted, json.loads(env[LAUNCHER]))
    except (LookupError, TypeError, ValueError) as error:
        raise command_line.CommandError(
            f"{LAUNCHER} is not set as a lease has it: an agent is started by the broker, in a job of Slurm's"
        ) from error
    return steps.for_lease(wanted)

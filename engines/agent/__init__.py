"""The agent: the process inside a lease that starts slots, watches them and speaks to the broker."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engines.agent import spec
    from scheduler.contracts import clock, ports, usage


async def serve(
    told: "spec.AgentSpec",
    *,
    launcher: "ports.StepLauncher",
    sink: "usage.UsageSink",
    clock: "clock.Clock",
) -> int:
    """Run a lease's agent until it is closed or Slurm ends it: the body of ``forebay agent --spec FILE``.

    Args:
        told: its spec (`engines.agent.spec.AgentSpec.read`).
        launcher: starts slots as job steps, or as local processes.
        sink: where the rows of GPU time go.
        clock: the clock.

    Returns:
        The exit code: 0 when every slot has closed and the ledger is on disk.
    """
    from engines.agent import lease

    return await lease.Agent(told, launcher, sink, clock).run()

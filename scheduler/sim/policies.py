"""The planner's settings in a simulation, and the policies that are compared: one planner, told differently.

Defaults are those of the broker (`scheduler.runtime.settings`); a test compares them.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class Planner:
    """What `scheduler.core.plan` is told."""

    stats_stale_s: float = 1.0
    agent_silent_s: float = 5.0
    agent_lost_s: float = 30.0
    cordon_s: float = 1800.0
    agent_connect_s: float = 60.0
    absent_polls: int = 3
    ttft_slo_ms: float = 500.0
    pressure_ticks: int = 2
    itl_slo_ms: float = 25.0
    rungs: tuple[int, ...] = (0, 1, 2, 3)
    scale_fill: float = 0.6
    scale_down_s: float = 300.0
    use_forecast: bool = True
    lend_every_s: float = 900.0
    min_run_s: float = 600.0
    calm_s: float = 30.0
    lease_walltime_s: int = 86400
    lease_time_min_s: int = 0
    rollover_at_once: int = 2
    node_gpus: int = 0
    lease_gpus: int = 0
    lease_team: str = "forebay"
    pending_leases: int = 4
    idle_lease_s: float = 30.0
    start_timeout_s: float = 900.0
    drain_s: float = 30.0
    quarantine_after: int = 3
    quarantine_s: float = 600.0


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """One policy.

    Attributes:
        rungs: of the ladder.
        forecast: whether history is used.
        fixed: numbers of replicas stand still: a static partition.
        slurm_preempts: Slurm takes backfill leases back, not we.
        what: one line for the report.
    """

    rungs: tuple[int, ...]
    forecast: bool = True
    fixed: bool = False
    slurm_preempts: bool = False
    what: str = ""


POLICIES: Mapping[str, Policy] = {
    "static": Policy(
        (), forecast=False, fixed=True, what="replicas sized for the peak, the other GPUs for batch"
    ),
    "slurm_preemption": Policy(
        (3,),
        forecast=False,
        slurm_preempts=True,
        what="autoscaling on signals; batch in backfill leases that Slurm preempts",
    ),
    "no_forecast": Policy((0, 1, 2, 3), forecast=False, what="the whole ladder, on signals alone"),
    "lease_only": Policy((3,), what="forecast; batch apart, leases given back and asked for anew"),
    "full": Policy((0, 1, 2, 3), what="all of it"),
}

"""The phases of a start, from the ask to the first request: pure.

| phase | from | to |
| --- | --- | --- |
| queue | the lease was asked for | Slurm has started it; 0 in a lease that was there |
| allocate | the replica was ordered | its slot holds the GPUs (a job step has begun) |
| stage | | its weights are on the node's disk |
| load | | the engine has its weights: imports, configuration, loading |
| compile | | its kernels and graphs are compiled, where the engine tells; else that is part of load |
| warm-up | | it serves: whatever is left |

What a replica did not tell is left out.
"""

from collections.abc import Mapping

PHASES = ("queue", "allocate", "stage", "load", "compile", "warm-up")
_LOADING = (
    "fork server",
    "configure",
    "load",
)  # as replicas tell them; `engine` is the last two and more


def phases(
    told: Mapping[str, float], *, queue_s: float, allocate_s: float, total_s: float
) -> dict[str, float]:
    """Return seconds by phase; they add up to the whole time, unless more was told than there was.

    Args:
        told: phases as the replica told them, seconds.
        queue_s: that its lease waited in Slurm's queue, if it was asked for this replica.
        allocate_s: from the order until its slot was ready.
        total_s: from the order until it served.
    """
    found = {"queue": queue_s, "allocate": allocate_s}
    found |= {name: told[name] for name in ("stage", "compile") if name in told}
    parts = sum(told.get(name, 0.0) for name in _LOADING)
    whole = told.get("fork server", 0.0) + told.get("engine", 0.0)
    if parts or whole:
        found["load"] = max(parts, whole) - told.get("compile", 0.0)
    found["warm-up"] = total_s - (sum(found.values()) - queue_s)
    return {name: round(max(0.0, found[name]), 3) for name in PHASES if name in found}

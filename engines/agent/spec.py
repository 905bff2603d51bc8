"""What an agent is told at its start: a JSON file that the lease's script names, and Slurm's environment."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from engines import settings, told
from scheduler.contracts import fleet


@dataclasses.dataclass(frozen=True, slots=True)
class AgentSpec(told.Spec):
    """A lease's agent.

    Attributes:
        kind: serve or backfill.
        team: the team that the lease is charged to.
        gpus: the lease's GPUs, over all of its nodes.
        broker_file: path of broker.json, read anew at each connection.
        token_file: 0600 file with the control token.
        run_dir: the lease's folder, which gateways see too: launch records and secrets.
        slot_argv: the command that runs a slot's supervisor; ``--spec FILE`` is added.
        replica_argv: the command that runs a simulated or HTTP replica; ``--spec FILE`` is added.
        sink_factory: import path ``module:function`` of the replicas' usage sink factory, which must
            load in the engines' environments.
        log_dir: folder for logs; "" is ``logs`` below ``run_dir``.
        options: the [engines] settings.
        parts: of a GPU that `gpus` counts; 1: whole ones.
        nodes: of the lease; what needs more GPUs than one has goes over several.
    """

    cluster: str
    lease_id: str
    kind: str
    team: str
    gpus: int
    broker_file: str
    token_file: str
    run_dir: str
    slot_argv: tuple[str, ...]
    replica_argv: tuple[str, ...]
    sink_factory: str
    log_dir: str = ""
    options: settings.EnginesSettings = dataclasses.field(default_factory=settings.EnginesSettings)
    parts: int = 1
    nodes: int = 1

    def spread(self, gpus: int) -> int:
        """Return over how many nodes a slot of so many GPUs goes."""
        return fleet.spread(gpus, self.gpus // self.nodes)

    @property
    def logs(self) -> Path:
        """The folder for logs."""
        return Path(self.log_dir) if self.log_dir else Path(self.run_dir) / "logs"


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """What Slurm's environment says of the lease's job.

    Attributes:
        job_id: Slurm's id, "" outside of Slurm.
        run: which run of a requeued job this is, from 0.
        started_us: UTC µs when the job script began; 0 if it did not say.
    """

    job_id: str
    run: int
    started_us: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Job":
        """Read it; what is missing or no number counts as 0."""
        return cls(
            job_id=environment.get("SLURM_JOB_ID", ""),
            run=_whole(environment.get("SLURM_RESTART_COUNT")),
            started_us=_whole(environment.get("FOREBAY_LEASE_STARTED_US")),
        )


def _whole(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0

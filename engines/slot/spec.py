"""What a slot's supervisor is told at its start, as a JSON file that the agent writes."""

import dataclasses

from engines import settings, told


@dataclasses.dataclass(frozen=True, slots=True)
class SlotSpec(told.Spec):
    """A slot.

    Attributes:
        agent_address: ``host:port`` of the agent's SlotLink server.
        agent_pid: the agent's process, and when it started (`processes.start_time`): on the same node
            the supervisor sees by these that it is gone.
        agent_machine: `places.machine` of the agent.
        token_file: 0600 file with the token of the agent's server.
        run_dir: folder for launch records and secrets, 0700, seen by the gateways.
        log_dir: folder for the replicas' logs.
        gpus: GPUs that the step was given.
        replica_argv: the command that runs a simulated or HTTP replica; ``--spec FILE`` is added.
        sink_factory: import path of the replicas' `SinkFactory`.
        options: the [engines] settings.
        parts: of a GPU that `gpus` counts; more than 1: the slot has one GPU, and shares it with others.
    """

    slot_id: str
    lease_id: str
    cluster: str
    slurm_job_id: str
    agent_address: str
    agent_pid: int
    agent_started: int
    agent_machine: str
    token_file: str
    run_dir: str
    log_dir: str
    gpus: int
    replica_argv: tuple[str, ...]
    sink_factory: str
    options: settings.EnginesSettings
    parts: int = 1

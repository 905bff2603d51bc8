"""What a slot's supervisor is told at its start, as a JSON file that the agent writes."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines import settings


class SpecError(ValueError):
    """The spec can't be used; the message says which file and why."""


@dataclasses.dataclass(frozen=True, slots=True)
class SlotSpec:
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

    def to_json(self) -> dict[str, Any]:
        """Return the spec as JSON values."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**fields, "options": self.options.to_json()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "SlotSpec":
        """Read what `to_json` wrote.

        Raises:
            SpecError: a field is missing, unknown or wrong.
        """
        try:
            fields = dict(value)
            fields["replica_argv"] = tuple(fields["replica_argv"])
            fields["options"] = settings.EnginesSettings.from_json(fields["options"])
            return cls(**fields)
        except (KeyError, TypeError, ValueError) as error:
            raise SpecError(f"slot spec: {error}") from error

    @classmethod
    def read(cls, path: Path) -> "SlotSpec":
        """Read the spec from a file.

        Raises:
            SpecError: it can't be read, or is wrong.
        """
        try:
            return cls.from_json(json.loads(path.read_bytes()))
        except (OSError, ValueError) as error:
            raise SpecError(f"{path}: {error}") from error

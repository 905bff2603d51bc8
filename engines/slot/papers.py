"""The files of one replica, and the order to start its process that is written from them."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engines import private, processes
from engines.replica import launch
from engines.slot import children, means, spec
from scheduler.contracts import fleet


@dataclasses.dataclass(frozen=True, slots=True)
class Papers:
    """Where they lie: the secret and the launch record until its process has ended, the log for good."""

    replica_id: str
    secret: Path
    record: Path
    log: Path

    @classmethod
    def of(cls, slot: spec.SlotSpec, replica_id: str, rank: int = 0) -> "Papers":
        """Return those of a replica of this slot, or of one rank of it; nothing is written."""
        name = f"{replica_id}.{rank}" if rank else replica_id
        run, logs = Path(slot.run_dir), Path(slot.log_dir)
        secret, record = run / f"{name}.secret", run / f"{name}.json"
        return cls(replica_id, secret, record, logs / f"{name}.log")

    def order(
        self,
        given: means.Means,
        staged: fleet.ReplicaSpec,
        role: fleet.Role,
        incarnation: int,
        env: Mapping[str, str],
        heard: Callable[[Mapping[str, Any]], None],
        rank: launch.Rank | None = None,
    ) -> children.Order:
        """Write a new secret and the launch record, and return the order.

        Args:
            given: the slot's means.
            staged: the spec, with the weights where they are on this node.
            role: its first one.
            incarnation: its number.
            env: what its environment has beside the slot's own.
            heard: called with each of its status lines.
            rank: which part of it, where it goes over several nodes.
        """
        slot = given.slot
        private.new_secret(self.secret)
        record = launch.Launch(
            replica_id=self.replica_id,
            cluster=slot.cluster,
            lease_id=slot.lease_id,
            slot_id=slot.slot_id,
            slurm_job_id=slot.slurm_job_id,
            node=given.node,
            spec=staged,
            role=role,
            secret_file=str(self.secret),
            host=given.host,
            incarnation=incarnation,
            sink_factory=slot.sink_factory,
            rank=rank,
        )
        private.write(self.record, children.record_text(record))
        extra = {
            processes.LEASE: slot.lease_id,
            processes.SLOT: slot.slot_id,
            processes.REPLICA: self.replica_id,
            **env,
        }
        return children.Order(
            record=record,
            record_file=self.record,
            env=children.environment(extra),
            extra_env=extra,
            log=self.log,
            heard=heard,
        )

    def kill(self, slot: spec.SlotSpec) -> None:
        """Kill what bears its marks here: another slot of this machine may hold another rank of it."""
        marks = {processes.REPLICA: self.replica_id, processes.SLOT: slot.slot_id}
        processes.kill_marked(marks)

    def told(self, reason: str) -> str:
        """Return a reason with the last lines of the replica's log."""
        said = children.last_lines(self.log)
        return f"{reason}; log ends: {said}" if said else reason

    def burn(self) -> None:
        """Remove what opens a way to the replica."""
        for path in (self.secret, self.record):
            path.unlink(missing_ok=True)

"""What a lease runs: the agent's specification on disk, and the Slurm job that starts the agent."""

import dataclasses
import json
import math
import os
import shlex
import sys
from pathlib import Path

from engines import settings as engine_settings
from engines.agent import spec
from engines.replica import spans
from engines.slot import starters
from forebay import in_lease, installation, sinks, telemetry
from forebay import settings as forebay_settings
from scheduler.contracts import fleet, slurm
from scheduler.core import grounds
from scheduler.runtime import address, config, guard
from scheduler.runtime import settings as scheduler_settings
from slurm_plugins import launch, sbatch, steps
from slurm_plugins import settings as slurm_settings

SPEC = "agent.json"


def where(here: config.Config) -> grounds.Grounds:
    """Return on which nodes `Renderer` lets leases start that say nothing else."""
    table = here.table(slurm_settings.SlurmSettings)
    options = here.table(scheduler_settings.Settings)
    only = (options.lease_partition,) if options.lease_partition else ()
    return grounds.Grounds(
        serve=only or tuple(table.serve_partitions),
        backfill=only or tuple(table.backfill_partitions),
        gres_type=options.lease_gres_type or table.gres_type,
        constraint=table.constraint,
    )


class Renderer:
    """Makes the job of a lease; implements the broker's `LeaseRenderer`."""

    def __init__(self, here: installation.Installation, port: slurm.SlurmPort) -> None:
        self._here = here
        self._port = port

    def __call__(self, lease: fleet.Lease) -> slurm.JobSpec:
        """Write the agent's specification for ``lease`` and return the job to submit."""
        folder = self._folder(lease)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._write_spec(lease, folder, self._python())
        return self.job(lease)

    def engine(self, lease: fleet.Lease) -> str:
        """Return a comment that tells how vLLM starts in the slots of a lease, "" without vLLM.

        Raises:
            container.ContainerError: the image or what it shall see can't be used.
        """
        options, folder = self._options(lease), self._folder(lease)
        if not options.vllm_python:
            return ""
        gpus = lease.hardware.gres != "none"
        line = starters.engine_line(options, str(folder), str(folder / "logs"), gpus=gpus)
        words = shlex.join([*line, "--spec", str(folder / "REPLICA.json")])
        return f"\n# Each vLLM replica starts in a step of this job, by the agent, as:\n# {words}\n"

    def _folder(self, lease: fleet.Lease) -> Path:
        return self._here.state / "leases" / lease.lease_id

    def job(self, lease: fleet.Lease) -> slurm.JobSpec:
        """Return the job of a lease; nothing is written."""
        table = self._here.config.table(slurm_settings.SlurmSettings)
        folder = self._folder(lease)
        python = self._python()
        backfill = lease.kind is fleet.LeaseKind.BACKFILL
        named = table.backfill_partitions if backfill else table.serve_partitions
        limit = table.backfill_time_limit_s if backfill else table.serve_time_limit_s
        gres_type = lease.gres_type or table.gres_type
        nodes = max(1, lease.whole_nodes)
        gpus = lease.gpus // nodes
        # Only what a lease needs: a service's whole environment is nobody else's business.
        kept = ("PATH", "HOME", "LANG", "PYTHONDONTWRITEBYTECODE", "SLURM_CONF", "TMPDIR")
        environment = {
            name: value
            for name, value in os.environ.items()
            if name in kept or name.startswith(telemetry.PREFIX)
        }
        if table.conf:
            environment["SLURM_CONF"] = table.conf
        if telemetry.wanted():
            environment[spans.FACTORY] = telemetry.FACTORY
        environment |= launch.environment(table.template)
        environment |= {
            sinks.SPOOL: self._here.spool(),
            in_lease.LAUNCHER: json.dumps(
                dataclasses.asdict(self._launcher(gres_type, lease.hardware.gres))
            ),
        }
        return slurm.JobSpec(
            # The submit filter takes a lease without GPUs only where it says that it wants none.
            name=f"forebay-{lease.kind}{'-cpu' if lease.hardware.gres == 'none' else ''}",
            script=sbatch.lease_script(
                python=python,
                spec_file=str(folder / SPEC),
                prolog=launch.lines(table.template),
                environment=environment,
            ),
            partitions=(lease.partition,) if lease.partition else tuple(named),
            time_limit_s=min(lease.walltime_s, limit) or limit,
            time_min_s=lease.time_min_s or (table.backfill_time_min_s if backfill else 0),
            output=str(folder / "job-%j.log"),
            directory=str(folder),
            stamp=slurm.Stamp(lease.cluster, lease.lease_id, lease.kind, lease.team),
            account=self._account(lease, table),
            qos=table.qos,
            nodes=nodes,
            # Old REST can't say it: better a lease on a cordoned node, where nothing starts, than none.
            exclude=lease.exclude if self._port.excludes else (),
            cpus_per_node=self._cpus(lease, gpus, table),
            gpus_per_node=gpus,
            memory_mb=self._memory_mb(lease, gpus),
            gres=lease.hardware.gres if gpus else "gpu",
            gres_type=gres_type,
            constraint=lease.hardware.constraint or table.constraint,
            environment=environment,
        )

    @staticmethod
    def _cpus(lease: fleet.Lease, gpus: int, table: slurm_settings.SlurmSettings) -> int:
        """Return a node's CPUs: those of the lease's profile, else the site's by GPU."""
        hardware = lease.hardware
        if hardware.cpus:
            return math.ceil(hardware.cpus / max(1, lease.whole_nodes))
        return max(1, hardware.whole(gpus) * table.cpus_per_gpu)

    def _memory_mb(self, lease: fleet.Lease, gpus: int) -> int | None:
        """Return a node's memory in Slurm's MB (2^20 bytes), parked models included; None: its default."""
        table = self._here.config.table(scheduler_settings.Settings)
        whole = max(1, lease.hardware.whole(gpus))
        if lease.hardware.memory_gb:
            each_gb = lease.hardware.memory_gb / max(1, lease.whole_nodes)
            return math.ceil((each_gb + whole * table.park_gb_per_gpu) * 1e9 / (1 << 20))
        if not table.lease_gb_per_gpu:
            return None
        each_gb = table.lease_gb_per_gpu + table.park_gb_per_gpu
        return math.ceil(whole * each_gb * 1e9 / (1 << 20))

    def _account(self, lease: fleet.Lease, table: slurm_settings.SlurmSettings) -> str:
        shared = self._here.config.table(scheduler_settings.Settings).lease_team
        own = table.charge_dedicated and lease.team != shared
        return lease.team if own else table.account

    def _launcher(self, gres_type: str, gres: str) -> steps.Wanted:
        """Say how the agent starts its slots."""
        table = self._here.config.table(slurm_settings.SlurmSettings)
        return steps.Wanted(
            client=self._port.kind,
            gres_type=gres_type,
            gres=gres,
            options=table.srun_options,
            start_timeout_s=table.step_start_timeout_s,
        )

    def _python(self) -> str:
        return self._here.config.table(forebay_settings.ForebaySettings).python or sys.executable

    def _options(self, lease: fleet.Lease) -> engine_settings.EnginesSettings:
        """Return the engines' settings; replicas in an image see the state folder: secrets, logs, spools."""
        table = self._here.config.table(engine_settings.EnginesSettings)
        if lease.hardware.container:
            table = dataclasses.replace(table, container=lease.hardware.container)
        if not table.container:
            return table
        return dataclasses.replace(
            table, container_binds=[*table.container_binds, str(self._here.state)]
        )

    def _write_spec(self, lease: fleet.Lease, folder: Path, python: str) -> None:
        state = self._here.state
        command = (python, "-P", "-m", "forebay")
        told = spec.AgentSpec(
            cluster=lease.cluster,
            lease_id=lease.lease_id,
            kind=lease.kind,
            team=lease.team,
            gpus=lease.gpus,
            broker_file=str(state / address.FILE),
            token_file=str(state / guard.FILE),
            run_dir=str(folder),
            slot_argv=(*command, "slot"),
            replica_argv=(*command, "replica"),
            sink_factory=sinks.FACTORY,
            options=self._options(lease),
            parts=lease.hardware.parts,
            nodes=max(1, lease.whole_nodes),
        )
        fresh = folder / f".{SPEC}.{os.getpid()}"
        fresh.write_text(json.dumps(told.to_json()))
        fresh.replace(folder / SPEC)

"""Slurm through pyslurm: Slurm's own library in this process, no process and no HTTP a call.

pyslurm fits one Slurm release; `available` says whether it is there. What crashes it across
releases (reading a job's layout by node) is not used.
"""

import importlib
import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from scheduler.contracts import ids, slurm, times
from slurm_plugins import (
    find,
    hostlist,
    owner,
    parse_sacct,
    parse_squeue,
    sbatch,
    stamp,
    states,
    tres,
)

_Result = TypeVar("_Result")
_GONE = ("invalid job id", "already completing or completed", "already finished")
_UNCERTAIN = ("socket timed out", "zero bytes", "unexpected message")
# What pyslurm calls by another name than Slurm.
_FLAGS = {
    "MAINTENANCE": "MAINT", "IGNORE_RUNNING_JOBS": "IGNORE_JOBS", "SPECIFIC_NODES": "SPEC_NODES",
    "PARTITION_NODES_ONLY": "PART_NODES", "STATIC_NODES": "STATIC",
}  # fmt: skip
# Names that are not just their words joined.
_CONFIG_NAMES = {
    "version": "SLURM_VERSION", "kill_wait_time": "KillWait", "cluster_name": "ClusterName",
    "gres_types": "GresTypes", "accounting_storage_tres": "AccountingStorageTRES",
    "credential_type": "CredType", "job_accounting_gather_type": "JobAcctGatherType",
    "proctrack_type": "ProctrackType", "min_job_age": "MinJobAge",
}  # fmt: skip


def available() -> str:
    """Return "" if pyslurm is installed here, else one line that says so; loads nothing."""
    if importlib.util.find_spec("pyslurm") is None:
        return "pyslurm is not installed"
    return ""


def _load(conf: Path | None) -> Any:
    """Import pyslurm, which reads slurm.conf at once; without one Slurm's library ends the process."""
    named = Path(conf or os.environ.get("SLURM_CONF") or "/etc/slurm/slurm.conf")
    if not named.is_file():
        raise slurm.SlurmUnavailable(f"there is no {named}; set [slurm] conf")
    os.environ["SLURM_CONF"] = str(named)
    try:
        return importlib.import_module("pyslurm")
    except ImportError as error:
        raise slurm.SlurmUnavailable(f"pyslurm can't be loaded: {error}") from error


class PyslurmClient:
    """`slurm.SlurmPort` over pyslurm.

    Args:
        conf: slurm.conf; None leaves it to Slurm's own search. One a process: the library reads it once.
        cluster: the cluster's name; "" takes Slurm's.
    """

    kind = "pyslurm"
    excludes = True

    def __init__(self, conf: Path | None = None, *, cluster: str = "") -> None:
        self._pyslurm = _load(conf)
        self._cluster = cluster
        self.users = owner.names()

    @property
    def cluster(self) -> str:
        """The cluster's name; the first use may ask Slurm for it."""
        if not self._cluster:
            self._cluster = self.config()["ClusterName"]
        return self._cluster

    def versions(self) -> slurm.Versions:
        """Return pyslurm's version and the controller's."""
        return slurm.Versions(
            client=str(self._pyslurm.__version__), controller=self.config().get("SLURM_VERSION", "")
        )

    def submit(self, spec: slurm.JobSpec) -> slurm.Submitted:
        """Submit a job."""
        sbatch.check(spec)
        description = self._pyslurm.JobSubmitDescription(**_description(spec))
        try:
            job_id = self._ask(f"submitting {spec.name!r}", description.submit)
        except slurm.SlurmError as error:
            if any(word in str(error).lower() for word in _UNCERTAIN):
                return find.submitted(self, spec, str(error))
            raise
        return slurm.Submitted(ids.SlurmJobId(str(job_id)), self.cluster)

    def cancel(self, job_id: ids.SlurmJobId, *, signal: str = "") -> None:
        """Cancel a job, or signal its steps."""
        job = self._job_handle(job_id)
        name = signal if signal.startswith("SIG") else f"SIG{signal}"
        try:
            if signal:
                self._ask(f"signal {job_id}", lambda: job.send_signal(name, steps="children"))
            else:
                self._ask(f"cancel {job_id}", job.cancel)
        except slurm.SlurmRefused as error:
            if not any(word in str(error).lower() for word in _GONE):
                raise

    def update(
        self, job_id: ids.SlurmJobId, *, time_limit_s: int | None = None, comment: str | None = None
    ) -> None:
        """Change a job's walltime or comment."""
        changes: dict[str, Any] = {}
        if time_limit_s is not None:
            changes["time_limit"] = times.print_duration(sbatch.minutes(time_limit_s) * 60)
        if comment is not None:
            changes["comment"] = comment
        if changes:
            wanted = self._pyslurm.JobSubmitDescription(**changes)
            job = self._job_handle(job_id)
            self._ask(f"update {job_id}", lambda: job.modify(wanted))

    def jobs(self) -> tuple[slurm.Job, ...]:
        """List all jobs by one call."""
        loaded = self._ask("jobs", self._pyslurm.Jobs.load)
        return tuple(job for raw in loaded.values() for job in self._jobs(raw))

    def states(self, job_ids: Iterable[ids.SlurmJobId]) -> Mapping[ids.SlurmJobId, slurm.JobState]:
        """Return the states of the jobs asked for, out of one list of all."""
        known = {job.job_id: job.state for job in self.jobs()}
        return {job_id: known.get(job_id, slurm.JobState.UNKNOWN) for job_id in job_ids}

    def nodes(self) -> tuple[slurm.Node, ...]:
        """List nodes; where accounting does not track GPUs, their use is summed over running jobs."""
        loaded = self._ask("nodes", self._pyslurm.Nodes.load)
        used = self._used_gpus()
        return tuple(_node(raw, used) for raw in loaded.values())

    def partitions(self) -> tuple[slurm.Partition, ...]:
        """List partitions."""
        loaded = self._ask("partitions", self._pyslurm.Partitions.load)
        return tuple(_partition(raw) for raw in loaded.values())

    def reservations(self) -> tuple[slurm.Reservation, ...]:
        """List reservations."""
        loaded = self._ask("reservations", self._pyslurm.Reservations.load)
        return tuple(_reservation(raw) for raw in loaded.values())

    def accounting(self, job_id: ids.SlurmJobId) -> tuple[slurm.JobRun, ...]:
        """Return the runs of a job from slurmdbd; of one that was requeued pyslurm has the last alone."""
        self._need_accounting()
        database = self._pyslurm.db
        wanted = database.JobFilter(ids=[int(job_id)], with_duplicates=True)
        loaded = self._ask(f"accounting of {job_id}", lambda: database.Jobs.load(wanted))
        rows = [raw for raw in loaded.values() if str(raw.id) == job_id]
        rows.sort(key=lambda raw: raw.start_time or float("inf"))
        return tuple(_run(raw, number, job_id) for number, raw in enumerate(rows))

    def associations(self) -> tuple[slurm.Association, ...]:
        """List who may charge which account; coordinators are not told here."""
        self._need_accounting()
        loaded = self._ask("associations", self._pyslurm.db.Associations.load)
        return tuple(
            slurm.Association(
                user=str(raw.user or ""),
                account=str(raw.account or ""),
                default=bool(raw.user) and bool(getattr(raw, "is_default", False)),
            )
            for raw in loaded.values()
        )

    def config(self) -> Mapping[str, str]:
        """Return the configuration under Slurm's own names, as far as pyslurm tells it."""
        loaded = self._ask("config", self._pyslurm.slurmctld.Config.load)
        found = {}
        for name in dir(loaded):
            value = None if name.startswith("_") else getattr(loaded, name)
            if value is not None and not callable(value):
                found[_CONFIG_NAMES.get(name) or _camel(name)] = _text(value)
        return found

    def _need_accounting(self) -> None:
        kind = self.config().get("AccountingStorageType", "")
        if "slurmdbd" not in kind:
            raise slurm.AccountingOff(
                "Slurm accounting storage is disabled: the cluster keeps none"
            )

    def _job_handle(self, job_id: str) -> Any:
        if re.fullmatch(r"\d+", job_id, re.ASCII) is None:
            raise slurm.SlurmRefused(f"{job_id!r} is no job id")
        return self._pyslurm.Job(int(job_id))

    def _ask(self, what: str, call: Callable[[], _Result]) -> _Result:
        try:
            return call()
        except self._pyslurm.PyslurmError as error:
            raise parse_squeue.fault(f"pyslurm: {what}", str(error)) from error
        except UnicodeDecodeError as error:
            raise slurm.SlurmGarbled(f"pyslurm: {what}: {error}") from error
        except ValueError as error:
            raise slurm.SlurmRefused(f"pyslurm: {what}: {error}") from error

    def _jobs(self, raw: Any) -> Iterable[slurm.Job]:
        reading = states.job(_read(raw, "state"))
        comment = _read(raw, "comment")
        limit = raw.time_limit
        for job_id in _job_ids(raw):
            yield slurm.Job(
                job_id=ids.SlurmJobId(job_id),
                cluster=_read(raw, "cluster") or self.cluster,
                name=_read(raw, "name"),
                user=_read(raw, "user_name") or str(raw.user_id),
                account=_read(raw, "account"),
                partition=_read(raw, "partition"),
                state=reading.state,
                reason=_read(raw, "state_reason"),
                comment=comment,
                stamp=stamp.parse(comment),
                flags=reading.flags,
                nodes=tuple(hostlist.expand(_read(raw, "allocated_nodes"))),
                gpus=_job_gpus(raw),
                submitted_us=_us(raw.submit_time),
                started_us=0 if reading.state is slurm.JobState.PENDING else _us(raw.start_time),
                ended_us=_us(raw.end_time) if reading.state.final else 0,
                time_limit_s=limit * 60 if isinstance(limit, int) else 0,
                restarts=int(raw.requeue_count or 0),
                exit_code=f"{raw.exit_code or 0}:{raw.exit_code_signal or 0}",
            )

    def _used_gpus(self) -> dict[str, int | None]:
        """Sum the GPUs of running jobs by node; None where a job there does not say how many it has."""
        used: dict[str, int | None] = {}
        for job in self.jobs():
            if not job.nodes or job.state not in _HOLDING:
                continue
            for node in job.nodes:
                before = used.get(node, 0)
                share = None if job.gpus is None else -(-job.gpus // len(job.nodes))
                used[node] = None if before is None or share is None else before + share
        return used


_HOLDING = frozenset({slurm.JobState.RUNNING, slurm.JobState.COMPLETING, slurm.JobState.SUSPENDED})


def _description(spec: slurm.JobSpec) -> dict[str, Any]:
    optional = {
        "account": spec.account,
        "qos": spec.qos,
        "constraints": spec.constraint,
        "comment": stamp.render(spec.stamp) if spec.stamp is not None else "",
        "gres_per_node": tres.request(spec.gpus_per_node, spec.gres_type, spec.gres)
        if spec.gpus_per_node
        else "",
        "memory_per_node": "" if spec.memory_mb is None else str(spec.memory_mb),
        "required_nodes": list(spec.nodelist) or "",
        "excluded_nodes": list(spec.exclude) or "",
        "time_limit_min": times.print_duration(sbatch.minutes(spec.time_min_s) * 60)
        if spec.time_min_s
        else "",
    }
    return {
        "name": spec.name,
        "script": spec.script,
        "partitions": ",".join(spec.partitions),
        "time_limit": times.print_duration(sbatch.minutes(spec.time_limit_s) * 60),
        "standard_output": spec.output,
        "working_directory": spec.directory,
        "environment": sbatch.environment(spec),
        "nodes": spec.nodes,
        "ntasks": spec.nodes,
        "ntasks_per_node": 1,
        "cpus_per_task": spec.cpus_per_node,
        "is_requeueable": False,
        **({"priority": 0} if spec.hold else {}),
        **{key: value for key, value in optional.items() if value},
    }


def _read(raw: Any, name: str) -> str:
    """Read a text; one that is not UTF-8 can't be had from pyslurm and must not lose us the job."""
    try:
        return str(getattr(raw, name) or "")
    except UnicodeDecodeError as error:
        return bytes(error.object).decode(errors="backslashreplace")


def _job_ids(raw: Any) -> tuple[str, ...]:
    if raw.array_id and raw.array_tasks_waiting:
        return parse_sacct.array_tasks(
            f"{raw.array_id}_[{str(raw.array_tasks_waiting).strip('[]')}]"
        )
    if raw.array_id and raw.array_task_id is not None:
        return (f"{raw.array_id}_{raw.array_task_id}",)
    return (str(raw.id),)


def _job_gpus(raw: Any) -> int | None:
    per_node = raw.gres_per_node or {}
    counts = [
        int(count) for key, count in per_node.items() if re.match(r"(gres[:/])?gpu(:|$)", str(key))
    ]
    return sum(counts) * int(raw.num_nodes or 1) if counts else None


def _node(raw: Any, used: Mapping[str, int | None]) -> slurm.Node:
    reading = states.node(str(raw.state or "UNKNOWN"))
    has = tres.gres(
        ",".join(f"{key}:{count}" for key, count in (raw.configured_gres or {}).items())
    )
    taken = used.get(str(raw.name), 0)
    free = None if has is None or taken is None else max(0, has.count - taken)
    total_cpus = int(raw.effective_cpus or raw.total_cpus or 0)
    return slurm.Node(
        name=str(raw.name),
        state=reading.state,
        flags=reading.flags,
        usable=reading.usable,
        partitions=tuple(raw.partitions or ()),
        gpus=None if has is None else has.count,
        gpus_free=free if reading.usable else 0,
        gres_type="" if has is None else has.gres_type,
        cpus=total_cpus,
        cpus_free=max(0, total_cpus - int(raw.allocated_cpus or 0)) if reading.usable else 0,
        memory_mb=int(raw.real_memory or 0),
        reason=_read(raw, "reason"),
        unknown_flags=reading.unknown,
    )


def _partition(raw: Any) -> slurm.Partition:
    limit = raw.max_time
    return slurm.Partition(
        name=str(raw.name),
        up=str(raw.state).upper() == "UP",
        nodes=tuple(hostlist.expand(_read(raw, "nodes"))),
        max_time_s=limit * 60 if isinstance(limit, int) else None,
        preempt_mode=_read(raw, "preempt_mode"),
        priority_tier=int(raw.priority_tier or 1),
        grace_time_s=int(raw.preemption_grace_time or 0),
    )


def _reservation(raw: Any) -> slurm.Reservation:
    again = str(getattr(raw.reoccurrence, "value", raw.reoccurrence))
    named = {flag.name for flag in type(raw.flags) if flag in raw.flags}
    return slurm.Reservation(
        name=str(raw.name),
        starts_us=_us(raw.start_time),
        ends_us=_us(raw.end_time),
        nodes=tuple(hostlist.expand(_read(raw, "nodes"))),
        flags=frozenset(_FLAGS.get(name, name) for name in (named | ({again} - {"NO"}))),
        users=tuple(raw.users or ()),
        accounts=tuple(raw.accounts or ()),
    )


def _run(raw: Any, number: int, job_id: ids.SlurmJobId) -> slurm.JobRun:
    # Objects, of which pyslurm makes no text: {"gpu:a100": .count, "shard": .count, …}.
    held = {} if raw.allocated_tres is None else raw.allocated_tres.gres
    allocated = ",".join(f"gres/{name}={each.count}" for name, each in held.items())
    return slurm.JobRun(
        job_id=job_id,
        run=number,
        state=states.job(str(raw.state or "UNKNOWN")).state,
        started_us=_us(raw.start_time),
        ended_us=_us(raw.end_time),
        elapsed_s=int(raw.elapsed_time or 0),
        gpus=tres.gpus(allocated),
        shared=tres.shared(allocated),
        node_count=int(raw.num_nodes or 0),
        exit_code=f"{raw.exit_code or 0}:{raw.exit_code_signal or 0}",
    )


def _us(seconds: Any) -> int:
    return int(seconds) * 1_000_000 if seconds else 0


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{key}={_text(entry)}" for key, entry in value.items())
    if isinstance(value, list | tuple):
        return ",".join(_text(entry) for entry in value)
    return str(value)

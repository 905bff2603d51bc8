"""The embedded Slurm's memory: its jobs in one JSON file, changed under a lock, written atomically.

Any process may open the same folder; each change reads the newest state first, so that a broker that
restarts, or a second one, finds every job and its process.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from scheduler.contracts import ids, slurm, stored
from slurm_plugins import embedded_runner, hostlist, sbatch, steps


@dataclasses.dataclass(slots=True)
class Record:
    """One job.

    Attributes:
        why: the final state that was decided before the job ended (CANCELLED, TIMEOUT, PREEMPTED), or "".
        gpus: the indexes that it holds on each of its nodes.
        runner_pid, runner_start: the runner, told from a later process of the same number by its start.
    """

    job_id: str
    spec: slurm.JobSpec
    user: str
    comment: str
    time_limit_s: int
    submitted_us: int
    state: slurm.JobState = slurm.JobState.PENDING
    reason: str = ""
    partition: str = ""
    why: str = ""
    gpus: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    runner_pid: int = 0
    runner_start: int = 0
    started_us: int = 0
    ended_us: int = 0
    exit_code: str = "0:0"


@dataclasses.dataclass(slots=True)
class State:
    """Everything: the next number, the jobs by theirs, and the reservations by name."""

    next_id: int = 1
    jobs: dict[str, Record] = dataclasses.field(default_factory=dict)
    reservations: dict[str, slurm.Reservation] = dataclasses.field(default_factory=dict)

    def running(self) -> list[Record]:
        """Return the jobs that hold GPUs."""
        return [r for r in self.jobs.values() if r.started_us and not r.state.final]

    def forget(self, kept: int) -> None:
        """Drop the oldest ended jobs beyond ``kept``."""
        ended = [key for key, record in self.jobs.items() if record.state.final]
        for key in ended[: max(0, len(ended) - kept)]:
            del self.jobs[key]


def output_file(record: Record) -> str:
    """Return the file that a started job writes to, patterns filled in."""
    text = record.spec.output
    for mark, value in (
        ("%j", record.job_id), ("%A", record.job_id), ("%x", record.spec.name),
        ("%u", record.user), ("%N", next(iter(record.gpus))),
    ):  # fmt: skip
        text = text.replace(mark, value)
    return str(Path(record.spec.directory, text))


def environment(record: Record, cluster: str) -> dict[str, str]:
    """Return the environment of a started job, as Slurm's own would be."""
    nodes = list(record.gpus)
    gpus = ",".join(map(str, record.gpus[nodes[0]]))
    names = hostlist.compress(nodes)
    account = record.spec.account or "root"
    held = {"SLURM_JOB_GPUS": gpus, "CUDA_VISIBLE_DEVICES": gpus} if gpus else {}
    if len(nodes) > 1:
        each = {name: ",".join(map(str, record.gpus[name])) for name in nodes}
        held[steps.NODES] = json.dumps(each)
    return {
        **sbatch.environment(record.spec),
        "HOME": os.environ.get("HOME", "/"),
        "USER": record.user,
        "SLURM_JOB_ID": record.job_id,
        "SLURM_JOBID": record.job_id,
        "SLURM_JOB_NAME": record.spec.name,
        "SLURM_JOB_USER": record.user,
        "SLURM_JOB_ACCOUNT": account,
        "SLURM_JOB_PARTITION": record.partition,
        "SLURM_JOB_NODELIST": names,
        "SLURM_NODELIST": names,
        "SLURM_JOB_NUM_NODES": str(len(nodes)),
        "SLURM_NNODES": str(len(nodes)),
        "SLURM_CPUS_ON_NODE": str(record.spec.cpus_per_node),
        "SLURM_GPUS_ON_NODE": str(len(record.gpus[nodes[0]])),
        "SLURM_SUBMIT_DIR": record.spec.directory,
        "SLURM_CLUSTER_NAME": cluster,
        "SLURMD_NODENAME": nodes[0],
        **held,
    }


class Store:
    """The file, its lock, and the jobs' folders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder  # made by the first use: who only asks what is here changes nothing
        self._file = folder / "jobs.json"
        self._threads = threading.Lock()

    def job_folder(self, job_id: str) -> Path:
        """Return the folder of one job's script and marks."""
        return self.folder / "jobs" / job_id

    @contextlib.contextmanager
    def change(self) -> Iterator[State]:
        """Lend the newest state; what was changed is on disk when the block ends without an error."""
        with self._threads, self._lock() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            before = self._text()
            state = _read(before, self._file)
            yield state
            value = _plain(state)
            if json.dumps(value) != before:
                embedded_runner.write(self._file, value)

    def _lock(self) -> TextIO:
        try:
            return (self.folder / "lock").open("w")
        except FileNotFoundError:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            return (self.folder / "lock").open("w")

    def _text(self) -> str:
        try:
            return self._file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""


def _plain(state: State) -> dict[str, Any]:
    return {
        "next_id": state.next_id,
        "jobs": {key: dataclasses.asdict(record) for key, record in state.jobs.items()},
        "reservations": {
            key: {**dataclasses.asdict(kept), "flags": sorted(kept.flags)}
            for key, kept in state.reservations.items()
        },
    }


def _read(text: str, file: Path) -> State:
    if not text:
        return State()
    try:
        value = json.loads(text)
        jobs = {key: _record(raw) for key, raw in value["jobs"].items()}
        kept = {key: _reservation(raw) for key, raw in value.get("reservations", {}).items()}
        return State(next_id=int(value["next_id"]), jobs=jobs, reservations=kept)
    except (ValueError, KeyError, TypeError) as error:
        raise slurm.SlurmGarbled(
            f"embedded Slurm: {file} can't be read ({error}); move it away to start anew"
        ) from error


def _record(raw: Mapping[str, Any]) -> Record:
    return stored.read(Record, raw, spec=_spec(raw["spec"]), state=slurm.JobState(raw["state"]))


def _reservation(raw: Mapping[str, Any]) -> slurm.Reservation:
    lists = {name: tuple(raw[name]) for name in ("nodes", "users", "accounts")}
    return stored.read(slurm.Reservation, raw, **lists, flags=frozenset(raw["flags"]))


def _spec(raw: Mapping[str, Any]) -> slurm.JobSpec:
    lists = {name: tuple(raw[name]) for name in ("partitions", "nodelist", "exclude")}
    stamp = None
    if raw["stamp"] is not None:
        lease_id = ids.LeaseId(raw["stamp"]["lease_id"])
        stamp = stored.read(slurm.Stamp, raw["stamp"], lease_id=lease_id)
    return stored.read(slurm.JobSpec, raw, **lists, stamp=stamp)

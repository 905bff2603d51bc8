"""Starts slots in a lease: as Slurm job steps (`SrunLauncher`) or as local processes (`LocalLauncher`)."""

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from scheduler.contracts import slurm
from slurm_plugins import children, sbatch

# Runs in the step, before its command: says by the step's output that it has started, and its id. What a file
# on a shared file system says may be seen on another node half a minute later.
_ANNOUNCE = 'printf "%s %s\\n" "$0" "$SLURM_JOB_ID.$SLURM_STEP_ID" || exit 70; exec "$@"'
_LOOKED = 1 << 16  # bytes of a step's log that are searched for that
# Runs before a local slot's command: it must not outlive the agent. The check covers an agent that
# died before the request was made.
_BOUND = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) or os._exit(70); os.execvp(sys.argv[2], sys.argv[2:])"
)
NODES = "FOREBAY_NODE_GPUS"  # environment of an embedded job over several nodes: {"n1": "0,1", "n2": "2,3"}
_POLL_S = 0.02
KILLED_S = 2.0  # from SIGKILL at a step to srun's end; it takes 0.2 s
_SCANCEL_TIMEOUT_S = 10.0
# Inherited from the batch script, these would set defaults of the step against its own options.
_DROPPED = ("SLURM_CPU_BIND", "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_MEM_PER_NODE",
            "SLURM_MEM_PER_CPU", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE",
            "SLURM_GRES", "SLURM_TRES_PER_TASK")  # fmt: skip
_BUSY = ("temporarily disabled", "Unable to contact", "Socket timed out", "Requested nodes are busy",
         "Connection refused", "Communication connection failure", "Zero Bytes",
         "step creation still disabled", "Unable to confirm allocation",
         "Required node not available")  # fmt: skip


class SrunStep:
    """A running job step; `ports.Step`."""

    def __init__(self, process: "subprocess.Popen[bytes]", step_id: str) -> None:
        self._process = process
        self.step_id = step_id

    @property
    def pid(self) -> int:
        """The local srun."""
        return self._process.pid

    async def wait(self) -> int:
        """Return srun's exit code, which is the task's."""
        return await children.wait(self._process)

    async def terminate(self) -> None:
        """Send SIGTERM to the tasks.

        By scancel: a SIGTERM to srun itself would kill the tasks at once.

        Raises:
            slurm.SlurmUnavailable: the controller does not answer, nothing was sent.
        """
        await self._scancel("--signal=TERM")

    async def kill(self) -> None:
        """End the tasks for good; where Slurm does not, through srun, and srun with them.

        The controller may not answer, or the step's slurmstepd be gone: then nobody ever tells srun.
        """
        with contextlib.suppress(slurm.SlurmUnavailable):
            await self._scancel("--signal=KILL")
            if await self._ends():
                return
        for number in (signal.SIGTERM, signal.SIGKILL):
            # By SIGTERM it tells the node directly, and gives its tasks no time.
            if self._process.poll() is None:
                children.signal_group(self._process.pid, number)
                if await self._ends():
                    return

    async def _ends(self) -> bool:
        """Return whether srun ends within a moment."""
        try:
            async with asyncio.timeout(KILLED_S):
                await self.wait()
        except TimeoutError:
            return False
        return True

    async def _scancel(self, option: str) -> None:
        if self._process.poll() is not None:
            return
        try:
            done = await children.run(
                ["scancel", option, self.step_id], timeout_s=_SCANCEL_TIMEOUT_S
            )
        except (TimeoutError, FileNotFoundError) as error:
            raise slurm.SlurmUnavailable(f"scancel {option} {self.step_id}: {error!r}") from error
        # A step that ended meanwhile is what was wanted; all else is the controller's trouble.
        over = ("Invalid job", "already completing", "No such process", "invalid step")
        if done.code and not any(word in done.output for word in over):
            raise slurm.SlurmUnavailable(f"scancel {option} {self.step_id}: {done.output}")


def _announced(log: Path, mark: str, since: int) -> str:
    """Return the id by which a step has said that it runs, "" before it has."""
    found = None
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(since)
        found = re.search(rf"{re.escape(mark)} (\S+)\n".encode(), file.read(_LOOKED))
    return found[1].decode() if found else ""


def exporting(options: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Return srun's options so that its task gets ``env``, and srun itself does not.

    What a step leaves behind is found by such marks and killed. An srun that bears them dies with it, and
    slurmstepd then tries for 2 s to tell it of the step's end before Slurm has the GPUs back.

    Raises:
        slurm.SlurmRefused: a value can't be told in an option: it holds a comma.
    """
    bad = [name for name, value in env.items() if "," in value]
    if bad:
        raise slurm.SlurmRefused(f"srun --export can't tell {bad[0]}: its value holds a comma")
    told = ",".join(["ALL", *(f"{name}={value}" for name, value in env.items())])
    return [f"--export={told}" if option == "--export=ALL" else option for option in options]


class SrunLauncher:
    """Starts each slot as one step of the lease, so that binding and accounting are Slurm's.

    Args:
        job_id: the lease's job (`$SLURM_JOB_ID`).
        gres_type: the lease's GPU type, "" for any.
        gres: what a slot's GPUs are counted in: `gpu`, or parts of one.
        options: more options for srun, from the site's settings.
        start_timeout_s: how long a step may wait for its GPUs.
    """

    def __init__(
        self,
        job_id: str,
        *,
        gres_type: str = "",
        gres: str = "gpu",
        options: Sequence[str] = (),
        start_timeout_s: float = 60.0,
    ) -> None:
        self._job_id = job_id
        self._gres = gres
        self._gres_type = gres_type
        self._options = tuple(options)
        self._start_timeout_s = start_timeout_s
        self._count = 0

    async def start(
        self,
        argv: Sequence[str],
        *,
        gpus: int,
        cpus: int,
        env: Mapping[str, str],
        log: Path,
        node: int | None = None,
    ) -> SrunStep:
        """Start a step and return once its task runs; see `ports.StepLauncher`.

        Raises:
            slurm.SlurmUnavailable: no controller, or no GPUs in time; try again later.
            slurm.SlurmRefused: Slurm will not start it.
        """
        self._count += 1
        since = log.stat().st_size if log.exists() else 0
        mark = f"forebay-step.{os.getpid()}.{self._count}"
        options = sbatch.srun_arguments(
            self._job_id,
            gpus=gpus,
            cpus=cpus,
            gres_type=self._gres_type,
            gres=self._gres,
            extra=self._options,
            node=node,
        )
        inherited = {name: value for name, value in os.environ.items() if name not in _DROPPED}
        try:
            process = children.spawn(
                ["srun", *exporting(options, env), "/bin/sh", "-c", _ANNOUNCE, mark, *argv],
                env=inherited,
                log=log,
            )
        except OSError as error:
            raise slurm.SlurmUnavailable(f"srun can't be started: {error}") from error
        try:
            return SrunStep(process, await self._started(process, mark, log, since))
        except BaseException:
            await _abandon(process)
            raise

    async def _started(
        self, process: "subprocess.Popen[bytes]", mark: str, log: Path, since: int
    ) -> str:
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while True:
                    ended = (
                        process.poll() is not None
                    )  # before the look: what it said is there then
                    if step_id := _announced(log, mark, since):
                        return step_id
                    if ended:
                        raise self._failure(process.returncode, children.tail(log, since=since))
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise slurm.SlurmUnavailable(
                f"job {self._job_id}: the step did not start within {self._start_timeout_s:g} s: "
                f"{children.tail(log, since=since)}"
            ) from None

    def _failure(self, code: int, said: str) -> slurm.SlurmError:
        kind = slurm.SlurmUnavailable if any(word in said for word in _BUSY) else slurm.SlurmRefused
        return kind(f"job {self._job_id}: srun ended with {code} before the step started: {said}")


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """How the slots of a lease are to be started.

    Attributes:
        client: the kind of client that submitted the lease; `embedded` has no srun.
        gres_type: and all that follows: see `SrunLauncher`.
    """

    client: str
    gres_type: str = ""
    gres: str = "gpu"
    options: Sequence[str] = ()
    start_timeout_s: float = 60.0


def for_lease(wanted: Wanted) -> "SrunLauncher | LocalLauncher":
    """Return the launcher for the lease that this process runs in.

    Raises:
        slurm.SlurmRefused: this is no Slurm job.
    """
    if wanted.client == "embedded":
        return LocalLauncher()
    job_id = os.environ.get("SLURM_JOB_ID", "")
    if not job_id:
        raise slurm.SlurmRefused("SLURM_JOB_ID is not set: a lease's agent runs in a Slurm job")
    return SrunLauncher(
        job_id,
        gres_type=wanted.gres_type,
        gres=wanted.gres,
        options=wanted.options,
        start_timeout_s=wanted.start_timeout_s,
    )


async def _abandon(process: "subprocess.Popen[bytes]") -> None:
    """End an srun whose step is not wanted: TERM, so that it takes a started task with it, then KILL."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(2.0):
                await children.wait(process)
        except TimeoutError:
            process.kill()
            process.wait()


class LocalStep:
    """A local process group that stands for a step; `ports.Step`."""

    def __init__(self, process: "subprocess.Popen[bytes]", launcher: "LocalLauncher") -> None:
        self._process = process
        self._launcher = launcher

    @property
    def pid(self) -> int:
        """The process itself, which leads its group."""
        return self._process.pid

    async def wait(self) -> int:
        """Return its exit code, once what it left of its group is gone too."""
        code = await children.wait(self._process)
        self._launcher.ended(self._process)
        return code

    async def terminate(self) -> None:
        """Send SIGTERM to the group, as Slurm does to all processes of a step."""
        if self._process.poll() is None:
            children.signal_group(self._process.pid, signal.SIGTERM)

    async def kill(self) -> None:
        """Send SIGKILL to the group."""
        if self._process.poll() is None:
            children.signal_group(self._process.pid, signal.SIGKILL)


class LocalLauncher:
    """Starts slots as local processes, each with its own share of the lease's GPUs.

    Args:
        devices: the lease's GPUs as CUDA_VISIBLE_DEVICES names them: indexes, UUIDs or MIG ids.
        nodes: of a lease over several pretended nodes, all of which are this machine, the same of each, as
            `NODES` has it.
    """

    def __init__(self, devices: str | None = None, nodes: str | None = None) -> None:
        named = os.environ.get("CUDA_VISIBLE_DEVICES", "") if devices is None else devices
        told = os.environ.get(NODES, "") if nodes is None else nodes
        self._nodes = tuple(
            (name, tuple(part.strip() for part in text.split(",") if part.strip()))
            for name, text in (json.loads(told) if told else {"": named}).items()
        )
        self._held: dict[int, tuple[int, tuple[str, ...]]] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._count = 0

    def _free(self, node: int) -> tuple[str, ...]:
        """Return the devices of a node that no live step holds."""
        for process in list(self._processes.values()):
            if process.poll() is not None:
                self.ended(process)
        held = {name for where, names in self._held.values() if where == node for name in names}
        return tuple(name for name in self._nodes[node][1] if name not in held)

    async def start(
        self,
        argv: Sequence[str],
        *,
        gpus: int,
        cpus: int,
        env: Mapping[str, str],
        log: Path,
        node: int | None = None,
    ) -> LocalStep:
        """Start a process in a group of its own; see `ports.StepLauncher`. CPUs are not bound here.

        Raises:
            slurm.SlurmUnavailable: too few free GPUs now, or the process can't be started.
            slurm.SlurmRefused: the lease has no such node.
        """
        where, mine = self._place(gpus, node)
        names = ",".join(mine)
        environment = {
            **os.environ,
            **env,
            "CUDA_VISIBLE_DEVICES": names,
            "SLURM_STEP_GPUS": names,
            "SLURM_STEP_ID": str(self._count),
            "SLURM_PROCID": "0",
            "SLURM_CPUS_PER_TASK": str(max(1, cpus)),
        }
        if self._nodes[where][0]:
            environment["SLURMD_NODENAME"] = self._nodes[where][0]
        command = [sys.executable, "-I", "-S", "-c", _BOUND, str(os.getpid()), *argv]
        try:
            process = children.spawn(command, env=environment, log=log)
        except OSError as error:
            raise slurm.SlurmUnavailable(f"{argv[0]} can't be started: {error}") from error
        self._count += 1
        self._held[process.pid] = (where, mine)
        self._processes[process.pid] = process
        return LocalStep(process, self)

    def _place(self, gpus: int, node: int | None) -> tuple[int, tuple[str, ...]]:
        """Return a node with so many free GPUs, and which; raises as `start` does."""
        if node is not None and node >= len(self._nodes):
            raise slurm.SlurmRefused(
                f"the lease has {len(self._nodes)} nodes, none is number {node}"
            )
        every: Sequence[int] = range(len(self._nodes)) if node is None else [node]
        free = {where: self._free(where) for where in every}
        for where, names in free.items():
            if gpus <= len(names):
                return where, names[:gpus]
        most = max(map(len, free.values()))
        raise slurm.SlurmUnavailable(f"the lease has {most} free GPUs, {gpus} are needed")

    def ended(self, process: "subprocess.Popen[bytes]") -> None:
        """Take the GPUs of an ended process back, after ending what it left in its group."""
        if self._processes.pop(process.pid, None) is not None:
            children.signal_group(process.pid, signal.SIGKILL)
            self._held.pop(process.pid, None)

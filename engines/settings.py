"""The table ``[engines]`` of ``forebay.toml``: how replicas are started, watched and stopped."""

import dataclasses
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scheduler.contracts import stored
from scheduler.contracts.settings import setting


@dataclasses.dataclass(frozen=True, slots=True)
class EnginesSettings:
    """Settings of agents, slots and replicas."""

    vllm_python: str = setting(
        "", "Python of the environment that holds vLLM (an absolute path); empty: no vLLM here."
    )
    fork_server: str = setting(
        "auto",
        "on, off or auto: start vLLM replicas by forking a process that has vLLM imported. auto is on "
        "where a slot has no real GPU (CUDA must not be touched before a fork) and off elsewhere.",
    )
    container: str = setting(
        "",
        "Image in which vLLM replicas run (a .sif file, or docker://…); `vllm_python` is then a path inside. "
        "Empty: no image.",
    )
    container_runtime: str = setting("apptainer", "apptainer, singularity, or the path of one.")
    container_options: list[str] = setting(
        [], "More options of its exec, such as --cleanenv or --no-home."
    )
    container_binds: list[str] = setting(
        [],
        "Folders of the node that replicas see inside under the same names (weights that lie on a shared "
        "file system); Forebay's own are there anyway. :ro behind one for reading only.",
    )
    host: str = setting(
        "127.0.0.1",
        "Address on which agents and replicas listen; `node` takes the address that the node's name "
        "resolves to, which a site with gateways on other hosts, or replicas over several nodes, needs.",
    )
    drain_s: float = setting(
        20.0,
        "A stopping replica's requests get so long, if the broker says nothing.",
        unit="s",
        least=0,
    )
    term_s: float = setting(
        4.0,
        "From SIGTERM to SIGKILL for a drained replica; vLLM ends in 1 to 3 s or hangs.",
        unit="s",
        least=0.1,
    )
    grace_s: float = setting(
        20.0,
        "From Slurm's SIGTERM to the end of a lease; below Slurm's KillWait (30 s by default), so that "
        "rows are on disk before SIGKILL comes.",
        unit="s",
        least=1,
    )
    sleep_timeout_s: float = setting(
        60.0,
        "A parked replica whose engine does not sleep by then is ended instead; weights go to host memory at "
        "10 to 50 GB/s.",
        unit="s",
        least=1,
    )
    start_timeout_s: float = setting(
        900.0,
        "A replica that does not listen by then is given up; large weights from a cold disk take "
        "minutes.",
        unit="s",
        least=1,
    )
    stats_s: float = setting(
        0.2, "Between two readings of a replica's stats.", unit="s", least=0.02
    )
    heartbeat_s: float = setting(
        1.0, "Between two reports when nothing has changed.", unit="s", least=0.1
    )
    unhealthy_s: float = setting(
        5.0,
        "A replica that does not answer for so long leaves the routes; a long prefill on few cores "
        "keeps an engine from answering for a second or two.",
        unit="s",
        least=0.5,
    )
    no_step_s: float = setting(
        30.0,
        "An engine that has work and makes no step for so long (or for 50 of its usual steps, if that "
        "is longer) hangs and leaves the routes; after twice that it is killed, as is a replica that does "
        "not answer at all for as long. The longest honest step, a 32k prefill on a slow machine, is below "
        "it.",
        unit="s",
        least=1,
    )
    agent_lost_s: float = setting(
        30.0,
        "A slot on another node than its agent stops everything after so long without it; on the "
        "same node it sees at once that the agent's process is gone.",
        unit="s",
        least=1,
    )
    ledger_s: float = setting(60.0, "Between two rows of a lease's GPU time.", unit="s", least=1)
    ledger_pulse_s: float = setting(
        1.0,
        "Between two extensions of the newest rows of GPU time: a killed agent loses so much of it.",
        unit="s",
        least=0.1,
    )
    gpu_lock_dir: Path = setting(
        Path(tempfile.gettempdir()) / "forebay-gpus",
        "Folder on the node's own disk where replicas note which GPU they hold.",
    )
    weights_dir: str = setting(
        "",
        "Folder on the node's own disk for staged weights and compile caches, for all leases of the node; "
        "empty: forebay-weights-<uid> where temporary files go, which a site with a /tmp of each job's own "
        "must not leave so.",
    )
    weights_budget_gb: float = setting(
        0.0,
        "Most that weights and caches may take there; the longest unused leave. 0: what the disk has.",
        unit="10^9 bytes",
        least=0,
    )
    weights_reserve_gb: float = setting(
        5.0, "So much of that disk stays free for others.", unit="10^9 bytes", least=0
    )
    weights_parallel: int = setting(
        8,
        "Ranges of 16 MiB that a staging reads at once; one stream of an object store gives a tenth of a "
        "node's network.",
        least=1,
        most=64,
    )
    weights_unsafe: bool = setting(
        False, "Take pickled weights (*.bin, *.pt) too; they can run code when they are loaded."
    )
    s3_endpoint: str = setting("", "URL of an S3 service that is not Amazon's.")
    s3_region: str = setting("", "Its region; empty: AWS_REGION, else us-east-1.")
    s3_credentials: str = setting(
        "",
        "An AWS credentials file (its profile `default`) that only the agents' user may read; empty: the "
        "environment's AWS_* variables or the machine's role.",
    )

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON values, for the spec of an agent or a slot."""
        return {**dataclasses.asdict(self), "gpu_lock_dir": str(self.gpu_lock_dir)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "EnginesSettings":
        """Read what `to_json` wrote; keys that are missing have their defaults."""
        made = {"gpu_lock_dir": Path(value["gpu_lock_dir"])} if "gpu_lock_dir" in value else {}
        return stored.read(cls, value, **made)

"""The table ``[slurm]`` of ``forebay.toml``."""

import dataclasses

from scheduler.contracts import settings


@dataclasses.dataclass(frozen=True, slots=True)
class SlurmSettings:
    """How Forebay reaches Slurm, and what it asks for."""

    client: str = settings.setting(
        "auto",
        "auto, pyslurm, slurmrestd, cli or embedded; auto takes the first of them that works here.",
    )
    conf: str = settings.setting(
        "", "Path of slurm.conf; empty leaves it to Slurm's own search (SLURM_CONF, /etc/slurm)."
    )
    cluster: str = settings.setting(
        "", "The cluster's name on every record; empty takes ClusterName from Slurm."
    )
    rest_url: str = settings.setting(
        "", "Base URL of slurmrestd, such as http://127.0.0.1:6820; empty if there is none."
    )
    rest_user: str = settings.setting("root", "The user that slurmrestd's tokens are made out to.")
    jwt_key_file: str = settings.setting(
        "", "Slurm's JWT key (AuthAltParameters jwt_key=…), to sign own tokens with."
    )
    jwt_token_file: str = settings.setting(
        "", "A file with a ready token, read anew for each call; used where there is no key."
    )
    call_timeout_s: float = settings.setting(
        20.0,
        "Time limit of one call; Slurm's own MessageTimeout is 10 s, so that it can answer first.",
        unit="s",
        least=0.1,
    )
    serve_partitions: list[str] = settings.setting(
        ["serve"], "Partitions of protected leases; Slurm takes the first that can start."
    )
    backfill_partitions: list[str] = settings.setting(
        ["backfill"], "Partitions of preemptible leases."
    )
    account: str = settings.setting(
        "", "Slurm account that leases are charged to; empty leaves it to Slurm's default."
    )
    charge_dedicated: bool = settings.setting(
        False,
        "Charge the leases of a team's dedicated replicas to the team's own Slurm account; the user that "
        "Forebay runs as needs an association with it.",
    )
    qos: str = settings.setting("", "QOS of the leases; empty leaves it to Slurm's default.")
    gres_type: str = settings.setting(
        "", "GPU type to ask for, as the nodes spell it or in another case; empty for any."
    )
    serve_time_limit_s: int = settings.setting(
        86_400, "Walltime of a serve lease; a day keeps successions rare.", unit="s", least=60
    )
    backfill_time_limit_s: int = settings.setting(
        14_400, "Walltime of a backfill lease; short ones fit into more gaps.", unit="s", least=60
    )
    backfill_time_min_s: int = settings.setting(
        900, "Least walltime that a backfill lease is worth starting for.", unit="s", least=0
    )
    cpus_per_gpu: int = settings.setting(
        1, "CPUs asked for with each GPU; sites set their own ratio.", least=1
    )
    script_prolog: list[str] = settings.setting(
        [], "Lines of shell that a lease's script runs before the agent, such as module load cuda."
    )
    srun_options: list[str] = settings.setting(
        [], "More options for each slot's srun, such as --cpu-bind=none."
    )
    step_start_timeout_s: float = settings.setting(
        60.0,
        "How long a slot's step may wait for its GPUs; those of a step that ended come in 0.2 s.",
        unit="s",
        least=1,
    )
    embedded_nodes: int = settings.setting(
        4, "Pretend nodes of the embedded Slurm; four show leases of several replicas.", least=1
    )
    embedded_gpus: int = settings.setting(4, "Pretend GPUs on each of them.", least=0)
    embedded_cpus: int = settings.setting(64, "Pretend CPUs on each of them.", least=1)
    embedded_kill_wait_s: float = settings.setting(
        30.0,
        "Seconds from SIGTERM to SIGKILL in the embedded Slurm, as KillWait.",
        unit="s",
        least=0,
    )

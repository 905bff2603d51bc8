"""The table ``[slurm]`` of ``forebay.toml``."""

import dataclasses

from scheduler.contracts import settings
from slurm_plugins import launch


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
    service_users: list[str] = settings.setting(
        [],
        "More users whose jobs are taken for leases by their stamp, beside the one that Forebay's jobs run "
        "as, such as the one that they ran as before.",
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
    constraint: str = settings.setting(
        "",
        "Features that a lease's nodes must have, as sbatch --constraint takes them; empty for any.",
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
    modules: list[str] = settings.setting(
        [], "Environment modules that a lease loads, such as cuda/12.9; first of all."
    )
    spack_root: str = settings.setting("", "Folder of the site's Spack, where `spack` names some.")
    spack: list[str] = settings.setting([], "Spack specs that a lease loads, such as cuda@12.9.")
    venv: str = settings.setting("", "A virtual environment that a lease activates.")
    script_prolog: list[str] = settings.setting(
        [],
        "Lines of shell that a lease's script runs after these and before the agent, as they are.",
    )
    proxy: str = settings.setting(
        "",
        "The site's way out, as http://host:port, for stores of weights; own links never use it.",
    )
    no_proxy: str = settings.setting(
        "", "Hosts that are reached without it, with commas; this node always is."
    )
    srun_options: list[str] = settings.setting(
        [],
        "More options for each slot's srun, such as --cpu-bind=none; no --output: a step says there that it "
        "has started.",
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

    def __post_init__(self) -> None:
        launch.lines(self.template)
        launch.environment(self.template)

    @property
    def template(self) -> launch.Template:
        """How nodes get what a lease needs."""
        return launch.Template(
            modules=self.modules,
            spack_root=self.spack_root,
            spack=self.spack,
            venv=self.venv,
            prolog=self.script_prolog,
            proxy=self.proxy,
            no_proxy=self.no_proxy,
        )

"""The [scheduler] table of forebay.toml: the broker's times, limits and places."""

import dataclasses
from collections.abc import Mapping

from scheduler.contracts import settings


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """What the broker may be told; every default works on one machine."""

    listen: str = settings.setting(
        "127.0.0.1:0",
        "Address of the control server (agents and gateways connect to it); port 0 takes a free one, "
        "a site with agents on other hosts names an address that they reach.",
    )
    advertise: str = settings.setting(
        "",
        "Host that agents and gateways are told to connect to; empty: the host part of `listen`.",
    )
    registry_url: str = settings.setting(
        "",
        "SQLAlchemy URL of the registry; empty: SQLite in the state folder. "
        "PostgreSQL: postgresql+psycopg://user@host/forebay.",
    )
    tick_s: float = settings.setting(
        0.2, "Between two plans; as often as replicas and gateways report.", unit="s", least=0.01
    )
    slurm_poll_s: float = settings.setting(
        2.0,
        "Between two polls of Slurm (all jobs and nodes in one go); each costs the controller some ms.",
        unit="s",
        least=0.1,
    )
    stats_stale_s: float = settings.setting(
        1.0, "Replica stats older than this are not used for decisions.", unit="s", least=0.1
    )
    agent_silent_s: float = settings.setting(
        5.0,
        "An agent that says nothing for so long is silent: its replicas are not routed to until it speaks.",
        unit="s",
        least=0.5,
    )
    agent_lost_s: float = settings.setting(
        30.0,
        "A running lease whose agent has been silent for so long is given back and replaced; Slurm "
        "itself notices a dead node only after SlurmdTimeout (300 s by default).",
        unit="s",
        least=1,
    )
    cordon_s: float = settings.setting(
        1800.0,
        "How long a node that took an agent with it is kept off: no lease is asked for on it, nothing new "
        "starts there. `fctl uncordon NODE` ends it; 0: no node is.",
        unit="s",
        least=0,
    )
    agent_connect_s: float = settings.setting(
        60.0,
        "A running lease whose agent has not come by then is given back.",
        unit="s",
        least=1,
    )
    absent_polls: int = settings.setting(
        3,
        "Polls in a row in which Slurm must not list a lease before absence is read as its end, and "
        "then only if the agent is silent as well.",
        least=1,
    )
    adopt_grace_s: float = settings.setting(
        5.0,
        "After taking the lead nothing is started, asked for or given back for so long, so that agents "
        "can reconnect and Slurm can be read first.",
        unit="s",
        least=0,
    )
    ttft_slo_ms: float = settings.setting(
        500.0,
        "Interactive time to first token aimed at; a predicted wait above half of it is pressure.",
        unit="ms",
        least=1,
    )
    pressure_ticks: int = settings.setting(
        2, "Ticks in a row with pressure before a replica turns interactive (rung 1).", least=1
    )
    itl_slo_ms: float = settings.setting(
        25.0,
        "Time per output token aimed at, 40 tokens/s a stream; slower steps are pressure. 0: not looked at.",
        unit="ms",
        least=0,
    )
    rungs: tuple[int, ...] = settings.setting(
        (0, 1, 3),
        "Rungs of the reclaim ladder that are used: 0 seats, 1 roles, 2 swap in place, 3 leases. Without 2 "
        "interactive and batch replicas live in leases of their own.",
    )
    scale_fill: float = settings.setting(
        0.6,
        "Share of what replicas can take that the autoscaler plans for; the rest is for bursts.",
        least=0.1,
        most=1,
    )
    scale_down_s: float = settings.setting(
        300.0,
        "A lower need must hold for so long before replicas are given up, a tenth at a time.",
        unit="s",
        least=0,
    )
    use_forecast: bool = settings.setting(
        True, "Whether the demand of earlier days asks for capacity before it is needed."
    )
    forecast_days: int = settings.setting(
        14,
        "Days of the ledger that forecasts learn from: two of each day of the week.",
        unit="d",
        least=1,
        most=35,
    )
    forecast_every_s: float = settings.setting(
        900.0,
        "Between two looks at the ledger; what it tells comes in quarters of an hour.",
        unit="s",
        least=1,
    )
    zone: str = settings.setting(
        "",
        "Time zone whose clock the days of callers follow, as Europe/Berlin; empty: this machine's.",
    )
    lend_every_s: float = settings.setting(
        900.0,
        "Between two moves of batch shares among models; a move costs a start, 2 to 5 minutes.",
        unit="s",
        least=0,
    )
    min_run_s: float = settings.setting(
        600.0,
        "A replica that batch was lent runs at least so long before its share may move.",
        unit="s",
        least=0,
    )
    calm_s: float = settings.setting(
        30.0,
        "Calm after which a replica is shared with batch again; shorter ones flip for ever in real traces.",
        unit="s",
        least=0,
    )
    lease_walltime_s: int = settings.setting(
        86400, "Walltime asked for a lease; renewed by a new lease.", unit="s", least=60
    )
    lease_time_min_s: int = settings.setting(
        0,
        "Least walltime that is still useful (sbatch --time-min), so that Slurm can start a lease sooner; "
        "0: only the whole.",
        unit="s",
        least=0,
    )
    rollover_at_once: int = settings.setting(
        2,
        "Leases that are replaced at once as their walltime nears; each overlaps a start.",
        least=1,
    )
    fleet_gpus: int = settings.setting(
        0, "Most GPUs that Forebay holds at once; 0: what leases there are.", least=0
    )
    node_gpus: int = settings.setting(
        0, "GPUs of a node, for leases over several; 0: no lease spans nodes.", least=0
    )
    lease_gpus: int = settings.setting(
        0, "GPUs asked for in one lease; 0: as many as the replica that it is for.", least=0
    )
    lease_gb_per_gpu: float = settings.setting(
        0.0,
        "Host memory asked for with each GPU of a lease (sbatch --mem), in 10^9 bytes; 0: Slurm's default.",
        least=0,
    )
    park_gb_per_gpu: float = settings.setting(
        0.0,
        "Host memory asked for on top of it, for models that are parked in the lease (rung 2), in 10^9 "
        "bytes; 0: nothing is parked.",
        least=0,
    )
    lease_team: str = settings.setting(
        "forebay", "Team (Slurm account) that warm leases are charged to."
    )
    lease_partition: str = settings.setting("", "Partition for leases; empty: the [slurm] table's.")
    lease_gres_type: str = settings.setting(
        "", "GPU type for leases as the site spells it (`H100`); empty: any."
    )
    slot_cpus: int = settings.setting(1, "CPUs bound to each slot.", least=1)
    pending_leases: int = settings.setting(
        4, "Leases that may wait in Slurm's queue at once, over all models.", least=1
    )
    lease_backoff_s: float = settings.setting(
        5.0,
        "Pause after Slurm refused or ended a lease early; doubles to 12 times.",
        unit="s",
        least=0,
    )
    idle_lease_s: float = settings.setting(
        30.0, "A lease without any replica is given back after so long.", unit="s", least=0
    )
    start_timeout_s: float = settings.setting(
        300.0,
        "A replica that is not serving by then is stopped and counts as failed.",
        unit="s",
        least=1,
    )
    drain_s: float = settings.setting(
        30.0, "How long a replica that is to stop may finish its streams.", unit="s", least=0
    )
    prestage_models: int = settings.setting(
        4,
        "Sets of weights that the node of each lease stages before a replica wants them, those with the most "
        "replicas first; they take only room that nobody needs. 0: none.",
        least=0,
    )
    restart_backoff_s: float = settings.setting(
        1.0,
        "Pause before a dead replica is started anew; doubles with each failed start.",
        unit="s",
        least=0,
    )
    restart_backoff_max_s: float = settings.setting(
        60.0, "Longest pause between two starts.", unit="s", least=0
    )
    quarantine_after: int = settings.setting(
        3, "Failed starts in a row after which a model is quarantined, its reason kept.", least=1
    )
    quarantine_s: float = settings.setting(
        600.0, "How long a quarantine lasts; `fctl resume MODEL` ends it.", unit="s", least=0
    )
    leader_ttl_s: float = settings.setting(
        5.0, "A leader that has not renewed for so long may be replaced.", unit="s", least=0.5
    )
    leader_renew_s: float = settings.setting(
        1.0, "Between two renewals of the lead.", unit="s", least=0.1
    )
    registry_patience_s: float = settings.setting(
        2.0,
        "A leader whose registry has not answered for so long goes on with what it has in memory: roles turn "
        "(rung 1) and lost replicas leave the routes; nothing is started, stopped or asked of Slurm.",
        unit="s",
        least=0.1,
    )
    plan_history: int = settings.setting(
        200, "Plans with actions that the registry keeps for `fctl explain`.", least=1
    )
    lease_history_days: float = settings.setting(
        30.0,
        "How long the registry knows leases, slots and replicas that have ended; the newest thousand stay.",
        unit="d",
        least=1,
    )
    lease_history_rows: int = settings.setting(
        10_000,
        "Ended leases, and ended replicas, that the registry keeps at most, however young they are.",
        least=1000,
    )
    directory_refresh_s: float = settings.setting(
        60.0, "Between two readings of Slurm's associations.", unit="s", least=1
    )
    quota_refresh_s: float = settings.setting(
        1.0,
        "Between two exchanges of quotas with the registry: a changed limit is in force within two of "
        "them, and an owner that is killed forgets the use of one.",
        unit="s",
        least=0.1,
    )
    quota_warn_percent: int = settings.setting(
        80, "Share of a day's or month's quota at which a warning is due.", unit="%", least=1
    )
    adapter_folders: tuple[str, ...] = settings.setting(
        (),
        "Folders (or s3:// and hf:// places) below which LoRA adapters may lie that are registered over "
        "/admin; none: they are refused.",
    )
    adapter_retry_s: float = settings.setting(
        600.0,
        "How long an adapter that failed to load is not tried again on its version; declaring it anew "
        "ends it too.",
        unit="s",
        least=0,
    )
    user_teams: Mapping[str, str] = settings.setting(
        {}, "Unix user to team, for a cluster without accounting; `*` stands for everybody else."
    )
    admins: tuple[str, ...] = settings.setting((), "Unix users that may see and change everything.")

    def __post_init__(self) -> None:
        if self.park_gb_per_gpu and not self.lease_gb_per_gpu:
            raise ValueError(
                "park_gb_per_gpu is asked for on top of lease_gb_per_gpu, which is 0: set that too"
            )

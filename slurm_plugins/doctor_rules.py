"""What in a site's Slurm configuration would hinder Forebay, as pure rules over a survey.

Each rule names what it saw, why that matters, and the line to write instead. The times in the reasons were
measured with Slurm 22.05 unless the reason says otherwise.
"""

from collections.abc import Callable, Iterator

from slurm_plugins.doctor_survey import Finding, Severity, Survey

_KILL_WAIT_S = 5  # Slurm itself waits at least that long between SIGTERM and SIGKILL
_BACKFILL_INTERVAL_S = 30  # Slurm's default; below it reclaiming is no faster
_BATCH_DELAY_S = 3  # Slurm's default
_FINISHED_JOB_AGE_S = 60
_SKEW_S = 1.0
_SKEW_MUNGE_S = 300.0  # a credential's time to live: munge refuses beyond it
_JOBS_FULL = 0.8


Rule = Callable[[Survey], Iterator[Finding]]


def examine(survey: Survey) -> tuple[Finding, ...]:
    """Return every finding, the worst first."""
    found = [finding for rule in RULES for finding in rule(survey)]
    return tuple(sorted(found, key=lambda finding: -finding.severity))


def _conf(severity: Severity, what: str, why: str, line: str) -> Finding:
    return Finding(severity, what, why, "slurm.conf", line)


def _kill_wait(survey: Survey) -> Iterator[Finding]:
    seconds = survey.seconds("KillWait")
    if seconds is not None and seconds > _KILL_WAIT_S:
        yield _conf(
            Severity.SLOW,
            f"KillWait is {seconds:g} s",
            "a replica that hangs keeps its GPUs that long after a cancel",
            f"KillWait={_KILL_WAIT_S}",
        )


def _preemption(survey: Survey) -> Iterator[Finding]:
    kind = survey.text("PreemptType").lower()
    mode = survey.words("PreemptMode")
    if not kind or kind.endswith("/none"):
        yield _conf(
            Severity.SLOW,
            "PreemptType is none",
            "Slurm can't take a backfill lease's GPUs for another job; Forebay alone gives them back",
            "PreemptType=preempt/partition_prio",
        )
    elif mode <= {"off"}:
        yield _conf(
            Severity.SLOW,
            "PreemptMode is OFF",
            "no partition's jobs can be preempted, so backfill leases stand in other people's way",
            "PreemptMode=REQUEUE",
        )
    if "suspend" in mode:
        yield _conf(
            Severity.ERROR,
            f"PreemptMode is {survey.text('PreemptMode')}",
            "a suspended job keeps its GPUs: nothing is ever reclaimed",
            "PreemptMode=REQUEUE",
        )
    exempt = survey.seconds("PreemptExemptTime")
    if exempt:
        yield _conf(
            Severity.SLOW,
            f"PreemptExemptTime is {exempt:g} s",
            "a backfill lease can't be preempted before it has run that long",
            "PreemptExemptTime=0",
        )


def _partitions(survey: Survey) -> Iterator[Finding]:
    known = {partition.name for partition in survey.partitions}
    for kind, names in (("serve", survey.serve), ("backfill", survey.backfill)):
        for name in names:
            if name not in known:
                yield _conf(
                    Severity.ERROR,
                    f"partition {name} does not exist",
                    f"{kind} leases are submitted to it (forebay.toml, [slurm] {kind}_partitions)",
                    f"PartitionName={name} Nodes=ALL {_PARTITION_LINES[kind]}",
                )
    for partition in survey.leases(survey.serve + survey.backfill):
        if not partition.up:
            yield Finding(
                Severity.ERROR,
                f"partition {partition.name} is not up",
                "no lease starts in it",
                "shell",
                f"scontrol update partitionname={partition.name} state=up",
            )


_PARTITION_LINES = {
    "serve": "PriorityTier=100 PreemptMode=OFF",
    "backfill": "PriorityTier=1 PreemptMode=REQUEUE GraceTime=0",
}


def _backfill_partitions(survey: Survey) -> Iterator[Finding]:
    for partition in survey.leases(survey.backfill):
        name, modes = partition.name, frozenset(partition.preempt_mode.lower().split(","))
        if "suspend" in modes:
            yield _conf(
                Severity.ERROR,
                f"partition {name} has PreemptMode={partition.preempt_mode}",
                "a suspended lease keeps its GPUs: nothing is ever reclaimed",
                f"PartitionName={name} … PreemptMode=REQUEUE",
            )
        elif "off" in modes:
            yield _conf(
                Severity.SLOW,
                f"partition {name} has PreemptMode=OFF",
                "backfill leases can't be preempted and stand in other people's way",
                f"PartitionName={name} … PreemptMode=REQUEUE",
            )
        if partition.grace_time_s > 0:
            yield _conf(
                Severity.SLOW,
                f"partition {name} has GraceTime={partition.grace_time_s}",
                "the kill waits for a pass of the controller every 30 s: 16-22 s instead of 1-4 s",
                f"PartitionName={name} … GraceTime=0",
            )


def _serve_partitions(survey: Survey) -> Iterator[Finding]:
    kind = survey.text("PreemptType").lower()
    others = max((p.priority_tier for p in survey.partitions), default=0)
    for partition in survey.leases(survey.serve):
        if not kind.endswith("partition_prio"):
            return
        protected = "off" in partition.preempt_mode.lower().split(",")
        if not protected and partition.priority_tier < others:
            yield _conf(
                Severity.ERROR,
                f"partition {partition.name} can be preempted (PreemptMode={partition.preempt_mode})",
                "warm replicas are lost whenever a partition of a higher tier wants their GPUs",
                f"PartitionName={partition.name} … PreemptMode=OFF",
            )
        for lower in survey.leases(survey.backfill):
            if lower.priority_tier >= partition.priority_tier:
                yield _conf(
                    Severity.SLOW,
                    f"partition {lower.name} has PriorityTier={lower.priority_tier}, "
                    f"{partition.name} has {partition.priority_tier}",
                    "a serve lease can't preempt backfill leases, and waits for them",
                    f"PartitionName={partition.name} … PriorityTier={lower.priority_tier + 1}",
                )


def _scheduler(survey: Survey) -> Iterator[Finding]:
    key = "SchedulerParameters"
    if survey.text("SchedulerType").lower() not in {"", "sched/backfill"}:
        yield _conf(
            Severity.SLOW,
            f"SchedulerType is {survey.text('SchedulerType')}",
            "leases of short walltime find no gaps in front of waiting jobs",
            "SchedulerType=sched/backfill",
        )
    for name, limit in (
        ("bf_interval", _BACKFILL_INTERVAL_S),
        ("batch_sched_delay", _BATCH_DELAY_S),
    ):
        value = survey.option(key, name)
        if value is not None and value.isdecimal() and int(value) > limit:
            yield _conf(
                Severity.SLOW,
                f"{key} has {name}={value}",
                "freed GPUs wait that many seconds for the next lease",
                f"{key}={_without(survey.text(key), name, f'{name}={limit}')}",
            )
    if survey.option(key, "defer") is not None:
        yield _conf(
            Severity.SLOW,
            f"{key} has defer",
            "a lease is not tried when it is submitted, only in the scheduler's next pass",
            f"{key}={_without(survey.text(key), 'defer')}",
        )
    wait = survey.seconds("CompleteWait")
    if wait:
        yield _conf(
            Severity.SLOW,
            f"CompleteWait is {wait:g} s",
            "nothing is started while a job that gave its GPUs back is completing",
            "CompleteWait=0",
        )


def _without(text: str, name: str, instead: str = "") -> str:
    """Return a comma list without ``name``, or with ``instead`` in its place."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    kept = [instead if word.partition("=")[0].lower() == name else word for word in words]
    return ",".join(word for word in kept if word)


def _gpus(survey: Survey) -> Iterator[Finding]:
    if "GresTypes" in survey.config and "gpu" not in survey.words("GresTypes"):
        both = ",".join(sorted(survey.words("GresTypes") | {"gpu"}))
        yield _conf(
            Severity.ERROR,
            f"GresTypes is {survey.text('GresTypes') or 'not set'}",
            "Slurm hands out no GPUs, so no lease can ask for one",
            f"GresTypes={both}",
        )
    if not survey.text("SelectType").lower().endswith("cons_tres") and survey.text("SelectType"):
        yield _conf(
            Severity.ERROR,
            f"SelectType is {survey.text('SelectType')}",
            "a lease takes a whole node, or GPUs can't be counted",
            "SelectType=select/cons_tres",
        )
    if _accounting_on(survey) and "gres/gpu" not in survey.words("AccountingStorageTRES"):
        extra = sorted(survey.words("AccountingStorageTRES") - _ALWAYS_TRACKED | {"gres/gpu"})
        yield _conf(
            Severity.SLOW,
            "AccountingStorageTRES lacks gres/gpu",
            "allocated GPUs can't be read from Slurm, and GPU-seconds not be checked against sacct",
            f"AccountingStorageTRES={','.join(extra)}",
        )
    silent = [node.name for node in survey.nodes if node.usable and node.gpus_free is None]
    if silent:
        yield _conf(
            Severity.SLOW,
            f"free GPUs are not known on {_some(silent)}",
            "such a node counts as full: no lease is asked for there",
            "AccountingStorageTRES=gres/gpu",
        )
    if survey.nodes and not any(node.gpus for node in survey.nodes):
        yield Finding(
            Severity.ERROR,
            "no node has GPUs that Slurm knows of",
            "no lease can start",
            "slurm.conf and gres.conf",
            f"NodeName={survey.nodes[0].name} … Gres=gpu:4",
        )


_ALWAYS_TRACKED = frozenset({"cpu", "mem", "energy", "node", "billing", "fs/disk", "vmem", "pages"})


def _accounting_on(survey: Survey) -> bool:
    return bool(survey.text("AccountingStorageType")) and not survey.text(
        "AccountingStorageType"
    ).endswith("/none")


def _accounting(survey: Survey) -> Iterator[Finding]:
    if "AccountingStorageType" in survey.config and not _accounting_on(survey):
        yield _conf(
            Severity.SLOW,
            "accounting storage is off",
            "GPU-seconds stay unreconciled, and users' teams can't be read from Slurm's associations",
            "AccountingStorageType=accounting_storage/slurmdbd",
        )
    limit, jobs = survey.seconds("MaxJobCount"), survey.jobs
    if limit and jobs is not None and jobs > _JOBS_FULL * limit:
        yield _conf(
            Severity.SLOW,
            f"the controller holds {jobs} jobs, MaxJobCount is {limit:g}",
            "beyond it every submission is refused, leases too",
            f"MaxJobCount={int(limit) * 2}",
        )
    age = survey.seconds("MinJobAge")
    if age is not None and age < _FINISHED_JOB_AGE_S:
        yield _conf(
            Severity.SLOW,
            f"MinJobAge is {age:g} s",
            "a lease that ended is forgotten before the broker has read how it ended",
            "MinJobAge=300",
        )


def _clean_up(survey: Survey) -> Iterator[Finding]:
    track = survey.text("ProctrackType")
    if track and not track.lower().endswith("/cgroup"):
        yield _conf(
            Severity.SLOW,
            f"ProctrackType is {track}",
            "a process that left its session outlives its lease and may keep GPU memory",
            "ProctrackType=proctrack/cgroup",
        )
    if "JobSubmitPlugins" in survey.config and "lua" not in survey.words("JobSubmitPlugins"):
        plugins = ",".join([*sorted(survey.words("JobSubmitPlugins")), "lua"])
        yield _conf(
            Severity.NOTE,
            "JobSubmitPlugins lacks lua",
            "anybody may give a job a lease's stamp; the broker leaves it alone, job_submit.lua refuses it",
            f"JobSubmitPlugins={plugins}",
        )
    if "Epilog" in survey.config and not survey.text("Epilog"):
        yield _conf(
            Severity.NOTE,
            "no Epilog is set",
            "what a dead replica left on a node stays there; Forebay's epilog.sh clears it",
            "Epilog=/etc/slurm/epilog.sh",
        )
    if "preempt_send_user_signal" in survey.words("SlurmctldParameters"):
        rest = _without(survey.text("SlurmctldParameters"), "preempt_send_user_signal")
        yield _conf(
            Severity.NOTE,
            "SlurmctldParameters has preempt_send_user_signal",
            "with --signal=B: only a job's script hears of the preemption, its steps do not",
            f"SlurmctldParameters={rest}",
        )


def _health(survey: Survey) -> Iterator[Finding]:
    skew = survey.clock_skew_s
    if skew is not None and abs(skew) > _SKEW_S:
        yield Finding(
            Severity.ERROR if abs(skew) > _SKEW_MUNGE_S else Severity.SLOW,
            f"the controller's clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} this one",
            f"leases end earlier or later than planned; beyond {_SKEW_MUNGE_S:.0f} s munge refuses all",
            "shell",
            "chronyc makestep",
        )
    if survey.munge:
        yield Finding(
            Severity.ERROR,
            f"munge does not work: {survey.munge}",
            "no command reaches Slurm, and no user can be told from another",
            "shell",
            "systemctl restart munge && munge -n | unmunge",
        )
    out = [node for node in survey.nodes if not node.usable and _OUT & {node.state, *node.flags}]
    if out:
        reasons = sorted({node.reason for node in out if node.reason})
        yield Finding(
            Severity.NOTE,
            f"{len(out)} of {len(survey.nodes)} nodes drained or down: {_some([n.name for n in out])}"
            + (f" ({'; '.join(reasons[:3])})" if reasons else ""),
            "their GPUs are not used",
            "shell",
            f"scontrol update nodename={','.join(node.name for node in out)} state=resume",
        )
    unknown = sorted({flag for node in survey.nodes for flag in node.unknown_flags})
    if unknown:
        yield Finding(
            Severity.NOTE,
            f"node state flags that Forebay does not know: {', '.join(unknown)}",
            "such nodes count as not usable",
            "shell",
            "scontrol show node",
        )


_OUT = frozenset({"drain", "drained", "draining", "down", "fail", "failing", "not_responding"})


def _some(names: list[str], most: int = 5) -> str:
    """List names, the first few only."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


RULES: tuple[Rule, ...] = (
    _kill_wait,
    _preemption,
    _partitions,
    _backfill_partitions,
    _serve_partitions,
    _scheduler,
    _gpus,
    _accounting,
    _clean_up,
    _health,
)

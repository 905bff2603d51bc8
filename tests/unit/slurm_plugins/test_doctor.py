"""The doctor's rules, one table of sites and what must be said of each, and how findings are printed."""

import io
from collections.abc import Mapping

import pytest

from scheduler.contracts import slurm
from slurm_plugins import doctor
from slurm_plugins.doctor import Severity

GOOD = {
    "ClusterName": "alpha",
    "AccountingStorageType": "accounting_storage/slurmdbd",
    "AccountingStorageTRES": "cpu,mem,energy,node,billing,fs/disk,vmem,pages,gres/gpu",
    "CompleteWait": "0 sec",
    "Epilog": "/etc/slurm/epilog.sh",
    "GresTypes": "gpu",
    "JobSubmitPlugins": "lua",
    "KillWait": "5 sec",
    "MaxJobCount": "10000",
    "MinJobAge": "300 sec",
    "PreemptExemptTime": "00:00:00",
    "PreemptMode": "REQUEUE",
    "PreemptType": "preempt/partition_prio",
    "ProctrackType": "proctrack/cgroup",
    "SchedulerParameters": "bf_interval=30",
    "SchedulerType": "sched/backfill",
    "SelectType": "select/cons_tres",
    "SlurmctldParameters": "(null)",
}


def partition(
    name: str, mode: str = "OFF", *, tier: int = 100, grace_s: int = 0, up: bool = True
) -> slurm.Partition:
    """Build a partition."""
    return slurm.Partition(name, up, ("n1",), None, mode, tier, grace_s)


def node(
    name: str = "n1",
    *,
    gpus: int | None = 4,
    free: int | None = 4,
    flags: frozenset[str] = frozenset(),
    unknown: frozenset[str] = frozenset(),
) -> slurm.Node:
    """Build a node."""
    return slurm.Node(
        name, "idle", flags, not flags, ("serve",), gpus, free, reason="disk", unknown_flags=unknown
    )


SERVE, BACKFILL = partition("serve"), partition("backfill", "REQUEUE", tier=1)


def examine(
    changes: Mapping[str, str] | None = None,
    partitions: tuple[slurm.Partition, ...] = (SERVE, BACKFILL),
    nodes: tuple[slurm.Node, ...] = (node(),),
    *,
    jobs: int | None = 10,
    skew_s: float | None = 0.0,
    munge: str | None = "",
) -> tuple[doctor.Finding, ...]:
    """Examine a good site with a few things changed."""
    return doctor.examine(
        doctor.Survey(
            {**GOOD, **(changes or {})},
            partitions,
            nodes,
            clock_skew_s=skew_s,
            munge=munge,
            jobs=jobs,
        )
    )


def test_a_good_site_needs_no_change() -> None:
    assert examine() == ()


@pytest.mark.parametrize(
    ("changes", "severity", "what", "line"),
    [
        ({"KillWait": "30 sec"}, Severity.SLOW, "KillWait is 30 s", "KillWait=5"),
        ({"PreemptType": "preempt/none"}, Severity.SLOW, "PreemptType is none",
         "PreemptType=preempt/partition_prio"),
        ({"PreemptType": "(null)"}, Severity.SLOW, "PreemptType is none",
         "PreemptType=preempt/partition_prio"),
        ({"PreemptMode": "OFF"}, Severity.SLOW, "PreemptMode is OFF", "PreemptMode=REQUEUE"),
        ({"PreemptMode": "GANG,SUSPEND"}, Severity.ERROR, "PreemptMode is GANG,SUSPEND",
         "PreemptMode=REQUEUE"),
        ({"PreemptExemptTime": "1-00:05:00"}, Severity.SLOW, "PreemptExemptTime is 86700 s",
         "PreemptExemptTime=0"),
        ({"SchedulerParameters": "bf_window=60,bf_interval=120"}, Severity.SLOW,
         "SchedulerParameters has bf_interval=120", "SchedulerParameters=bf_window=60,bf_interval=30"),
        ({"SchedulerParameters": "defer,bf_interval=30"}, Severity.SLOW,
         "SchedulerParameters has defer", "SchedulerParameters=bf_interval=30"),
        ({"SchedulerParameters": "batch_sched_delay=20"}, Severity.SLOW,
         "SchedulerParameters has batch_sched_delay=20", "SchedulerParameters=batch_sched_delay=3"),
        ({"SchedulerType": "sched/builtin"}, Severity.SLOW, "SchedulerType is sched/builtin",
         "SchedulerType=sched/backfill"),
        ({"CompleteWait": "32 sec"}, Severity.SLOW, "CompleteWait is 32 s", "CompleteWait=0"),
        ({"GresTypes": "(null)"}, Severity.ERROR, "GresTypes is not set", "GresTypes=gpu"),
        ({"GresTypes": "nic"}, Severity.ERROR, "GresTypes is nic", "GresTypes=gpu,nic"),
        ({"SelectType": "select/linear"}, Severity.ERROR, "SelectType is select/linear",
         "SelectType=select/cons_tres"),
        ({"AccountingStorageTRES": "cpu,mem,energy,node,billing,fs/disk,vmem,pages,license/x"},
         Severity.SLOW, "AccountingStorageTRES lacks gres/gpu",
         "AccountingStorageTRES=gres/gpu,license/x"),
        ({"AccountingStorageType": "accounting_storage/none"}, Severity.SLOW,
         "accounting storage is off", "AccountingStorageType=accounting_storage/slurmdbd"),
        ({"AccountingStorageType": "(null)"}, Severity.SLOW,
         "accounting storage is off", "AccountingStorageType=accounting_storage/slurmdbd"),
        ({"MaxJobCount": "11"}, Severity.SLOW, "the controller holds 10 jobs, MaxJobCount is 11",
         "MaxJobCount=22"),
        ({"MinJobAge": "2 sec"}, Severity.SLOW, "MinJobAge is 2 s", "MinJobAge=300"),
        ({"ProctrackType": "proctrack/linuxproc"}, Severity.SLOW,
         "ProctrackType is proctrack/linuxproc", "ProctrackType=proctrack/cgroup"),
        ({"JobSubmitPlugins": "require_timelimit"}, Severity.NOTE, "JobSubmitPlugins lacks lua",
         "JobSubmitPlugins=require_timelimit,lua"),
        ({"Epilog": "(null)"}, Severity.NOTE, "no Epilog is set", "Epilog=/etc/slurm/epilog.sh"),
        ({"SlurmctldParameters": "enable_configless,preempt_send_user_signal"}, Severity.NOTE,
         "SlurmctldParameters has preempt_send_user_signal",
         "SlurmctldParameters=enable_configless"),
    ],
)  # fmt: skip
def test_each_setting_has_its_finding_with_the_line_to_write(
    changes: dict[str, str], severity: Severity, what: str, line: str
) -> None:
    (finding,) = examine(changes)
    assert (finding.severity, finding.what, finding.line) == (severity, what, line)
    assert finding.where == "slurm.conf"
    assert finding.why


@pytest.mark.parametrize(
    ("partitions", "severity", "what", "line"),
    [
        ((SERVE,), Severity.ERROR, "partition backfill does not exist",
         "PartitionName=backfill Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=0"),
        ((SERVE, partition("backfill", "REQUEUE", tier=1, grace_s=60)), Severity.SLOW,
         "partition backfill has GraceTime=60", "PartitionName=backfill … GraceTime=0"),
        ((SERVE, partition("backfill", "SUSPEND", tier=1)), Severity.ERROR,
         "partition backfill has PreemptMode=SUSPEND", "PartitionName=backfill … PreemptMode=REQUEUE"),
        ((SERVE, partition("backfill", "OFF", tier=1)), Severity.SLOW,
         "partition backfill has PreemptMode=OFF", "PartitionName=backfill … PreemptMode=REQUEUE"),
        ((SERVE, partition("backfill", "REQUEUE", tier=100)), Severity.SLOW,
         "partition backfill has PriorityTier=100, serve has 100",
         "PartitionName=serve … PriorityTier=101"),
        ((partition("serve", "REQUEUE", tier=5), BACKFILL, partition("top", tier=9)), Severity.ERROR,
         "partition serve can be preempted (PreemptMode=REQUEUE)",
         "PartitionName=serve … PreemptMode=OFF"),
        ((partition("serve", up=False), BACKFILL), Severity.ERROR, "partition serve is not up",
         "scontrol update partitionname=serve state=up"),
    ],
)  # fmt: skip
def test_partitions(
    partitions: tuple[slurm.Partition, ...], severity: Severity, what: str, line: str
) -> None:
    (finding,) = examine(partitions=partitions)
    assert (finding.severity, finding.what, finding.line) == (severity, what, line)


def test_a_node_whose_free_gpus_are_not_known_is_named_with_the_setting() -> None:
    (finding,) = examine(nodes=(node(), node("n2", free=None)))
    assert finding.what == "free GPUs are not known on n2"
    assert finding.line == "AccountingStorageTRES=gres/gpu"


def test_a_site_without_gpus() -> None:
    (finding,) = examine(nodes=(node(gpus=0, free=0),))
    assert finding.severity is Severity.ERROR
    assert finding.what == "no node has GPUs that Slurm knows of"


def test_drained_nodes_are_named_with_their_reason_and_the_command() -> None:
    drained = [node(f"n{index}", free=0, flags=frozenset({"drain"})) for index in range(2, 9)]
    (finding,) = examine(nodes=(node(), *drained))
    assert finding.what == ("7 of 8 nodes drained or down: n2, n3, n4, n5, n6 and 2 more (disk)")
    assert finding.line == "scontrol update nodename=n2,n3,n4,n5,n6,n7,n8 state=resume"


def test_unknown_flags_are_reported() -> None:
    odd = node("n2", free=0, flags=frozenset({"wobbly"}), unknown=frozenset({"wobbly"}))
    (finding,) = examine(nodes=(node(), odd))
    assert finding.what == "node state flags that Forebay does not know: wobbly"


@pytest.mark.parametrize(
    ("skew_s", "expected"),
    [
        (None, None),
        (0.9, None),
        (-45.0, (Severity.SLOW, "the controller's clock is 45 s behind this one")),
        (400.0, (Severity.ERROR, "the controller's clock is 400 s ahead of this one")),
    ],
)
def test_clock_skew(skew_s: float | None, expected: tuple[Severity, str] | None) -> None:
    found = [(finding.severity, finding.what) for finding in examine(skew_s=skew_s)]
    assert found == ([expected] if expected else [])


def test_a_munge_that_fails_is_an_error_and_one_that_is_not_installed_is_nothing() -> None:
    (finding,) = examine(munge="munge: Error: Unable to access socket")
    assert finding.severity is Severity.ERROR
    assert "Unable to access socket" in finding.what
    assert examine(munge=None) == ()


def test_the_worst_comes_first() -> None:
    findings = examine({"Epilog": "", "KillWait": "30 sec", "GresTypes": ""})
    assert [f.severity for f in findings] == [Severity.ERROR, Severity.SLOW, Severity.NOTE]


def test_the_report_is_plain_and_its_status_tells_of_errors() -> None:
    out = io.StringIO()
    assert doctor.report(examine({"KillWait": "30 sec"}), out) == 0
    assert out.getvalue() == (
        "SLOW: KillWait is 30 s\n"
        "  why:  a replica that hangs keeps its GPUs that long after a cancel\n"
        "  slurm.conf:  KillWait=5\n"
        "0 ERROR, 1 SLOW, 0 NOTE\n"
    )
    assert doctor.report(examine({"GresTypes": ""}), io.StringIO()) == 1
    empty = io.StringIO()
    assert doctor.report((), empty) == 0
    assert empty.getvalue() == "nothing to change\n"


def test_settings_that_a_client_does_not_know_are_not_complained_about() -> None:
    """The embedded Slurm has a handful of settings and no more."""
    bare = {
        "ClusterName": "local",
        "KillWait": "5 sec",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "CANCEL",
    }
    survey = doctor.Survey(bare, (SERVE, BACKFILL), (node(),))
    assert doctor.examine(survey) == ()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30 sec", 30.0),
        ("00:01:30", 90.0),
        ("2-00:00:00", 172800.0),
        ("UNLIMITED", None),
        ("", None),
    ],
)
def test_times_as_slurm_prints_them(text: str, seconds: float | None) -> None:
    assert doctor.Survey({"K": text}, (), ()).seconds("K") == seconds

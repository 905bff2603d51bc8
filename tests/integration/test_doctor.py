"""The doctor at a real cluster: healthy, badly set, and without a controller."""

import os
import signal
from pathlib import Path

import pytest

from slurm_plugins import cli, devcluster, doctor
from slurm_plugins.doctor import Severity
from tests import realslurm

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(120)]


def whats(findings: tuple[doctor.Finding, ...]) -> dict[str, doctor.Finding]:
    """Index findings by what they say."""
    return {finding.what: finding for finding in findings}


def test_the_development_cluster_is_fit_for_forebay(slurm_site: devcluster.Site) -> None:
    findings = doctor.collect(cli.CliClient(slurm_site.slurm_conf))
    assert list(whats(findings)) == ["ProctrackType is proctrack/linuxproc"]


def test_what_a_real_controller_says_of_bad_settings_is_understood(tmp_path: Path) -> None:
    realslurm.require_slurm()
    folder = tmp_path / "bad"
    try:
        site = devcluster.up(
            folder,
            nodes=1,
            rest=False,
            accounting=False,
            extra_conf={
                "KillWait": "30",
                "SchedulerParameters": "defer,bf_interval=300",
                "CompleteWait": "10",
                "MinJobAge": "5",
                "PreemptMode": "SUSPEND,GANG",
                "SlurmctldParameters": "preempt_send_user_signal",
                "Epilog": "",
                "JobSubmitPlugins": "",
            },
            partition_conf={"backfill": {"PreemptMode": "SUSPEND", "GraceTime": "60"}},
        )
        found = whats(doctor.collect(cli.CliClient(site.slurm_conf), serve=("serve", "gone")))
        lines = {finding.line for finding in found.values()}
        assert {
            "KillWait=5",
            "SchedulerParameters=defer,bf_interval=30",
            "SchedulerParameters=bf_interval=300",
            "CompleteWait=0",
            "MinJobAge=300",
            "PreemptMode=REQUEUE",
            "PartitionName=backfill … PreemptMode=REQUEUE",
            "PartitionName=backfill … GraceTime=0",
            "PartitionName=gone Nodes=ALL PriorityTier=100 PreemptMode=OFF",
            "Epilog=/etc/slurm/epilog.sh",
            "JobSubmitPlugins=lua",
            "SlurmctldParameters=",
            "AccountingStorageType=accounting_storage/slurmdbd",
        } <= lines
        assert not any("clock" in what or "munge" in what for what in found)

        pid = next(d.pid for d in devcluster.status(folder).daemons if d.name == "munged")
        assert pid
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert doctor.munge_fault(f"socket={site.munge_socket}")
        broken = doctor.collect(cli.CliClient(site.slurm_conf, timeout_s=5))
        assert [finding.severity for finding in broken] == [Severity.ERROR]
    finally:
        devcluster.down(folder, purge=True)

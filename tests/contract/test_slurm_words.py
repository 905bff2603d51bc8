"""Host lists, points in time and durations: our readers beside Slurm's own binaries, without a controller."""

import datetime
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from scheduler.contracts import times
from slurm_plugins import hostlist
from tests import services

NOW = datetime.datetime(2026, 11, 30, 12, 0, tzinfo=datetime.UTC)
HOSTS = [
    "n[09-11]", "n[1-2]-ib[0-1]", "n3,n1,n2,n1", "login", "n[3,1-2]", "gpu-[001-002,004]",
    "c[1-2]-ib[0]", "n[1-2]x", "n[1-0]", "n[a-b]",
]  # fmt: skip
POINTS = [
    "now", "now+90", "now+7days", "now+1hour", "today", "tomorrow", "midnight", "noon", "teatime",
    "16:00", "12:05am", "2027-11-01", "2027-11-1", "2027-11-01T08:00", "1231", "110127", "uts1900000000",
    "now+7d", "9pm", "13:00pm", "24:00", "2027-1-1", "13/01/2027", "1900000000", "soon", "now+",
]  # fmt: skip
DURATIONS = [
    "5", "30:15", "1:02:03", "2-12", "3-0:00", "1-2:3:4", "25:61:61", "0", "-1", "infinite", "UNLIMITED",
    "1h", "1:", "1-2-3", "soon",
]  # fmt: skip


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a Slurm whose controller is never asked."""
    services.require(bool(shutil.which("scontrol") and shutil.which("sbatch")), "Slurm's commands")
    conf = tmp_path / "slurm.conf"
    conf.write_text(
        "ClusterName=words\nSlurmctldHost=localhost\nNodeName=localhost\n"
        "PartitionName=main Nodes=localhost\n"
    )
    return {"PATH": os.environ["PATH"], "SLURM_CONF": str(conf), "TZ": "UTC"}


def said(argv: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)


def takes(option: str, text: str, env: dict[str, str]) -> bool:
    """Whether sbatch reads ``text``; a wrong option behind it stops it before it asks a controller."""
    behind = "--time=wrong" if option == "begin" else "--begin=wrong"
    words = said(["sbatch", f"--{option}={text}", behind, "--wrap=true"], env).stderr
    refused = [name for name in ("begin", "time") if f"Invalid --{name} specification" in words]
    assert len(refused) == 1, words
    return refused != [option]


@pytest.mark.parametrize("text", HOSTS)
def test_host_lists_expand_as_scontrol_does(slurm: dict[str, str], text: str) -> None:
    real = said(["scontrol", "show", "hostnames", text], slurm)
    if "nvalid" in real.stderr:
        with pytest.raises(hostlist.HostlistError):
            hostlist.expand(text)
    else:
        assert hostlist.expand(text) == real.stdout.split()


def test_l2_where_we_read_a_host_list_otherwise_than_slurm(slurm: dict[str, str]) -> None:
    """L2: a name may go on behind its brackets; an open bracket is no host called ``n]``."""
    assert "Invalid" in said(["scontrol", "show", "hostnames", "c[1-2]-ib0"], slurm).stderr
    assert hostlist.expand("c[1-2]-ib0") == ["c1-ib0", "c2-ib0"]
    assert said(["scontrol", "show", "hostnames", "n[1-2"], slurm).stdout == "n]\n"
    with pytest.raises(hostlist.HostlistError, match="not closed"):
        hostlist.expand("n[1-2")


@pytest.mark.parametrize("hosts", ["n3,n1,n2", "n1,n2,n3", "n09,n10,n11,login"])
def test_host_lists_compress_as_scontrol_does(slurm: dict[str, str], hosts: str) -> None:
    real = said(["scontrol", "show", "hostlist", hosts], slurm)
    assert hostlist.compress(hosts.split(",")) == real.stdout.strip()


@pytest.mark.parametrize("text", POINTS)
def test_sbatch_and_we_read_the_same_points(slurm: dict[str, str], text: str) -> None:
    try:
        times.point(text, now=NOW, tz=datetime.UTC)
        ours = True
    except times.TimeError:
        ours = False
    assert ours is takes("begin", text, slurm)


@pytest.mark.parametrize("text", DURATIONS)
def test_sbatch_and_we_read_the_same_durations(slurm: dict[str, str], text: str) -> None:
    try:
        times.duration(text)
        ours = True
    except times.TimeError:
        ours = False
    assert ours is takes("time", text, slurm)

"""What Slurm runs: it passes its linters, and prolog and epilog do their work without a Slurm around them."""

import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_plugins.devcluster import processes
from tests import services

HOOKS = Path(__file__).parents[3] / "slurm_plugins" / "hooks"
SCRIPTS = sorted(HOOKS.glob("*.sh"))

# What slurmd gives each job, and each hook too. A cluster for each process that runs these tests: hooks
# look at all processes of the machine, and would end those of a test beside.
ALPHA = {"SLURM_CLUSTER_NAME": "alpha", "SLURM_CONF": f"/no/such/alpha-{os.getpid()}/slurm.conf"}
BETA = {**ALPHA, "SLURM_CLUSTER_NAME": "beta"}
NAMESAKE = {**ALPHA, "SLURM_CONF": "/no/such/other/slurm.conf"}


def test_the_shell_hooks_pass_shellcheck() -> None:
    services.require(
        bool(shutil.which("shellcheck")), "shellcheck: run .ci/debian-packages as root"
    )
    done = subprocess.run(["shellcheck", *SCRIPTS], capture_output=True, text=True, cwd=HOOKS)
    assert done.returncode == 0, done.stdout


def test_the_submit_plugin_passes_luacheck() -> None:
    services.require(bool(shutil.which("luacheck")), "luacheck: run .ci/debian-packages as root")
    done = subprocess.run(
        ["luacheck", "--no-color", "job_submit.lua"], capture_output=True, text=True, cwd=HOOKS
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture
def hooks(tmp_path: Path) -> Path:
    """Copy the hooks beside a conf that sends their log here, as `devcluster` does."""
    services.require(sys.platform == "linux", "Linux's /proc")
    folder = tmp_path / "etc"
    folder.mkdir()
    for script in SCRIPTS:
        shutil.copy(script, folder)
    (folder / "forebay_hooks.conf").write_text(f"hook_log = {tmp_path}/hooks.log\n")
    for name in ("tmp", "shm"):
        (tmp_path / name).mkdir()
    return folder


def run(hooks: Path, script: str, job: str, comment: str) -> int:
    """Run a hook as slurmd would, but for its user."""
    environ = {
        "PATH": os.environ["PATH"],
        "SLURM_JOB_ID": job,
        "SLURM_JOB_UID": str(os.getuid()),
        "SLURM_JOB_COMMENT": comment,
        **ALPHA,
        "FOREBAY_HOOKS_TMP": str(hooks.parent / "tmp"),
        "FOREBAY_HOOKS_SHM": str(hooks.parent / "shm"),
    }
    return subprocess.run(["bash", hooks / script], env=environ, check=False, timeout=60).returncode


def comment(lease: str) -> str:
    """Return a lease's stamp."""
    return f"forebay/1 cluster=alpha lease={lease} kind=serve team=a"


def sleeper(**environ: str) -> subprocess.Popen[bytes]:
    """Start a process with an environment of its own."""
    process = subprocess.Popen(["sleep", "600"], env={"PATH": os.environ["PATH"], **environ})
    # Between fork and exec it still has our environment, in which a hook would find no lease.
    wanted = b"sleep"
    assert processes.wait_until(
        lambda: Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(wanted), 10.0
    )
    return process


def test_the_epilog_tells_processes_apart(hooks: Path) -> None:
    lease = f"l-{os.urandom(6).hex()}"
    mine = [
        sleeper(FOREBAY_LEASE=lease, SLURM_JOB_ID="71", **ALPHA),
        sleeper(FOREBAY_LEASE=lease),
    ]
    others = [
        sleeper(FOREBAY_LEASE=lease, SLURM_JOB_ID="72", **ALPHA),  # submitted from inside the lease
        sleeper(FOREBAY_LEASE=lease, SLURM_JOB_ID="71", **BETA),
        sleeper(FOREBAY_LEASE=lease, SLURM_JOB_ID="71", **NAMESAKE),
        sleeper(FOREBAY_LEASE=lease, SLURM_JOB_ID="71"),  # a stand-in for Slurm
        sleeper(FOREBAY_LEASE=f"{lease}0"),
        sleeper(SLURM_JOB_ID="71", **ALPHA),  # of the job, but nothing that a replica left
    ]
    try:
        assert run(hooks, "epilog.sh", "71", comment(lease)) == 0
        assert [process.wait(timeout=10) for process in mine] == [-9, -9]
        assert [process.poll() for process in others] == [None] * len(others)
    finally:
        for process in (*mine, *others):
            process.kill()
            process.wait()


def test_the_epilog_of_a_job_that_is_no_lease_does_nothing(hooks: Path) -> None:
    lease = f"l-{os.urandom(6).hex()}"
    process = sleeper(FOREBAY_LEASE=lease, SLURM_JOB_ID="71", **ALPHA)
    try:
        assert run(hooks, "epilog.sh", "71", "my own notes") == 0
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    assert not (hooks.parent / "hooks.log").exists()


def test_the_epilog_removes_the_leases_files_and_no_others(hooks: Path) -> None:
    tmp, shm = hooks.parent / "tmp", hooks.parent / "shm"
    lease = "l-00000000cc01"
    gone = [tmp / f"forebay-{lease}", tmp / f"forebay-{lease}.r1", shm / f"forebay-{lease}.kv"]
    kept = [tmp / f"forebay-{lease}0", tmp / "forebay-l-00000000cc02", shm / "psm_1", tmp / "other"]
    for path in (*gone, *kept):
        path.mkdir()
        (path / "file").write_text("x")
    link = tmp / f"forebay-{lease}.link"
    link.symlink_to(kept[0])
    assert run(hooks, "epilog.sh", "71", comment(lease)) == 0
    assert not any(path.exists() for path in gone)
    assert all((path / "file").exists() for path in kept)
    assert link.is_symlink()


def test_a_segment_that_only_the_dead_had_mapped_goes_and_a_shared_one_stays(hooks: Path) -> None:
    shm = hooks.parent / "shm"
    lease = f"l-{os.urandom(6).hex()}"
    for name in ("alone", "shared"):
        (shm / name).write_bytes(b"\0" * mmap.PAGESIZE)
    body = (
        "import mmap,sys\n"
        "files = [open(path, 'r+b') for path in sys.argv[1:]]\n"
        "maps = [mmap.mmap(file.fileno(), 0) for file in files]\n"
        "print('mapped', flush=True)\nsys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", body, str(shm / "alone"), str(shm / "shared")],
        env={"PATH": os.environ["PATH"], "FOREBAY_LEASE": lease},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"mapped\n"
        with (shm / "shared").open("r+b") as file, mmap.mmap(file.fileno(), 0):
            assert run(hooks, "epilog.sh", "71", comment(lease)) == 0
            assert holder.wait(timeout=10) == -9
            assert not (shm / "alone").exists()
            assert (shm / "shared").exists()
    finally:
        holder.kill()
        holder.communicate()


@pytest.mark.parametrize("lease", ["../../etc", "a b", "$(touch x)", "", "*"])
def test_a_lease_that_is_no_identifier_removes_nothing(hooks: Path, lease: str) -> None:
    kept = hooks.parent / "tmp" / "forebay-"
    kept.mkdir()
    assert run(hooks, "epilog.sh", "71", comment(lease)) == 0
    assert kept.exists()
    assert not list(hooks.parent.glob("**/x"))


def test_the_prolog_ends_only_what_dead_jobs_left(hooks: Path) -> None:
    lost = sleeper(FOREBAY_LEASE="l-00000000dd01", SLURM_JOB_ID="999999", **ALPHA)
    others = [
        sleeper(FOREBAY_LEASE="l-00000000dd01"),  # outside Slurm
        sleeper(FOREBAY_LEASE="l-00000000dd02", SLURM_JOB_ID="71", **ALPHA),  # the new job
        sleeper(FOREBAY_LEASE="l-00000000dd03", SLURM_JOB_ID="999999", **BETA),
        sleeper(FOREBAY_LEASE="l-00000000dd04", SLURM_JOB_ID="999999", **NAMESAKE),
    ]
    try:
        assert run(hooks, "prolog.sh", "71", "not a lease") == 0
        assert lost.poll() is None
        assert run(hooks, "prolog.sh", "71", comment("l-00000000dd02")) == 0
        assert lost.wait(timeout=10) == -9
        assert [process.poll() for process in others] == [None] * len(others)
        assert f": {lost.pid}\n" in (hooks.parent / "hooks.log").read_text()
    finally:
        for process in (lost, *others):
            process.kill()
            process.wait()

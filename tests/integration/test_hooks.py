"""What Slurm itself runs: the submit plugin in a real slurmctld, prolog and epilog under a real slurmd."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from scheduler.contracts import ids, slurm
from slurm_plugins import devcluster, stamp
from slurm_plugins.devcluster import processes
from tests import realslurm

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("slurm_at_rest"),  # jobs end with the test that submitted them
]


def lease_comment(lease: str, kind: str = "serve", *, cluster: str = "forebay") -> str:
    """Return the comment that the broker gives a lease."""
    return stamp.render(
        slurm.Stamp(cluster=cluster, lease_id=ids.LeaseId(lease), kind=kind, team="physics")
    )


def run(
    on: devcluster.Site, *argv: str, user: str = "", check: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands, as another user if one is named."""
    words = ["runuser", "-u", user, "--", *argv] if user else list(argv)
    return subprocess.run(
        words,
        env={**os.environ, **on.env()},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=check,
    )


def sbatch(
    on: devcluster.Site, *options: str, body: str = "true", user: str = ""
) -> subprocess.CompletedProcess[str]:
    """Submit a job that keeps no output."""
    return run(on, "sbatch", "--parsable", "-o", "/dev/null", *options, "--wrap", body, user=user)


def field(on: devcluster.Site, job: str, name: str) -> str:
    """Return one field of `scontrol show job`."""
    text = run(on, "scontrol", "show", "job", job, check=True).stdout
    found = re.search(rf"(?:^|\s){name}=(.*?)(?:$|\s+\w[\w:/]*=)", text, re.MULTILINE)
    assert found is not None, text
    return found.group(1)


def comments(on: devcluster.Site, job: str) -> str:
    """Return a job's comment."""
    return run(on, "squeue", "-h", "-j", job, "-o", "%k", check=True).stdout.strip()


class TestSubmit:
    """job_submit.lua on new jobs."""

    def test_the_service_users_lease_is_taken_and_never_requeued(
        self, slurm_site: devcluster.Site
    ) -> None:
        done = sbatch(slurm_site, "--hold", "-p", "serve", "--gres=gpu:4", "--requeue",
                      "--comment", lease_comment("l-00000000aa01"))  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert field(slurm_site, done.stdout.strip(), "Requeue") == "0"

    def test_anybody_elses_stamp_is_forged(self, slurm_site: devcluster.Site) -> None:
        for comment in (lease_comment("l-00000000aa02"), "forebay/1", "  FOREBAY/9 x"):
            done = sbatch(slurm_site, "-p", "serve", "--gres=gpu:4", "--comment", comment,
                          user="nobody")  # fmt: skip
            assert done.returncode != 0
            assert "only Forebay itself may give a job a comment" in done.stderr

    def test_a_lease_for_another_user_is_refused(self, slurm_site: devcluster.Site) -> None:
        done = sbatch(slurm_site, "--uid=nobody", "-p", "serve", "--gres=gpu:1", "--comment",
                      lease_comment("l-00000000aa03"))  # fmt: skip
        assert done.returncode != 0
        assert "must run as one of Forebay's service users" in done.stderr

    def test_other_jobs_pass_untouched(self, slurm_site: devcluster.Site) -> None:
        done = sbatch(slurm_site, "--hold", "--comment", "my forebay/1 notes", user="nobody")
        assert done.returncode == 0, done.stderr
        assert field(slurm_site, done.stdout.strip(), "Requeue") == "1"

    @pytest.mark.parametrize(
        ("options", "comment", "reason"),
        [
            (["-p", "backfill", "--gres=gpu:1"], lease_comment("l-1"), "may not run in partition backfill"),
            (["-p", "serve", "--gres=gpu:1"], lease_comment("l-1", "backfill"),
             "may not run in partition serve"),
            (["-p", "backfill,serve", "--gres=gpu:1"], lease_comment("l-1", "backfill"),
             "may not run in partition serve"),
            (["--gres=gpu:1"], lease_comment("l-1"), "must name its partition"),
            (["-p", "serve"], lease_comment("l-1"), "must ask for GPUs"),
            (["-p", "serve", "--gres=gpu:1"], lease_comment("l-1", cluster="beta"), "for cluster beta"),
            (["-p", "serve", "--gres=gpu:1"], "forebay/2 cluster=forebay lease=l-1 kind=serve team=a",
             "must start with forebay/1"),
            (["-p", "serve", "--gres=gpu:1"], "forebay/1 cluster=forebay lease=l-1 kind=serve team=",
             "team is missing"),
            (["-p", "serve", "--gres=gpu:1"], "forebay/1 cluster=forebay lease=l-1 kind=best team=a",
             "kind must be serve or backfill"),
            (["-p", "serve", "--gres=gpu:1"],
             "forebay/1 cluster=forebay lease=l-1 lease=l-2 kind=serve team=a", "lease is given twice"),
            (["-p", "serve", "--gres=gpu:1"], "forebay/1 cluster=forebay lease=../x kind=serve team=a",
             "is not an identifier"),
        ],
    )  # fmt: skip
    def test_a_lease_that_does_not_fit_is_refused_with_the_reason(
        self, slurm_site: devcluster.Site, options: list[str], comment: str, reason: str
    ) -> None:
        done = sbatch(slurm_site, *options, "--comment", comment)
        assert done.returncode != 0
        assert reason in done.stderr

    @pytest.mark.parametrize("ask", ["--gres=gpu:2", "--gpus=2", "--gpus-per-node=2"])
    def test_every_way_to_ask_for_gpus_counts(self, slurm_site: devcluster.Site, ask: str) -> None:
        done = sbatch(slurm_site, "--hold", "-p", "backfill", ask, "--comment",
                      lease_comment("l-00000000aa04", "backfill"))  # fmt: skip
        assert done.returncode == 0, done.stderr


class TestModify:
    """job_submit.lua on changes to jobs."""

    def test_only_the_service_user_changes_a_leases_comment(
        self, slurm_site: devcluster.Site
    ) -> None:
        comment = lease_comment("l-00000000bb01")
        done = sbatch(slurm_site, "--hold", "-p", "serve", "--gres=gpu:4", "--comment", comment)
        assert done.returncode == 0, done.stderr
        job = done.stdout.strip()
        refused = run(slurm_site, "scontrol", "update", f"jobid={job}", "comment=mine",
                      user="nobody")  # fmt: skip
        assert refused.returncode != 0
        assert comments(slurm_site, job) == comment
        wrong = run(slurm_site, "scontrol", "update", f"jobid={job}", "partition=backfill")
        assert wrong.returncode != 0
        assert field(slurm_site, job, "Partition") == "serve"
        fitting = run(slurm_site, "scontrol", "update", f"jobid={job}", "timelimit=10")
        assert fitting.returncode == 0, fitting.stderr

    def test_a_users_own_job_can_not_become_a_lease(self, slurm_site: devcluster.Site) -> None:
        done = sbatch(slurm_site, "--hold", user="nobody")
        assert done.returncode == 0, done.stderr
        job = done.stdout.strip()
        forged = f"comment={lease_comment('l-00000000bb02')}"
        for user in ("nobody", ""):
            forging = run(slurm_site, "scontrol", "update", f"jobid={job}", forged, user=user)
            assert forging.returncode != 0
            shown = run(slurm_site, "scontrol", "show", "job", job, check=True)
            assert "forebay/1" not in shown.stdout
        plain = run(slurm_site, "scontrol", "update", f"jobid={job}", "comment=x", user="nobody")
        assert plain.returncode == 0, plain.stderr


class TestLeftovers:
    """prolog.sh and epilog.sh under a real slurmd."""

    def test_the_epilog_ends_what_the_lease_left_and_nothing_else(
        self, slurm_site: devcluster.Site, tmp_path: Path
    ) -> None:
        """The orphan left the job's session, so that Slurm's own clean-up does not see it."""
        lease = f"l-{os.urandom(6).hex()}"
        other = f"{lease}0"  # a name that starts alike
        scratch = [Path("/tmp") / f"forebay-{lease}", Path("/tmp") / f"forebay-{lease}.r1"]
        kept = Path("/tmp") / f"forebay-{other}"
        shared = Path("/dev/shm") / f"forebay-{lease}.kv"
        for path in (*scratch, kept):
            path.mkdir()
        shared.write_bytes(b"x")
        start(slurm_site, other, tmp_path / "other")
        job = start(slurm_site, lease, tmp_path / "mine")
        orphan, bystander = (pid(tmp_path / name) for name in ("mine", "other"))
        stranger = subprocess.Popen(["sleep", "600"])
        try:
            run(slurm_site, "scancel", job, check=True)
            assert processes.wait_until(lambda: not alive(orphan), 30.0)
            assert processes.wait_until(lambda: not any(p.exists() for p in scratch), 30.0)
            assert processes.wait_until(lambda: not shared.exists(), 30.0)
            assert f"left behind: {orphan}\n" in (slurm_site.logs / "hooks.log").read_text()
            assert alive(bystander)
            assert stranger.poll() is None
            assert kept.exists()
        finally:
            stranger.kill()
            stranger.wait()
        realslurm.at_rest(slurm_site)
        assert processes.wait_until(lambda: not alive(bystander), 30.0)
        assert processes.wait_until(lambda: not kept.exists(), 30.0)
        states = run(slurm_site, "sinfo", "-h", "-o", "%T", check=True).stdout
        assert "drain" not in states

    def test_the_epilog_finds_the_lease_of_a_process_without_a_job_id(
        self, slurm_site: devcluster.Site, tmp_path: Path
    ) -> None:
        lease = f"l-{os.urandom(6).hex()}"
        job = start(slurm_site, lease, tmp_path / "mine", wrapper="env -u SLURM_JOB_ID")
        orphan = pid(tmp_path / "mine")
        assert alive(orphan)
        run(slurm_site, "scancel", job, check=True)
        assert processes.wait_until(lambda: not alive(orphan), 30.0)
        assert f"left behind: {orphan}\n" in (slurm_site.logs / "hooks.log").read_text()

    def test_the_prolog_ends_what_a_lost_lease_left(
        self, slurm_site: devcluster.Site, tmp_path: Path
    ) -> None:
        """As after a crash of slurmd: the job is long gone, its process still lives."""
        lease = f"l-{os.urandom(6).hex()}"
        marks = {"FOREBAY_LEASE": lease, "SLURM_CLUSTER_NAME": slurm_site.cluster,
                 "SLURM_CONF": str(slurm_site.slurm_conf)}  # fmt: skip
        lost = subprocess.Popen(
            ["sleep", "600"], env={**os.environ, **marks, "SLURM_JOB_ID": "999999"}
        )
        outside = subprocess.Popen(["sleep", "600"], env={**os.environ, "FOREBAY_LEASE": lease})
        elsewhere = subprocess.Popen(
            ["sleep", "600"],
            env={
                **os.environ,
                **marks,
                "SLURM_JOB_ID": "999999",
                "SLURM_CONF": "/other/slurm.conf",
            },
        )
        try:
            new = f"l-{os.urandom(6).hex()}"
            start(slurm_site, new, tmp_path / "new")
            assert lost.wait(timeout=30) == -9
            assert outside.poll() is None  # a lease outside Slurm is not the prolog's business
            assert elsewhere.poll() is None
            assert alive(pid(tmp_path / "new"))
        finally:
            for process in (lost, outside, elsewhere):
                process.kill()
                process.wait()


def start(on: devcluster.Site, lease: str, flag: Path, wrapper: str = "") -> str:
    """Start a lease whose script leaves a detached process; return the job's id once it runs."""
    body = (
        f"export FOREBAY_LEASE={lease}\n"
        # Its parent ends at once, so that neither session nor descent leads Slurm to it.
        f"(setsid {wrapper} bash -c 'echo $$ >{flag}.new; mv {flag}.new {flag}; exec sleep 600' "
        "</dev/null >/dev/null 2>&1 &)\n"
        "exec sleep 600\n"
    )
    done = sbatch(on, "-p", "serve", "--gres=gpu:1", "--comment", lease_comment(lease), body=body)
    assert done.returncode == 0, done.stderr
    assert processes.wait_until(flag.exists, 30.0)
    return done.stdout.strip()


def pid(flag: Path) -> int:
    """Return the pid that a lease's detached process wrote."""
    return int(flag.read_text())


def alive(pid: int) -> bool:
    """Whether a process lives and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False

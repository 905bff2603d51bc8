"""What every Slurm client must do, on the fake and on the real thing."""

import dataclasses
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.contracts import ids, slurm
from slurm_plugins import cli, sbatch
from tests import services
from tests.contract import slurm_subject
from tests.contract.slurm_subject import Subject, eventually, final, running

MISSING = ids.SlurmJobId("999999")


@pytest.fixture(scope="module", params=slurm_subject.SUBJECTS)
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    yield from slurm_subject.make(request.param, tmp_path_factory.mktemp("jobs"), request)


def test_it_says_what_it_is(subject: Subject) -> None:
    versions = subject.port.versions()
    assert subject.port.kind in {"pyslurm", "slurmrestd", "cli", "embedded"}
    assert subject.port.cluster == subject.port.config()["ClusterName"]
    assert versions.client
    assert versions.controller


def test_a_lease_runs_with_its_gpus_and_its_environment_alone(subject: Subject) -> None:
    spec = subject.spec("printenv; echo the end; sleep 60", name="a lease 'with' \"quotes\"; $X")
    submitted = subject.port.submit(spec)
    job = subject.until(submitted.job_id, running)
    assert submitted.cluster == job.cluster == subject.port.cluster
    assert (job.name, job.stamp, job.gpus) == (spec.name, spec.stamp, 2)
    assert job.user in subject.port.users
    assert (len(job.nodes), job.partition, job.time_limit_s) == (1, "serve", 600)
    assert 0 < job.submitted_us <= job.started_us
    assert job.ended_us == 0
    printed = subject.output(submitted.job_id, "the end").splitlines()
    variables = dict(line.partition("=")[::2] for line in printed if "=" in line)
    assert variables["FOREBAY_TEST"] == spec.environment["FOREBAY_TEST"]
    assert variables["PATH"] == "/usr/bin:/bin"
    assert variables["SLURM_JOB_ID"] == submitted.job_id
    assert len(variables["CUDA_VISIBLE_DEVICES"].split(",")) == 2
    assert "PYTEST_CURRENT_TEST" not in variables
    subject.port.cancel(submitted.job_id)
    ended = subject.until(submitted.job_id, final)
    assert ended.state is slurm.JobState.CANCELLED
    assert ended.ended_us >= ended.started_us


def test_a_missing_id_is_unknown_and_a_final_state_stays(subject: Subject) -> None:
    job_id = subject.port.submit(subject.spec("exit 3", gpus=0, stamped=False)).job_id
    ended = subject.until(job_id, final)
    assert (ended.state, ended.exit_code) == (slurm.JobState.FAILED, "3:0")
    assert subject.port.states([MISSING, job_id]) == {
        MISSING: slurm.JobState.UNKNOWN,
        job_id: slurm.JobState.FAILED,
    }
    assert subject.port.states([]) == {}


def test_cancelling_what_is_gone_is_no_error(subject: Subject) -> None:
    job_id = subject.port.submit(subject.spec("sleep 60")).job_id
    subject.port.cancel(job_id)
    subject.port.cancel(job_id)
    subject.until(job_id, final)
    subject.port.cancel(job_id)
    subject.port.cancel(MISSING)
    assert subject.port.states([job_id])[job_id] is slurm.JobState.CANCELLED


def test_a_held_job_waits_and_can_be_cancelled(subject: Subject) -> None:
    job_id = subject.port.submit(dataclasses.replace(subject.spec("true"), hold=True)).job_id
    eventually(lambda: subject.job(job_id).reason == "JobHeldUser", "the reason")
    job = subject.job(job_id)
    assert (job.state, job.started_us, job.nodes) == (slurm.JobState.PENDING, 0, ())
    subject.port.cancel(job_id)
    assert subject.until(job_id, final).state is slurm.JobState.CANCELLED


def test_nodes_count_what_is_free(subject: Subject) -> None:
    before = {node.name: node for node in subject.port.nodes()}
    assert len(before) == 4
    assert all(node.usable and node.gpus == 4 and node.gpus_free == 4 for node in before.values())
    job_id = subject.port.submit(subject.spec("sleep 60", gpus=3)).job_id
    job = subject.until(job_id, running)
    busy = next(node for node in subject.port.nodes() if node.name in job.nodes)
    assert (busy.state, busy.gpus_free) == ("mixed", 1)
    assert "serve" in busy.partitions
    subject.port.cancel(job_id)
    subject.until(job_id, final)
    eventually(lambda: all(n.gpus_free == 4 for n in subject.port.nodes()), "all GPUs back")


def test_a_lease_of_two_nodes_holds_gpus_on_both(subject: Subject) -> None:
    spec = dataclasses.replace(subject.spec("sleep 60"), nodes=2)
    job_id = subject.port.submit(spec).job_id
    job = subject.until(job_id, running)
    assert (len(job.nodes), job.gpus) == (2, 4)
    subject.port.cancel(job_id)
    subject.until(job_id, final)


def test_nodes_are_asked_for_by_name(subject: Subject) -> None:
    name = subject.port.nodes()[1].name
    spec = dataclasses.replace(subject.spec("sleep 60"), nodelist=(name,))
    if not subject.exclude:
        with pytest.raises(slurm.SlurmRefused, match="client = cli"):
            subject.port.submit(spec)
        return
    job_id = subject.port.submit(spec).job_id
    assert subject.until(job_id, running).nodes == (name,)
    subject.port.cancel(job_id)
    subject.until(job_id, final)


def test_partitions_say_who_goes_first(subject: Subject) -> None:
    found = {partition.name: partition for partition in subject.port.partitions()}
    assert {"serve", "backfill"} <= found.keys()
    assert all(partition.up and len(partition.nodes) == 4 for partition in found.values())
    assert found["serve"].priority_tier > found["backfill"].priority_tier
    # REST before 0.0.45 has no word on it, except for 0.0.38.
    assert found["serve"].preempt_mode in {"OFF", ""}
    assert found["backfill"].preempt_mode in {"REQUEUE", "CANCEL", ""}


def test_reservations_are_told_and_no_lease_that_would_cross_one_starts(subject: Subject) -> None:
    """All nodes are kept in half an hour: ten minutes still fit before it, an hour does not."""
    nodes = tuple(sorted(node.name for node in subject.port.nodes()))
    starts_us = (int(time.time()) + 1800) * 1_000_000
    kept = slurm.Reservation(
        f"maint-{subject.port.kind}", starts_us, starts_us + 3_600_000_000, nodes,
        frozenset({"MAINT", "IGNORE_JOBS"}), ("root",),
    )  # fmt: skip
    assert kept.name not in {one.name for one in subject.port.reservations()}
    subject.reserve(kept)
    try:
        (found,) = (one for one in subject.port.reservations() if one.name == kept.name)
        assert (found.starts_us, found.ends_us) == (kept.starts_us, kept.ends_us)
        assert tuple(sorted(found.nodes)) == nodes
        assert found.maintenance
        assert kept.flags <= found.flags
        assert (found.users, found.accounts) == (("root",), ())
        crossing = dataclasses.replace(subject.spec("sleep 60"), time_limit_s=3600)
        waits = subject.port.submit(crossing).job_id
        fits = subject.port.submit(subject.spec("sleep 60")).job_id
        subject.until(fits, running)
        eventually(lambda: "ReqNodeNotAvail" in subject.job(waits).reason, "why it waits")
        assert subject.job(waits).state is slurm.JobState.PENDING
        subject.port.cancel(fits)
    finally:
        subject.release(kept.name)
    assert kept.name not in {one.name for one in subject.port.reservations()}
    subject.until(waits, running)
    for job_id in (waits, fits):
        subject.port.cancel(job_id)
        subject.until(job_id, final)


@pytest.mark.parametrize(
    "change", [{"partitions": ("nosuch",)}, {"gpus_per_node": 99}, {"script": "no shell named"}]
)
def test_what_can_not_run_is_refused(subject: Subject, change: dict[str, object]) -> None:
    spec = dataclasses.replace(subject.spec("true"), **change)  # type: ignore[arg-type] # varied
    with pytest.raises(slurm.SlurmRefused):
        subject.port.submit(spec)
    # Slurm may keep the record of what it refused; nothing of it may be waiting.
    assert not [j for j in subject.port.jobs() if j.stamp == spec.stamp and not j.state.final]


def test_update_changes_the_walltime(subject: Subject) -> None:
    spec = subject.spec("sleep 60")
    job_id = subject.port.submit(spec).job_id
    subject.port.update(job_id, time_limit_s=1199)
    job = subject.job(job_id)
    assert (job.time_limit_s, job.stamp) == (1200, spec.stamp)
    subject.port.cancel(job_id)
    subject.until(job_id, final)
    with pytest.raises(slurm.SlurmRefused):
        subject.port.update(MISSING, time_limit_s=600)


def test_accounting_tells_each_run(subject: Subject) -> None:
    job_id = subject.port.submit(subject.spec("sleep 1")).job_id
    job = subject.until(job_id, final)
    if not subject.accounting:
        with pytest.raises(slurm.AccountingOff):
            subject.port.accounting(job_id)
        return
    eventually(lambda: bool(subject.port.accounting(job_id)[-1:][0].ended_us), "the end")
    (run,) = subject.port.accounting(job_id)
    assert (run.job_id, run.run, run.state) == (job_id, 0, slurm.JobState.COMPLETED)
    assert (run.gpus, run.exit_code) == (2, "0:0")
    assert abs(run.started_us - job.started_us) <= 1_000_000
    assert 0 <= run.elapsed_s <= 5
    assert subject.port.accounting(MISSING) == ()


def test_associations_say_who_may_charge_whom(subject: Subject) -> None:
    if not subject.associations:
        with pytest.raises(slurm.AccountingOff):
            subject.port.associations()
        return
    found = {(one.user, one.account): one for one in subject.port.associations()}
    assert found["alice", "physics"].default
    assert found["bob", "biology"].default
    assert ("alice", "biology") not in found
    assert ("", "physics") in found
    assert found["root", "root"].admin
    assert not found["alice", "physics"].admin


def test_the_lease_script_becomes_the_agent_and_notes_its_start(subject: Subject) -> None:
    script = sbatch.lease_script(
        python="/bin/echo",
        spec_file="/a folder/it's.json",
        prolog=['echo "started $FOREBAY_LEASE_STARTED_US"'],
    )
    spec = dataclasses.replace(subject.spec(""), script=script)
    job_id = subject.port.submit(spec).job_id
    job = subject.until(job_id, final)
    printed = subject.output(job_id, "--spec")
    assert "-P -m forebay agent --spec /a folder/it's.json" in printed
    started_us = int(printed.split("started ")[1].split()[0])
    assert abs(started_us - job.started_us) < 3_000_000


def test_l10_names_with_pipes_breaks_and_foreign_bytes_hide_no_job(subject: Subject) -> None:
    lease = subject.spec("sleep 60", name="our lease")
    mine = subject.port.submit(lease).job_id
    odd = {}
    for name in ("a|b", "x\ny", "t\tab ]%5"):
        spec = subject.spec("sleep 60", name=name, gpus=0, stamped=False)
        odd[subject.port.submit(spec).job_id] = name
    if subject.port.kind != "embedded":
        odd[_submit_bytes(subject)] = "caf\\xe9"
    subject.until(mine, running)
    jobs = {job.job_id: job for job in subject.port.jobs()}
    assert jobs[mine].stamp == lease.stamp
    for job_id, name in odd.items():
        assert (jobs[ids.SlurmJobId(job_id)].name, jobs[ids.SlurmJobId(job_id)].partition) == (
            name,
            "serve",
        )
    for job_id in (mine, *odd):
        subject.port.cancel(ids.SlurmJobId(job_id))
        subject.until(ids.SlurmJobId(job_id), final)


def _submit_bytes(subject: Subject) -> ids.SlurmJobId:
    """Submit a job whose name is not UTF-8, as a user with a Latin-1 terminal does."""
    argv = [
        b"sbatch", b"--parsable", b"--partition=serve", b"--job-name=caf\xe9", b"--output=/dev/null",
        b"--mem=100", b"--wrap=sleep 60",
    ]  # fmt: skip
    done = subprocess.run(
        argv,
        capture_output=True,
        check=True,
        env={**os.environ, "SLURM_CONF": subject.conf, "LC_ALL": "C"},
    )
    return ids.SlurmJobId(done.stdout.decode().strip().split(";")[0])


@pytest.mark.slurm
def test_nobody_there_is_unavailable(tmp_path: Path) -> None:
    services.require(shutil.which("squeue") is not None, "Slurm's client commands")
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=x\nSlurmctldHost=localhost\nSlurmctldPort=1\nMessageTimeout=2\n")
    port = cli.CliClient(conf, cluster="x", timeout_s=15)
    with pytest.raises(slurm.SlurmUnavailable):
        port.jobs()

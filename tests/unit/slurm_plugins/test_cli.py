"""The command-line client against commands that are slow, refuse, stop in the middle or say nothing."""

import json
import os
import textwrap
from pathlib import Path

import pytest

from scheduler.contracts import ids, slurm
from slurm_plugins import cli, owner, stamp

STAMP = slurm.Stamp("alpha", ids.LeaseId("l-0123456789ab"), "serve", "physics")
CONFIG = "Configuration data as of 2026\nClusterName             = alpha\nSLURM_VERSION = 22.05.8\n"
LEASE = {
    "job_id": 17, "job_state": "RUNNING", "comment": stamp.render(STAMP), "name": "lease",
    "cluster": "alpha", "tres_alloc_str": "cpu=1,gres/gpu=4", "nodes": "n[1-2]", "start_time": 5,
    "end_time": 9, "time_limit": 10, "exit_code": 0, "user_name": owner.name(),
}  # fmt: skip


class Commands:
    """A folder of fake commands; each notes how often it ran."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.add("squeue", f"[ \"$1\" = --version ] && echo 'slurm-wlm 22.05.8' && exit; {_jobs()}")
        self.add("scontrol", f"cat <<'END'\n{CONFIG}END")

    def add(self, name: str, body: str) -> None:
        file = self.folder / name
        count = self.folder / f"{name}.count"
        file.write_text(f"#!/bin/sh\necho x >>{count}\n{textwrap.dedent(body)}\n")
        file.chmod(0o755)

    def count(self, name: str) -> int:
        file = self.folder / f"{name}.count"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def port(self, timeout_s: float = 10.0) -> cli.CliClient:
        path = f"{self.folder}{os.pathsep}/usr/bin{os.pathsep}/bin"
        return cli.CliClient(None, timeout_s=timeout_s, path=path)


def _jobs(*jobs: dict[str, object]) -> str:
    return f"cat <<'END'\n{json.dumps({'errors': [], 'jobs': list(jobs)})}\nEND"


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    return Commands(tmp_path)


def _spec(stamped: slurm.Stamp | None = STAMP) -> slurm.JobSpec:
    return slurm.JobSpec(
        name="lease", script="#!/bin/sh\n", partitions=("serve",), time_limit_s=60,
        output="/dev/null", directory="/", stamp=stamped,
    )  # fmt: skip


def _version_or(body: str) -> str:
    return f"[ \"$1\" = --version ] && echo 'slurm-wlm 22.05.8' && exit\n{body}"


def test_l1_a_submission_is_answered(commands: Commands) -> None:
    commands.add("sbatch", "cat >/dev/null; echo 'Dear users'; echo '4711;beta'")
    assert commands.port().submit(_spec()) == slurm.Submitted(ids.SlurmJobId("4711"), "beta")
    commands.add("sbatch", "cat >/dev/null; echo 4711")
    assert commands.port().submit(_spec()).cluster == "alpha"


@pytest.mark.parametrize(
    "answer", ["true", "echo 'sbatch: error: Socket timed out' >&2; exit 1", "exec sleep 30"]
)
def test_l1_without_an_answer_the_stamp_is_looked_up(commands: Commands, answer: str) -> None:
    commands.add("sbatch", answer)
    commands.add("squeue", _version_or(_jobs(LEASE)))
    assert commands.port(1.0).submit(_spec()).job_id == "17"
    assert commands.count("sbatch") == 1


def test_a_stamp_that_somebody_else_has_copied_is_not_what_was_submitted(
    commands: Commands,
) -> None:
    commands.add("sbatch", "true")
    copied = {**LEASE, "job_id": 16, "user_name": "mallory"}
    commands.add("squeue", _version_or(_jobs(copied)))
    with pytest.raises(slurm.SubmitUncertain):
        commands.port().submit(_spec())
    commands.add("squeue", _version_or(_jobs(copied, LEASE)))
    assert commands.port().submit(_spec()).job_id == "17"


def test_a_user_goes_by_name_and_by_number_where_there_is_no_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert owner.names("root") == {"root", "0"}
    assert owner.names("nobody-of-that-name") == {"nobody-of-that-name"}
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000_000)
    assert owner.names() == {"4000000000"}


@pytest.mark.parametrize("stamped", [STAMP, None])
def test_l1_what_is_not_found_is_uncertain_and_not_sent_again(
    commands: Commands, stamped: slurm.Stamp | None
) -> None:
    commands.add("sbatch", "true")
    with pytest.raises(slurm.SubmitUncertain, match="look for its stamp"):
        commands.port().submit(_spec(stamped))
    assert commands.count("sbatch") == 1


def test_a_refusal_carries_slurms_words(commands: Commands) -> None:
    said = "sbatch: error: Batch job submission failed: Invalid account"
    commands.add("sbatch", f"echo '{said}' >&2; exit 1")
    with pytest.raises(slurm.SlurmRefused, match="Invalid account"):
        commands.port().submit(_spec())


def test_jobs_are_read_and_missing_ones_are_unknown(commands: Commands) -> None:
    commands.add("squeue", _version_or(_jobs(LEASE)))
    (job,) = commands.port().jobs()
    assert (job.stamp, job.gpus, job.nodes, job.time_limit_s) == (STAMP, 4, ("n1", "n2"), 600)
    known, missing = ids.SlurmJobId("17"), ids.SlurmJobId("18")
    assert commands.port().states([known, missing]) == {
        known: slurm.JobState.RUNNING,
        missing: slurm.JobState.UNKNOWN,
    }


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("exec sleep 30", slurm.SlurmTimeout),
        ("true", slurm.SlurmGarbled),
        ("echo '{\"jobs\": [{\"job_id\"'", slurm.SlurmGarbled),
        ("echo '[]'", slurm.SlurmGarbled),
        ("echo '{}'", slurm.SlurmGarbled),
        ('echo \'{"errors": [{"error": "Unable to contact slurm controller"}]}\'', slurm.SlurmUnavailable),
        ("echo 'slurm_load_jobs error: Unable to contact' >&2; exit 1", slurm.SlurmUnavailable),
        ("echo 'squeue: error: Invalid user' >&2; exit 1", slurm.SlurmRefused),
    ],
)  # fmt: skip
def test_bad_answers_are_errors_and_never_an_empty_list(
    commands: Commands, body: str, error: type[slurm.SlurmError]
) -> None:
    commands.add("squeue", _version_or(body))
    with pytest.raises(error):
        commands.port(1.0).jobs()


def test_commands_that_are_not_there_are_unavailable(commands: Commands) -> None:
    with pytest.raises(slurm.SlurmUnavailable, match="sbatch is not on PATH"):
        cli.CliClient(None, path=str(commands.folder)).submit(_spec())


def test_l7_without_accounting_states_come_from_the_controller(commands: Commands) -> None:
    commands.add("squeue", _version_or(_jobs(LEASE)))
    commands.add("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    job_id = ids.SlurmJobId("17")
    with pytest.raises(slurm.AccountingOff):
        commands.port().accounting(job_id)
    assert commands.port().states([job_id])[job_id] is slurm.JobState.RUNNING
    commands.add("sacct", "echo 'sacct: error: Problem talking to the database' >&2; exit 1")
    with pytest.raises(slurm.SlurmUnavailable):
        commands.port().accounting(job_id)
    assert commands.port().states([job_id])[job_id] is slurm.JobState.RUNNING


def test_every_run_of_a_requeued_job_counts(commands: Commands) -> None:
    commands.add(
        "sacct",
        """\
        echo '17|NODE_FAIL|1000|1100|100|cpu=4,gres/gpu=4|1|0:0'
        echo '17|CANCELLED by 0|1500|1550|50|cpu=4,gres/gpu=4|1|0:15'
        echo '17|REQUEUED|1200|1400|200|cpu=4,gres/gpu=4|1|0:0'
        echo '18|COMPLETED|1|2|1||1|0:0'""",
    )
    runs = commands.port().accounting(ids.SlurmJobId("17"))
    assert [run.elapsed_s for run in runs] == [100, 200, 50]
    assert [run.run for run in runs] == [0, 1, 2]
    assert sum(run.elapsed_s * (run.gpus or 0) for run in runs) == 1400
    assert runs[0].started_us == 1_000_000_000
    commands.add("sacct", "echo '17|NODE_FAIL|1000'")
    with pytest.raises(slurm.SlurmGarbled):
        commands.port().accounting(ids.SlurmJobId("17"))


def test_l10_old_slurm_without_json_shifts_no_field(commands: Commands) -> None:
    comment = stamp.render(STAMP)
    commands.add(
        "squeue",
        f"""\
        [ "$1" = --version ] && echo 'slurm 20.11.9' && exit
        for word; do case $word in --format=*) format=${{word#--format=}};; esac; done
        mark=${{format%%"%"*}}
        row() {{
          printf '%s' "$mark$1$mark$2$mark"; shift 2
          printf 'root%sphys%sserve%sn1%s1%s10:00%s2026-11-01T00:00:00%s2026-11-01T00:01:00%sUnknown%s' \\
            "$mark" "$mark" "$mark" "$mark" "$mark" "$mark" "$mark" "$mark" "$mark"
          printf '%s%s%s%s%s%s%s%s\\n' gpu:2 "$mark" None "$mark" "$1" "$mark" "$2" "$mark"
        }}
        row 1 RUNNING '(null)' 'a|b'
        row 2 RUNNING 'x
        <00>17' "$(printf 'caf\\351')"
        row 3 RUNNING '{comment}' lease
        row '56_[1-3,7%2]' PENDING '(null)' array""",
    )
    jobs = {job.job_id: job for job in commands.port().jobs()}
    assert list(jobs) == ["1", "2", "3", "56_1", "56_2", "56_3", "56_7"]
    assert jobs[ids.SlurmJobId("1")].name == "a|b"
    assert jobs[ids.SlurmJobId("2")].name == "caf\\xe9"
    assert jobs[ids.SlurmJobId("3")].stamp == STAMP
    assert all(job.gpus == 2 and job.partition == "serve" for job in jobs.values())


def test_an_old_answer_that_was_cut_is_garbled(commands: Commands) -> None:
    commands.add(
        "squeue",
        """\
        [ "$1" = --version ] && echo 'slurm 20.11.9' && exit
        for word; do case $word in --format=*) format=${word#--format=}; ;; esac; done
        printf '%s1%sRUNNING' "${format%%"%"*}" "${format%%"%"*}" """,
    )
    with pytest.raises(slurm.SlurmGarbled):
        commands.port().jobs()


def test_l4_and_l5_nodes_as_scontrol_tells_them(commands: Commands) -> None:
    common = "CPUTot=64 CPUAlloc=5 RealMemory=1000 Partitions=serve"
    commands.add(
        "scontrol",
        f"""\
        cat <<'END'
        NodeName=a {common} Gres=gpu:h100:8 GresUsed=gpu:h100:5(IDX:0-4) State=MIXED CfgTRES=cpu=64
        NodeName=b {common} Gres=gpu:h100:8 State=MIXED CfgTRES=cpu=64 AllocTRES=cpu=5
        NodeName=c {common} Gres=gpu:4 GresUsed=gpu:0 State=IDLE+DRAIN Reason=bad fan State=IDLE [root@2026]
        NodeName=d {common} Gres=gpu:4 GresUsed=gpu:0 State=IDLE+SPARKLING
        END""".replace("        ", ""),
    )
    nodes = {node.name: node for node in commands.port().nodes()}
    assert (nodes["a"].gpus, nodes["a"].gpus_free, nodes["a"].gres_type) == (8, 3, "h100")
    assert (nodes["b"].gpus, nodes["b"].gpus_free) == (8, None)
    assert (nodes["c"].usable, nodes["c"].gpus_free, nodes["c"].reason[:7]) == (False, 0, "bad fan")
    assert nodes["d"].unknown_flags == {"sparkling"}
    commands.add("scontrol", "printf 'NodeName=a CPUTot'")
    with pytest.raises(slurm.SlurmGarbled):
        commands.port().nodes()


def test_cancelling_a_job_that_is_gone_is_no_error(commands: Commands) -> None:
    commands.add("scancel", "echo 'scancel: error: Invalid job id specified' >&2; exit 1")
    commands.port().cancel(ids.SlurmJobId("9"))
    assert commands.count("scancel") == 1
    commands.add("scancel", "echo 'scancel: error: Access/permission denied' >&2; exit 1")
    with pytest.raises(slurm.SlurmRefused, match="denied"):
        commands.port().cancel(ids.SlurmJobId("9"))

"""What is handed to Slurm: options, scripts, and that no value can become another."""

import dataclasses
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from scheduler.contracts import ids, slurm
from slurm_plugins import sbatch
from tests import services

SPEC = slurm.JobSpec(
    name="forebay-serve",
    script="#!/bin/bash\ntrue\n",
    partitions=("serve", "big"),
    time_limit_s=3601,
    output="/logs/%j",
    directory="/state",
    stamp=slurm.Stamp("alpha", ids.LeaseId("l-1"), "serve", "phys ics"),
    account="physics",
    cpus_per_node=8,
    gpus_per_node=4,
    gres_type="H100",
    memory_mb=0,
    time_min_s=60,
    nodelist=("n1", "n2"),
    exclude=("n9",),
    environment={"A": "1,2"},
)


def test_every_option_is_one_argument() -> None:
    assert sbatch.arguments(SPEC) == [
        "--parsable", "--no-requeue", "--export=ALL", "--job-name=forebay-serve",
        "--partition=serve,big", "--time=61", "--output=/logs/%j", "--chdir=/state",
        "--comment=forebay/1 cluster=alpha lease=l-1 kind=serve team=phys%20ics",
        "--account=physics", "--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=8",
        "--gres=gpu:H100:4", "--mem=0", "--time-min=1", "--nodelist=n[1-2]", "--exclude=n9",
    ]  # fmt: skip
    bare = dataclasses.replace(SPEC, gpus_per_node=0, memory_mb=None, hold=True, nodelist=())
    assert not any(a.startswith(("--gres", "--mem=", "--nodelist")) for a in sbatch.arguments(bare))
    assert "--hold" in sbatch.arguments(bare)


def test_the_environment_is_the_specs_alone() -> None:
    assert sbatch.environment(SPEC) == {"PATH": sbatch.DEFAULT_PATH, "A": "1,2"}
    own = dataclasses.replace(SPEC, environment={"PATH": "/bin"})
    assert sbatch.environment(own) == {"PATH": "/bin"}


@pytest.mark.parametrize(
    "change",
    [{"script": "echo"}, {"partitions": ()}, {"nodes": 0}, {"time_limit_s": 0}, {"name": "a\0b"}],
)
def test_what_slurm_would_misread_is_refused(change: dict[str, object]) -> None:
    spec = dataclasses.replace(SPEC, **change)  # type: ignore[arg-type] # varied fields
    with pytest.raises(slurm.SlurmRefused):
        sbatch.arguments(spec)


def _lease_script(spec_file: str = "/state/leases/l-1/agent.json") -> str:
    return sbatch.lease_script(
        python="/opt/fore bay/bin/python",
        spec_file=spec_file,
        prolog=["module load cuda"],
        environment={"HF_HOME": "/scratch/a b's"},
    )


def test_the_lease_script_notes_its_start_first_and_execs_the_agent() -> None:
    lines = _lease_script().splitlines()
    assert lines[0] == "#!/bin/bash"
    assert lines[1].startswith("FOREBAY_LEASE_STARTED_US=")
    assert lines[-1] == (
        "exec '/opt/fore bay/bin/python' -P -m forebay agent --spec /state/leases/l-1/agent.json"
    )
    assert "module load cuda" in lines
    with pytest.raises(ValueError, match="line break"):
        sbatch.lease_script(python="p", spec_file="s", prolog=["a\nb"])


def test_the_start_is_in_microseconds_and_values_are_quoted(tmp_path: Path) -> None:
    evil = "/x/it's $(touch pwned); `id`"
    script = sbatch.lease_script(
        python="/usr/bin/printf", spec_file=evil, environment={"V": "a'b\"$c"}
    ).replace("-P -m forebay agent --spec", '\'%s|\' "$FOREBAY_LEASE_STARTED_US" "$V"')
    done = subprocess.run(
        ["bash"], input=script, text=True, capture_output=True, check=True, cwd=tmp_path
    )
    started, value, spec_file, _ = done.stdout.split("|")
    assert len(started) == 16
    assert int(started) > 1_700_000_000_000_000
    assert (value, spec_file) == ("a'b\"$c", evil)
    assert list(tmp_path.iterdir()) == []


def test_rendered_scripts_pass_shellcheck(tmp_path: Path) -> None:
    services.require(shutil.which("shellcheck") is not None, "shellcheck (Debian: shellcheck)")
    script = tmp_path / "lease.sh"
    script.write_text(_lease_script(), encoding="utf-8")
    done = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_steps_get_gpus_of_their_own() -> None:
    argv = sbatch.srun_arguments(
        "4711", gpus=2, cpus=0, gres_type="H100", extra=["--cpu-bind=none"]
    )
    assert {"--jobid=4711", "--exact", "--mem=0", "--gres=gpu:H100:2", "--ntasks=1"} <= set(argv)
    assert "--cpus-per-task=1" in argv
    assert argv[-1] == "--cpu-bind=none"
    assert "--overlap" not in argv
    assert "--gres=none" in sbatch.srun_arguments("1", gpus=0, cpus=1)
    assert "--relative=2" in sbatch.srun_arguments("1", gpus=1, cpus=1, node=2)
    assert shlex.split(shlex.join(argv)) == argv

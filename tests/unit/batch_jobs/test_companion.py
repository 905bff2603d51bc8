"""The companion of a batch job in Slurm: its script, what sbatch is told, and what becomes of a refusal."""

import io
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from batch_jobs import commands, companion, waiting
from forebay import batch_companion
from scheduler.contracts import command_line, ports
from tests import services
from tests.unit.batch_jobs import world


@pytest.fixture
def api(tmp_path: Path) -> world.AppApi:
    return world.AppApi(world.open_store(tmp_path), tmp_path)


def submit(
    api: world.AppApi, folder: Path, submitted: companion.Submit | None, *argv: str
) -> world.Said:
    (folder / "requests.jsonl").write_bytes(world.many(2))
    out, err = io.StringIO(), io.StringIO()
    code = commands.fbatch(
        [*argv, "--companion", "requests.jsonl"],
        api=api,
        out=out,
        err=err,
        env={"TZ": "UTC"},
        cwd=folder,
        stdin=io.StringIO(),
        companion=submitted,
    )
    return world.Said(code, out.getvalue(), err.getvalue())


def test_the_script_passes_shellcheck_and_names_each_task(tmp_path: Path) -> None:
    text = companion.script([12, 13], "/opt/fore bay/bin/fqueue", command_line.UNANSWERED)
    assert "'/opt/fore bay/bin/fqueue' --wait --jobs=12,13 &" in text
    services.require(shutil.which("shellcheck") is not None, "shellcheck (Debian: shellcheck)")
    path = tmp_path / "script.sh"
    path.write_text(text)
    done = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("codes", "want"), [([0], 0), ([1], 1), ([command_line.UNANSWERED, 0], 0), ([3], 3)]
)
def test_it_ends_as_the_batch_job_and_asks_again_where_nobody_answered(
    tmp_path: Path, codes: list[int], want: int
) -> None:
    fqueue = tmp_path / "fqueue"
    (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
    fqueue.write_text(
        '#!/bin/sh\ncd "$(dirname "$0")" || exit 9\necho "$@" >> asked\n'
        'code=$(head -n 1 codes)\nsed -i 1d codes\nexit "$code"\n'
    )
    fqueue.chmod(0o755)
    script = companion.script([12], str(fqueue), command_line.UNANSWERED).replace(
        "sleep 30", "sleep 0"
    )
    done = subprocess.run(["sh", "-c", script], timeout=60, check=False)
    assert done.returncode == want
    assert (tmp_path / "asked").read_text() == "--wait --jobs=12\n" * len(codes)


def test_near_its_time_limit_it_goes_back_into_the_queue(tmp_path: Path) -> None:
    for name, text in (
        ("fqueue", 'kill -USR1 "$PPID"\nexec sleep 60\n'),
        ("scontrol", 'echo "$@" > "$(dirname "$0")/asked"\n'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}")
        (tmp_path / name).chmod(0o755)
    script = companion.script([12], str(tmp_path / "fqueue"), command_line.UNANSWERED)
    script = script.replace(f"sleep {companion.LEAVE_S}", "exit 0")
    done = subprocess.run(
        ["sh", "-c", script],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "4711"},
        timeout=30,
        check=False,
    )
    assert done.returncode == 0
    assert (tmp_path / "asked").read_text() == "requeue 4711\n"


def test_both_ids_are_told(api: world.AppApi, tmp_path: Path) -> None:
    asked: list[Sequence[int]] = []

    def submitted(job_ids: Sequence[int]) -> str:
        asked.append(job_ids)
        return "4711"

    said = submit(api, tmp_path, submitted)
    assert said.code == 0
    assert said.out == "Submitted batch job 1\nSlurm job 4711 ends as it does\n"
    assert submit(api, tmp_path, submitted, "--parsable").out == "2;slurm:4711\n"
    assert submit(api, tmp_path, submitted, "--array=0-1", "--quiet").out == ""
    assert submit(api, tmp_path, submitted, "--test-only").code == 0
    assert asked == [[1], [2], [3, 4]]


def test_without_its_companion_a_job_is_not_submitted(api: world.AppApi, tmp_path: Path) -> None:
    def refused(job_ids: Sequence[int]) -> str:
        raise command_line.CommandError("--companion: sbatch: error: no partition for you")

    said = submit(api, tmp_path, refused)
    assert (said.code, said.out) == (1, "")
    assert said.err == (
        "fbatch: error: --companion: sbatch: error: no partition for you; batch job 1 was cancelled\n"
    )
    job = json.loads(world.run_command("fqueue", ["--json", "-t", "all"], api, tmp_path).out)
    assert [each["cancel_us"] > 0 for each in job["jobs"]] == [True]
    assert submit(api, tmp_path, None).code == 1


def test_a_job_that_cannot_be_cancelled_is_named_and_keeps_no_other(
    api: world.AppApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(job_ids: Sequence[int]) -> str:
        raise command_line.CommandError("--companion: no partition for you")

    really = api.call

    def call(method: str, path: str, **given: Any) -> ports.ApiResponse:
        if path.endswith("/1/cancel"):
            raise command_line.Unanswered("the gateway does not answer")
        return really(method, path, **given)

    monkeypatch.setattr(api, "call", call)
    said = submit(api, tmp_path, refused, "--array=0-1")
    assert said.err == (
        "fbatch: error: --companion: no partition for you; batch job 2 was cancelled; "
        "batch job 1 was not cancelled: fcancel 1\n"
    )
    job = json.loads(world.run_command("fqueue", ["--json", "-r"], api, tmp_path).out)
    assert [each["cancel_us"] > 0 for each in job["jobs"]] == [False, True]


@pytest.mark.parametrize(
    ("sbatch", "want"),
    [
        ("echo '4711;alpha'", "4711"),
        ("echo 'Site notice'; echo 4711", "4711"),
        ("echo 'sbatch: error: Batch job submission failed' >&2; exit 1", None),
        ("echo hello", None),
    ],
)
def test_what_sbatch_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sbatch: str, want: str | None
) -> None:
    (tmp_path / "sbatch").write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/argv\ncat > {tmp_path}/script\n{sbatch}\n'
    )
    (tmp_path / "fqueue").write_text("")
    for name in ("sbatch", "fqueue"):
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    monkeypatch.setattr("os.environ", env)  # where subprocess itself looks for the command
    if want is None:
        with pytest.raises(command_line.CommandError, match="--companion: "):
            batch_companion.submit([12], env)
        return
    assert batch_companion.submit([12], env) == want
    argv = (tmp_path / "argv").read_text().splitlines()
    assert argv == ["--parsable", *companion.arguments([12])]
    assert f"{tmp_path}/fqueue --wait --jobs=12 &" in (tmp_path / "script").read_text()


def test_what_other_jobs_of_the_user_take_is_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exclusive node, GPUs, an array, or sbatch waiting for the job's end would come with them."""
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\nenv > {tmp_path}/env\necho 4711\n")
    (tmp_path / "fqueue").write_text("")
    for name in ("sbatch", "fqueue"):
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    monkeypatch.setattr("os.environ", env)
    mine = {"FOREBAY_URL": "http://gateway", "SBATCH_ACCOUNT": "physics", "SBATCH_QOS": "long"}
    others = ("EXCLUSIVE", "GPUS", "GPUS_PER_NODE", "ARRAY_INX", "WAIT", "MEM_PER_CPU", "EXPORT")
    batch_companion.submit([12], {**env, **mine, **{f"SBATCH_{name}": "1" for name in others}})
    found = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines())
    assert {name: text for name, text in found.items() if name in mine} == mine
    assert {name for name in found if name.startswith("SBATCH_")} == {
        "SBATCH_ACCOUNT",
        "SBATCH_QOS",
    }
    assert "--export=ALL" in companion.arguments([12])


def test_without_slurm_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fqueue").write_text("")
    (tmp_path / "fqueue").chmod(0o755)
    with pytest.raises(command_line.CommandError, match="there is no sbatch here"):
        batch_companion.submit([12], {"PATH": str(tmp_path)})
    with pytest.raises(command_line.CommandError, match="fqueue is not on the PATH"):
        batch_companion.submit([12], {"PATH": str(tmp_path / "none")})


@pytest.mark.parametrize(("waited_s", "each_s"), [(0, 0.5), (100, 2.0), (86_400, 10.0)])
def test_who_waits_long_asks_seldom(waited_s: float, each_s: float) -> None:
    assert waiting.pace_s(waited_s) == each_s

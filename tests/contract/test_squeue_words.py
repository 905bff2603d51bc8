"""fqueue's rows, fbatch's arrays, patterns and exit codes beside the real squeue and sbatch on a cluster.

The jobs are held at the cluster's, so they stay as they are while they are looked at.
"""

import dataclasses
import datetime
import io
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batch_jobs import arrays, commands, dependencies, listing, model, patterns
from scheduler.contracts import command_line, ports
from slurm_plugins import devcluster
from tests import realslurm

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]
NAME = "a job with a long name"
FORMATS = [
    "%i", "%.18i %.8j %.8u %.2t %.10M %R", "%j|%8j|%.8j|%3j|%.3j|%30j|%.30j|", "%A %F %K", "%a %u", "%t %T",
    "%.1T|%12T|", "%r %R", "%l %L", "%.4l|%14l|", "%k", "%q", "%E", "%o", "%S", "%e",
    "jobs: %i, by %u", "%i%i",
]  # fmt: skip
STATES = [
    "PD", "pd", "PENDING", "Pending", "R,CD", "r", "all", "completed", "TO", "CA", "F", "CG", "XX", "PENDIN",
]  # fmt: skip
LONG = [
    "jobid,name,state", "jobid:8,name:30,username:.12", "Account,QOS,Comment", "statecompact:4,reason",
    "timelimit:12,timeused,timeleft", "JobArrayID,ArrayJobID,ArrayTaskID",
]  # fmt: skip
IDS = ["x", "-1"]
MISREAD_IDS = ["{0};2", "{0}.5", "{0}_x"]  # as the job, a step of it, and no job at all
ARRAYS = [
    "0-3", "0-15:4", "1,3,5-7", "1-3%2", "0-0", "5", "3-1", "x", "1-", "-1", "0-9:0", "1-2:x", "0-2000",
]  # fmt: skip
MISREAD_ARRAYS = ["", "1,,2", "1-3%0", "1-3%x"]  # as no array, as 1,2, and as without a limit
DEPENDENCIES = [
    "afterok:{0}", "afterok:{0}:{1}", "afterok:{0},afterany:{1}", "afterok:{0}?afterany:{1}", "singleton",
    "after:{0}", "afternotok:{0}", "singleton,afterok:{0}", "afterok", "before:{0}", "afterok:x", "afterok:",
]  # fmt: skip
PATTERNS = ["%j.out", "%x-%j", "%u/%j", "%A-%x", "out", "a%%b"]


@dataclasses.dataclass(frozen=True)
class Queue:
    """The cluster, and jobs in it as fqueue would have them."""

    env: dict[str, str]
    jobs: list[dict[str, Any]]

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv,
            env=self.env,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
            check=False,
        )


@pytest.fixture(scope="module")
def queue(slurm_site: devcluster.Site) -> Iterator[Queue]:
    env = {**os.environ, **slurm_site.env(), "TZ": "UTC", "SBATCH_ACCOUNT": "physics"}
    found = Queue(env, [])
    wanted: list[tuple[list[str], dict[str, Any]]] = [
        (["--hold", f"--job-name={NAME}"], {"name": NAME, "held": "user"}),
        (["--hold", "-Jb", "--time=90"], {"name": "b", "held": "user", "time_limit_s": 5_400}),
        (
            ["--hold", "-Jc", "--time=2-12", "--comment=said so"],
            {"name": "c", "held": "user", "time_limit_s": 216_000, "comment": "said so"},
        ),
        (["--begin=2040-01-01T08:00:00", "-Jd"], {"name": "d", "begin_us": 2_209_017_600_000_000}),
    ]
    try:
        for options, fields in wanted:
            done = found.run("sbatch", "--parsable", *options, "--output=/dev/null", "--wrap=true")
            assert done.returncode == 0, done.stderr
            job = model.BatchJob(int(done.stdout), "physics", "root", **fields)
            found.jobs.append(job.public(1))
        yield found
    finally:
        realslurm.at_rest(slurm_site)


@pytest.mark.parametrize("text", FORMATS)
def test_rows_are_squeues(queue: Queue, text: str) -> None:
    told = text not in {"%S", "%e"}  # a begin is squeue's start; ours is when it is expected to
    jobs = [job for job in queue.jobs if told or not job["begin_us"]]
    ids = ",".join(str(job["job_id"]) for job in jobs)
    real = queue.run("squeue", "-j", ids, "-S", "i", "-o", text).stdout.splitlines()
    ours = listing.lines(jobs, listing.Format(text, datetime.UTC), header=True)
    assert ours[1:] == [line.rstrip() for line in real[1:]]
    assert ours[0] == real[0].rstrip().replace("NODELIST(REASON)", "(REASON)")


def test_an_array_that_waits_is_one_row_as_with_squeue(queue: Queue) -> None:
    done = queue.run("sbatch", "--parsable", "--hold", "-Je", "--array=0-2,7%2", "--wrap=true")
    array_id = int(done.stdout)
    jobs = [
        model.BatchJob(
            array_id + number, "physics", "root", name="e", held="user", array_id=array_id,
            array_task=task, array_limit=2,
        ).public(1)
        for number, task in enumerate((0, 1, 2, 7))
    ]  # fmt: skip
    form = listing.Format("%i %F %K %t %r", datetime.UTC)
    try:
        for options, rows in ((), listing.collapsed(jobs)), (("-r",), jobs):
            real = queue.run("squeue", *options, "-h", "-j", str(array_id), "-o", form.text)
            ours = listing.lines(rows, form, header=False)
            assert sorted(ours) == sorted(line.rstrip() for line in real.stdout.splitlines())
    finally:
        queue.run("scancel", str(array_id))


@pytest.mark.parametrize("text", LONG)
def test_long_formats_are_squeues(queue: Queue, text: str) -> None:
    ids = ",".join(str(job["job_id"]) for job in queue.jobs)
    real = queue.run("squeue", "-j", ids, "-S", "i", "-O", text)
    form = listing.Format(listing.long_format(text), datetime.UTC)
    ours = listing.lines(queue.jobs, form, header=True)
    theirs = [line.rstrip() for line in real.stdout.splitlines()]
    assert ours == [line.replace("NODELIST(REASON)", "(REASON)") for line in theirs]


@pytest.mark.parametrize("keys", ["i", "-i", "j", "-j", "l,i", "-l,-i"])
def test_jobs_are_sorted_as_by_squeue(queue: Queue, keys: str) -> None:
    ids = ",".join(str(job["job_id"]) for job in queue.jobs)
    real = queue.run("squeue", "-h", "-j", ids, "-S", keys, "-o", "%i").stdout.split()
    form = listing.Format("%i", datetime.UTC)
    ours = form.sorted(queue.jobs, keys)
    shown = [str(job["job_id"]) for job in ours]
    if "l" in keys:  # how squeue orders those without a limit is its own affair
        limited = {str(job["job_id"]) for job in queue.jobs if job["time_limit_s"]}
        shown, real = ([each for each in these if each in limited] for these in (shown, real))
    assert shown == real


@pytest.mark.parametrize("text", STATES)
def test_states_that_squeue_takes_we_take(queue: Queue, text: str) -> None:
    taken = queue.run("squeue", "-t", text).returncode == 0
    try:
        listing.states(text)
        assert taken
    except command_line.CommandError:
        assert not taken


class _NoApi:
    """A gateway that knows no job."""

    def call(self, method: str, path: str, **options: Any) -> ports.ApiResponse:
        del method, path, options
        return ports.ApiResponse(200, {"jobs": []}, b"")


def fqueue(*argv: str) -> int:
    out = io.StringIO()
    around: Any = {"out": out, "err": out, "env": {}, "cwd": Path(), "stdin": io.StringIO()}
    return commands.fqueue(argv, api=_NoApi(), **around)


@pytest.mark.parametrize("text", [*IDS, "99999999"])
def test_ids_that_squeue_refuses_we_refuse(queue: Queue, text: str) -> None:
    assert queue.run("squeue", f"--jobs={text}").returncode == fqueue(f"--jobs={text}") == 1


@pytest.mark.parametrize("text", MISREAD_IDS)
def test_ids_that_squeue_misreads_we_refuse(queue: Queue, text: str) -> None:
    named = text.format(queue.jobs[0]["job_id"])
    assert queue.run("squeue", f"--jobs={named}").returncode == 0
    assert fqueue(f"--jobs={named}") == 1


@pytest.mark.parametrize("text", MISREAD_ARRAYS)
def test_arrays_that_sbatch_misreads_we_refuse(queue: Queue, text: str) -> None:
    done = queue.run("sbatch", "--test-only", "--hold", f"--array={text}", "--wrap=true")
    assert done.returncode == 0
    with pytest.raises(arrays.ArrayError):
        arrays.read(text)


@pytest.mark.parametrize("text", ARRAYS)
def test_arrays_that_sbatch_takes_we_take(queue: Queue, text: str) -> None:
    done = queue.run("sbatch", "--test-only", "--hold", f"--array={text}", "--wrap=true")
    if "rray" not in done.stderr and done.returncode:
        pytest.fail(done.stderr)
    try:
        arrays.read(text)
        assert not done.returncode, done.stderr
    except arrays.ArrayError:
        assert done.returncode


@pytest.mark.parametrize("text", DEPENDENCIES)
def test_dependencies_that_sbatch_takes_we_take(queue: Queue, text: str) -> None:
    named = text.format(*(job["job_id"] for job in queue.jobs))
    done = queue.run("sbatch", "--parsable", "--hold", f"--dependency={named}", "--wrap=true")
    if not done.returncode:
        queue.run("scancel", done.stdout.strip())
    try:
        dependencies.read(named)
        assert not done.returncode, done.stderr
    except dependencies.DependencyError:
        assert done.returncode


@pytest.mark.parametrize("text", PATTERNS)
def test_file_names_are_filled_in_as_sbatch_does(queue: Queue, tmp_path: Path, text: str) -> None:
    (tmp_path / "root").mkdir()
    done = queue.run(
        "sbatch", "--parsable", "--wait", "-Jname", f"--output={tmp_path}/{text}", "--wrap=true"
    )
    assert done.returncode == 0, done.stderr
    wanted = patterns.expand(
        f"{tmp_path}/{text}",
        job_id=int(done.stdout),
        array_id=None,
        name="name",
        user="root",
        task_id=None,
    )
    assert Path(wanted).is_file(), list(tmp_path.rglob("*"))


@pytest.mark.parametrize(
    ("argv", "code"),
    [(["--nonsense"], 255), (["--begin=wrong"], 255), (["--array=3-1"], None), (["/none/here"], 1)],
)
def test_fbatch_ends_with_sbatchs_codes(
    queue: Queue, tmp_path: Path, argv: list[str], code: int | None
) -> None:
    (tmp_path / "job.sh").write_text("#!/bin/sh\n")
    (tmp_path / "requests.jsonl").write_text("{}\n")
    named = argv[0].startswith("/")
    real = queue.run("sbatch", *argv, *([] if named else [str(tmp_path / "job.sh")])).returncode
    out = io.StringIO()
    around: Any = {"out": out, "err": out, "env": {}, "cwd": tmp_path, "stdin": io.StringIO()}
    files = [] if named else ["requests.jsonl"]
    ours = commands.fbatch([*argv, *files], api=_NoApi(), **around)
    assert ours
    assert real
    if code is not None:
        assert ours == real == code, out.getvalue()

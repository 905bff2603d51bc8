"""Where sites differ: modules, Spack, a venv, proxies, an image; rendered, shellchecked, and run."""

import dataclasses
import shutil
import subprocess
from pathlib import Path

import pytest

from engines import container, processes
from scheduler.contracts import ids, slurm
from slurm_plugins import launch, sbatch, settings
from tests import services

FULL = launch.Template(
    modules=("gcc/13.2", "cuda/12.9"),
    spack_root="/opt/spack",
    spack=("python@3.11 ^openssl@3", "/abc123"),
    venv="/opt/venvs/forebay it",
    prolog=("ulimit -n 65536", 'export NCCL_SOCKET_IFNAME="ib0"'),
    proxy="http://proxy.site:3128",
    no_proxy=".site,10.0.0.0/8",
)


def script(template: launch.Template) -> str:
    return sbatch.lease_script(
        python="/opt/python",
        spec_file="/state/agent.json",
        prolog=launch.lines(template),
        environment=launch.environment(template),
    )


@pytest.mark.parametrize(
    "template",
    [
        launch.Template(),
        launch.Template(modules=FULL.modules),
        launch.Template(spack_root=FULL.spack_root, spack=FULL.spack),
        launch.Template(venv=FULL.venv),
        FULL,
    ],
)
def test_every_way_passes_shellcheck(template: launch.Template, tmp_path: Path) -> None:
    services.require(shutil.which("shellcheck") is not None, "shellcheck (Debian's package)")
    spec = slurm.JobSpec(
        name="forebay-serve",
        script=script(template),
        partitions=("serve",),
        time_limit_s=60,
        output="/logs/%j",
        directory="/state",
        stamp=slurm.Stamp("alpha", ids.LeaseId("l-1"), "serve", "phys ics"),
    )
    text = sbatch.job_text(spec)
    assert text.startswith("#!/bin/bash\n#SBATCH --parsable\n")
    path = tmp_path / "job.sh"
    path.write_text(text)
    # SC1090, SC1091: files of the site that are not here.
    subprocess.run(["shellcheck", "-e", "SC1090,SC1091", str(path)], check=True)


def test_the_parts_come_in_the_order_in_which_they_build_on_each_other() -> None:
    said = "\n".join(launch.lines(FULL))
    order = [
        "module load gcc/13.2",
        "module load cuda/12.9",
        "setup-env.sh",
        "spack load",
        "bin/activate",
        "ulimit",
    ]
    places = [said.index(word) for word in order]
    assert places == sorted(places)


def test_what_is_missing_is_told_and_ends_the_job(tmp_path: Path) -> None:
    venv = dataclasses.replace(launch.Template(), venv=str(tmp_path / "none"))
    ended = subprocess.run(
        ["bash", "-c", script(venv)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == launch.EXIT
    assert f"forebay: there is no virtual environment in {tmp_path}/none" in ended.stderr
    module = launch.Template(modules=("nothing/1",), prolog=("module() { false; }",))
    lines = [*module.prolog, *launch.lines(dataclasses.replace(module, prolog=()))]
    ended = subprocess.run(
        ["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == launch.EXIT
    assert "forebay: module nothing/1 can not be loaded" in ended.stderr


def test_the_proxy_is_said_both_ways_and_never_for_this_node() -> None:
    said = launch.environment(FULL)
    assert said["https_proxy"] == said["HTTP_PROXY"] == "http://proxy.site:3128"
    assert said["no_proxy"] == "localhost,127.0.0.1,::1,.site,10.0.0.0/8"
    assert launch.environment(launch.Template()) == {}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"modules": ["cuda; rm -rf /"]}, "no module's name"),
        ({"modules": ["-h"]}, "no module's name"),
        ({"spack": ["python"]}, "write the absolute folder of the site's Spack"),
        ({"spack_root": "/s", "spack": ["$(reboot)"]}, "no spec of Spack's"),
        ({"venv": "venv"}, "write an absolute folder"),
        ({"script_prolog": ["a\nb"]}, "holds a line break"),
        ({"proxy": "proxy:3128"}, "write http://host:port"),
        ({"proxy": "http://user:secret@proxy:3128"}, "without a user or password"),
    ],
)
def test_what_could_become_another_command_is_refused_with_the_configuration(
    change: dict[str, object], why: str
) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        settings.SlurmSettings(**change)  # type: ignore[arg-type]
    assert "secret" not in str(caught.value)


def test_an_image_is_entered_with_what_a_replica_must_see(tmp_path: Path) -> None:
    """Apptainer is played by a script that runs what it is given: the real one is not run here."""
    stand_in = tmp_path / "apptainer"
    stand_in.write_text(
        '#!/bin/sh\n[ "$1" = exec ] || exit 9\nshift\n'
        'while case "$1" in -*) true ;; *) false ;; esac; do echo "$1"; shift; done\n'
        'echo "$1"; shift; exec "$@"\n'
    )
    stand_in.chmod(0o700)
    line = container.wrap(
        ["sh", "-c", f"echo parent ${processes.PARENT}"],
        image="/images/vllm 0.32.sif",
        runtime=str(stand_in),
        options=["--cleanenv"],
        binds=["/state/l-1", "/code:ro", "/state/l-1"],
        gpus=True,
    )
    told = subprocess.run(line, capture_output=True, text=True, check=True).stdout.splitlines()
    assert told == [
        "--nv", "--bind=/state/l-1:/state/l-1", "--bind=/code:/code:ro", "--cleanenv",
        "/images/vllm 0.32.sif", "parent 0",
    ]  # fmt: skip
    cpu = container.wrap(["x"], image="i", runtime="r", options=[], binds=[], gpus=False)
    assert "--nv" not in cpu


@pytest.mark.parametrize(
    ("image", "bind"), [("--fakeroot", "/a"), ("i", "a"), ("i", "/a:/b"), ("i", "/a,/b")]
)
def test_an_image_or_bind_that_would_be_an_option_is_refused(image: str, bind: str) -> None:
    with pytest.raises(container.ContainerError, match=r"\[engines\] container"):
        container.wrap(["x"], image=image, runtime="r", options=[], binds=[bind], gpus=False)

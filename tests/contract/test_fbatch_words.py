"""A script's directives: ours beside sbatch's own reading of the same lines, without a controller.

Each script asks for a begin that is wrong. Who reads that line refuses it; who takes it for a comment goes
on to the wrong time limit in the environment.
"""

import datetime
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from batch_jobs import directives, options
from scheduler.contracts import command_line, times
from tests import services

NOW = datetime.datetime(2026, 11, 30, tzinfo=datetime.UTC)
SCRIPTS = {
    "at column 0": "#MARK --begin=wrong",
    "with a tab": "#MARK\t--begin=wrong",
    "short": "#MARK -b wrong",
    "short and stuck": "#MARK -bwrong",
    "value apart": "#MARK --begin wrong",
    "unambiguous prefix": "#MARK --com=x --begin=wrong",
    "behind a blank": " #MARK --begin=wrong",
    "twice commented": "##MARK --begin=wrong",
    "marker in small letters": "#mark --begin=wrong",
    "behind blank lines and comments": "\n# said\n\n#MARK --begin=wrong",
    "behind a command": "true\n#MARK --begin=wrong",
    "behind a quoted blank": "#MARK --comment='a b' --begin=wrong",
    "behind a hash": "#MARK --comment=a # --begin=wrong",
    "behind a hash in quotes": '#MARK --comment="a # b" --begin=wrong',
    "without a blank": "#MARK--begin=wrong",
    "no variable": "#MARK --comment=$HOME --begin=wrong",
}
REFUSED = {
    "empty": b"",
    "no shebang": b"true\n",
    "DOS": b"#!/bin/sh\r\ntrue\r\n",
    "NUL": b"#!/bin/sh\n\0\n",
}


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a Slurm whose controller is never asked."""
    services.require(bool(shutil.which("sbatch")), "Slurm's commands")
    conf = tmp_path / "slurm.conf"
    conf.write_text(
        "ClusterName=words\nSlurmctldHost=localhost\nNodeName=localhost\n"
        "PartitionName=main Nodes=localhost\n"
    )
    return {"PATH": os.environ["PATH"], "SLURM_CONF": str(conf), "TZ": "UTC"}


def sbatch(script: bytes, folder: Path, env: dict[str, str]) -> str:
    """Return what sbatch says of a script."""
    path = folder / "script"
    path.write_bytes(script)
    done = subprocess.run(
        ["sbatch", str(path)],
        env={**env, "SBATCH_TIMELIMIT": "wrong"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    return done.stderr.decode(errors="replace")


@pytest.mark.parametrize("name", SCRIPTS)
def test_sbatch_and_we_read_the_same_directives(
    tmp_path: Path, slurm: dict[str, str], name: str
) -> None:
    text = f"#!/bin/sh\n{SCRIPTS[name]}\n"

    def marked(marker: str) -> bytes:
        return text.replace("MARK", marker).replace("mark", marker.lower()).encode()

    words = sbatch(marked("SBATCH"), tmp_path, slurm)
    read = "Invalid --begin specification" in words
    assert read or "Invalid --time specification" in words, words
    found = options.directive_lines(directives.read(marked("FBATCH")).directives)
    assert ("begin" in found) is read
    if read:
        with pytest.raises(times.TimeError):
            times.point(found["begin"], now=NOW, tz=datetime.UTC)


@pytest.mark.parametrize("name", REFUSED)
def test_scripts_that_sbatch_refuses_we_refuse(
    tmp_path: Path, slurm: dict[str, str], name: str
) -> None:
    words = sbatch(REFUSED[name], tmp_path, slurm)
    assert "Invalid --time" not in words, words
    with pytest.raises(directives.ScriptError):
        directives.read(REFUSED[name])


def test_a_backslash_groups_nothing(tmp_path: Path, slurm: dict[str, str]) -> None:
    line = b"--comment=a\\ b --begin=now\n"
    assert "Invalid directive" in sbatch(b"#!/bin/sh\n#SBATCH " + line, tmp_path, slurm)
    script = directives.read(b"#!/bin/sh\n#FBATCH " + line)
    with pytest.raises(command_line.CommandError, match="line 2: 'b' is no option"):
        options.directive_lines(script.directives)


def test_a_prefix_of_two_options_is_ambiguous_to_both(
    tmp_path: Path, slurm: dict[str, str]
) -> None:
    words = sbatch(b"#!/bin/sh\n#SBATCH --ti=5\n", tmp_path, slurm)
    assert "ambiguous" in words
    script = directives.read(b"#!/bin/sh\n#FBATCH --ti=5\n")
    with pytest.raises(command_line.CommandError, match="ambiguous"):
        options.directive_lines(script.directives)

"""fctl lease --render: how an engine starts in the site's image is shown too, and passes shellcheck."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forebay import commands, installation
from slurm_plugins import embedded
from tests import services


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a profile on an image."""
    port = embedded.EmbeddedClient(tmp_path / "slurm", cluster="alpha")
    monkeypatch.setattr(installation.Installation, "connect_slurm", lambda _: port)
    monkeypatch.setenv("FOREBAY_FOREBAY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("FOREBAY_ENGINES_VLLM_PYTHON", "/opt/vllm/bin/python")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.yaml").write_text(
        "profiles: {big: {gpus: 4, container: '/images/vllm 0.32.sif'}, bare: {gpus: 0}}"
    )
    return tmp_path


def rendered(profile: str, site: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Render the lease of a profile."""
    file = str(site / "models.yaml")
    words = ["fctl", "lease", "--render", "--profile", profile, "--file", file]
    monkeypatch.setattr(sys, "argv", words)
    return commands.fctl()


def test_the_image_is_entered_as_it_is_shown(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    services.require(shutil.which("shellcheck") is not None, "shellcheck (Debian's package)")
    monkeypatch.setenv("FOREBAY_ENGINES_CONTAINER_BINDS", '["/shared/models:ro"]')
    assert rendered("big", site, monkeypatch) == 0
    text = capsys.readouterr().out
    line = text.splitlines()[-1].removeprefix("# ")
    assert line.startswith("apptainer exec --nv ")
    assert "--bind=/shared/models:/shared/models:ro" in line
    assert "'/images/vllm 0.32.sif' env FOREBAY_PARENT_PID=0 /opt/vllm/bin/python -P" in line
    for name, script in (("job", text), ("line", f"#!/bin/bash\n{line}\n")):
        path = site / f"{name}.sh"
        path.write_text(script)
        argv = ["shellcheck", "--severity=warning", str(path)]
        found = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout


def test_without_an_image_it_is_the_python_that_has_the_engine(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rendered("bare", site, monkeypatch) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("# /opt/vllm/bin/python -P -m engines.replica --spec ")


def test_an_image_that_would_be_an_option_is_refused_in_a_line(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FOREBAY_ENGINES_CONTAINER", "--fakeroot")
    assert rendered("bare", site, monkeypatch) == 1
    said = capsys.readouterr().err
    assert said.startswith("fctl: error: [engines] container '--fakeroot'")
    assert said.count("\n") == 1

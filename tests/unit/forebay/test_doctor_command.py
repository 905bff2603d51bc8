"""`fctl doctor` on a host that reaches Slurm: for people, as JSON, and without a trace."""

import io
import json
import sys
import types
from pathlib import Path

import pytest

from forebay import commands
from slurm_plugins import doctor, select

FOUND = (
    doctor.Finding(
        doctor.Severity.ERROR, "no GRES", "no lease can ask for GPUs", "slurm.conf", "a=b"
    ),
    doctor.Finding(doctor.Severity.NOTE, "odd", "worth a look", "shell", "true"),
)


@pytest.fixture(autouse=True)
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "forebay.toml"
    path.write_text(
        f'[forebay]\nstate_dir = "{tmp_path / "state"}"\n[slurm]\nclient = "embedded"\n'
    )
    monkeypatch.setenv("FOREBAY_CONFIG", str(path))


def test_findings_come_as_text_or_as_json_with_one_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = types.SimpleNamespace(kind="cli")
    choice = types.SimpleNamespace(port=port, reason="the command line")
    monkeypatch.setattr(select, "connect", lambda *args: choice)
    monkeypatch.setattr(doctor, "collect", lambda *args, **names: FOUND)
    out = io.StringIO()
    assert commands.examine(out, True) == 1
    told = json.loads(out.getvalue())
    assert (told["client"], told["examined"]) == ("the command line", True)
    assert [one["severity"] for one in told["findings"]] == ["error", "note"]
    assert told["findings"][0]["line"] == "a=b"
    out = io.StringIO()
    assert commands.examine(out) == 1
    assert "1 ERROR, 0 SLOW, 1 NOTE" in out.getvalue()


def test_the_embedded_slurm_has_nothing_to_examine(monkeypatch: pytest.MonkeyPatch) -> None:
    port = types.SimpleNamespace(kind="embedded")
    choice = types.SimpleNamespace(port=port, reason="the embedded Slurm")
    monkeypatch.setattr(select, "connect", lambda *args: choice)
    out = io.StringIO()
    assert commands.examine(out, True) == 0
    told = json.loads(out.getvalue())
    assert (told["examined"], told["findings"]) == (False, [])


@pytest.mark.parametrize("words", ["doctor", "doctor --json", "lease --render"])
def test_who_only_looks_leaves_nothing_behind(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["fctl", *words.split()])
    monkeypatch.chdir(tmp_path)
    assert commands.fctl() == 0
    assert [path.name for path in tmp_path.rglob("*")] == ["forebay.toml"]

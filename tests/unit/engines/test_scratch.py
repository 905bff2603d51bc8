"""A slot's temporary files: in a folder of its own, and gone with the slot."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engines.slot import scratch


def test_children_leave_their_files_in_the_slots_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("TMPDIR", raising=False)
    with scratch.folder("l-1.s0") as own:
        code = "import tempfile; print(tempfile.mkdtemp())"
        made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert Path(made.stdout.strip()).parent == own == tmp_path / "forebay-l-1.s0"
        assert own.stat().st_mode & 0o777 == 0o700
    assert not own.exists()
    assert "TMPDIR" not in os.environ


def test_a_name_that_points_elsewhere_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    target = tmp_path / "somebody"
    target.mkdir()
    (tmp_path / "forebay-l-1.s0").symlink_to(target)
    with pytest.raises(PermissionError, match="another user has made it"), scratch.folder("l-1.s0"):
        pass
    assert target.exists()

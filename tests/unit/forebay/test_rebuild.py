"""`fctl rebuild` on the accounting host."""

import io
import json
from pathlib import Path

import pytest

from accounting import rollup
from forebay import commands
from scheduler.contracts import command_line
from tests.unit.accounting import test_rolling


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder that a configuration names."""
    path = tmp_path / "forebay.toml"
    path.write_text(f'[forebay]\nstate_dir = "{tmp_path / "state"}"\n')
    monkeypatch.setenv("FOREBAY_CONFIG", str(path))
    return tmp_path / "state"


def test_the_rollups_are_made_again(state: Path) -> None:
    test_rolling.record(state, [test_rolling.closed(1), test_rolling.closed(2)])
    out = io.StringIO()
    assert commands.rebuild(out) == 0
    assert out.getvalue() == "1 days summed anew\n"
    told = io.StringIO()
    assert commands.rebuild(told, True) == 0
    assert json.loads(told.getvalue()) == {"days": 1, "problems": []}
    with rollup.opened(rollup.path_of(state)) as session:
        assert session.execute("SELECT sum(attempts) FROM usage_days").fetchall() == [(2,)]


def test_elsewhere_it_says_where(state: Path) -> None:
    with pytest.raises(command_line.CommandError, match="on the accounting host"):
        commands.rebuild(io.StringIO())

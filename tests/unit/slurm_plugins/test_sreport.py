"""sreport's lines, and how it is asked."""

from pathlib import Path

import pytest

from scheduler.contracts import ids, slurm
from slurm_plugins import sreport
from tests.unit.slurm_plugins import test_cli

HOUR = 3_600_000_000
NOON = 1_795_780_800_000_000  # 2026-11-27T12:00:00Z
ANSWER = """root||gres/gpu|9000
forebay||gres/gpu|5400
forebay|svc|gres/gpu|5000
forebay|svc2|gres/gpu|400
physics||gres/gpu|3600
physics|ada|gres/gpu|3600
"""


def test_an_accounts_own_row_is_not_added_to_its_users() -> None:
    assert sreport.by_account(ANSWER) == {"forebay": 5400, "physics": 3600}
    assert sreport.by_account("") == {}


@pytest.mark.parametrize("line", ["forebay|svc|gres/gpu", "forebay|svc|gres/gpu|1.5h", "a|b|c|d|1"])
def test_a_cut_row_is_not_guessed_at(line: str) -> None:
    with pytest.raises(slurm.SlurmGarbled):
        sreport.by_account(line)


def test_sreport_and_sacct_are_asked_in_utc(tmp_path: Path) -> None:
    commands = test_cli.Commands(tmp_path)
    commands.add("sreport", f"echo \"$TZ $*\" >{tmp_path}/asked\ncat <<'END'\n{ANSWER}END")
    commands.add("sacct", "echo '17|forebay'; echo '18|'")
    books = sreport.AccountBooks(cluster="alpha", path=f"{tmp_path}:/usr/bin:/bin")
    assert books.gpu_seconds(NOON, NOON + HOUR) == {"forebay": 5400, "physics": 3600}
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith("UTC ")
    assert "start=2026-11-27T12:00:00 end=2026-11-27T13:00:00" in asked
    found = books.accounts([ids.SlurmJobId("17"), ids.SlurmJobId("18"), ids.SlurmJobId("local-1")])
    assert found == {"17": "forebay"}
    with pytest.raises(ValueError, match="whole hours"):
        books.gpu_seconds(NOON + 1, NOON + HOUR)


def test_accounting_that_does_not_answer_is_an_error_of_ours(tmp_path: Path) -> None:
    commands = test_cli.Commands(tmp_path)
    commands.add("sreport", "echo 'sreport: error: Connection refused' >&2; exit 1")
    books = sreport.AccountBooks(cluster="alpha", path=f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(slurm.SlurmError):
        books.gpu_seconds(NOON, NOON + HOUR)

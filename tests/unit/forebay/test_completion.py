"""Completion scripts: for every command, and the shell itself takes them."""

import shutil
import subprocess

import pytest

from forebay import completion

COMMANDS = ("fbatch", "fqueue", "fcancel", "facct", "freport", "finfo", "fctl", "forebay")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_every_command_is_completed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert completion.main([shell]) == 0
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert command in text
    assert "--helpformat" in text
    assert "close-month" in text
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=text, text=True, check=True, timeout=60)


def test_bash_offers_what_fits() -> None:
    """The script is run by bash: `freport t` is completed to the reports that begin so."""
    ask = """
COMP_WORDS=(freport t); COMP_CWORD=1; COMP_LINE='freport t'; COMP_POINT=9
_shtab_freport freport t freport; printf '%s\\n' "${COMPREPLY[@]}"
"""
    script = "\n".join(completion.scripts("bash")) + ask
    done = subprocess.run(
        ["bash", "--norc"], input=script, text=True, capture_output=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["team", "tier"]


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert completion.main(["fish"]) == 1
    assert "invalid choice: 'fish'" in capsys.readouterr().err

"""`.ci/setup` at a site with a mirror or an authority of its own: uv is told, a failure says what to do."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
case "$*" in
  -V) echo "Python 3.11.7" ;;
  "-m pip config get global."*) grep "^${5#global.}=" "$FAKE/pip.conf" | cut -d= -f2- | grep . ;;
  "-m venv .venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
  "-m pip install"*) [ ! -e "$FAKE/no-index" ] || exit 1; cp "$FAKE/uv" .venv/bin/uv ;;
esac
"""
UV = """#!/bin/sh
env | grep -E "^(SSL_CERT_FILE|UV_|PIP_)" | sort >"$FAKE/told"
[ ! -e "$FAKE/no-packages" ]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkout of nothing but the script, with a Python and a uv that write down how they are called."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/setup", tmp_path / ".ci/setup")
    for name, text in ((".ci/engine-env", "#!/bin/sh\n"), ("python", PYTHON), ("uv", UV)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for name in ("pyproject.toml", "pip.conf", "site.pem"):
        (tmp_path / name).write_text("")
    return tmp_path


def setup(folder: Path, **settings: str) -> tuple[int, str]:
    """Run the script; return its exit code and what it said on stderr."""
    env = {"PATH": os.environ["PATH"], "PYTHON": str(folder / "python"), "FAKE": str(folder)}
    done = subprocess.run(
        [folder / ".ci/setup", "demo"],
        env=env | settings,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stderr


def told(folder: Path) -> dict[str, str]:
    """Return what uv was told of the site."""
    lines = (folder / "told").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("UV_HTTP_TIMEOUT"))


def test_without_settings_uv_is_told_nothing(folder: Path) -> None:
    assert setup(folder) == (0, "")
    assert told(folder) == {}


def test_pips_environment_reaches_uv(folder: Path) -> None:
    pem = str(folder / "site.pem")
    env = {
        "PIP_CERT": pem,
        "PIP_INDEX_URL": "https://mirror.site/simple",
        "PIP_FIND_LINKS": "/srv/wheels /srv/more",
    }
    assert setup(folder, **env) == (0, "")
    assert told(folder) == {
        **env,
        "SSL_CERT_FILE": pem,
        "UV_DEFAULT_INDEX": "https://mirror.site/simple",
        "UV_FIND_LINKS": "/srv/wheels,/srv/more",
    }


def test_so_does_what_only_pip_conf_says(folder: Path) -> None:
    pem = folder / "site.pem"
    (folder / "pip.conf").write_text(f"cert={pem}\nindex-url=https://mirror.site/simple\n")
    assert setup(folder, PIP_INDEX_URL="https://newer.site/simple") == (0, "")
    found = told(folder)
    assert found["SSL_CERT_FILE"] == str(pem)
    assert found["UV_DEFAULT_INDEX"] == "https://newer.site/simple"


def test_of_several_indexes_the_best_version_counts_as_with_pip(folder: Path) -> None:
    """By itself uv takes the first index that has a package, however old its version there is."""
    more = "file:///srv/one file:///srv/two"
    (folder / "pip.conf").write_text(f"extra-index-url={more}\n")
    assert setup(folder) == (0, "")
    found = told(folder)
    assert (found["UV_INDEX"], found["UV_INDEX_STRATEGY"]) == (more, "unsafe-best-match")


@pytest.mark.parametrize("fault", ["no-index", "no-packages"])
def test_a_failure_says_in_a_line_what_a_site_may_have_to_set(folder: Path, fault: str) -> None:
    (folder / fault).touch()
    code, said = setup(folder)
    assert code == 1
    (line,) = said.splitlines()
    assert line.startswith("setup: error: ")
    assert "set PIP_CERT, PIP_INDEX_URL or PIP_FIND_LINKS" in line


def test_certificates_that_are_not_there_are_named(folder: Path) -> None:
    code, said = setup(folder, PIP_CERT="/nowhere/site.pem")
    assert code == 1
    assert said.startswith("setup: error: PIP_CERT: /nowhere/site.pem can't be read")
    assert said.count("\n") == 1

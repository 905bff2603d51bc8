"""A test session that is killed leaves nothing running."""

import os
import select
import subprocess
import sys
from pathlib import Path

from slurm_plugins.devcluster import processes

SESSION = """
import subprocess, sys
from tests import endings
with endings.afterwards(["touch", sys.argv[1]]):
    argv = endings.tied("TERM", ["sh", "-c", "echo $$; exec sleep 600"])
    with subprocess.Popen(argv):
        input()
"""


def test_what_a_killed_session_started_ends(tmp_path: Path) -> None:
    done = tmp_path / "done"
    with subprocess.Popen(
        [sys.executable, "-c", SESSION, str(done)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    ) as session:
        assert session.stdout is not None
        service = os.pidfd_open(int(session.stdout.readline()))
        assert not done.exists()
        session.kill()
        assert select.select([service], [], [], 30.0)[0]
        os.close(service)
    assert processes.wait_until(done.exists, 30.0, every_s=0.01)

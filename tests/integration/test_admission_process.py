"""The process that admits for others loads what it needs: its start is what a gateway's clients wait for."""

import json
import os
import subprocess
import sys
from pathlib import Path

_RUN = """
import asyncio, json, os, signal, sys
from pathlib import Path
from forebay import admission_service, cli, installation
from forebay import config as configs
body = cli.service("gateway-admission")
assert body is admission_service.admission
here = installation.Installation.open(configs.load(Path(sys.argv[1])))
def told(news):
    os.kill(os.getpid(), signal.SIGTERM)
asyncio.run(body(here, told))
print(json.dumps(sorted(set(sys.modules))))
"""
NOT_NEEDED = {
    "apscheduler", "batch_jobs.runner", "duckdb", "fastapi", "httptools", "httpx", "numpy", "openai",
    "pyarrow", "rich", "slurm_plugins.select", "starlette", "uvicorn",
}  # fmt: skip


def test_admission_runs_without_web_server_ledger_and_slurm(tmp_path: Path) -> None:
    config = tmp_path / "forebay.toml"
    config.write_text(f'[forebay]\nstate_dir = "{tmp_path / "state"}"\n')
    place = {"gateway": "g1", "socket": str(tmp_path / "admission.sock"), "workers": 0}
    done = subprocess.run(
        [sys.executable, "-P", "-c", _RUN, str(config)],
        env={**os.environ, "FOREBAY_ADMISSION": json.dumps(place)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert "sqlalchemy" in loaded  # quotas are in the registry: the list is of real modules
    assert not loaded & NOT_NEEDED

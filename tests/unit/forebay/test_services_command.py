"""`forebay gateway` and the like: which body runs, and what the command line sets for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forebay import (
    admission_service,
    batch_service,
    broker_service,
    cli,
    doors,
    gateway_service,
    installation,
    lifeline,
    sinks,
)
from gateway import settings as gateway_settings
from scheduler.contracts import webserver


def test_each_service_has_its_body() -> None:
    assert cli.service("broker") is broker_service.broker
    assert cli.service("gateway") is doors.gateway
    assert cli.service("batchd") is batch_service.batchd
    assert cli.service("gateway-worker") is gateway_service.worker
    assert cli.service("gateway-admission") is admission_service.admission


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "not_needed"),
    [
        ("batch_service", "fastapi uvicorn duckdb pyarrow apscheduler"),
        ("broker_service", "fastapi uvicorn"),
        ("doors", "fastapi uvicorn duckdb pyarrow"),
    ],
)
def test_a_service_loads_what_it_needs(module: str, not_needed: str) -> None:
    """A part that died is away for as long as its successor takes to load."""
    code = f"import sys, forebay.{module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=True)
    assert not set(not_needed.split()) & set(loaded.stdout.decode().split())


@pytest.mark.parametrize(("words", "workers"), [([], 3), (["--workers", "5"], 5)])
def test_the_command_line_says_how_many_workers(
    words: list[str], workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(sinks.SPOOL, "")
    monkeypatch.setenv("FOREBAY_GATEWAY_WORKERS", "3")
    config = tmp_path / "forebay.toml"
    config.write_text(f'[forebay]\nstate_dir = "{tmp_path / "state"}"\n')
    seen: list[int] = []

    async def body(here: installation.Installation, told: object) -> None:
        seen.append(here.config.table(gateway_settings.GatewaySettings).workers)

    monkeypatch.setattr(cli, "service", lambda name: body)
    monkeypatch.setattr(cli, "_log", lambda: None)
    monkeypatch.setattr(lifeline, "open_files", lambda: None)
    ends: list[int] = []
    monkeypatch.setattr(cli, "_gone", ends.append)  # a look-up that hangs must not be waited for
    assert cli.main(["gateway", "--config", str(config), *words]) == 0
    assert seen == [workers]
    assert ends == [0]
    assert int(os.environ["FOREBAY_GATEWAY_WORKERS"]) == workers


def test_no_worker_at_all_is_a_fault_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(sinks.SPOOL, "")
    monkeypatch.setenv("FOREBAY_GATEWAY_WORKERS", "1")
    monkeypatch.setattr(cli, "_log", lambda: None)
    config = tmp_path / "forebay.toml"
    config.write_text(f'[forebay]\nstate_dir = "{tmp_path / "state"}"\n')
    monkeypatch.setattr(lifeline, "open_files", lambda: None)
    assert cli.main(["gateway", "--config", str(config), "--workers", "0"]) != 0
    told = capsys.readouterr().err
    assert "FOREBAY_GATEWAY_WORKERS" in told
    assert len(told.strip().splitlines()) <= 2


def test_a_port_that_is_taken_is_a_fault_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(sinks.SPOOL, "")
    monkeypatch.setattr(cli, "_log", lambda: None)
    monkeypatch.setattr(lifeline, "open_files", lambda: None)
    config = tmp_path / "forebay.toml"
    config.write_text(f'[forebay]\nstate_dir = "{tmp_path / "state"}"\n')

    async def body(here: installation.Installation, told: object) -> None:
        raise webserver.CannotListen("[gateway] http_port 80 on ::: Address already in use")

    monkeypatch.setattr(cli, "service", lambda name: body)
    assert cli.main(["gateway", "--config", str(config)]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("[gateway] http_port 80 on ::: Address already in use")

"""What the composition root adds: secrets, lease jobs, the configuration document, process ties."""

import dataclasses
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from engines.agent import spec
from forebay import commands, in_lease, installation, lease, sinks, tree, up
from forebay import config as configs
from scheduler.contracts import fleet, ids
from scheduler.runtime import config, config_text
from slurm_plugins import embedded, sbatch, steps


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> installation.Installation:
    """An installation in a folder of its own."""
    monkeypatch.setenv(sinks.SPOOL, "")
    loaded = config.load(
        None, configs.TABLES, {"FOREBAY_FOREBAY_STATE_DIR": str(tmp_path / "state")}
    )
    return installation.Installation.open(loaded)


def test_the_documented_configuration_is_the_codes_own() -> None:
    shown = Path("docs/forebay.toml").read_text()
    assert shown == config_text.document(configs.TABLES), "run: make docs"


def test_secrets_are_private_and_made_once(here: installation.Installation) -> None:
    first = here.secret(installation.SERVICE_KEY)
    assert first.startswith("fbk_")
    assert here.secret(installation.SERVICE_KEY) == first
    for file in (here.state / "secrets").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE((here.state / "secrets").stat().st_mode) == 0o700


def test_a_state_folder_takes_one_tree_at_a_time(here: installation.Installation) -> None:
    with (
        up.alone(here.state),
        pytest.raises(tree.StartError, match="another `forebay up` runs on"),
        up.alone(here.state),
    ):
        pass
    with up.alone(here.state):
        assert (here.state / "run" / "up.lock").exists()


def test_forebays_own_keys_are_in_the_registry(here: installation.Installation) -> None:
    registry = here.open_registry()
    try:
        service = registry.keys.find(here.secret(installation.SERVICE_KEY)).caller()
        admin = registry.keys.find(here.secret(installation.ADMIN_KEY)).caller()
    finally:
        registry.close()
    assert (service.service, service.admin) == (True, False)
    assert (admin.service, admin.admin) == (False, True)


def test_a_lease_becomes_a_job_whose_agent_finds_its_spec(
    here: installation.Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET_OF_THE_SERVICE", "must not reach a job")
    port = embedded.EmbeddedClient(tmp_path / "slurm", cluster="alpha")
    try:
        job = lease.Renderer(here, port)(_lease())
    finally:
        port.close()
    assert job.stamp is not None
    assert (job.stamp.lease_id, job.stamp.kind, job.stamp.team) == ("l-1", "serve", "physics")
    assert (job.gpus_per_node, job.partitions, job.time_limit_s) == (4, ("serve",), 3600)
    told = spec.AgentSpec.read(here.state / "leases" / "l-1" / lease.SPEC)
    assert (told.cluster, told.gpus, told.sink_factory) == ("alpha", 4, sinks.FACTORY)
    assert str(here.state / "leases" / "l-1" / lease.SPEC) in job.script
    assert "A_SECRET_OF_THE_SERVICE" not in job.environment
    assert json.loads(job.environment[sinks.SPOOL])["folder"] == str(here.state / "spool")


def test_a_lease_over_whole_nodes_and_its_least_walltime_reach_the_job(
    here: installation.Installation, tmp_path: Path
) -> None:
    port = embedded.EmbeddedClient(tmp_path / "slurm", cluster="alpha")
    wide = dataclasses.replace(_lease(), gpus=16, whole_nodes=2, time_min_s=900)
    try:
        job = lease.Renderer(here, port)(wide)
    finally:
        port.close()
    assert (job.nodes, job.gpus_per_node, job.time_min_s) == (2, 8, 900)


@pytest.mark.parametrize(
    ("charge", "shared", "account"),
    [("false", "forebay", "site"), ("true", "forebay", "physics"), ("true", "physics", "site")],
)
def test_a_teams_own_lease_is_charged_to_it_if_the_site_wants_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, charge: str, shared: str, account: str
) -> None:
    monkeypatch.setenv(sinks.SPOOL, "")
    env = {
        "FOREBAY_FOREBAY_STATE_DIR": str(tmp_path / "state"),
        "FOREBAY_SLURM_ACCOUNT": "site",
        "FOREBAY_SLURM_CHARGE_DEDICATED": charge,
        "FOREBAY_SCHEDULER_LEASE_TEAM": shared,
    }
    here = installation.Installation.open(config.load(None, configs.TABLES, env))
    port = embedded.EmbeddedClient(tmp_path / "slurm", cluster="alpha")
    try:
        job = lease.Renderer(here, port)(_lease())
    finally:
        port.close()
    assert job.account == account


def test_host_memory_goes_by_gpu_and_holds_what_is_parked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(sinks.SPOOL, "")
    env = {
        "FOREBAY_FOREBAY_STATE_DIR": str(tmp_path / "state"),
        "FOREBAY_SCHEDULER_LEASE_GB_PER_GPU": "40",
        "FOREBAY_SCHEDULER_PARK_GB_PER_GPU": "24",
    }
    here = installation.Installation.open(config.load(None, configs.TABLES, env))
    port = embedded.EmbeddedClient(tmp_path / "slurm", cluster="alpha")
    try:
        job = lease.Renderer(here, port)(_lease())
    finally:
        port.close()
    assert job.memory_mb == 244_141  # 4 GPUs x 64e9 bytes, in 2^20 bytes, rounded up


@pytest.mark.parametrize(
    ("hardware", "gpus", "said"),
    [
        (
            fleet.Hardware(
                gres_type="H100", memory_gb=100.0, cpus=12, constraint="nvlink", container="/i.sif"
            ),
            2,
            ("--gres=gpu:H100:2", "--mem=95368", "--cpus-per-task=12", "--constraint=nvlink"),
        ),
        (
            fleet.Hardware("shard", parts=4, memory_gb=12.0),
            4,
            ("--gres=shard:4", "--mem=11445", "--cpus-per-task=1"),
        ),
        (
            fleet.Hardware("none", memory_gb=8.0, cpus=4),
            0,
            ("--job-name=forebay-serve-cpu", "--mem=7630", "--cpus-per-task=4"),
        ),
        (fleet.Hardware("mps", parts=100), 50, ("--gres=mps:50",)),
    ],
)
def test_a_profile_reaches_the_job_and_its_agent(
    here: installation.Installation,
    tmp_path: Path,
    hardware: fleet.Hardware,
    gpus: int,
    said: tuple[str, ...],
) -> None:
    port = embedded.EmbeddedClient(tmp_path / "slurm", cluster="alpha")
    asked = dataclasses.replace(
        _lease(), gpus=gpus, hardware=hardware, gres_type=hardware.gres_type
    )
    try:
        job = lease.Renderer(here, port)(asked)
    finally:
        port.close()
    options = sbatch.arguments(job)
    assert set(said) <= set(options), options
    assert any(option.startswith("--gres") for option in options) is bool(gpus)
    told = spec.AgentSpec.read(here.state / "leases" / "l-1" / lease.SPEC)
    assert (told.parts, told.options.container) == (hardware.parts, hardware.container)
    assert json.loads(job.environment[in_lease.LAUNCHER])["gres"] == hardware.gres


def test_fctl_prints_the_job_of_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = embedded.EmbeddedClient(tmp_path / "slurm", cluster="alpha")
    monkeypatch.setattr(installation.Installation, "connect_slurm", lambda _: port)
    monkeypatch.setenv("FOREBAY_FOREBAY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("FOREBAY_SCHEDULER_LEASE_GPUS", "1")
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "models.yaml"
    file.write_text("profiles: {small: {gres: 'shard:1', parts: 4, constraint: fast, cpus: 2}}")
    words = ["fctl", "lease", "--render", "--profile", "small", "--file", str(file)]
    monkeypatch.setattr(sys, "argv", words)
    try:
        assert commands.fctl() == 0
    finally:
        port.close()
    said = capsys.readouterr().out
    for option in ("--gres=shard:4", "--constraint=fast", "--cpus-per-task=8"):
        assert option in said, said
    assert not (tmp_path / "state").exists(), "nothing is written"


def _lease() -> fleet.Lease:
    return fleet.Lease(
        lease_id=ids.LeaseId("l-1"),
        cluster="alpha",
        kind=fleet.LeaseKind.SERVE,
        team="physics",
        state=fleet.LeaseState.REQUESTED,
        gpus=4,
        walltime_s=3600,
    )


def test_slots_start_by_srun_in_a_job_and_locally_elsewhere(
    here: installation.Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = embedded.EmbeddedClient(tmp_path / "slurm", cluster="alpha")
    try:
        job = lease.Renderer(here, port)(_lease())
    finally:
        port.close()
    assert isinstance(in_lease.launcher(job.environment), steps.LocalLauncher)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    real = json.loads(job.environment[in_lease.LAUNCHER]) | {"client": "slurmrestd"}
    found = in_lease.launcher({in_lease.LAUNCHER: json.dumps(real)})
    assert isinstance(found, steps.SrunLauncher)


def test_the_sink_factory_needs_nothing_but_the_standard_library() -> None:
    """It loads inside an engine's environment, which has none of Forebay's dependencies."""
    code = (
        "import sys, importlib; importlib.import_module('forebay.sinks');"
        "bad = {'grpc', 'duckdb', 'pyarrow', 'sqlalchemy', 'fastapi', 'aiohttp'} & set(sys.modules);"
        "print(sorted(bad))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_part_whose_parent_is_gone_leaves_at_once() -> None:
    code = "from forebay import lifeline; lifeline.tie(1234567); print('still here')"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == ""


def test_a_part_dies_with_its_parent() -> None:
    child = (
        "import os, sys, time; from forebay import lifeline;"
        "lifeline.tie(int(sys.argv[1])); print(os.getpid(), flush=True); time.sleep(600)"
    )
    parent = (
        "import os, subprocess, sys;"
        f"made = subprocess.Popen([sys.executable, '-P', '-c', {child!r}, str(os.getpid())],"
        " stdout=subprocess.PIPE); print(made.stdout.readline().decode(), flush=True, end='');"
        "os._exit(0)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", parent], capture_output=True, text=True, check=True, timeout=60
    )
    _await_end(int(done.stdout))


def _await_end(pid: int) -> None:
    """Wait for the end of a process that is not ours; the test's own time limit bounds it."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    import select

    readable, _, _ = select.select([descriptor], [], [], 30)
    os.close(descriptor)
    assert readable, f"process {pid} outlived its parent"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (
            "[scheduler]\ntick_s = 0.2\nticks = 3\n",
            "forebay.toml:3: [scheduler] ticks: unknown key",
        ),
        ('[gateway]\nhttp_port = "x"\n', "forebay.toml:2: [gateway] http_port: "),
    ],
)
def test_config_check_names_the_line(
    tmp_path: Path, text: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from forebay import cli

    file = tmp_path / "forebay.toml"
    file.write_text(text)
    assert cli.main(["config", "check", "--config", str(file)]) == 1
    assert place in capsys.readouterr().err
    file.write_text("")
    assert cli.main(["config", "check", "--config", str(file)]) == 0


def test_a_service_opens_as_many_files_as_the_site_allows() -> None:
    code = (
        "import resource; from forebay import lifeline; kind = resource.RLIMIT_NOFILE;"
        "resource.setrlimit(kind, (64, 200)); lifeline.open_files(); print(resource.getrlimit(kind))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "(200, 200)\n"


def test_config_show_keeps_a_password_to_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from forebay import cli

    file = tmp_path / "forebay.toml"
    file.write_text('[scheduler]\nregistry_url = "postgresql+psycopg://me:hush@db/forebay"\n')
    assert cli.main(["config", "show", "--config", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "registry_url = postgresql+psycopg://me:***@db/forebay" in shown
    assert "hush" not in shown

"""What the demo stands on: a Slurm cluster, a tiny model, a configuration, all in one folder."""

import asyncio
import contextlib
import dataclasses
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

from scheduler.contracts import command_line
from slurm_plugins import devcluster
from slurm_plugins.devcluster import daemons

MODEL = "chat"
SEATS = 8
REPLICAS = 3
USERS_TEAM = "physics"  # whose people chat
BATCH_TEAM = "biology"  # whose lines fill the gaps
CALM_S = 4.0  # a real site waits 30 s; a demo has not so much time


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """Where the demo runs.

    Attributes:
        folder: everything of it.
        config_file: its forebay.toml.
        slurm: which Slurm, for people.
        env: variables for commands that speak to this cluster.
        munge: whether the Unix user is credential enough.
    """

    folder: Path
    config_file: Path
    slurm: str
    env: Mapping[str, str]
    munge: bool


def choose() -> tuple[bool, str]:
    """Return whether a real Slurm can be brought up here, and why (not)."""
    if os.environ.get("SLURM") == "embedded":
        return False, "SLURM=embedded asks for it"
    if os.geteuid() != 0:
        return False, "a real cluster needs root"
    missing = daemons.missing()
    if missing:
        return False, f"not installed: {', '.join(missing)}"
    return True, "root, and its daemons are installed"


def engine_python() -> Path:
    """Return the Python of the newest engine environment beside Forebay's own.

    Raises:
        command_line.CommandError: there is none.
    """
    beside = Path(sys.prefix).parent
    found = sorted(beside.glob(".venv-vllm-*/bin/python"))
    if not found:
        raise command_line.CommandError(f"no engine environment in {beside}: run .ci/setup demo")
    return found[-1]


@contextlib.asynccontextmanager
async def prepared(say: Callable[[str], None]) -> AsyncIterator[Site]:
    """Bring the demo's cluster up; down again at the end, however the body ended."""
    folder = Path("build/demo").absolute()
    with _alone(folder):
        async with _prepared(folder, say) as found:
            yield found


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the demo's folder: a second run would clear away what the first one stands on."""
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / "demo.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise command_line.CommandError(
                f"another `make demo` or `make up` runs in {folder.parent.parent}: end it first"
            ) from None
        yield


@contextlib.asynccontextmanager
async def _prepared(folder: Path, say: Callable[[str], None]) -> AsyncIterator[Site]:
    real, why = choose()
    say(f"Slurm: {'real, in its own folder and ports' if real else 'embedded'} ({why})")
    await asyncio.to_thread(devcluster.down, folder / "slurm", purge=True)  # what a killed run left
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    python = engine_python()
    model = await asyncio.to_thread(_model, python, say)
    if not real:
        table = {"client": "embedded", "embedded_kill_wait_s": 10.0}
        yield Site(folder, _write(folder, python, model, table, {}), "embedded", {}, munge=False)
        return
    say(
        "Slurm: starting munged, MariaDB, slurmdbd, slurmctld and 4 slurmd with 4 pretend GPUs each"
    )
    try:
        cluster = await asyncio.to_thread(
            devcluster.up,
            folder / "slurm",
            nodes=4,
            gpus_per_node=4,
            accounts={USERS_TEAM: ["nobody"], BATCH_TEAM: ["root"], "forebay": ["root"]},
        )
        table = {
            "conf": str(cluster.slurm_conf),
            "rest_url": cluster.rest_url,
            "rest_user": cluster.rest_user,
            "jwt_key_file": str(cluster.jwt_key),
            "account": "forebay",
        }
        door = {"munge_socket": str(cluster.munge_socket)}
        env = {**cluster.env(), "FOREBAY_MUNGE_SOCKET": str(cluster.munge_socket)}
        file = _write(folder, python, model, table, door)
        yield Site(folder, file, cluster.version, env, munge=True)
    except devcluster.DevClusterError as error:
        raise command_line.CommandError(f"no Slurm cluster here: {error}") from error
    finally:
        await asyncio.to_thread(devcluster.down, folder / "slurm", purge=True)


def _model(python: Path, say: Callable[[str], None]) -> Path:
    """Make the tiny Llama, unless it is there."""
    folder = Path("build/tiny-llama").absolute()
    if not (folder / "config.json").exists():
        say("model: making a tiny Llama and its tokenizer")
        argv = [str(python), "-P", "-m", "engines.tinymodel", str(folder)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            words = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
            raise command_line.CommandError(f"the model could not be made: {words[0]}")
    return folder


def _write(
    folder: Path,
    python: Path,
    model: Path,
    slurm: Mapping[str, object],
    door: Mapping[str, object],
) -> Path:
    tables: dict[str, Mapping[str, object]] = {
        "forebay": {"state_dir": str(folder / "state")},
        "scheduler": {"calm_s": CALM_S, "adopt_grace_s": 1.0, "drain_s": 5.0, "idle_lease_s": 1.0},
        "slurm": slurm,
        "gateway": {"http_port": 0, "grpc_port": 0, **door},
        # Not the default under /tmp: another demo, or another user's, has nodes of the same names.
        "engines": {
            "vllm_python": str(python),
            "gpu_lock_dir": str(folder / "gpus"),
            "grace_s": 4.0,
        },
    }
    lines = []
    for name, values in tables.items():
        lines += [f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in values.items()), ""]
    lines += [
        "[[models]]",
        f'name = "{MODEL}"',
        f'weights = "{model}"',
        f"seats = {SEATS}",
        "reserved_seats = 1",
        "itl_slo_ms = 1000",  # a CPU that others share too keeps no better promise
        "gpus = 4",
        f"replicas = {REPLICAS}",
        "[models.engine_args]",
        'dtype = "float32"',
        "enforce-eager = true",
        "kv-cache-memory-bytes = 33554432",
    ]
    file = folder / "forebay.toml"
    file.write_text("\n".join(lines) + "\n")
    return file


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()

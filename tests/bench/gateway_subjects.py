"""The routers under the gateway bench: how each is started, asked and stopped."""

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

PEERS = {"vllm_router": "vllm-router", "smg": "smg", "litellm": "litellm"}
STREAMS = 256
# A token costs LiteLLM about a millisecond, so 256 streams of 50 tokens/s would be ten times what one worker
# passes on: most would never begin, and the rest measure a queue. This many leave it half idle.
_CARRIED = {"litellm": 8}
_READY_S = 180.0
_ROOT = Path(__file__).resolve().parents[2]


class BenchError(Exception):
    """Something did not come up; the message says what and shows the end of its log."""


@dataclasses.dataclass
class Subject:
    """A running router.

    Attributes:
        name: its key in the JSON.
        address: ``host:port``.
        version: its distribution's version.
        pid: the root of its processes; 0 for no router at all.
        headers: what its requests carry besides.
        streams: how many it is given at once; fewer where one worker can't carry `STREAMS`.
    """

    name: str
    address: str
    version: str = ""
    pid: int = 0
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    streams: int = STREAMS


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@contextlib.asynccontextmanager
async def process(
    argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run ``argv`` in a session of its own until the block ends; stderr goes to ``log``."""
    # A peer must not take a proxy of this machine for its way to the engines.
    kept = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    with log.open("wb") as file:
        started = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=file,
            env={**kept, **(env or {})},
            cwd=_ROOT,
            start_new_session=True,
            limit=1 << 20,
        )
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(started.wait(), 10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        await started.wait()


async def told(started: asyncio.subprocess.Process, log: Path) -> object:
    """Return the JSON of the next line that a process prints."""
    assert started.stdout is not None
    line = await asyncio.wait_for(started.stdout.readline(), _READY_S)
    if not line:
        raise BenchError(f"{log.stem} ended; its log says:\n{log.read_text()[-2000:]}")
    return json.loads(line)


def python(module: str, *arguments: str) -> list[str]:
    """Return the command of one of the bench's own processes."""
    return [sys.executable, "-m", f"tests.bench.{module}", *arguments]


def peer_argv(
    name: str, env_dir: Path, port: int, engines: Sequence[str], folder: Path
) -> list[str]:
    """Return the command of a peer, one worker, on ``port``."""
    urls = [f"http://{engine}" for engine in engines]
    bin_dir = env_dir / "bin"
    common = ["--host", "127.0.0.1", "--port", str(port)]
    if name == "litellm":
        entries = [
            {
                "model_name": "chat",
                "litellm_params": {"model": "openai/chat", "api_base": f"{url}/v1", "api_key": "x"},
            }
            for url in urls
        ]
        config = folder / "litellm.json"  # YAML reads JSON
        config.write_text(json.dumps({"model_list": entries}))
        return [str(bin_dir / "litellm"), *common, "--config", str(config), "--num_workers", "1"]
    quiet = ["--log-level", "error" if name == "smg" else "critical"]
    metrics = ["--prometheus-port", str(free_port())]
    command = [str(bin_dir / PEERS[name]), *(["launch"] if name == "smg" else [])]
    return [*command, *common, "--policy", "cache_aware", *quiet, *metrics, "--worker-urls", *urls]


def peer_version(name: str, env_dir: Path) -> str:
    """Return a peer's version from its environment."""
    (packages,) = (env_dir / "lib").glob("python3.*/site-packages")
    found = importlib.metadata.distributions(name=PEERS[name], path=[str(packages)])
    return next(iter(found)).version


@contextlib.asynccontextmanager
async def peer(
    name: str, env_dir: Path, engines: Sequence[str], folder: Path
) -> AsyncIterator[Subject]:
    """Run a peer; it answers when the block begins."""
    port, log = free_port(), folder / f"{name}.log"
    argv = peer_argv(name, env_dir, port, engines, folder)
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
    async with process(argv, log, quiet) as started:
        drain = asyncio.create_task(_drain(started))
        try:
            version, streams = peer_version(name, env_dir), _CARRIED.get(name, STREAMS)
            yield Subject(name, f"127.0.0.1:{port}", version, started.pid, streams=streams)
        finally:
            drain.cancel()


async def _drain(started: asyncio.subprocess.Process) -> None:
    """Throw away what a peer prints, so that it never waits for us."""
    assert started.stdout is not None
    while await started.stdout.read(1 << 16):
        pass


@contextlib.asynccontextmanager
async def forebay(engines: Sequence[str], folder: Path) -> AsyncIterator[Subject]:
    """Run Forebay's gateway."""
    log = folder / "forebay.log"
    async with process(python("gateway_forebay", str(folder), *engines), log) as started:
        news = await told(started, log)
        assert isinstance(news, dict)
        yield Subject(
            "forebay",
            str(news["http"]).removeprefix("http://"),
            importlib.metadata.version("forebay"),
            started.pid,
            {"authorization": f"Bearer {news['token']}"},
        )

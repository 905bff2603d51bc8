"""Real vLLM replicas for tests: one fork server per vLLM version, started once for the whole session."""

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import subprocess
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines import forkproto, tinymodel
from engines.replica import launch
from scheduler.contracts import fleet, frames, ids, usage
from tests import services
from tests.contract import vllm_sink

REPOSITORY = Path(__file__).parents[2]
NEWEST, BEFORE = "0.32", "0.31"
SECRET = "test-replica-secret"
READY_S = 280.0  # importing takes 9 s on two idle cores, 40 s on busy ones, minutes at a load of 30
START_S = 90.0  # a replica takes 1 to 8 s
PATIENCE_S = 60.0  # for what takes milliseconds on an idle machine
ARGUMENTS: Mapping[str, Any] = {
    "enforce-eager": True,
    "kv-cache-memory-bytes": "16M",
    "dtype": "float32",  # greedy answers are then equal from one batch to another
    "block-size": 32,
}


def descendants(pid: int) -> set[int]:
    """Return the processes below ``pid``."""
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{waiting.pop()}/task").iterdir():
                children = {int(n) for n in (task / "children").read_text().split()}
                waiting += children - found
                found |= children
    return found


def python(version: str) -> Path:
    """Return the interpreter of a vLLM environment."""
    return REPOSITORY / f".venv-vllm-{version}" / "bin" / "python"


def require(version: str) -> None:
    """Skip, or fail in CI, unless the environment of ``version`` is there."""
    services.require(python(version).exists(), f"vLLM {version}: run .ci/setup all")


class ForkServer:
    """A fork server and its event stream."""

    def __init__(self, version: str, folder: Path, module: str = "engines.vllm.forkserver") -> None:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment[vllm_sink.ROWS] = str(folder / "rows.jsonl")
        self.folder = folder
        self.log = folder / "forkserver.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [str(python(version)), "-P", "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                bufsize=0,
            )
        self._buffer = b""
        self._seen: list[Any] = []
        self.ready = self.wait(lambda event: isinstance(event, forkproto.Ready), READY_S)

    def send(self, command: forkproto.Command) -> None:
        """Write a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(forkproto.encode(command))

    def wait(self, wanted: Callable[[Any], bool], seconds: float = START_S) -> Any:
        """Return the first event, seen before or not, that is wanted."""
        until = time.monotonic() + seconds
        while True:
            for event in self._seen:
                if wanted(event):
                    self._seen.remove(event)
                    return event
            if not self._read(until - time.monotonic()):
                pytest.fail(
                    f"no such event; seen {self._seen}; log: {self.log.read_text()[-2000:]}"
                )

    def _read(self, seconds: float) -> bool:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(max(0.0, seconds)):
                return False
        chunk = os.read(self.process.stdout.fileno(), 65536)
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        self._seen += [forkproto.decode(line) for line in lines]
        return bool(chunk)

    def close(self) -> None:
        """Close its stdin, which ends it and every replica; kill it if it does not."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


@dataclasses.dataclass
class Replica:
    """A running replica."""

    id: str
    pid: int
    address: str
    phases_s: Mapping[str, float]
    log: Path
    rows_file: Path

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://{self.address}"

    def client(self) -> httpx.Client:
        """Return a client that holds the secret."""
        return httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {SECRET}"},
            timeout=60,
            trust_env=False,
            verify=False,
        )

    def kill_engine(self) -> None:
        """Kill the engine core, which is the main process's only child; the main process lives on."""
        (core,) = descendants(self.pid)
        os.kill(core, signal.SIGKILL)

    def state(self) -> dict[str, Any]:
        """Return what the replica says of itself."""
        with self.client() as client:
            state: dict[str, Any] = client.get("/forebay/state").raise_for_status().json()
        return state

    def until(
        self, holds: Callable[[dict[str, Any]], bool], seconds: float = PATIENCE_S
    ) -> dict[str, Any]:
        """Ask for the state until ``holds``."""
        until = time.monotonic() + seconds
        while True:
            state = self.state()
            if holds(state):
                return state
            assert time.monotonic() < until, f"still {state}"
            time.sleep(0.01)  # a process rings no bell, and it needs this core

    def row(self, request_id: str) -> dict[str, Any]:
        """Return the one usage row of a request, once it is written."""
        until = time.monotonic() + PATIENCE_S
        while True:
            lines = self.rows_file.read_text().splitlines() if self.rows_file.exists() else []
            rows = [row for row in map(json.loads, lines) if row["request_id"] == request_id]
            if rows or time.monotonic() > until:
                assert len(rows) == 1
                return dict(rows[0])
            time.sleep(0.01)  # a process rings no bell, and it needs this core


def spec(folder: Path, **changes: Any) -> fleet.ReplicaSpec:
    """Return the spec of the tiny model, which is made in ``folder`` if it is not there."""
    weights = folder / "tiny"
    if not (weights / "config.json").exists():
        tinymodel.main([str(weights), "--lora", "formal", "--lora", "rhyme"])
    fields: dict[str, Any] = {
        "model": "chat",
        "version": "1",
        "engine": fleet.EngineKind.VLLM,
        "weights": str(weights),
        "engine_args": ARGUMENTS,
        "itl_slo_ms": 10_000.0,  # busy machines' steps must not send batch away
        **changes,
    }
    return fleet.ReplicaSpec(**fields)


def record(replica_id: str, wanted: fleet.ReplicaSpec, folder: Path) -> launch.Launch:
    """Return the launch record of a replica."""
    secret = folder / "secret"
    if not secret.exists():
        secret.touch(mode=0o600)
        secret.write_text(SECRET)
    return launch.Launch(
        replica_id=replica_id,
        cluster="test",
        lease_id="l-0123456789ab",
        slot_id="l-0123456789ab.s0",
        slurm_job_id="1",
        node="n1",
        spec=wanted,
        role=fleet.Role.SHARED,
        secret_file=str(secret),
        sink_factory="tests.contract.vllm_sink:make",
    )


def begin(
    server: ForkServer, wanted: fleet.ReplicaSpec, env: Mapping[str, str] | None = None
) -> str:
    """Order a replica and return its id at once."""
    replica_id = ids.short_id("r")
    log = str(server.folder / f"{replica_id}.log")
    launched = record(replica_id, wanted, server.folder).to_json()
    server.send(forkproto.Start(replica_id, launched, env or {}, log))
    return replica_id


def listening(server: ForkServer, replica_id: str) -> Replica:
    """Return a replica that was ordered, once it listens."""
    started = server.wait(lambda e: isinstance(e, forkproto.Started) and e.id == replica_id)
    said = server.wait(
        lambda e: (
            getattr(e, "id", "") == replica_id
            and (isinstance(e, forkproto.Exited) or "address" in getattr(e, "status", {}))
        )
    )
    log = server.folder / f"{replica_id}.log"
    assert isinstance(said, forkproto.Status), f"{said}: {log.read_text()[-3000:]}"
    status = said.status
    return Replica(
        replica_id,
        started.pid,
        status["address"],
        status["phases_s"],
        log,
        server.folder / "rows.jsonl",
    )


def stop(server: ForkServer, replica_id: str, number: int = 9) -> forkproto.Exited:
    """Send a signal to a replica and return how it exited."""
    server.send(forkproto.Signal(replica_id, number))
    exited: forkproto.Exited = server.wait(
        lambda e: isinstance(e, forkproto.Exited) and e.id == replica_id
    )
    return exited


_SERVERS: dict[str, ForkServer] = {}


def shared(
    request: pytest.FixtureRequest, version: str, make: pytest.TempPathFactory
) -> ForkServer:
    """Return the session's fork server for ``version``; it is closed when the session ends."""
    require(version)
    if version not in _SERVERS or _SERVERS[version].process.poll() is not None:
        server = _SERVERS[version] = ForkServer(version, make.mktemp(f"vllm-{version}"))
        request.config.add_cleanup(server.close)
    return _SERVERS[version]


def identity(replica: Replica, endpoint: str, **changes: Any) -> usage.Identity:
    """Return the identity of a new attempt."""
    fields: dict[str, Any] = {
        "request_id": ids.uuid7(),
        "attempt": 1,
        "cluster": "test",
        "team": "physics",
        "user": "ada",
        "key_id": "k1",
        "model": "chat",
        "version": "1",
        "adapter": "",
        "endpoint": endpoint,
        "tier": "interactive",
        "replica_id": replica.id,
        "lease_id": "l-0123456789ab",
        "slurm_job_id": "1",
        "arrived_us": 1,
        "started_us": 2,
        **changes,
    }
    return usage.Identity(**fields)


def headers(who: usage.Identity) -> dict[str, str]:
    """Return the headers with which a gateway asks for frames."""
    return {
        "Accept": frames.MEDIA_TYPE,
        "X-Request-Id": f"{who.request_id}.{who.attempt}",
        "X-Forebay-Identity": urllib.parse.quote(json.dumps(dataclasses.asdict(who))),
    }


def ask(
    replica: Replica, path: str, body: Mapping[str, Any], **changes: Any
) -> tuple[list[frames.Frame], usage.Identity]:
    """Send a request as a gateway does, and return the whole answer's frames."""
    who = identity(replica, path, **changes)
    with replica.client() as client:
        answer = client.post(path, json=body, headers=headers(who))
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == frames.MEDIA_TYPE
    decoder = frames.Decoder()
    found = list(decoder.feed(answer.content))
    assert decoder.empty
    return found, who


def events(payload: bytes) -> Iterator[dict[str, Any]]:
    """Return the JSON of each server-sent event but ``[DONE]``; strict: no NaN, no Infinity."""
    for event in payload.decode().split("\n\n"):
        if event and event != "data: [DONE]":
            yield strict(event.removeprefix("data: "))


def strict(text: str | bytes) -> dict[str, Any]:
    """Parse JSON, refusing the constants that JSON does not have."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    value: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return value


class Spelling:
    """What the tiny model's tokens say, by its ``tokenizer.json``; special tokens say nothing."""

    def __init__(self, weights: str) -> None:
        read = json.loads((Path(weights) / "tokenizer.json").read_text())
        letters = {letter: n for letter, n in read["model"]["vocab"].items() if n < 256}
        self._bytes = {
            n: bytes(letters[letter] for letter in name)
            for name, n in read["model"]["vocab"].items()
        }

    def text(self, token_ids: tuple[int, ...] | list[int]) -> str:
        """Return the text; bytes that are no character become U+FFFD."""
        raw = b"".join(self._bytes.get(n, b"") for n in token_ids)
        return raw.decode(errors="replace")

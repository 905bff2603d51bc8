"""`forebay up` as a process of its own, and what can be seen of it from outside."""

import dataclasses
import functools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from forebay import config as configs
from forebay import installation
from slurm_plugins import select
from slurm_plugins import settings as slurm_settings
from tests import endings
from tests.integration.whole import processes as living
from tests.integration.whole import waiting

MODEL = "chat"
REPLICAS = 2
SEATS = 8
CONTEXT = 2048
STEP_MS = 20.0  # so that a stream of 100 tokens lasts two seconds
_UP_S = 180.0
# One call first, which imports everything: the other user may not be able to read this Python's files.
_AS_USER = """
import os, pwd, sys, httpx
from forebay import commands
httpx.get(os.environ["FOREBAY_URL"] + "/health", trust_env=False)
user = pwd.getpwnam(sys.argv[1])
os.setgroups([])
os.setgid(user.pw_gid)
os.setuid(user.pw_uid)
sys.argv = sys.argv[2:]
sys.exit(getattr(commands, sys.argv[0])())
"""
_TABLES: dict[str, dict[str, Any]] = {
    "scheduler": {
        "slurm_poll_s": 0.5,
        "adopt_grace_s": 2.0,
        "calm_s": 2.0,
        # A busy machine's delays are no spike; one that fills every seat is, whatever this says.
        "ttft_slo_ms": 4000.0,
        "drain_s": 3.0,
        "idle_lease_s": 1.0,
        "restart_backoff_s": 0.2,
        "lease_backoff_s": 0.5,
        "leader_ttl_s": 2.0,
        "agent_lost_s": 12.0,  # far above a heartbeat of 0.5 s on a busy machine
        "leader_renew_s": 0.5,
        "lease_team": "physics",
    },
    "gateway": {"key_cache_s": 0.0, "no_replica_grace_s": 20.0},
    # Below the cluster's KillWait of 5 s.
    "engines": {"grace_s": 4.0, "term_s": 1.0, "heartbeat_s": 0.5},
    "batch_jobs": {"first_window": 16, "first_backoff_s": 0.1, "max_wait_s": 0.5},
    "accounting": {"segment_bytes": 262144, "segment_age_s": 2.0, "ship_every_s": 3.0},
}


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """How a command ended."""

    code: int
    out: str
    err: str


class Running:
    """One installation; `up` starts it if it does not run.

    Args:
        folder: state, configuration and log go there.
        slurm: the [slurm] table.
        munge_socket: munged's socket, "" for none.
        env: variables that point commands at the cluster.
        gateway: more keys of the [gateway] table.
        scheduler: more keys of the [scheduler] table.
        models: the [[models]] tables, as TOML; the default is what `REPLICAS` and its like say.
        replicas: that serve when it is at rest.
    """

    def __init__(
        self,
        folder: Path,
        slurm: Mapping[str, Any],
        munge_socket: str = "",
        env: Mapping[str, str] | None = None,
        gateway: Mapping[str, Any] | None = None,
        *,
        scheduler: Mapping[str, Any] | None = None,
        models: str = "",
        replicas: int = 0,
    ) -> None:
        self.size = replicas or REPLICAS
        self.came_up_s = 0.0  # seconds from its last start until it was at rest
        self.folder = folder
        self.state = folder / "state"
        self.config_file = folder / "forebay.toml"
        self._log = folder / "up.log"
        self._process: subprocess.Popen[bytes] | None = None
        # A client and its TLS context for each call would cost more than the call; no connection is
        # kept, since what is at its other end may be killed.
        self.client = httpx.Client(
            timeout=90,
            trust_env=False,
            verify=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )
        http, grpc = _free_ports()
        self.http, self.grpc = f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc}"
        self.env = {**os.environ, **(env or {}), "FOREBAY_URL": self.http}
        for name in ("FOREBAY_API_KEY", "FOREBAY_API_KEY_FILE", "FOREBAY_SPOOL"):
            self.env.pop(name, None)
        if munge_socket:
            self.env["FOREBAY_MUNGE_SOCKET"] = munge_socket
        doors = {"http_port": http, "grpc_port": grpc, "munge_socket": munge_socket}
        here = {
            "state_dir": str(self.state),
            "stable_s": 1.0,
        }  # what is killed by turns is no crash loop
        tables = {**_TABLES, "forebay": here, "slurm": dict(slurm)}
        tables["gateway"] = {**tables["gateway"], **doors, **(gateway or {})}
        tables["scheduler"] = {**tables["scheduler"], **(scheduler or {})}
        tables["engines"] = {**tables["engines"], "gpu_lock_dir": str(folder / "gpus")}
        self.config_file.write_text(_toml(tables) + (models or simulated(self.size)))

    # Its life

    def up(self) -> None:
        """Start it, unless it runs, and wait until every replica serves."""
        if self._process is None or self._process.poll() is not None:
            (self.state / "gateway.json").unlink(missing_ok=True)
            argv = [sys.executable, "-P", "-m", "forebay", "up", "--config", str(self.config_file)]
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    endings.tied("INT", argv), stdout=log, stderr=log, env=self.env
                )
            began = time.monotonic()
            self.settled(_UP_S)
            self.came_up_s = time.monotonic() - began
        self.settled(_UP_S)

    def down(self) -> int:
        """End it as Ctrl-C does and return its exit code; 0 if it did not run."""
        if self._process is None:
            return 0
        self._process.send_signal(signal.SIGINT)
        try:
            return self._process.wait(120)
        finally:
            self._process = None

    def close(self) -> None:
        """End it for good."""
        try:
            self.down()
        finally:
            self.client.close()

    def log(self) -> str:
        """Return the log of `forebay up`."""
        return self._log.read_text(errors="replace")

    def processes(self) -> list[living.Process]:
        """List everything of it that lives, in leases too; not commands that tests run."""
        return living.marked(str(self.state / "spool"))

    def part(self, name: str) -> living.Process:
        """Return the one process of a part."""
        (found,) = (each for each in self.processes() if each.part == name)
        return found

    def replica_process(self, replica_id: str) -> living.Process:
        """Return a replica's process."""
        (found,) = (
            each
            for each in self.processes()
            if each.part == "replica" and any(replica_id in word for word in each.argv)
        )
        return found

    # What it says

    @property
    def admin_key(self) -> str:
        """The platform's own admin key."""
        return (self.state / "secrets" / installation.ADMIN_KEY).read_text().strip()

    def call(self, method: str, path: str, body: Any = None, **params: str) -> Any:
        """Ask the gateway as an admin; an answer that is no success fails the test."""
        answer = self.client.request(
            method,
            self.http + path,
            json=body,
            params=params,
            headers={"Authorization": f"Bearer {self.admin_key}"},
        )
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json()

    def replicas(self) -> list[dict[str, Any]]:
        """Return the replicas that serve, oldest id first."""
        found = self.call("GET", "/admin/replicas")["replicas"]
        return sorted(
            (each for each in found if each["state"] == "serving"),
            key=lambda each: str(each["replica_id"]),
        )

    def leases(self, *, ended: bool = False) -> list[dict[str, Any]]:
        """Return the leases, without those that have ended unless asked."""
        params = {"all": "true"} if ended else {}
        found: list[dict[str, Any]] = self.call("GET", "/admin/leases", **params)["leases"]
        return found

    def batch_seats(self) -> int:
        """Return how many seats batch holds, by the replicas' own word."""
        return sum((each["stats"] or {}).get("batch", 0) for each in self.replicas())

    def attempts(self, **params: str) -> list[dict[str, Any]]:
        """Return usage rows, one for each attempt."""
        answer = self.call("GET", "/forebay/v1/usage/requests", attempts="1", **params)
        assert answer["problems"] == []
        rows: list[dict[str, Any]] = answer["rows"]
        return rows

    def attempts_of(self, caller_request_id: str) -> list[dict[str, Any]]:
        """Return the attempts of a request by the id that its caller gave."""
        return [row for row in self.attempts() if row["caller_request_id"] == caller_request_id]

    def open_requests(self) -> int:
        """Return how many requests wait or run in the gateway."""
        headers = {"Authorization": f"Bearer {self.admin_key}"}
        text = self.client.get(f"{self.http}/metrics", headers=headers).text
        (line,) = (each for each in text.splitlines() if each.startswith("forebay_requests_open "))
        return int(float(line.split()[1]))

    def settled(self, within_s: float = waiting.LONG_S) -> None:
        """Wait until it is as if nothing had happened: all replicas serve, no seat held, no row open."""
        waiting.eventually(self._settled, "an installation at rest", within_s)

    def _settled(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError(f"forebay up has ended: {self.log()}")
        try:
            held = [
                (each["role"], each["stats"]["interactive"], each["stats"]["batch"])
                for each in self.replicas()
                if each["stats"] is not None
            ]
            assert held == [("shared", 0, 0)] * self.size, held
            assert len(self.leases()) == self.size
            assert self.open_requests() == 0
        except (httpx.TransportError, FileNotFoundError) as error:
            raise AssertionError(f"the gateway does not answer: {error}") from error
        rows = self.attempts(outcome="open")
        assert rows == [], rows
        return True

    def slurm_jobs(self) -> list[str]:
        """Return the ids of the open Slurm jobs that bear our stamp, by Slurm's own word."""
        table = configs.load(self.config_file).table(slurm_settings.SlurmSettings)
        if table.rest_url:
            table = dataclasses.replace(table, client="cli")  # another way than Forebay's own
        port = select.connect(table, self.state).port
        return sorted(job.job_id for job in port.jobs() if job.stamp and not job.state.final)

    # Its commands

    def command(
        self, name: str, *words: str, key: str = "", user: str = "", cwd: Path | None = None
    ) -> Command:
        """Run a command as a user does; without a key it is MUNGE that says who asks."""
        argv = [str(Path(sys.executable).parent / name), *words]
        if user:
            argv = [sys.executable, "-P", "-c", _AS_USER, user, name, *words]
        done = subprocess.run(
            argv,
            env=self.env | ({"FOREBAY_API_KEY": key} if key else {}),
            cwd=cwd or self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=waiting.LONG_S,
            check=False,
        )
        return Command(done.returncode, done.stdout, done.stderr)

    @functools.cached_property
    def key(self) -> str:
        """An API key of team physics for every tier, the same for all tests."""
        return self.new_key()

    def new_key(self, tiers: str = "interactive,standard,batch", *words: str) -> str:
        """Make an API key of team physics with fctl and return its token."""
        done = self.command(
            *("fctl", "key", "create", "--team", "physics", "--user", "ada", "--tiers", tiers),
            *words,
            key=self.admin_key,
        )
        assert done.code == 0, done.err
        return done.out.splitlines()[0]


def _free_ports() -> tuple[int, int]:
    """Return two ports below those that outgoing connections take: a gateway comes back to its own."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    while len(found) < 2:
        port = random.randrange(10_000, max(low, 20_000))
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if port not in found and probe.connect_ex(("127.0.0.1", port)) != 0:
                found.append(port)
    return found[0], found[1]


def _toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    lines = []
    for name, values in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def simulated(replicas: int, name: str = MODEL, args: str = f'"step-base-ms" = {STEP_MS}') -> str:
    """Return a [[models]] table of the simulated engine, each replica a whole node."""
    return f"""\
[[models]]
name = "{name}"
engine = "simulated"
seats = {SEATS}
reserved_seats = 1
itl_slo_ms = 1000
max_context = {CONTEXT}
gpus = 4
replicas = {replicas}
engine_args = {{ {args} }}
"""

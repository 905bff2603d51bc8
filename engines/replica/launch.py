"""The launch record: all that a replica's process must know to begin, and how it answers while it does.

The slot's supervisor writes it as a JSON file for a child process, or sends it through a fork server.
The process reports by JSON lines on a pipe whose number is in its environment.
"""

import contextlib
import dataclasses
import importlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from engines import private
from engines.replica import app, state, throttle
from scheduler.contracts import fleet, spec_json, stored, usage

STATUS_FD = "FOREBAY_STATUS_FD"  # environment: the pipe's number
SinkFactory = Callable[[str], usage.UsageSink]


class LaunchError(ValueError):
    """The launch record can't be used; the message says which part."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rank:
    """Which part of a replica over several nodes a process is.

    Attributes:
        number: 0 serves; the others compute for it.
        nodes: how many there are.
        meet: ``host:port`` where rank 0 waits for the others.
    """

    number: int
    nodes: int
    meet: str

    @property
    def place(self) -> tuple[str, int]:
        """Return `meet` as host and port."""
        host, _, port = self.meet.rpartition(":")
        return host, int(port)


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """How to start one replica.

    Attributes:
        host: address to listen on; the port is chosen by the kernel.
        secret_file: 0600 file with the bearer secret.
        sink_factory: import path ``module:function`` of a `SinkFactory`, for processes that are not
            started through Forebay's own command line (a fork server's children); "" otherwise.
        rank: which part of it, of a replica over several nodes; None: it has one.
    """

    replica_id: str
    cluster: str
    lease_id: str
    slot_id: str
    slurm_job_id: str
    node: str
    spec: fleet.ReplicaSpec
    role: fleet.Role
    secret_file: str
    host: str = "127.0.0.1"
    incarnation: int = 1
    sink_factory: str = ""
    rank: Rank | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Launch":
        """Read what `to_json` wrote.

        Raises:
            LaunchError: a field is missing, unknown or wrong.
        """
        try:
            rank = value.get("rank")
            return stored.read(
                cls,
                value,
                spec=spec_json.read(value["spec"]),
                role=fleet.Role(value["role"]),
                rank=None if rank is None else stored.read(Rank, rank),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise LaunchError(f"launch record: {error}") from error

    @classmethod
    def read(cls, path: Path) -> "Launch":
        """Read the record from a file.

        Raises:
            LaunchError: it can't be read, or is wrong.
        """
        try:
            return cls.from_json(json.loads(path.read_bytes()))
        except (OSError, ValueError) as error:
            raise LaunchError(f"{path}: {error}") from error

    def secret(self) -> str:
        """Return the bearer secret.

        Raises:
            LaunchError: the file is missing, empty, or others may read it.
        """
        try:
            return private.read(Path(self.secret_file))
        except private.PrivateFileError as error:
            raise LaunchError(str(error)) from error

    def options(self) -> app.Options:
        """Return how to set the replica's stack up."""
        return app.Options(
            secret=self.secret(),
            role=self.role,
            seats=self.spec.seats,
            reserved_seats=self.spec.reserved_seats,
            about=state.About(
                replica_id=self.replica_id,
                cluster=self.cluster,
                lease_id=self.lease_id,
                slurm_job_id=self.slurm_job_id,
                model=self.spec.model,
                version=self.spec.version,
                incarnation=self.incarnation,
            ),
            limits=throttle.Limits(self.spec.itl_slo_ms, _chunk(self.spec)),
        )

    def open_sink(self) -> usage.UsageSink:
        """Call the `SinkFactory` that `sink_factory` names, with this replica's writer name.

        Raises:
            LaunchError: there is no such function.
        """
        module, _, function = self.sink_factory.partition(":")
        try:
            factory: SinkFactory = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError, ValueError) as error:
            raise LaunchError(f"sink_factory {self.sink_factory!r}: {error}") from error
        return factory(self.writer)

    @property
    def writer(self) -> str:
        """The name under which this replica's process appends rows."""
        return f"replica-{self.replica_id}"


def _chunk(spec: fleet.ReplicaSpec) -> int:
    """Return the prompt tokens of one step at most, as far as the spec says."""
    said = str(spec.engine_args.get("max-num-batched-tokens", ""))
    if said.isdecimal() and int(said):
        return int(said)
    return int(spec.tuning.get("chunk_tokens", throttle.PREFILL_TOKENS))


class Reporter(Protocol):
    """How a starting replica tells its supervisor where it stands."""

    def phase(self, name: str, seconds: float) -> None:
        """One start-up phase is over."""
        ...

    def listening(self, address: str, incarnation: int, phases_s: Mapping[str, float]) -> None:
        """It answers at ``address``."""
        ...

    def failed(self, reason: str) -> None:
        """It can't start; ``reason`` is one line. The process ends after this."""
        ...


class PipeReporter:
    """Writes JSON lines to a pipe, as `engines.forkproto.Status` describes them."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def from_environment(cls) -> "PipeReporter":
        """Return the reporter for `STATUS_FD`; without one it reports to nobody."""
        return cls(int(os.environ.pop(STATUS_FD, "-1")))

    def phase(self, name: str, seconds: float) -> None:
        """Tell that a phase is over."""
        self._write({"phase": name, "seconds": seconds})

    def listening(self, address: str, incarnation: int, phases_s: Mapping[str, float]) -> None:
        """Tell the address."""
        self._write({"address": address, "incarnation": incarnation, "phases_s": dict(phases_s)})

    def failed(self, reason: str) -> None:
        """Tell why it can't start."""
        self._write({"failed": " ".join(reason.split())})

    def _write(self, value: Mapping[str, Any]) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(BrokenPipeError):  # the supervisor is gone: so shall we be
                os.write(self._descriptor, json.dumps(value).encode() + b"\n")

"""Ports between the parts: what one needs of another, wired together by `forebay/` alone."""

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from scheduler.contracts import errors, fleet, observed, requests


class FleetSource(Protocol):
    """What a gateway worker knows of the fleet, and where it tells its demand."""

    def view(self) -> fleet.FleetView | None:
        """Return the newest view, or None before the first; never blocks."""
        ...

    async def changed(self, after: int) -> None:
        """Return once the view's revision is other than ``after``."""
        ...

    def report(self, demand: Sequence[observed.Demand]) -> None:
        """Offer the newest demand; it is sent with the next report, older ones are dropped."""
        ...

    def tell(self, trials: Sequence[observed.Trial]) -> None:
        """Offer how requests fared on the versions that are compared."""
        ...

    def compared(
        self, copies: Sequence[observed.Copied], dropped: Sequence[observed.CopiesDropped]
    ) -> None:
        """Offer how copies fared that shadow versions got, and how many were not made."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class BatchWork:
    """What batch jobs still want of one model.

    Attributes:
        lines: lines left, of jobs that may run.
        output_tokens: tokens that these lines are expected to sample.
        deadline_us: UTC µs of the earliest deadline, 0 without one.
    """

    lines: int
    output_tokens: int
    deadline_us: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Arrived:
    """What a quarter of an hour brought of one model, tiers interactive and standard.

    Attributes:
        requests: that arrived in it.
        held_s: seconds that one of them stayed, from its arrival to its last token; 0 if not known.
    """

    requests: float
    held_s: float = 0.0


class DemandLedger(Protocol):
    """What callers asked for so far; `accounting.demand` is the real one, over the rollups."""

    def quarters(self, first_us: int, last_us: int) -> Mapping[str, Mapping[int, Arrived]]:
        """Return model → begin of a quarter of an hour (UTC µs, from ``first_us``) → what arrived.

        A quarter without requests is absent. Blocks.

        Raises:
            OSError: it can't be read now; ask again later.
        """
        ...


class NoLedger:
    """A ledger of an installation that keeps none: nothing is known."""

    def quarters(self, first_us: int, last_us: int) -> Mapping[str, Mapping[int, Arrived]]:
        """Return nothing."""
        return {}


class StaticFleet:
    """The fake source: a view that a test sets."""

    def __init__(self, view: fleet.FleetView | None = None) -> None:
        self._view = view
        self._event = asyncio.Event()
        self.demand: list[observed.Demand] = []
        self.trials: list[observed.Trial] = []
        self.copies: list[observed.Copied] = []
        self.dropped: list[observed.CopiesDropped] = []

    def view(self) -> fleet.FleetView | None:
        """Return the view that was set last."""
        return self._view

    def set(self, view: fleet.FleetView) -> None:
        """Publish ``view`` and wake who waits."""
        self._view = view
        self._event.set()
        self._event = asyncio.Event()

    async def changed(self, after: int) -> None:
        """Wait for `set`, unless the view is already another one."""
        if self._view is None or self._view.revision == after:
            await self._event.wait()

    def report(self, demand: Sequence[observed.Demand]) -> None:
        """Keep what was reported last."""
        self.demand = list(demand)

    def tell(self, trials: Sequence[observed.Trial]) -> None:
        """Keep what was told."""
        self.trials += trials

    def compared(
        self, copies: Sequence[observed.Copied], dropped: Sequence[observed.CopiesDropped]
    ) -> None:
        """Keep what was told."""
        self.copies += copies
        self.dropped += dropped


class Authenticator(Protocol):
    """Turns an Authorization header into a caller."""

    async def authenticate(self, authorization: str | None) -> requests.Caller:
        """Return who the credential is.

        Args:
            authorization: the header's value: ``Bearer fbk_…`` or ``Munge MUNGE:…:``.

        Raises:
            errors.Unauthenticated: none, or unknown; `errors.KeyExpired` where it was good once.
        """
        ...


class KeyStore(Protocol):
    """Finds API keys; the registry is the real one."""

    async def find(self, token: str) -> requests.Caller:
        """Return the key's caller; raises as `Authenticator.authenticate` does."""
        ...


class Directory(Protocol):
    """Knows which team a Unix user charges, from Slurm's associations."""

    async def caller(self, user: str) -> requests.Caller:
        """Return the caller for a Unix user.

        Raises:
            errors.Forbidden: the user has no association.
        """
        ...


class StaticKeys:
    """The fake of `KeyStore` and `Authenticator`: tokens that a test knows."""

    def __init__(self, callers: Mapping[str, requests.Caller]) -> None:
        self.callers = dict(callers)

    async def find(self, token: str) -> requests.Caller:
        """Return the caller of ``token``."""
        if token not in self.callers:
            raise errors.Unauthenticated("API key not known: create one with `fctl key create`")
        return self.callers[token]

    async def authenticate(self, authorization: str | None) -> requests.Caller:
        """Return the caller of ``Bearer <token>``."""
        return await self.find((authorization or "").removeprefix("Bearer "))


class Step(Protocol):
    """A running job step (or a local process that stands for one)."""

    @property
    def pid(self) -> int:
        """The local process that represents it: srun, or the process itself."""
        ...

    async def wait(self) -> int:
        """Return its exit code once it has ended."""
        ...

    async def terminate(self) -> None:
        """Send SIGTERM to the step's tasks; no error if they are gone."""
        ...

    async def kill(self) -> None:
        """End the step's tasks for good; no error if they are gone."""
        ...


class StepLauncher(Protocol):
    """Starts a slot's supervisor with GPUs of its lease bound to it."""

    async def start(
        self,
        argv: Sequence[str],
        *,
        gpus: int,
        cpus: int,
        env: Mapping[str, str],
        log: Path,
        node: int | None = None,
    ) -> Step:
        """Start ``argv`` as one task holding ``gpus`` GPUs that no other step has.

        Args:
            argv: the command.
            gpus: GPUs to bind; 0 for none.
            cpus: CPUs to bind.
            env: the whole environment to add to the lease's own.
            log: file for stdout and stderr, appended.
            node: on which of the lease's nodes, from 0; None: any that has the GPUs.

        Raises:
            slurm.SlurmError: the step could not be started (`SlurmUnavailable`: try again later).
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class ApiResponse:
    """A control-plane answer: HTTP status, the parsed JSON (or None), and the raw body."""

    status: int
    json: Any
    body: bytes


class Api(Protocol):
    """The commands' way to a gateway: base URL and credential are the implementation's business."""

    def call(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: Mapping[str, str] | None = None,
        upload: Path | None = None,
        download: Path | None = None,
    ) -> ApiResponse:
        """Send one request; ``upload`` streams a file as the body, ``download`` streams the body to one.

        Raises:
            command_line.CommandError: the gateway can't be reached or refused; the message is one
                line, ready for stderr.
        """
        ...

"""The LoRA adapters of one replica: loaded and let go as told, one after the other, beside what it serves.

Which ones is the broker's decision (`scheduler.core.adapters`). Here an adapter with running sequences stays
until they have ended, one that can't be loaded is told and harms nothing, and a request for one that is not
loaded gets no answer by the base model: it is sent back to wait.
"""

import asyncio
import contextlib
import dataclasses
import logging
import time as timing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from engines.replica import gate
from scheduler.contracts import clock, loras

_log = logging.getLogger(__name__)
_S = loras.AdapterState


class AdapterFailed(Exception):
    """An engine can't use an adapter; the message is one line. The engine goes on as before."""


class AdapterPort(Protocol):
    """An engine that takes adapters while it serves."""

    @property
    def room(self) -> int:
        """How many it may hold at once, 0 if it was not started for any."""
        ...

    @property
    def fixed(self) -> Mapping[str, str]:
        """Adapters that came with the engine, name to path; they stay."""
        ...

    async def load(self, name: str, path: str) -> None:
        """Have an adapter ready to run; raises `AdapterFailed`."""
        ...

    async def unload(self, name: str) -> None:
        """Forget an adapter on which nothing runs; raises `AdapterFailed`."""
        ...


@dataclasses.dataclass(slots=True)
class _Held:
    path: str
    state: loras.AdapterState
    running: int = 0
    used_us: int = 0
    uses: int = 0
    load_ms: float = 0.0
    reason: str = ""


class Adapters:
    """A replica's adapters.

    Args:
        port: the engine's way to load them; None: it takes none, and a request's adapter is its own affair.
        time: the clock.
    """

    def __init__(self, port: AdapterPort | None, time: clock.Clock) -> None:
        self._port = port
        self._clock = time
        self._held: dict[str, _Held] = {}
        self._fixed = dict(port.fixed) if port is not None else {}
        for name, path in self._fixed.items():
            self._held[name] = _Held(path, _S.LOADED, used_us=time.wall_us())
        self._wanted: dict[str, str] = dict(self._fixed)
        self._order: tuple[str, ...] = ()
        self._going = ""  # the engine lets it go now: it can't be kept any more
        self._bell = asyncio.Event()
        self._moved = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None

    @property
    def room(self) -> int:
        """How many it may hold at once, 0 if it takes none."""
        return self._port.room if self._port is not None else 0

    def report(self) -> list[dict[str, Any]] | None:
        """Return what is to be told of each; None where the engine takes none while it serves."""
        if not self.room:
            return None
        return [
            {"name": name, **dataclasses.asdict(held), "state": held.state.value}
            for name, held in sorted(self._held.items())
        ]

    @contextlib.contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Keep an adapter while a request runs on it.

        Raises:
            gate.NoAdapter: it is not loaded, or on its way out: the request waits elsewhere.
        """
        held = self._held.get(name)
        if not name or not self.room:
            yield
            return
        if held is None or held.state is not _S.LOADED:
            state = held.state if held else "not loaded"
            raise gate.NoAdapter(f"adapter {name} is {state} here")
        held.running += 1
        try:
            yield
        finally:
            held.running -= 1
            held.uses += 1
            held.used_us = self._clock.wall_us()
            if not held.running:
                self._bell.set()

    def want(self, wanted: Sequence[tuple[str, str]]) -> None:
        """Have these loaded, name and path, the most urgent first; every other one goes."""
        self._order = tuple(name for name, _ in wanted)
        self._wanted = {**dict(wanted), **self._fixed}
        for name, held in list(self._held.items()):
            kept = self._wanted.get(name) == held.path
            if held.state is _S.LOADED and not kept:
                held.state = _S.LEAVING
            elif held.state is _S.LEAVING and kept and name != self._going:
                held.state = _S.LOADED
            elif held.state is _S.FAILED and not kept:
                del self._held[name]
        self._bell.set()
        if self._worker is None and self.room:
            self._worker = asyncio.create_task(self._work())

    async def settled(self, limit_s: float) -> None:
        """Return once all is as wanted, or what is not waits for running sequences, or time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._worker is not None and self._next() is not None:
                    await self._moved.wait()

    def end(self) -> None:
        """Load nothing more: the replica stops."""
        if self._worker is not None:
            self._worker.cancel()

    async def _work(self) -> None:
        while True:
            self._bell.clear()
            step = self._next()
            if step is None:
                await self._bell.wait()
                continue
            name, loads = step
            if loads:
                await self._load(name, self._wanted[name])
            else:
                await self._unload(name)
            self._moved.set()
            self._moved = asyncio.Event()

    def _next(self) -> tuple[str, bool] | None:
        """Return whom to load (true) or let go now."""
        for name, held in self._held.items():
            if held.state is _S.LOADING:
                return name, True
        for name, held in self._held.items():
            if held.state is _S.LEAVING and not held.running:
                return name, False
        inside = sum(held.state is not _S.FAILED for held in self._held.values())
        if inside >= self.room:
            return None
        return next(((name, True) for name in self._order if name not in self._held), None)

    async def _load(self, name: str, path: str) -> None:
        began = timing.monotonic()
        held = self._held[name] = _Held(path, _S.LOADING, used_us=self._clock.wall_us())
        reason = await self._tried(self._port.load(name, path)) if self._port else ""
        held.load_ms = round((timing.monotonic() - began) * 1000, 1)
        held.used_us = self._clock.wall_us()
        if reason:
            held.state, held.reason = _S.FAILED, reason
            _log.warning("adapter %s of %s: not loaded: %s", name, path, reason)
        else:
            held.state = _S.LOADED
            _log.info("adapter %s of %s: loaded in %.0f ms", name, path, held.load_ms)
        if self._wanted.get(name) != path:  # it was given up meanwhile
            if held.state is _S.LOADED:
                held.state = _S.LEAVING
            else:
                del self._held[name]

    async def _unload(self, name: str) -> None:
        held = self._held[name]
        self._going = name
        reason = await self._tried(self._port.unload(name)) if self._port else ""
        self._going = ""
        # An engine that does not let go has no slot for another one either: the next load will say so.
        _log.info("adapter %s of %s: let go%s", name, held.path, f": {reason}" if reason else "")
        del self._held[name]

    @staticmethod
    async def _tried(act: Any) -> str:
        """Return why an act failed, as one line, or ""."""
        try:
            await act
        except AdapterFailed as error:
            return " ".join(str(error).split())[:500]
        except Exception as error:  # whatever an engine raises: the replica goes on
            _log.exception("adapter")
            return " ".join(f"{type(error).__name__}: {error}".split())[:500]
        return ""

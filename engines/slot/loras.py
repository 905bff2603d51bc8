"""A replica's adapters as its slot follows them: staged, judged beside the base, ordered, and told.

The broker says which (`scheduler.core.adapters`); the replica loads and lets go (`engines.replica.adapters`).
What is wrong with an adapter's files is found here, before an engine sees them.
"""

import asyncio
import dataclasses
import logging
import time as timing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engines import lora
from engines.slot import control
from engines.weights import stager, store
from scheduler.contracts import fleet, loras, wire
from scheduler.contracts.v1 import control_pb2 as pb

_log = logging.getLogger(__name__)
_S = loras.AdapterState
Wanted = Sequence[tuple[str, str]]


@dataclasses.dataclass(slots=True)
class _Files:
    """An adapter's files: where they come from and how far they are.

    Attributes:
        folder: where they lie on this node, "" until they are there.
        reason: why they can't be used, or "".
        took_ms: that having and judging them took.
    """

    path: str
    work: "asyncio.Task[None] | None" = None
    use: store.Use | None = None
    folder: str = ""
    reason: str = ""
    took_ms: float = 0.0
    told: str = ""


class Loras:
    """Follows which adapters a replica shall hold.

    Args:
        what: the replica's spec, with its weights where they are on this node.
        provider: the node's weights.
        news: called when there is something to do or to tell.
    """

    def __init__(
        self,
        what: Callable[[], fleet.ReplicaSpec],
        provider: stager.Provider,
        news: Callable[[], None],
    ) -> None:
        self._what = what
        self._provider = provider
        self._news = news
        self._files: dict[str, _Files] = {}
        self._sent: list[tuple[str, str]] | None = None
        self._sending: asyncio.Task[None] | None = None
        self._said: Sequence[Mapping[str, Any]] | None = None
        self._room = 0

    def heard(self, state: Mapping[str, Any]) -> None:
        """Take what the replica says of its adapters."""
        self._said = state.get("adapters")
        self._room = int(state.get("adapter_room", 0))

    def follow(self, wanted: Wanted | None, remote: control.Control) -> None:
        """Bring the replica nearer to what is wanted; None: it is not said. Never waits."""
        if wanted is None or self._said is None:
            return
        names = dict(wanted)
        for name, files in list(self._files.items()):
            if names.get(name) != files.path and self._gone(name, files):
                self._drop(name)
        for name, path in wanted:
            if name not in self._files:
                files = self._files[name] = _Files(path)
                files.work = asyncio.create_task(self._prepare(files))
        ready = [
            (name, self._files[name].folder)
            for name, path in wanted
            if self._files[name].path == path and self._files[name].folder
        ]
        sending = self._sending is not None and not self._sending.done()
        if ready != self._sent and not sending:
            self._sending = asyncio.create_task(self._send(ready, remote))

    def _gone(self, name: str, files: _Files) -> bool:
        """Whether the replica does not use an adapter's files any more."""
        return not any(
            said["name"] == name and said["path"] == files.folder for said in self._said or ()
        )

    async def _prepare(self, files: _Files) -> None:
        """Have an adapter's files on this node, and look whether the base can take them."""
        began = timing.monotonic()
        try:
            files.use = await self._provider.adapter(
                files.path, lambda line: self._tell(files, line)
            )
            folder = files.use.folder if files.use is not None else Path(files.path)
            spec = self._what()
            if spec.engine is fleet.EngineKind.VLLM:
                await asyncio.to_thread(lora.judge, folder, 0, [spec])
            files.folder = str(folder)
        except (stager.Refused, lora.AdapterError, OSError) as error:
            files.reason = " ".join(str(error).split())[:500]
            _log.warning("adapter of %s: %s", files.path, files.reason)
        except Exception as error:  # whatever odd files do: it is told, and the slot goes on
            files.reason = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
            _log.exception("adapter of %s", files.path)
        files.told = ""
        files.took_ms = (timing.monotonic() - began) * 1000
        self._news()

    def _tell(self, files: _Files, line: str) -> None:
        files.told = line
        self._news()

    async def _send(self, ready: list[tuple[str, str]], remote: control.Control) -> None:
        try:
            self.heard({"adapter_room": self._room, **await remote.adapters(ready)})
        except control.ControlError as error:
            _log.warning("adapters: %s", error)
            return  # tried again with the next look at the replica, not at once and for ever
        self._sent = ready
        self._news()

    def report(self, told: pb.ReplicaReport) -> None:
        """Put what is to be told of them into a replica's report."""
        told.takes_adapters = self._said is not None
        told.adapter_room = self._room
        told.adapters.extend(wire.adapters_to_pb(self._held()))

    def _held(self) -> list[loras.HeldAdapter]:
        """Return the adapters by the paths that they are declared with."""
        found: dict[str, loras.HeldAdapter] = {}
        for said in self._said or ():
            files = self._files.get(said["name"])
            mine = files is not None and files.folder == said["path"]
            took_ms = files.took_ms if files is not None and mine else 0.0
            found[said["name"]] = loras.HeldAdapter(
                **{
                    **said,
                    "state": _S(said["state"]),
                    "path": files.path if files is not None and mine else said["path"],
                    "load_ms": said["load_ms"] + took_ms if said["load_ms"] else 0.0,
                }
            )
        for name, files in self._files.items():
            if name not in found:
                state = _S.FAILED if files.reason else _S.LOADING
                reason = files.reason or files.told
                found[name] = loras.HeldAdapter(name, files.path, state, reason=reason)
        return list(found.values())

    def _drop(self, name: str) -> None:
        files = self._files.pop(name)
        if files.work is not None:
            files.work.cancel()
        if files.use is not None:
            files.use.close()

    def clear(self) -> None:
        """Forget everything: the replica's process has ended."""
        for name in list(self._files):
            self._drop(name)
        if self._sending is not None:
            self._sending.cancel()
        self._sent, self._said, self._room = None, None, 0

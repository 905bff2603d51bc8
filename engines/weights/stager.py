"""How a slot or an agent comes to weights on its node: on the disk already, or by a staging process."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from engines import processes, settings
from engines.weights import store, task
from scheduler.contracts import fleet, weights

GB = 1_000_000_000
_REAP_S = 0.01  # between two looks whether a killed process is gone
Told = Callable[[str], None]


class Refused(Exception):
    """These weights can't be had as they are; the message is one line for the model's owner."""


class Provider(Protocol):
    """What a keeper needs of the node's weights."""

    async def get(self, what: fleet.ReplicaSpec, told: Told) -> store.Use | None:
        """Return a replica's weights, in use, fetched if need be; None: they are loaded where they lie.

        Args:
            what: the replica.
            told: called with a line that says how far it is, or why it waits.

        Raises:
            Refused: they can't be had as they are.
        """
        ...

    async def adapter(self, path: str, told: Told) -> store.Use | None:
        """Return a LoRA adapter's files, in use, fetched if need be; None: they are loaded where they lie.

        Args:
            path: a folder, or a place.
            told: called with a line that says how far it is, or why it waits.

        Raises:
            Refused: they can't be had as they are.
        """
        ...

    def caches(self, what: fleet.ReplicaSpec) -> Mapping[str, str]:
        """Return the environment that keeps what its engine compiles beside its weights."""
        ...


class Stager:
    """The real `Provider`.

    Args:
        options: the [engines] settings.
        root: the folder; where the settings say if not given.
    """

    def __init__(self, options: settings.EnginesSettings, root: Path | None = None) -> None:
        self._options = options
        named = Path(options.weights_dir) if options.weights_dir else store.default_root()
        self._root = root or named

    def open(self) -> store.Store:
        """Open the node's folder; raises OSError if it can't be used."""
        return store.Store(self._root)

    async def get(self, what: fleet.ReplicaSpec, told: Told) -> store.Use | None:
        """Return a replica's weights; see `Provider`."""
        if what.engine is not fleet.EngineKind.VLLM or not weights.staged(what.weights):
            return None
        order = self._order(what.weights, what.weights_digest)
        return await self._have(order, told)

    async def adapter(self, path: str, told: Told) -> store.Use | None:
        """Return a LoRA adapter's files; see `Provider`."""
        if not weights.staged(path):
            return None
        order = dataclasses.replace(self._order(path, ""), adapter=True)
        return await self._have(order, told)

    async def _have(self, order: task.Order, told: Told) -> store.Use:
        while True:
            try:
                use = self.open().use(order.key)
            except OSError as error:
                raise Refused(f"weights: {error}") from error
            if use is not None:
                return use
            asked = task.Task(str(self._root), order, places(self._options))
            await self._run(asked, lambda news: told(_words(order.uri, news)))

    async def fetch(
        self, uri: str, digest: str, told: Told, *, ahead: bool = False, patient: bool = True
    ) -> Mapping[str, Any]:
        """Have weights on the disk; returns what the staging says of itself (`staging.Done`).

        Args:
            uri: their place.
            digest: that they must have, or "".
            told: called with a line that says how far it is, or why it waits.
            ahead: nobody waits for it: nothing is evicted for it.
            patient: wait for a place that is down; else it is refused.

        Raises:
            Refused: they can't be had as they are.
        """
        asked = self._task(uri, digest, ahead=ahead)
        asked = dataclasses.replace(asked, patience=-1 if patient else 0)
        return await self._run(asked, lambda news: told(_words(uri, news)))

    async def verify(self, uri: str, digest: str) -> str:
        """Read staged weights anew and compare them with their manifest; returns what came of it.

        Raises:
            Refused: they are not there, or damaged: gone from the disk then, and staged anew when wanted.
        """
        asked = dataclasses.replace(self._task(uri, digest), verify=True)
        done = await self._run(asked, lambda news: None)
        return f"whole, {done['size'] / GB:.2f} GB"

    def remove(self, uri: str, digest: str) -> str:
        """Remove staged weights; returns what came of it.

        Raises:
            Refused: they are in use, or not there.
        """
        key = weights.key(uri, digest)
        where = self.open()
        if where.about(key) is None:
            raise Refused(f"{uri}: not on this node's disk")
        if not where.evict(key):
            raise Refused(f"{uri}: in use on this node: drain its replicas first")
        return "removed"

    async def _run(
        self, asked: task.Task, told: Callable[[Mapping[str, Any]], None]
    ) -> Mapping[str, Any]:
        opened = subprocess.Popen(  # noqa: ASYNC220 - asyncio's own would start a thread to wait for it
            [sys.executable, "-P", "-m", "engines.weights"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, processes.PARENT: str(os.getpid())},
            start_new_session=True,
        )
        reader = asyncio.StreamReader()
        transport: asyncio.ReadTransport | None = None
        try:
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), opened.stdout
            )
            if opened.stdin is not None:
                opened.stdin.write(asked.to_json().encode() + b"\n")
                opened.stdin.close()
            while line := await reader.readline():
                try:
                    news = json.loads(line)
                except ValueError:  # a library's word on stdout
                    continue
                if "done" in news:
                    done: Mapping[str, Any] = news["done"]
                    return done
                if "failed" in news:
                    raise Refused(str(news["failed"]))
                told(news)
            raise Refused(
                f"{asked.order.uri}: its staging ended without a word: see the slot's log"
            )
        finally:
            left = (opened.stdin, opened.stdout if transport is None else transport)
            for pipe in left:
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()
            with contextlib.suppress(ProcessLookupError):
                opened.send_signal(signal.SIGKILL)
            # One that waits for its disk dies when that answers.
            while opened.poll() is None:  # noqa: ASYNC110 - a process that dies rings no bell
                await asyncio.sleep(_REAP_S)

    def _task(self, uri: str, digest: str, *, ahead: bool = False) -> task.Task:
        order = self._order(uri, digest, ahead=ahead)
        return task.Task(str(self._root), order, places(self._options))

    def _order(self, uri: str, digest: str, *, ahead: bool = False) -> task.Order:
        options = self._options
        return task.Order(
            uri,
            digest,
            parallel=options.weights_parallel,
            budget=round(options.weights_budget_gb * GB),
            reserve=round(options.weights_reserve_gb * GB),
            unsafe=options.weights_unsafe,
            ahead=ahead,
        )

    def caches(self, what: fleet.ReplicaSpec) -> Mapping[str, str]:
        """Return the environment for an engine's caches; see `Provider`.

        Empty where the node's folder can't be used: a replica whose weights are elsewhere does without.
        """
        if what.engine is not fleet.EngineKind.VLLM:
            return {}
        key = weights.key(
            what.weights if weights.staged(what.weights) else f"path://{what.weights}",
            what.weights_digest,
        )
        try:
            folder = self.open().caches(key)
        except OSError:
            return {}
        names = {
            "VLLM_CACHE_ROOT": "vllm",
            "TORCHINDUCTOR_CACHE_DIR": "inductor",
            "TRITON_CACHE_DIR": "triton",
        }
        return {name: str(folder / part) for name, part in names.items()}


def places(options: settings.EnginesSettings) -> task.Options:
    """Return how places are reached, as the settings say."""
    return task.Options(options.s3_endpoint, options.s3_region, options.s3_credentials)


def _words(uri: str, news: Mapping[str, Any]) -> str:
    if "waiting" in news:
        return f"waits for its weights: {news['waiting']}"
    if not news["of"]:
        return f"waits for its weights: another replica of this node stages {uri}"
    return f"staging {uri}: {news['got'] / GB:.2f} of {news['of'] / GB:.2f} GB"

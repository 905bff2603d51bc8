"""Which way a replica's process is started: depends on its engine and on the node."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from engines import container, settings
from engines.slot import children, spec
from engines.weights import store
from scheduler.contracts import fleet

DRIVER = Path("/dev/nvidiactl")  # there where NVIDIA's driver is


def engine_line(
    options: settings.EnginesSettings, run_dir: str, log_dir: str, *, gpus: bool
) -> list[str]:
    """Return the command of a vLLM replica, but for its ``--spec FILE``; in the site's image if there is one.

    Args:
        options: the [engines] settings.
        run_dir: the slot's; it is seen inside, as `log_dir` is.
        log_dir: the slot's.
        gpus: whether the node's GPUs and driver are to be inside.

    Raises:
        container.ContainerError: the image or what it shall see can't be used.
    """
    argv = [options.vllm_python, "-P", "-m", "engines.replica"]
    if not options.container:
        return argv
    own = [f"{children.ROOT}:ro", run_dir, log_dir, tempfile.gettempdir()]
    weights = options.weights_dir or str(store.default_root())
    return container.wrap(
        argv,
        image=options.container,
        runtime=options.container_runtime,
        options=options.container_options,
        binds=[*own, weights, *options.container_binds],
        gpus=gpus,
    )


class Starter(Protocol):
    """Starts replicas' processes."""

    def start(self, order: children.Order) -> children.Child:
        """Start one.

        Raises:
            children.StartError: it can't be started.
        """
        ...


class Starters:
    """The real `Starter` of a slot.

    Args:
        told: its spec.
        changed: called when the fork server becomes ready or fails.
    """

    def __init__(self, told: spec.SlotSpec, changed: Callable[[], None]) -> None:
        self._spec = told
        self._changed = changed
        self._forks: children.ForkServer | None = None

    @property
    def forks(self) -> bool:
        """Whether vLLM replicas come from a fork server."""
        wish = self._spec.options.fork_server
        if self._spec.options.container:
            return False  # the image is entered anew by each replica
        return wish == "on" or (wish == "auto" and not DRIVER.exists())

    def start(self, order: children.Order) -> children.Child:
        """Start a replica in the way that its engine needs.

        Raises:
            children.StartError: it can't be started.
        """
        if order.record.spec.engine is not fleet.EngineKind.VLLM:
            return children.PlainChild.start(self._spec.replica_argv, order)
        slot, options = self._spec, self._spec.options
        python = options.vllm_python
        if not python:
            raise children.StartError("no vLLM on this node: set engines.vllm_python")
        if not self.forks:
            try:
                line = engine_line(options, slot.run_dir, slot.log_dir, gpus=DRIVER.exists())
            except container.ContainerError as error:
                raise children.StartError(str(error)) from error
            return children.PlainChild.start(line, order)
        if self._forks is None:
            log = Path(self._spec.log_dir) / f"{self._spec.slot_id}.forkserver.log"
            self._forks = children.ForkServer(python, log, self._changed)
        return self._forks.order(order)

    async def close(self) -> None:
        """End the fork server."""
        if self._forks is not None:
            await self._forks.close()

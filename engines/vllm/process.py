"""What must hold in a process before it imports vLLM, however it was started."""

import contextlib
import importlib.metadata
import os
import signal
from collections.abc import Iterator

from engines import processes

SUPPORTED = (
    (0, 31),
    (0, 34),
)  # vLLM's minor versions that the adapter was written for: from, below
_ENVIRONMENT = {
    # The model is a folder on this machine; nothing is to be asked of a hub, or told to anybody.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Replicas share the node's cores: threads pinned to cores would all sit on the first ones.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def prepare() -> None:
    """Set vLLM's environment where the site has not, and refuse a version that is not supported.

    Raises:
        RuntimeError: the version is not supported; one line that says what to install.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # As many threads as the slot has CPUs. Left to itself OpenMP takes one for each core of the node:
    # two spinning at a barrier on busy cores made a 2 ms step last up to 250.
    os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("SLURM_CPUS_PER_TASK", "1"))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    check_version(importlib.metadata.version("vllm"))


def check_version(found: str) -> None:
    """Refuse a vLLM that the adapter was not written for; its names move with every minor version."""
    minor = tuple(int(part) for part in found.split(".")[:2])
    if not SUPPORTED[0] <= minor < SUPPORTED[1]:
        least, below = (".".join(map(str, each)) for each in SUPPORTED)
        raise RuntimeError(f"vLLM {found} is not supported: install vllm>={least},<{below}")


def bind_workers() -> None:
    """Have every process that this one forks, and those that they fork, die with its parent.

    The engine core and its workers are such processes; a killed replica takes them along.
    """
    forking = [0]
    os.register_at_fork(
        before=lambda: forking.__setitem__(0, os.getpid()),
        after_in_child=lambda: processes.die_with_parent(forking[0]),
    )


@contextlib.contextmanager
def deaf_to_sigterm() -> Iterator[None]:
    """Have this thread, and every process that it begins in the block, not hear SIGTERM.

    Slurm sends it to each process of a step. The replica drains then; vLLM's engine core would abort what
    runs, and its workers would end. They need no word: a replica kills its own, or they die with it. The
    block's thread hears at its end what came meanwhile.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

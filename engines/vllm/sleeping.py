"""vLLM's own sleep and wake (rung 2 on GPUs) by its client's calls, and the proof that memory was freed.

Level 1 copies the weights to host memory and wakes by copying them back; level 2 drops them and wakes by
loading them in place. Both drop the KV cache. On some platforms vLLM's sleep does nothing and says that it
sleeps, so each worker is asked for its device's free memory before and after: a sleep that freed too little
is a failed one, and whoever ordered it ends the process instead.
"""

import argparse
import logging
import time as timing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engines.replica import engine
from scheduler.contracts import fleet, tuning

WORKERS = "engines.vllm.sleeping.Memory"  # what vLLM mixes into its workers
_LEAST_SHARE = 0.5  # of its weights' bytes that each worker must free; their KV cache comes on top
_OPTION = "enable-sleep-mode"
_log = logging.getLogger(__name__)


class Memory:
    """What each of vLLM's workers answers by `collective_rpc`, as `worker_extension_cls` has it."""

    model_runner: Any

    def forebay_memory(self) -> list[int] | None:
        """Return free bytes of its device and its weights' bytes there; None: it has no such device."""
        import torch

        if not torch.accelerator.is_available():
            return None
        free, _ = torch.accelerator.get_memory_info()
        return [int(free), int(getattr(self.model_runner, "model_memory_usage", 0))]


def prepare(args: argparse.Namespace, spec: fleet.ReplicaSpec, platform: Any) -> None:
    """Set what vLLM must be started with to sleep later, where the platform has it and parking asks for it.

    Args:
        args: vLLM's own arguments, changed in place.
        spec: the replica's.
        platform: vLLM's `current_platform`.
    """
    parking = tuning.read(spec.tuning).parking
    if parking == "process":
        return
    said = any(_plain(name) == _OPTION for name in spec.engine_args)
    allocates = not platform.is_cuda_alike() or platform.is_cumem_allocator_available()
    if not said and platform.is_sleep_mode_available() and allocates:
        args.enable_sleep_mode = True
    if args.enable_sleep_mode or parking != "auto":
        args.worker_extension_cls = WORKERS


def _plain(name: str) -> str:
    return name.removeprefix("--").replace("_", "-").removeprefix("no-")


def sleeper(llm: Any, config: Any, spec: fleet.ReplicaSpec) -> "Sleeper | None":
    """Return how this engine sleeps; None: it parks by the end of its process.

    A level that the version names is tried whatever the platform says of itself: `Sleeper.sleep` finds out.
    """
    parking = tuning.read(spec.tuning).parking
    if parking == "process" or (parking == "auto" and not config.model_config.enable_sleep_mode):
        return None
    return Sleeper(llm, 2 if parking == "level-2" else 1, lora=config.lora_config is not None)


class Sleeper:
    """`engine.SleepPort` of vLLM.

    Args:
        llm: the engine's client.
        level: of its sleep.
        lora: whether it was started with LoRA.
        host_free: returns the bytes of host memory that are left to this process.
    """

    def __init__(
        self, llm: Any, level: int, *, lora: bool, host_free: Callable[[], int] | None = None
    ) -> None:
        self._llm = llm
        self._level = level
        self._lora = lora
        self._host_free = host_free or host_free_bytes

    async def sleep(self) -> engine.Slept:
        """Free the GPU's memory; nothing runs or will enter.

        Raises:
            engine.SleepError: it was not freed.
        """
        if self._level == 2 and self._lora:
            raise engine.SleepError("level 2 crashes with LoRA: set tuning.parking to level-1")
        began = timing.monotonic()
        try:
            before = await self._memory()
            if self._level == 1:
                self._fits_the_host(before)
            await self._llm.sleep(self._level, "abort")  # pauses its scheduler first
            if not await self._llm.is_sleeping():
                raise engine.SleepError("vLLM says that it does not sleep")
            freed = _freed(before, await self._memory())
        except engine.SleepError:
            raise
        except Exception as error:  # whatever the engine's core raised comes as a plain Exception
            raise engine.SleepError(f"vLLM does not sleep: {_line(error)}") from error
        took_s = timing.monotonic() - began
        _log.info("asleep at level %d: %d bytes freed in %.3f s", self._level, freed, took_s)
        return engine.Slept(self._level, freed)

    async def wake(self) -> None:
        """Have weights and KV cache back, in vLLM's documented order: what was cached before is gone.

        Raises:
            engine.SleepError: it can't serve again.
        """
        llm = self._llm
        try:
            await llm.wake_up(tags=["weights"])
            if self._level == 2:
                await llm.collective_rpc("reload_weights")
            await llm.wake_up(tags=["kv_cache"])
            if not await llm.reset_prefix_cache():
                raise engine.SleepError("vLLM did not reset its prefix cache")
            if await llm.is_sleeping():
                raise engine.SleepError("vLLM says that it sleeps still")
        except engine.SleepError:
            raise
        except Exception as error:
            raise engine.SleepError(f"vLLM does not wake: {_line(error)}") from error

    async def _memory(self) -> Sequence[Sequence[int] | None]:
        answers: Sequence[Sequence[int] | None] = await self._llm.collective_rpc("forebay_memory")
        return answers

    def _fits_the_host(self, workers: Sequence[Sequence[int] | None]) -> None:
        needed, left = sum(each[1] for each in workers if each), self._host_free()
        if needed > left:
            raise engine.SleepError(
                f"level 1 takes {needed / 1e9:.1f} GB of host memory and {left / 1e9:.1f} GB are left "
                "here: raise park_gb and park_gb_per_gpu, or set tuning.parking to level-2 or process"
            )


def _freed(before: Sequence[Sequence[int] | None], after: Sequence[Sequence[int] | None]) -> int:
    """Return the device bytes freed over all workers.

    Raises:
        engine.SleepError: one has freed too little, or has no memory that could be freed.
    """
    freed = 0
    for rank, (was, now) in enumerate(zip(before, after, strict=True)):
        if was is None or now is None:
            raise engine.SleepError(
                "nothing was freed: vLLM says that it sleeps, and runs on no device with memory of its own"
            )
        mine, least = now[0] - was[0], max(1, round(was[1] * _LEAST_SHARE))
        if mine < least:
            raise engine.SleepError(
                f"worker {rank} freed {mine / 1e9:.2f} GB of device memory, at least {least / 1e9:.2f} "
                "GB were to be freed"
            )
        freed += mine
    if not before:
        raise engine.SleepError("nothing was freed: vLLM has no worker that answers")
    return freed


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def host_free_bytes(root: Path = Path("/")) -> int:
    """Return the host memory left to this process: the node's, and that of each control group it is in.

    Slurm bounds a job's memory (`--mem`) by a control group, of version 1 or 2; file cache counts there and
    gives way.

    Args:
        root: where ``proc`` and ``sys`` lie.
    """
    lines = (root / "proc/meminfo").read_text().splitlines()
    left = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        base = root / "sys/fs/cgroup"
        names = ("memory.max", "memory.current", "")
        if number != "0":
            if "memory" not in controllers.split(","):
                continue
            base /= "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        folder = base / path.lstrip("/")
        while folder != base.parent:
            left = min(left, _group_left(folder, names, left))
            folder = folder.parent
    return max(0, left)


def _group_left(folder: Path, names: tuple[str, str, str], otherwise: int) -> int:
    limit, used = _text(folder / names[0]).strip(), _text(folder / names[1]).strip()
    if not limit.isdecimal() or not used.isdecimal():
        return otherwise  # no bound here ("max"), or no such file
    cached = sum(
        int(words[1])
        for words in map(str.split, _text(folder / "memory.stat").splitlines())
        if words[0] in {f"{names[2]}inactive_file", f"{names[2]}active_file"}
    )
    return int(limit) - int(used) + cached


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""

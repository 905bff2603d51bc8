"""GPUs as CUDA_VISIBLE_DEVICES names them: indexes, UUIDs or MIG ids; never taken for integers. Pure."""

import re
from collections.abc import Iterable, Mapping

_INDEX = re.compile(r"\d+")
_UUID = re.compile(r"GPU-[0-9A-Za-z-]+")
_MIG = re.compile(r"MIG-(GPU-)?[0-9A-Za-z-]+(/\d+/\d+)?")


class GpuError(ValueError):
    """The GPUs can't be used as asked; the message is one clear line."""


def parse(value: str, source: str = "CUDA_VISIBLE_DEVICES") -> tuple[str, ...]:
    """Return the devices that ``value`` names, in order.

    Raises:
        GpuError: an entry is none of the three forms, or comes twice.
    """
    names = tuple(name.strip() for name in value.split(",") if name.strip())
    if value.strip() in {"", "NoDevFiles", "-1"}:
        return ()
    for name in names:
        if not any(form.fullmatch(name) for form in (_INDEX, _UUID, _MIG)):
            raise GpuError(f"{source}={value}: {name!r} is no GPU index, GPU-… or MIG-… id")
    if len(set(names)) != len(names):
        raise GpuError(f"{source}={value}: a GPU is named twice")
    return names


def of_step(environment: Mapping[str, str], wanted: int) -> tuple[str, ...]:
    """Return the GPUs of a step that was given ``wanted``.

    Raises:
        GpuError: the environment names fewer.
    """
    if wanted <= 0:
        return ()
    found: tuple[str, ...] = ()
    for source in ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        found = parse(environment.get(source, ""), source)
        if found:
            break
    if len(found) < wanted:
        raise GpuError(
            f"the slot has {len(found)} GPUs ({','.join(found) or 'none'}) and was promised {wanted}: "
            "check gres.conf and the step's --gres"
        )
    return found[:wanted]


def on_node(environment: Mapping[str, str], visible: Iterable[str]) -> dict[str, str]:
    """Return each visible GPU's name on the whole node.

    Where Slurm constrains devices, every step counts its own from 0: only its list of GPUs, which is
    in the same order, tells one step's 0 from another's. UUIDs and MIG ids mean the same everywhere.
    """
    names = tuple(visible)
    for source in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        listed = tuple(name.strip() for name in environment.get(source, "").split(",") if name)
        if len(listed) == len(names) and all(_INDEX.fullmatch(name) for name in (*names, *listed)):
            return dict(zip(names, listed, strict=True))
    return {name: name for name in names}


def choose(
    all_gpus: Iterable[str], held: Mapping[str, str], count: int, who: str
) -> tuple[str, ...]:
    """Return ``count`` GPUs that nobody holds.

    Args:
        all_gpus: the slot's GPUs.
        held: holder by GPU.
        count: how many.
        who: who asks, for the message.

    Raises:
        GpuError: there are too few.
    """
    names = tuple(all_gpus)
    free = tuple(name for name in names if name not in held)
    if count > len(free):
        holders = ", ".join(sorted({holder for gpu, holder in held.items() if gpu in names}))
        taken = f"; held by {holders}" if holders else ""
        raise GpuError(f"{who} needs {count} GPUs, {len(free)} of {len(names)} are free{taken}")
    return free[:count]

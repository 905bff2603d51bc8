"""An engine inside an image: the command that starts it there, with what it must see of the node. Pure.

The agent and the slots stay outside, where Slurm's commands are. Apptainer keeps the environment and the
process tree; only its own process stands between a slot and its replica, so that the replica can't take the
slot for its parent: it dies with the group that the slot kills.
"""

from collections.abc import Sequence

from engines import processes

NV = "--nv"


class ContainerError(ValueError):
    """The image or what it shall see can't be used; the message says what to write."""


def wrap(
    argv: Sequence[str],
    *,
    image: str,
    runtime: str,
    options: Sequence[str],
    binds: Sequence[str],
    gpus: bool,
) -> list[str]:
    """Return ``argv`` as it is started inside ``image``.

    Args:
        argv: the command as it is inside.
        image: a file on the node (``.sif``), or a reference that the runtime fetches (``docker://…``).
        runtime: apptainer or singularity, or the path of one.
        options: more options of the runtime's ``exec``.
        binds: folders of the node that it sees under the same names; ``:ro`` behind one for reading only.
        gpus: whether the node's GPUs and driver are to be inside.

    Raises:
        ContainerError: a value that would be read as something else.
    """
    if image.startswith("-") or not image.strip() or "\n" in image:
        raise ContainerError(f"[engines] container {image!r}: write an image's file or reference")
    seen: list[str] = []
    for bind in dict.fromkeys(binds):
        folder = bind.removesuffix(":ro")
        if not folder.startswith("/") or any(mark in folder for mark in ",:\n"):
            raise ContainerError(
                f"[engines] container_binds {bind!r}: write an absolute folder without a comma "
                "or a colon"
            )
        seen.append(f"{folder}:{folder}:ro" if bind.endswith(":ro") else f"{folder}:{folder}")
    return [
        runtime,
        "exec",
        *([NV] if gpus else []),
        *(f"--bind={each}" for each in seen),
        *options,
        image,
        "env",
        f"{processes.PARENT}=0",
        *argv,
    ]

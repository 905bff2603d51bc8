"""GPU counts out of Slurm's TRES and GRES texts. Pure.

Where Slurm does not say, the count is None, never 0: a node whose GPUs are not tracked is not a node
without GPUs, and a job of unknown size must not look free.
"""

import dataclasses
import re
from collections.abc import Iterable

_GRES_GPU = re.compile(
    r"(?:^|,)\s*(?:gres[:/])?gpu(?::(?P<type>[^:,()=]*[^:,()=\d][^:,()=]*))?(?:[:=](?P<count>\d+))?"
    r"(?=$|[,(])"
)
_SHARED = re.compile(
    r"(?:^|,)\s*(?:gres[:/])?(?P<kind>shard|mps)"
    r"(?::(?P<type>[^:,()=]*[^:,()=\d][^:,()=]*))?(?P<mark>[:=])(?P<count>\d+)"
)
_PARENTHESES = re.compile(r"\([^()]*\)")


@dataclasses.dataclass(frozen=True, slots=True)
class Gres:
    """GPUs as a GRES text names them: how many, and of which type ("" if untyped or mixed)."""

    count: int
    gres_type: str = ""


def gpus(text: str | None) -> int | None:
    """Count the GPUs of a TRES text: ``cpu=2,gres/gpu=4,gres/gpu:a100=4`` holds 4.

    Slurm repeats typed GPUs beside the untyped sum, so the sum is taken where it is there and the
    typed entries are added up where it is not.
    """
    total: int | None = None
    typed: int | None = None
    for item in (text or "").split(","):
        key, _, value = item.strip().partition("=")
        if not value.isdecimal():
            continue
        if key == "gres/gpu":
            total = (total or 0) + int(value)
        elif key.startswith("gres/gpu:"):
            typed = (typed or 0) + int(value)
    return typed if total is None else total


def gres(text: str | None) -> Gres | None:
    """Read a GRES text: ``gpu:h100:8(S:0-1)``, ``gpu:4``, ``gpu:h100:5(IDX:0-4),shard:3``.

    Returns:
        None if it names no GPU; that is "not said", and the caller decides what it means.
    """
    bare = _PARENTHESES.sub("", text or "").strip()
    count = 0
    types: set[str] = set()
    found = False
    for match in _GRES_GPU.finditer(bare):
        found = True
        count += int(match["count"]) if match["count"] is not None else 1
        types.add(match["type"] or "")
    if not found:
        return None
    return Gres(count, types.pop() if len(types) == 1 else "")


def node_gpus(*, gres_text: str, cfg_tres: str) -> Gres | None:
    """Return the GPUs that a node has: as configured, else as accounting counts them."""
    configured = gres(gres_text)
    if configured is not None:
        return configured
    counted = gpus(cfg_tres)
    return None if counted is None else Gres(counted)


def free_gpus(
    total: int | None, *, gres_used: str | None, cfg_tres: str, alloc_tres: str
) -> int | None:
    """Return a node's free GPUs, or None where nothing says how many are taken.

    `GresUsed` is asked first: where accounting does not track GPUs, AllocTRES lacks them, and a full
    node would look empty.
    """
    if total is None:
        return None
    used = gres(gres_used)
    if used is not None:
        return max(0, total - used.count)
    if gpus(cfg_tres) is not None:
        return max(0, total - (gpus(alloc_tres) or 0))
    return None


def shared(text: str | None) -> dict[str, int]:
    """Count parts of GPUs in a GRES or TRES text: ``gpu:4,shard:16`` or ``gres/shard=16`` hold 16 shards.

    A TRES text repeats typed ones beside their sum, as with whole GPUs.
    """
    typed: dict[str, int] = {}
    found: dict[str, int] = {}
    for match in _SHARED.finditer(_PARENTHESES.sub("", text or "")):
        into = typed if match["type"] and match["mark"] == "=" else found
        into[match["kind"]] = into.get(match["kind"], 0) + int(match["count"])
    return typed | found


def request(count: int, gres_type: str = "", gres: str = "gpu") -> str:
    """Return what ``--gres`` asks for: ``gpu:2``, ``gpu:H100:2``, ``shard:1``; the type is never re-spelt."""
    return f"{gres}:{gres_type}:{count}" if gres_type else f"{gres}:{count}"


def spelling(gres_type: str, known: Iterable[str]) -> str:
    """Return a GPU type as the site spells it; sbatch refuses one whose case differs.

    Args:
        gres_type: as somebody wrote it (`h100`).
        known: types as nodes name them (`H100`).
    """
    for candidate in known:
        if candidate.lower() == gres_type.lower():
            return candidate
    return gres_type

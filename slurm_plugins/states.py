"""Slurm's job and node states, in every spelling of every version, to the contract's. Pure."""

import dataclasses
from collections.abc import Iterable

from scheduler.contracts import slurm

_J = slurm.JobState
_SHORT = {
    "PD": "PENDING", "R": "RUNNING", "S": "SUSPENDED", "CG": "COMPLETING", "CD": "COMPLETED",
    "CA": "CANCELLED", "F": "FAILED", "TO": "TIMEOUT", "NF": "NODE_FAIL", "PR": "PREEMPTED",
    "BF": "BOOT_FAIL", "DL": "DEADLINE", "OOM": "OUT_OF_MEMORY", "CF": "CONFIGURING",
    "RQ": "REQUEUED", "RH": "REQUEUE_HOLD", "RD": "RESV_DEL_HOLD", "RF": "REQUEUE_FED",
    "RS": "RESIZING", "RV": "REVOKED", "SE": "SPECIAL_EXIT", "SI": "SIGNALING", "SO": "STAGE_OUT",
    "ST": "STOPPED",
}  # fmt: skip
# A flag alone, as squeue prints it, stands for the base state that the job is in meanwhile.
_FLAG_MEANS = {
    "CONFIGURING": _J.RUNNING, "RESIZING": _J.RUNNING, "SIGNALING": _J.RUNNING,
    "POWER_UP_NODE": _J.RUNNING, "UPDATE_DB": _J.RUNNING, "EXPEDITING": _J.PENDING,
    "REQUEUED": _J.PENDING, "REQUEUE_HOLD": _J.PENDING, "REQUEUE_FED": _J.PENDING,
    "RESV_DEL_HOLD": _J.PENDING, "SPECIAL_EXIT": _J.PENDING, "LAUNCH_FAILED": _J.FAILED,
    "RECONFIG_FAIL": _J.FAILED, "STAGE_OUT": _J.COMPLETING, "STOPPED": _J.SUSPENDED,
    "REVOKED": _J.CANCELLED,
}  # fmt: skip
_ALIASES = {"NODEFAIL": "NODE_FAIL", "BOOTFAIL": "BOOT_FAIL", "CANCELED": "CANCELLED"}


@dataclasses.dataclass(frozen=True, slots=True)
class JobReading:
    """A job state as read: the base state, the flags beside it, and words that are not known."""

    state: slurm.JobState
    flags: frozenset[str] = frozenset()
    unknown: frozenset[str] = frozenset()


def job(text: str | Iterable[str]) -> JobReading:
    """Read ``RUNNING``, ``PD``, ``CANCELLED by 1000``, ``CANCELLED+`` or ``["PENDING", "REQUEUED"]``.

    A job that is cancelled and still completing is COMPLETING: its GPUs are not free yet. A job that
    waits after a requeue is PENDING, whatever final state the list also names.
    """
    words = _job_words(text)
    base = [_J(word) for word in words if word in _J.__members__]
    flags = {word for word in words if word in _FLAG_MEANS or word == "COMPLETING"}
    unknown = frozenset(words) - flags - set(_J.__members__)
    if _J.COMPLETING in base or "STAGE_OUT" in flags:
        state = _J.COMPLETING
    elif _J.PENDING in base or any(_FLAG_MEANS.get(flag) == _J.PENDING for flag in flags):
        state = _J.PENDING
    elif base:
        state = base[0]
    else:
        state = next((_FLAG_MEANS[flag] for flag in sorted(flags)), _J.UNKNOWN)
    return JobReading(state, frozenset(flags), unknown)


def _job_words(text: str | Iterable[str]) -> list[str]:
    parts = text.split(" by ")[0].split(",") if isinstance(text, str) else list(text)
    words = [part.strip().rstrip("+").upper() for part in parts]
    words = [_SHORT.get(word, word) for word in words if word]
    return [_ALIASES.get(word, word) for word in words]


# Suffixes that sinfo and scontrol put behind a node's state.
_SUFFIX = {
    "*": "not_responding", "~": "powered_down", "#": "powering_up", "!": "power_down",
    "%": "powering_down", "$": "maintenance", "@": "reboot_requested", "^": "reboot_issued",
    "-": "planned",
}  # fmt: skip
_NODE_BASES = {
    "idle": "idle", "mixed": "mixed", "mix": "mixed", "allocated": "allocated", "alloc": "allocated",
    "down": "down", "error": "error", "future": "future", "unknown": "unknown", "unk": "unknown",
}  # fmt: skip
# Words that stand alone and carry a flag with them.
_COMPOUND = {
    "drained": ("idle", "drain"), "draining": ("allocated", "drain"), "drng": ("allocated", "drain"),
    "drain": ("idle", "drain"), "fail": ("idle", "fail"), "failing": ("allocated", "fail"),
    "failg": ("allocated", "fail"), "maint": ("idle", "maintenance"),
    "reserved": ("idle", "reserved"), "resv": ("idle", "reserved"),
    "planned": ("idle", "planned"), "plnd": ("idle", "planned"),
    "completing": ("mixed", "completing"), "comp": ("mixed", "completing"),
    "inval": ("idle", "invalid"), "reboot": ("idle", "reboot_issued"), "boot": ("idle", "reboot_issued"),
    "blocked": ("idle", "blocked"), "perfctrs": ("idle", "perfctrs"), "npc": ("idle", "perfctrs"),
    "powered_down": ("idle", "powered_down"), "pow_dn": ("idle", "powered_down"),
    "powering_down": ("idle", "powering_down"), "powering_up": ("idle", "powering_up"),
    "power_up": ("idle", "power_up"), "pow_up": ("idle", "power_up"),
}  # fmt: skip
_NODE_ALIASES = {
    "maint": "maintenance", "no_respond": "not_responding", "res": "reserved",
    "invalid_reg": "invalid", "inval": "invalid", "reboot": "reboot_requested",
    "power_saving": "powered_down", "net": "perfctrs", "poweredown": "powered_down",
}  # fmt: skip
# Flags under which a new job can still start. PLANNED is one: backfill may fit a short job in before
# the planned one, and Slurm decides that, not we.
_HARMLESS = frozenset(
    {"planned", "completing", "cloud", "dynamic_norm", "external", "undrain", "resume",
     "reboot_canceled", "reboot_cancel"}
)  # fmt: skip
_HARMFUL = frozenset(
    {"drain", "fail", "maintenance", "reserved", "not_responding", "powered_down", "powering_up",
     "powering_down", "power_down", "power_up", "power_drain", "reboot_requested", "reboot_issued",
     "invalid", "blocked", "perfctrs", "dynamic_future"}
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class NodeReading:
    """A node state as read: base, known flags, unknown ones, and whether a new lease could start."""

    state: str
    flags: frozenset[str]
    unknown: frozenset[str]
    usable: bool


def node(text: str | Iterable[str]) -> NodeReading:
    """Read ``IDLE+DRAIN``, ``MIXED+PLANNED``, ``idle*``, ``mixed-`` or ``["IDLE", "DRAIN"]``.

    A flag that is not known makes the node unusable: counting too little costs a moment, counting
    GPUs that nobody can have costs a reclaim. It is reported, so that somebody adds it here.
    """
    words = text.split("+") if isinstance(text, str) else list(text)
    base = ""
    flags: set[str] = set()
    for raw in words:
        word = raw.strip().lower()
        while word and word[-1] in _SUFFIX:
            flags.add(_SUFFIX[word[-1]])
            word = word[:-1]
        if not word:
            continue
        if not base and word in _NODE_BASES:
            base = _NODE_BASES[word]
        elif not base and word in _COMPOUND:
            base, flag = _COMPOUND[word]
            flags.add(flag)
        else:
            flags.add(_NODE_ALIASES.get(word, word))
    unknown = frozenset(flags - _HARMLESS - _HARMFUL)
    if not base:
        base = "unknown"
    usable = base in {"idle", "mixed", "allocated"} and not (flags & _HARMFUL) and not unknown
    return NodeReading(base, frozenset(flags), unknown, usable)

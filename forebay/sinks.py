"""Makes a process's usage sink: one spool of its own below the state folder.

Loads inside an engine's environment (a fork server's children come here by import path): the standard
library and the spool, nothing else.
"""

import json
import os
from pathlib import Path

from accounting import spool
from scheduler.contracts import clock

FACTORY = "forebay.sinks:open_spool"
SPOOL = "FOREBAY_SPOOL"  # environment: `describe`'s text, set by whoever starts the process


def describe(folder: Path, *, segment_bytes: int, max_age_s: float) -> str:
    """Return where and how spools are kept, as the environment carries it to every process."""
    told = {"folder": str(folder), "segment_bytes": segment_bytes, "max_age_s": max_age_s}
    return json.dumps(told)


def open_spool(writer: str) -> spool.Spool:
    """Return a spool for ``writer`` in the folder that the environment names.

    Raises:
        KeyError: the environment does not name it.
        errors.RecordingUnavailable: there is no room.
    """
    told = json.loads(os.environ[SPOOL])
    return spool.Spool(
        Path(told["folder"]),
        writer,
        segment_bytes=told["segment_bytes"],
        max_age_s=told["max_age_s"],
        clock=clock.SystemClock(),
    )

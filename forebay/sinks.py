"""Makes a process's usage sink: one spool of its own below the state folder.

Loads inside an engine's environment (a fork server's children come here by import path): the standard
library and the spool, nothing else.
"""

import os
from pathlib import Path

from accounting import spool
from scheduler.contracts import clock

FACTORY = "forebay.sinks:open_spool"
FOLDER = "FOREBAY_SPOOL"  # environment: the spool's folder, set by whoever starts the process


def open_spool(writer: str) -> spool.Spool:
    """Return a spool for ``writer`` in the folder that the environment names.

    Raises:
        KeyError: the environment does not name it.
        errors.RecordingUnavailable: there is no room.
    """
    return spool.Spool(Path(os.environ[FOLDER]), writer, clock=clock.SystemClock())

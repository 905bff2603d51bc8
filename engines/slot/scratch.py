"""A slot's own folder for temporary files, gone with it: engines leave sockets and stores where TMPDIR says.

The name is one that the epilog knows (`forebay-<lease>.…` below /tmp), for a supervisor that was killed.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def folder(slot_id: str) -> Iterator[Path]:
    """Make the folder, name it in TMPDIR for this process and its children, and remove it at the end.

    Raises:
        OSError: it can't be made, or another user has taken its name.
    """
    before = os.environ.get("TMPDIR")
    path = Path(tempfile.gettempdir()) / f"forebay-{slot_id}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.is_symlink() or path.stat().st_uid != os.geteuid():
        raise PermissionError(f"{path}: another user has made it; remove it, or set TMPDIR")
    os.environ["TMPDIR"] = str(path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before

"""A usage sink that writes rows as JSON lines: loaded by name inside a replica's own process."""

import json
import os
from pathlib import Path

from scheduler.contracts import usage

ROWS = "FOREBAY_TEST_ROWS"  # environment: where to


class JsonSink:
    """Appends each row to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, row: usage.Row) -> None:
        """Write the row."""
        fields = row.flat() if isinstance(row, usage.UsageRow) else {}
        with self._path.open("a") as file:
            file.write(json.dumps(fields) + "\n")

    async def sync(self) -> None:
        """Nothing is buffered."""

    def ready(self) -> None:
        """There is always room."""


def make(writer: str) -> usage.UsageSink:
    """Return the sink of one replica (`engines.replica.launch.SinkFactory`)."""
    return JsonSink(Path(os.environ[ROWS]))

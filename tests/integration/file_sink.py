"""A usage sink for other processes: JSON lines in the folder that FOREBAY_TEST_ROWS names."""

import dataclasses
import json
import os
from pathlib import Path

from scheduler.contracts import usage


class FileSink:
    """Appends rows to one file a writer."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, row: usage.Row) -> None:
        fields = row.flat() if isinstance(row, usage.UsageRow) else dataclasses.asdict(row)
        with self._path.open("a") as file:
            file.write(json.dumps({"row": type(row).__name__, **fields}) + "\n")

    async def sync(self) -> None:
        return

    def ready(self) -> None:
        return


def factory(writer: str) -> usage.UsageSink:
    return FileSink(Path(os.environ["FOREBAY_TEST_ROWS"]) / f"{writer}.jsonl")


def read(folder: Path, kind: str) -> list[dict[str, object]]:
    """Return all rows of one kind that any writer left; of rows under one key the last."""
    lines = [
        line for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().split("\n")
    ]
    rows = [json.loads(line) for line in lines if line]
    found = [row for row in rows if row["row"] == kind]
    if kind == "UsageRow":
        return found
    names = ("lease_id", "run", "replica_id", "seq")
    return list({tuple(row.get(name) for name in names): row for row in found}.values())

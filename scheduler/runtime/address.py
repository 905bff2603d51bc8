"""broker.json: where the leading broker is, written whole or not at all."""

import dataclasses
import json
import os
from pathlib import Path

FILE = "broker.json"


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """``host:port`` of the leader's control server, and its epoch."""

    address: str
    epoch: int


def publish(state_dir: Path, where: Address) -> None:
    """Replace broker.json in one step; the file is on disk before it has its name."""
    fresh = state_dir / f".{FILE}.{os.getpid()}"
    with fresh.open("w", encoding="ascii") as file:
        json.dump(dataclasses.asdict(where), file)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(state_dir / FILE)


def read(state_dir: Path) -> Address | None:
    """Return the leader's address, None if no broker has written one, or it can't be read now."""
    try:
        found = json.loads((state_dir / FILE).read_text(encoding="ascii"))
        return Address(str(found["address"]), int(found["epoch"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None

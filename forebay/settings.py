"""The [forebay] table: what every process of one installation shares."""

import dataclasses
from pathlib import Path

from scheduler.contracts.settings import setting


@dataclasses.dataclass(frozen=True, slots=True)
class ForebaySettings:
    """Settings that belong to no part alone."""

    state_dir: Path = setting(
        Path("/var/lib/forebay"),
        "Folder of registry, secrets, spools, Parquet, batch files and logs; on a file system that "
        "the lease's nodes see too, since agents read their specifications from it.",
    )
    python: str = setting(
        "",
        "Python that runs Forebay on the nodes (an absolute path); empty: the one that runs this.",
    )
    stable_s: float = setting(
        60.0,
        "A part that has run for so long is started again half a second after its end; one that ends "
        "sooner waits longer each time, up to ten seconds.",
        unit="s",
        least=0,
    )

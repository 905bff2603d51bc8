"""Which nodes the planner counts with: those that a lease is really sent to."""

from pathlib import Path

import pytest

from forebay import config, lease
from scheduler.core import grounds


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", grounds.Grounds(("serve",), ("backfill",))),
        (
            "[slurm]\nserve_partitions = ['a', 'b']\nbackfill_partitions = ['c']\n"
            "gres_type = 'h100'\nconstraint = 'ib'\n",
            grounds.Grounds(("a", "b"), ("c",), "h100", "ib"),
        ),
        (
            "[slurm]\ngres_type = 'h100'\n"
            "[scheduler]\nlease_partition = 'd'\nlease_gres_type = 'b200'\n",
            grounds.Grounds(("d",), ("d",), "b200"),
        ),
    ],
)
def test_partitions_type_and_features_are_those_of_the_jobs(
    tmp_path: Path, text: str, where: grounds.Grounds
) -> None:
    path = tmp_path / "forebay.toml"
    path.write_text(text)
    assert lease.where(config.load(path)) == where

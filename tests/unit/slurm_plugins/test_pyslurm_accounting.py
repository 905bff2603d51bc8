"""What a job held, as pyslurm tells it; its objects are those of its `db` modules (25.11)."""

import dataclasses
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from scheduler.contracts import ids, slurm
from slurm_plugins import pyslurm_client


@dataclasses.dataclass
class Held:
    """`pyslurm.db.TrackableResource`, and `GPU`."""

    count: int


def row(gres: dict[str, int] | None, job: int = 17) -> types.SimpleNamespace:
    resources = None
    if gres is not None:
        held = {name: Held(count) for name, count in gres.items()}
        resources = types.SimpleNamespace(gres=held)
    return types.SimpleNamespace(
        id=job, state="COMPLETED", start_time=1_000, end_time=1_060, elapsed_time=60,
        allocated_tres=resources, num_nodes=1, exit_code=0, exit_code_signal=0,
    )  # fmt: skip


def client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *rows: Any) -> slurm.SlurmPort:
    conf = tmp_path / "slurm.conf"
    conf.touch()
    config = types.SimpleNamespace(accounting_storage_type="accounting_storage/slurmdbd")
    fake: Any = types.ModuleType("pyslurm")
    fake.RPCError = OSError
    fake.slurmctld = types.SimpleNamespace(Config=types.SimpleNamespace(load=lambda: config))
    fake.db = types.SimpleNamespace(
        JobFilter=lambda **_: None,
        Jobs=types.SimpleNamespace(load=lambda _: dict(enumerate(rows))),
    )
    monkeypatch.setitem(sys.modules, "pyslurm", fake)
    monkeypatch.setenv("SLURM_CONF", str(conf))
    return pyslurm_client.PyslurmClient(conf, cluster="alpha")


@pytest.mark.parametrize(
    ("gres", "gpus", "shared"),
    [
        ({"gpu": 4, "gpu:a100": 4}, 4, {}),
        ({"gpu:a100": 2, "gpu:h100": 1}, 3, {}),
        ({"shard": 3}, None, {"shard": 3}),
        ({"shard": 3, "shard:a100": 3}, None, {"shard": 3}),
        ({"mps": 50}, None, {"mps": 50}),
        ({}, None, {}),
        (None, None, {}),
    ],
)
def test_gpus_and_their_parts_are_read_from_its_objects(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    gres: dict[str, int] | None,
    gpus: int | None,
    shared: dict[str, int],
) -> None:
    """They were looked for in the objects' text, which has none: no lease had Slurm's figure."""
    port = client(monkeypatch, tmp_path, row(gres), row({"gpu": 1}, job=18))
    (run,) = port.accounting(ids.SlurmJobId("17"))
    assert (run.gpus, dict(run.shared), run.elapsed_s) == (gpus, shared, 60)

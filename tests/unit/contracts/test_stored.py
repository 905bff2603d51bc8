"""What a newer release has written is read by an older one: members that it does not know are left out."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines import forkproto, settings
from engines.agent import spec as agent_spec
from engines.replica import launch
from engines.slot import spec as slot_spec
from engines.weights import task
from scheduler.contracts import fleet, frames, ids, slurm, spec_json, stored
from scheduler.runtime.registry import cordons, wishes
from slurm_plugins import embedded_store
from tests import registries

ROOT = Path(__file__).parents[3]
HARDWARE = fleet.Hardware(gres_type="H100", memory_gb=9.0)
REPLICA = fleet.ReplicaSpec(
    "chat", "v1", fleet.EngineKind.SIMULATED, seats=4, adapters={"law": "/a"}, hardware=HARDWARE
)


def newer(value: Any) -> Any:
    """Return JSON as a later release would write it: every object has a member more.

    Keys that a person chose (adapters, options) are not fields: such mappings are left as they are.
    """
    if isinstance(value, list | tuple):
        return [newer(item) for item in value]
    if not isinstance(value, dict):
        return value
    chosen = {"adapters", "engine_args", "tuning", "environment", "gpus"}
    told = {key: item if key in chosen else newer(item) for key, item in value.items()}
    return {**told, "of_next_year": {"any": "thing"}}


def agent() -> agent_spec.AgentSpec:
    return agent_spec.AgentSpec(
        "alpha", "l-1", "serve", "physics", 4, "/b", "/t", "/r", ("slot",), ("replica", "-v"), "m:f",
        options=settings.EnginesSettings(drain_s=3.0), nodes=2,
    )  # fmt: skip


def slot() -> slot_spec.SlotSpec:
    return slot_spec.SlotSpec(
        "l-1.s0", "l-1", "alpha", "7", "127.0.0.1:1", 2, 3, "n1", "/t", "/r", "/l", 2, ("replica",),
        "m:f", options=settings.EnginesSettings(),
    )  # fmt: skip


def launched() -> launch.Launch:
    return launch.Launch(
        ids.ReplicaId("r-1"), "alpha", "l-1", "s-1", "7", "n1", REPLICA, fleet.Role.SHARED, "/s",
        rank=launch.Rank(1, 2, "n1:5"),
    )  # fmt: skip


CASES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "agent": (agent(), agent_spec.AgentSpec.from_json),
    "slot": (slot(), slot_spec.SlotSpec.from_json),
    "launch": (launched(), launch.Launch.from_json),
    "replica spec": (REPLICA, spec_json.read),
    "END frame": (
        frames.End(("stop",), 3, 2, 1),
        lambda value: frames.End.parse(json.dumps(value).encode()),
    ),
    "ERROR frame": (
        frames.Error("preempted", "gone", 409, 1, 1, 1),
        lambda value: frames.Error.parse(json.dumps(value).encode()),
    ),
    "staging": (
        task.Task("/w", task.Order("hf://a/b", ahead=True)),
        lambda value: task.Task.from_json(json.dumps(value)),
    ),
    "fork server": (
        forkproto.Ready(pid=1, engine="vllm", version="0.32", import_s=2.5),
        lambda value: forkproto.decode(json.dumps({"type": "ready", **value}).encode()),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_only_a_newer_release_says_is_left_out(name: str) -> None:
    value, read = CASES[name]
    written = value.to_json() if hasattr(value, "to_json") else dataclasses.asdict(value)
    if isinstance(written, str):
        written = json.loads(written)
    later = newer(json.loads(json.dumps(written)))
    assert "of_next_year" in later
    assert read(later) == value


def test_the_embedded_slurm_goes_on_with_a_newer_ones_jobs(tmp_path: Path) -> None:
    stamp = slurm.Stamp("alpha", ids.LeaseId("l-1"), "serve", "physics")
    spec = slurm.JobSpec(
        "lease", "", ("serve",), 60, "/o", "/", stamp=stamp, environment={"A": "1"}
    )
    before = embedded_store.Store(tmp_path)
    with before.change() as state:
        state.jobs["1"] = embedded_store.Record("1", spec, "root", "", 60, 5)
        state.reservations["r"] = slurm.Reservation("r", 1, 2, ("n1",), frozenset({"MAINT"}))
        jobs, reservations = dict(state.jobs), dict(state.reservations)
    (file,) = tmp_path.glob("*.json")
    told = json.loads(file.read_text())
    for kind in ("jobs", "reservations"):
        told[kind] = {key: newer(item) for key, item in told[kind].items()}
    file.write_text(json.dumps(told))
    with embedded_store.Store(tmp_path).change() as state:
        assert state.jobs == jobs
        assert state.reservations == reservations


def test_an_older_broker_goes_on_with_a_newer_ones_facts(tmp_path: Path) -> None:
    registry = registries.opened(tmp_path)
    epoch = registry.lead.take("me", 0, 10_000_000)
    assert epoch is not None
    cordon = cordons.Cordon("n1", "fan", "ada", 5)
    mark = wishes.Mark("ada", "repair", 5)
    facts = {
        cordons.NAME: {"n1": newer(dataclasses.asdict(cordon))},
        wishes.NAME: {"drains": {"n1": newer(dataclasses.asdict(mark))}, "of_next_year": {}},
    }
    registry.journal.set_facts(epoch, 1, facts)
    assert registry.cordons.all() == {"n1": cordon}
    assert registry.wishes.read().drains == {"n1": mark}
    registry.close()


def test_what_lacks_a_field_or_is_no_object_is_told() -> None:
    with pytest.raises(TypeError, match="'engine'"):
        stored.read(fleet.ReplicaSpec, {"model": "chat", "version": "v1"})
    with pytest.raises(TypeError, match="object of Hardware"):
        stored.read(fleet.Hardware, [])  # type: ignore[arg-type] # what a damaged file may hold


def test_no_json_becomes_a_dataclass_by_its_own_names_alone() -> None:
    """Postings do on purpose: of a posting that is not known whole nothing is billed."""
    made = re.compile(r"\*\*\s*json(lib)?\.loads")
    folders = (
        "accounting",
        "batch_jobs",
        "engines",
        "forebay",
        "gateway",
        "scheduler",
        "slurm_plugins",
    )
    files = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    found = [path.name for path in files if made.search(path.read_text())]
    assert found == ["postings.py"]

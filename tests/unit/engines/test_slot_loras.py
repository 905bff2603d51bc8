"""A slot follows which adapters its replica shall hold: files staged and judged first, what is wrong told."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from engines import lora, settings, tinymodel
from engines.slot import control, loras
from engines.weights import stager, store
from scheduler.contracts import fleet
from scheduler.contracts import loras as held
from scheduler.contracts.v1 import control_pb2 as pb

S = held.AdapterState


class Remote(control.Control):
    """A replica's control paths: it has at once what it is told, or does not answer."""

    def __init__(self) -> None:
        self.orders: list[list[tuple[str, str]]] = []
        self.silent = False
        self.failed = 0

    async def adapters(self, wanted: Sequence[tuple[str, str]]) -> dict[str, Any]:
        if self.silent:
            self.failed += 1
            raise control.ControlError("POST /forebay/adapters: HTTP 500")
        self.orders.append(list(wanted))
        return {"adapters": said(*wanted)}


def said(*held: tuple[str, str], **changes: object) -> list[dict[str, Any]]:
    empty = {"state": "loaded", "running": 0, "used_us": 1, "uses": 0, "load_ms": 9.0, "reason": ""}
    return [{"name": name, "path": path, **empty, **changes} for name, path in held]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slot-loras")
    tinymodel.make(folder / "model")
    for number, name in enumerate(("law", "tax")):
        tinymodel.make_lora(folder / name, seed=number)
    return folder


class Slot:
    """A follower with a replica that listens."""

    def __init__(self, made: Path, disk: Path) -> None:
        options = settings.EnginesSettings(weights_dir=str(disk), weights_reserve_gb=0.0)
        self.spec = fleet.ReplicaSpec(
            "chat", "v1", fleet.EngineKind.VLLM, weights=str(made / "model"), adapter_slots=2
        )
        self.bell = asyncio.Event()
        self.remote = Remote()
        self.loras = loras.Loras(lambda: self.spec, stager.Stager(options), self.bell.set)
        self.loras.heard({"adapters": [], "adapter_room": 2})

    def report(self) -> dict[str, pb.HeldAdapter]:
        told = pb.ReplicaReport()
        self.loras.report(told)
        return {one.name: one for one in told.adapters}

    async def follow(
        self, wanted: Sequence[tuple[str, str]], until: Callable[[dict[str, pb.HeldAdapter]], bool]
    ) -> dict[str, pb.HeldAdapter]:
        """Follow until the report is as awaited."""
        async with asyncio.timeout(60):
            while True:
                self.bell.clear()
                self.loras.follow(wanted, self.remote)
                if until(self.report()):
                    return self.report()
                await self.bell.wait()


@pytest.fixture
def slot(made: Path, tmp_path: Path) -> Slot:
    return Slot(made, tmp_path / "disk")


async def test_files_where_they_lie_are_judged_and_the_replica_is_told(
    slot: Slot, made: Path
) -> None:
    wanted = [("law", str(made / "law")), ("tax", str(made / "tax"))]
    found = await slot.follow(
        wanted, lambda held: [one.state for one in held.values()] == ["loaded", "loaded"]
    )
    assert slot.remote.orders[-1] == wanted
    assert found["law"].load_ms >= 9.0
    found = await slot.follow(wanted[1:], lambda held: list(held) == ["tax"])
    assert slot.remote.orders[-1] == wanted[1:]
    slot.loras.clear()
    assert slot.report() == {}


async def test_a_place_is_staged_and_given_back(slot: Slot, made: Path, tmp_path: Path) -> None:
    place = f"file://{made / 'law'}"
    found = await slot.follow([("law", place)], lambda held: held["law"].state == "loaded")
    assert found["law"].path == place, "the leader hears the place, which all nodes share"
    ((_, folder),) = slot.remote.orders[-1]
    assert Path(folder).parent == tmp_path / "disk" / "models"
    assert (Path(folder) / lora.TENSORS).is_file()
    (held,) = store.Store(tmp_path / "disk").held()
    assert held.users == 1
    slot.loras.heard({"adapters": [], "adapter_room": 2})
    slot.loras.follow([], slot.remote)
    (held,) = store.Store(tmp_path / "disk").held()
    assert held.users == 0
    slot.loras.clear()


async def test_what_is_wrong_is_told_and_the_engine_never_sees_it(
    slot: Slot, made: Path, tmp_path: Path
) -> None:
    wanted = [("none", str(tmp_path / "none")), ("model", f"file://{made / 'model'}")]
    found = await slot.follow(
        wanted, lambda held: [one.state for one in held.values()] == ["failed", "failed"]
    )
    assert "put the adapter's folder there" in found["none"].reason
    assert "adapter_config.json is missing" in found["model"].reason
    assert all(order == [] for order in slot.remote.orders)
    found = await slot.follow([], lambda held: not held)
    slot.loras.clear()


async def test_a_replica_that_does_not_answer_is_told_again(slot: Slot, made: Path) -> None:
    slot.remote.silent = True
    wanted = [("law", str(made / "law"))]
    await slot.follow(wanted, lambda held: held["law"].state == "loading")
    work = slot.loras._files["law"].work
    assert work is not None
    await work
    for _ in range(3):
        slot.bell.clear()
        slot.loras.follow(wanted, slot.remote)
        await asyncio.sleep(0.01)
        assert not slot.bell.is_set(), "it would be tried again at once, for ever"
    assert slot.remote.failed >= 3
    slot.remote.silent = False
    await slot.follow(wanted, lambda held: held["law"].state == "loaded")
    slot.loras.clear()


async def test_nothing_is_told_while_nothing_is_said(slot: Slot) -> None:
    slot.loras.follow(None, slot.remote)
    assert slot.remote.orders == []
    told = pb.ReplicaReport()
    slot.loras.clear()
    slot.loras.report(told)
    assert not told.takes_adapters

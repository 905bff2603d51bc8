"""A replica whose weights are staged: before its process starts, told as it goes, held while it lives."""

import asyncio
import dataclasses
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from engines import settings
from engines.slot import children, starters
from engines.slot import spec as slot_spec
from engines.weights import stager, store
from scheduler.contracts import fleet
from scheduler.contracts import weights as places
from tests.unit.engines import keeping
from tests.unit.weights import places as models

VLLM = fleet.EngineKind.VLLM


class Slow:
    """A provider that waits for the test's word."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.told: asyncio.Future[Callable[[str], None]] = (
            asyncio.get_running_loop().create_future()
        )
        self.refuse = ""
        self.cancelled = False

    async def get(self, what: fleet.ReplicaSpec, told: stager.Told) -> store.Use | None:
        self.told.set_result(told)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if self.refuse:
            raise stager.Refused(self.refuse)
        return None

    async def adapter(self, path: str, told: stager.Told) -> store.Use | None:
        return None

    def caches(self, what: fleet.ReplicaSpec) -> Mapping[str, str]:
        return {"VLLM_CACHE_ROOT": "/c"}


async def test_staged_weights_are_loaded_from_the_disk_and_stay_there_while_it_lives(
    tmp_path: Path,
) -> None:
    place = models.model(tmp_path / "m")
    uri = f"file://{place}"
    root = tmp_path / "disk"
    options = {"weights_dir": str(root), "weights_reserve_gb": 0.0}
    provider = stager.Stager(settings.EnginesSettings(**options))  # type: ignore[arg-type]
    where = store.Store(root)
    async with keeping.play(tmp_path, kind=VLLM, weights=uri, provider=provider) as at:
        child = await at.starter.child
        loaded = child.order.record.spec.weights
        assert Path(loaded).parent == root / "models"
        assert at.one.report().spec.weights == uri, (
            "the broker hears the place, which all nodes share"
        )
        assert at.one.report().phases_s["stage"] > 0
        assert child.order.extra_env["VLLM_CACHE_ROOT"].startswith(str(root / "caches"))
        key = Path(loaded).name
        assert not where.evict(key)
        async with keeping.listening(child):
            await at.until(lambda r: r.state == "serving")
            at.one.want(dataclasses.replace(keeping.WISH, asleep=True))
            await at.until(lambda r: r.state == "asleep")
            assert not where.evict(key), "a parked one is as good as in use"
            at.one.want(dataclasses.replace(keeping.WISH, run=False))
            await at.end()
    assert where.evict(key)


async def test_it_says_what_it_waits_for_and_is_no_slow_start(tmp_path: Path) -> None:
    slow = Slow()
    async with keeping.play(tmp_path, kind=VLLM, weights="s3://b/m", provider=slow) as at:
        (await slow.told)("waits for its weights: s3://b/m: connection refused")
        report = await at.until(lambda r: r.staging)
        assert (report.state, report.reason) == (
            "starting",
            "waits for its weights: s3://b/m: connection refused",
        )
        assert not at.one.gpus, "no GPU is noted as held before its process starts"
        slow.go.set()
        await at.starter.child
        assert not at.one.report().staging


async def test_told_to_stop_it_stages_no_longer(tmp_path: Path) -> None:
    slow = Slow()
    async with keeping.play(tmp_path, kind=VLLM, weights="s3://b/m", provider=slow) as at:
        await slow.told
        at.one.want(dataclasses.replace(keeping.WISH, run=False))
        assert (await at.end()).state == "stopped"
        assert slow.cancelled


async def test_weights_that_can_never_be_had_end_it_with_the_reason(tmp_path: Path) -> None:
    slow = Slow()
    slow.refuse = "file:///m: config.json is missing"
    slow.go.set()
    async with keeping.play(tmp_path, kind=VLLM, weights="file:///m", provider=slow) as at:
        report = await at.end()
        assert (report.state, report.reason) == (
            "lost",
            "not started: file:///m: config.json is missing",
        )


async def test_a_staging_process_is_gone_with_whoever_wanted_it(tmp_path: Path) -> None:
    options = settings.EnginesSettings(weights_dir=str(tmp_path / "disk"))
    told: asyncio.Queue[str] = asyncio.Queue()
    task = asyncio.create_task(
        stager.Stager(options).fetch(f"file://{tmp_path}/none/m", "", told.put_nowait)
    )
    assert "is its file system mounted" in await told.get()
    task.cancel()
    await asyncio.wait({task})
    with_key = store.Store(tmp_path / "disk")
    key = places.key(f"file://{tmp_path}/none/m")
    with with_key.alone(key, wait=False) as ours:
        assert ours, "its lock is free"


async def test_a_plain_path_is_loaded_where_it_lies_with_caches_of_its_own(tmp_path: Path) -> None:
    options = settings.EnginesSettings(weights_dir=str(tmp_path / "disk"))
    provider = stager.Stager(options)
    spec = fleet.ReplicaSpec("m", "v1", VLLM, "/shared/m")
    assert await provider.get(spec, lambda line: None) is None
    other = dataclasses.replace(spec, weights="/shared/n")
    assert provider.caches(spec)["VLLM_CACHE_ROOT"] != provider.caches(other)["VLLM_CACHE_ROOT"]
    assert not provider.caches(dataclasses.replace(spec, engine=fleet.EngineKind.SIMULATED))


def test_in_an_image_a_replica_sees_its_lease_its_weights_and_our_code(tmp_path: Path) -> None:
    options = settings.EnginesSettings(
        vllm_python="/usr/bin/python3",
        container="/images/vllm.sif",
        container_binds=["/shared/models:ro"],
        weights_dir="/nvme/weights",
        fork_server="on",
    )
    told = slot_spec.SlotSpec(
        "s", "l", "c", "7", "", 0, 0, "", "", "/state/l/run", "/state/l/logs", 1, (), "", options
    )
    starter = starters.Starters(told, lambda: None)
    assert not starter.forks
    line = starters.engine_line(options, "/state/l/run", "/state/l/logs", gpus=False)
    assert line[:2] == ["apptainer", "exec"]
    bound = {
        word.removeprefix("--bind=").partition(":")[0] for word in line if word.startswith("--bind")
    }
    assert {
        "/state/l/run",
        "/state/l/logs",
        "/nvme/weights",
        "/shared/models",
        str(children.ROOT),
    } <= bound
    assert line[line.index("/images/vllm.sif") + 1 :] == [
        "env", "FOREBAY_PARENT_PID=0", "/usr/bin/python3", "-P", "-m", "engines.replica",
    ]  # fmt: skip


@pytest.mark.parametrize("turns", [2, 20])
async def test_a_staging_that_waits_for_its_disk_as_it_dies_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """Killed while it syncs gigabytes it dies when they are written: the slot was deaf until then.

    One that is given up as it starts is killed too.
    """
    polls: list[int] = []

    class Stuck(subprocess.Popen[bytes]):
        def poll(self) -> int | None:
            polls.append(self.pid)
            return super().poll() if len(polls) > 3 else None

        def wait(self, timeout: float | None = None) -> int:
            raise AssertionError("the event loop would stand still")

    monkeypatch.setattr(subprocess, "Popen", Stuck)
    provider = stager.Stager(settings.EnginesSettings(weights_dir=str(tmp_path / "disk")))
    fetching = asyncio.create_task(provider.fetch(f"file://{tmp_path}/no/m", "", lambda line: None))
    for _ in range(turns):
        await asyncio.sleep(0)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert len(polls) > 3


async def test_a_librarys_word_on_stdout_ends_no_staging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the agent's shelf, which staged nothing more on that node."""
    script = tmp_path / "python"
    script.write_text(
        "#!/bin/sh\nread order\necho 'a warning: {'\necho '{\"done\": {\"size\": 5}}'\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    provider = stager.Stager(settings.EnginesSettings(weights_dir=str(tmp_path / "disk")))
    assert await provider.fetch("file:///m", "", lambda line: None) == {"size": 5}

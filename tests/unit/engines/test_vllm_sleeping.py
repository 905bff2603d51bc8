"""vLLM's sleep and wake on a client that records: the order, and that nothing passes for freed memory."""

import argparse
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engines.replica import engine
from engines.vllm import arguments, sleeping
from scheduler.contracts import fleet

GB = 10**9


class Client:
    """Records what is called; a worker's free memory is what the test says, before and after."""

    def __init__(self, *free: Sequence[list[int] | None], wrong: str = "") -> None:
        self.calls: list[Any] = []
        self.free = list(free)
        self.wrong = wrong
        self.asleep = False

    async def sleep(self, level: int, mode: str) -> None:
        self.calls.append(("sleep", level, mode))
        if self.wrong == "sleep":
            raise RuntimeError("Memory usage\nincreased")
        self.asleep = self.wrong != "awake"

    async def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake_up", *tags))
        self.asleep = tags != ["kv_cache"] or self.wrong == "asleep"

    async def is_sleeping(self) -> bool:
        return self.asleep

    async def reset_prefix_cache(self) -> bool:
        self.calls.append("reset_prefix_cache")
        return self.wrong != "cache"

    async def collective_rpc(self, method: str) -> Any:
        self.calls.append(method)
        return self.free.pop(0) if method == "forebay_memory" else [None]


def sleeper(client: Client, level: int = 1, *, lora: bool = False, host: int = 100 * GB) -> Any:
    return sleeping.Sleeper(client, level, lora=lora, host_free=lambda: host)


@pytest.mark.parametrize("level", [1, 2])
async def test_it_sleeps_and_wakes_in_the_documented_order(level: int) -> None:
    client = Client([[GB, 14 * GB], [GB, 14 * GB]], [[71 * GB, 14 * GB], [70 * GB, 14 * GB]])
    one = sleeper(client, level)
    assert await one.sleep() == engine.Slept(level, 139 * GB)
    assert client.calls == ["forebay_memory", ("sleep", level, "abort"), "forebay_memory"]
    client.calls.clear()
    await one.wake()
    reload = ["reload_weights"] if level == 2 else []
    assert client.calls == [
        ("wake_up", "weights"),
        *reload,
        ("wake_up", "kv_cache"),
        "reset_prefix_cache",
    ]


@pytest.mark.parametrize(
    ("free", "reason"),
    [
        (([None], [None]), "nothing was freed"),
        (([], []), "nothing was freed"),
        (([[GB, 0]], [[GB, 0]]), "worker 0 freed 0.00 GB"),
        (([[GB, 14 * GB]], [[7 * GB, 14 * GB]]), "worker 0 freed 6.00 GB .* at least 7.00 GB"),
        (
            ([[GB, 2 * GB], [GB, 2 * GB]], [[70 * GB, 2 * GB], [GB, 2 * GB]]),
            "worker 1 freed 0.00 GB",
        ),
    ],
)
async def test_a_sleep_that_freed_nothing_or_too_little_has_failed(free: Any, reason: str) -> None:
    with pytest.raises(engine.SleepError, match=reason):
        await sleeper(Client(*free)).sleep()


async def test_one_that_says_it_is_awake_or_raises_has_failed_in_one_line() -> None:
    good = [[GB, GB]], [[9 * GB, GB]]
    with pytest.raises(engine.SleepError, match="says that it does not sleep"):
        await sleeper(Client(*good, wrong="awake")).sleep()
    with pytest.raises(engine.SleepError, match="RuntimeError: Memory usage increased"):
        await sleeper(Client(*good, wrong="sleep")).sleep()
    for wrong, reason in (("cache", "did not reset"), ("asleep", "sleeps still")):
        with pytest.raises(engine.SleepError, match=reason):
            await sleeper(Client(wrong=wrong)).wake()


async def test_level_1_asks_first_whether_the_host_has_room_and_level_2_does_not() -> None:
    free = [[GB, 14 * GB]], [[70 * GB, 14 * GB]]
    client = Client(*free)
    with pytest.raises(engine.SleepError, match=r"takes 14\.0 GB of host memory and 13\.0 GB"):
        await sleeper(client, host=13 * GB).sleep()
    assert client.calls == ["forebay_memory"]
    assert (await sleeper(Client(*free), 2, host=0).sleep()).freed_bytes == 69 * GB


async def test_level_2_with_lora_is_refused_before_anything_is_called() -> None:
    client = Client()
    with pytest.raises(engine.SleepError, match="level-1"):
        await sleeper(client, 2, lora=True).sleep()
    assert not client.calls


def spec(parking: str | None = None, **changes: Any) -> fleet.ReplicaSpec:
    tuning = {} if parking is None else {"parking": parking}
    return fleet.ReplicaSpec("m", "v1", fleet.EngineKind.VLLM, "/m", tuning=tuning, **changes)


class Platform:
    def __init__(self, *, sleeps: bool, allocates: bool = True) -> None:
        self.is_sleep_mode_available = lambda: sleeps
        self.is_cuda_alike = lambda: True
        self.is_cumem_allocator_available = lambda: allocates


@pytest.mark.parametrize(
    ("parking", "platform", "changes", "enabled"),
    [
        (None, Platform(sleeps=True), {}, True),
        ("level-2", Platform(sleeps=True), {}, True),
        ("process", Platform(sleeps=True), {}, False),
        (None, Platform(sleeps=False), {}, False),
        (None, Platform(sleeps=True, allocates=False), {}, False),
        (None, Platform(sleeps=True), {"engine_args": {"enable_sleep_mode": False}}, False),
    ],
)
def test_sleep_mode_is_on_where_the_platform_has_it_and_parking_may_use_it(
    parking: str | None, platform: Platform, changes: Any, enabled: bool
) -> None:
    args = argparse.Namespace(enable_sleep_mode=False, worker_extension_cls="")
    what = spec(parking, **changes)
    sleeping.prepare(args, what, platform)
    assert args.enable_sleep_mode is enabled
    assert bool(args.worker_extension_cls) is enabled
    model = types.SimpleNamespace(enable_sleep_mode=enabled)
    config = types.SimpleNamespace(model_config=model, lora_config=None)
    assert (sleeping.sleeper(None, config, what) is not None) is enabled


def test_a_level_that_is_named_is_tried_whatever_the_platform_says() -> None:
    args = argparse.Namespace(enable_sleep_mode=False, worker_extension_cls="")
    what = spec("level-1")
    sleeping.prepare(args, what, Platform(sleeps=False))
    assert (args.enable_sleep_mode, args.worker_extension_cls) == (False, sleeping.WORKERS)
    model = types.SimpleNamespace(enable_sleep_mode=False)
    config = types.SimpleNamespace(model_config=model, lora_config=None)
    assert sleeping.sleeper(None, config, what) is not None


def test_the_workers_mixin_is_where_vllm_will_look_for_it() -> None:
    module, _, name = sleeping.WORKERS.rpartition(".")
    assert module == sleeping.__name__
    assert getattr(sleeping, name) is sleeping.Memory


@pytest.mark.parametrize(
    "changes",
    [
        {"adapters": {"law": "/law"}},
        {"adapter_slots": 2},
        {"tuning": {"parking": "level-2", "speculative": {"method": "draft", "model": "/d"}}},
        {"engine_args": {"enable-sleep-mode": True}},
    ],
)
def test_what_level_2_does_not_go_with_is_refused(changes: dict[str, Any]) -> None:
    fields = {"tuning": {"parking": "level-2"}, **changes}
    what = fleet.ReplicaSpec("m", "v1", fleet.EngineKind.VLLM, "/m", **fields)
    with pytest.raises(arguments.ArgumentError, match=r"tuning\.parking"):
        arguments.command_line(what)
    assert arguments.command_line(spec("level-2"))


def _host(root: Path, groups: str, files: dict[str, str]) -> int:
    files = {
        "proc/meminfo": "MemTotal: 90 kB\nMemAvailable: 80 kB\n",
        "proc/self/cgroup": groups,
    } | files
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return sleeping.host_free_bytes(root)


def test_the_host_has_what_the_tightest_control_group_leaves(tmp_path: Path) -> None:
    kib = 1024
    assert _host(tmp_path / "none", "", {}) == 80 * kib
    top = "sys/fs/cgroup"
    second = {
        f"{top}/job/memory.max": f"{50 * kib}\n",
        f"{top}/job/memory.current": f"{40 * kib}\n",
        f"{top}/job/memory.stat": f"anon 5\nactive_file {kib}\ninactive_file {2 * kib}\n",
        f"{top}/job/step/memory.max": "max\n",
        f"{top}/job/step/memory.current": "7\n",
    }
    assert _host(tmp_path / "v2", "0::/job/step\n", second) == 13 * kib
    first = {
        f"{top}/memory/job/memory.limit_in_bytes": f"{30 * kib}",
        f"{top}/memory/job/memory.usage_in_bytes": f"{60 * kib}",
    }
    groups = "5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n"
    assert _host(tmp_path / "v1", groups, first) == 0

"""vLLM's processes: what the fork server starts, refuses and takes along when something dies."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engines import forkproto, processes
from scheduler.contracts import frames
from tests.contract import engine_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

GONE_S = 5.0  # case E1: nothing of a killed replica lives longer


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> engine_vllm.ForkServer:
    return engine_vllm.shared(request, engine_vllm.NEWEST, tmp_path_factory)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[engine_vllm.ForkServer]:
    """A fork server that the test may kill."""
    engine_vllm.require(engine_vllm.NEWEST)
    found = engine_vllm.ForkServer(engine_vllm.NEWEST, tmp_path)
    yield found
    found.close()


def eventually(holds: Callable[[], Any], seconds: float = GONE_S) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.01)  # the end of others' processes has no event


def private_mb(pids: set[int]) -> int:
    """Return the memory that only these processes hold, in MB."""
    lines = [
        line.split()
        for pid in pids
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    ]
    return sum(int(line[1]) for line in lines if line[0].startswith("Private_")) // 1024


def refusal(server: engine_vllm.ForkServer, **changes: Any) -> str:
    """Start a replica that can't start, and return why."""
    begun = engine_vllm.begin(server, engine_vllm.spec(server.folder, **changes))
    exited = server.wait(lambda e: isinstance(e, forkproto.Exited) and e.id == begun)
    assert exited.code == 1
    assert "\n" not in exited.reason
    return str(exited.reason)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"trust-remote-code": True}, "could run code"),
        ({"api_key": "x"}, "has one port"),
        ({"max-num-seqs": 4}, "set that instead"),
        ({"kv-cache-memori-bytes": "16M"}, "unrecognized arguments: --kv-cache-memori-bytes"),
        ({"kv-cache-memory": "16M"}, "unrecognized arguments"),  # no guessing from prefixes
        ({"block-size": "big"}, "block-size"),
        ({"dtype": "float33"}, "dtype"),
    ],
)
def test_a_bad_argument_is_one_clear_line(
    server: engine_vllm.ForkServer, arguments: dict[str, Any], words: str
) -> None:
    reason = refusal(server, engine_args={**engine_vllm.ARGUMENTS, **arguments})

    assert words in reason
    assert "model chat" in reason


def test_a_missing_model_is_one_clear_line(server: engine_vllm.ForkServer) -> None:
    assert "/nowhere" in refusal(server, weights="/nowhere")


def test_the_same_replica_is_not_started_twice(server: engine_vllm.ForkServer) -> None:
    spec = engine_vllm.spec(server.folder)
    begun = engine_vllm.begin(server, spec)
    launched = engine_vllm.record(begun, spec, server.folder).to_json()
    server.send(forkproto.Start(begun, launched))
    refused = server.wait(lambda e: isinstance(e, forkproto.Refused))
    engine_vllm.stop(server, begun)

    assert refused.id == begun


def test_the_cache_is_bounded_where_nobody_says_how(server: engine_vllm.ForkServer) -> None:
    """vLLM would take 90 % of the machine's memory for it."""
    arguments = {k: v for k, v in engine_vllm.ARGUMENTS.items() if k != "kv-cache-memory-bytes"}
    begun = engine_vllm.begin(server, engine_vllm.spec(server.folder, engine_args=arguments))
    blocks = engine_vllm.listening(server, begun).state()["stats"]["kv_blocks"]
    engine_vllm.stop(server, begun)

    assert 5_000 < blocks < 6_000  # 256 MiB of 48 KiB each


def test_two_replicas_of_one_server(
    server: engine_vllm.ForkServer, record_property: Callable[[str, object], None]
) -> None:
    """Both ordered at once; start-up times and memory are reported, not judged."""
    spec = engine_vllm.spec(server.folder)
    began = time.monotonic()
    first, second = (engine_vllm.begin(server, spec) for _ in range(2))
    replicas = [engine_vllm.listening(server, name) for name in (first, second)]
    took = time.monotonic() - began
    pids = [{r.pid, *engine_vllm.descendants(r.pid)} for r in replicas]
    figures = {
        "import_s": server.ready.import_s,
        "both_ready_s": round(took, 2),
        "private_mb": [private_mb(each) for each in pids],
        "fork_server_mb": private_mb({server.process.pid}),
        "processes": [len(each) for each in pids],
    }
    body = {"model": "chat", "prompt": "The water", "max_tokens": 12, "temperature": 0}
    answers = [
        [f.token_ids for f in engine_vllm.ask(r, "/v1/completions", body)[0]] for r in replicas
    ]
    for name in (first, second):
        engine_vllm.stop(server, name)
    print(f"\nvLLM {server.ready.version}: {figures}")
    for key, value in figures.items():
        record_property(key, value)

    assert answers[0] == answers[1]
    assert replicas[0].address != replicas[1].address
    assert pids[0].isdisjoint(pids[1])


def test_sigterm_ends_a_replica_and_a_second_one_does_no_harm(
    server: engine_vllm.ForkServer,
) -> None:
    begun = engine_vllm.begin(server, engine_vllm.spec(server.folder))
    replica = engine_vllm.listening(server, begun)
    below = engine_vllm.descendants(replica.pid)
    server.send(forkproto.Signal(begun, signal.SIGTERM))
    exited = engine_vllm.stop(server, begun, signal.SIGTERM)

    assert exited.code == 0
    assert below
    eventually(lambda: not any(processes.alive(pid) for pid in below))


def test_slurms_sigterm_cuts_no_answer(server: engine_vllm.ForkServer) -> None:
    """Slurm sends it to every process of a step, more than once: vLLM's own would abort what runs."""
    begun = engine_vllm.begin(server, engine_vllm.spec(server.folder))
    replica = engine_vllm.listening(server, begun)
    family = {replica.pid, *engine_vllm.descendants(replica.pid)}
    body = {"model": "chat", "prompt": "The water", "max_tokens": 500, "ignore_eos": True}
    found: list[frames.Frame] = []
    asking = threading.Thread(
        target=lambda: found.extend(engine_vllm.ask(replica, "/v1/completions", body)[0])
    )
    asking.start()
    replica.until(lambda state: state["running"] == 1 and state["steps_total"] > 10)
    for _ in range(2):
        for pid in family:
            os.kill(pid, signal.SIGTERM)
    asking.join()
    exited = server.wait(lambda e: isinstance(e, forkproto.Exited) and e.id == begun)

    assert found[-1].kind is frames.Kind.END
    assert sum(len(frame.token_ids) for frame in found if frame.kind is frames.Kind.DATA) == 500
    assert exited.code == 0
    eventually(lambda: not any(processes.alive(pid) for pid in family))


def test_killing_the_main_process_leaves_none(server: engine_vllm.ForkServer) -> None:
    """E1: the engine core is a process of its own and must not survive."""
    begun = engine_vllm.begin(server, engine_vllm.spec(server.folder))
    replica = engine_vllm.listening(server, begun)
    family = {replica.pid, *engine_vllm.descendants(replica.pid)}
    os.kill(replica.pid, signal.SIGKILL)
    exited = server.wait(lambda e: isinstance(e, forkproto.Exited) and e.id == begun)

    assert len(family) > 1
    assert exited.code == -signal.SIGKILL
    eventually(lambda: not any(processes.alive(pid) for pid in family))


def test_killing_it_during_start_up_leaves_none(server: engine_vllm.ForkServer) -> None:
    """E1, during start-up: as soon as the engine core exists."""
    begun = engine_vllm.begin(server, engine_vllm.spec(server.folder))
    started = server.wait(lambda e: isinstance(e, forkproto.Started) and e.id == begun)
    eventually(lambda: engine_vllm.descendants(started.pid), engine_vllm.START_S)
    family = {started.pid, *engine_vllm.descendants(started.pid)}
    os.kill(started.pid, signal.SIGKILL)
    server.wait(lambda e: isinstance(e, forkproto.Exited) and e.id == begun)

    # What was being forked at that moment ends by itself, a moment later.
    eventually(
        lambda: not any(map(processes.alive, family | engine_vllm.descendants(server.process.pid)))
    )


def test_a_dead_engine_core_is_told(server: engine_vllm.ForkServer) -> None:
    begun = engine_vllm.begin(server, engine_vllm.spec(server.folder))
    replica = engine_vllm.listening(server, begun)
    replica.kill_engine()
    state = replica.until(lambda state: bool(state["failure"]))
    path, body = "/v1/completions", {"model": "chat", "prompt": "The"}
    who = engine_vllm.identity(replica, path)
    with replica.client() as client:
        asked = client.post(path, json=body, headers=engine_vllm.headers(who))
        health = client.get("/health")
    engine_vllm.stop(server, begun)

    assert "engine core has died" in state["failure"]
    assert health.status_code == 503
    assert asked.status_code == 500
    assert "AttributeError" not in replica.log.read_text(), (
        "its last lines are what people are told"
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, 0], ids=["killed", "stdin closed"])
def test_a_fork_server_takes_its_replicas_along(
    own_server: engine_vllm.ForkServer, number: int
) -> None:
    begun = engine_vllm.begin(own_server, engine_vllm.spec(own_server.folder))
    replica = engine_vllm.listening(own_server, begun)
    family = {replica.pid, *engine_vllm.descendants(replica.pid)}
    if number:
        own_server.process.send_signal(number)
    else:
        assert own_server.process.stdin is not None
        own_server.process.stdin.close()

    eventually(lambda: not any(processes.alive(pid) for pid in family))
    assert own_server.process.wait(GONE_S) == -number


def test_the_supervisor_dying_during_the_import_ends_the_fork_server(tmp_path: Path) -> None:
    """E1: even before it reads its stdin; the kernel tells it."""
    engine_vllm.require(engine_vllm.NEWEST)
    script = (
        "import subprocess, sys\n"
        "argv = [sys.argv[1], '-P', '-m', 'engines.vllm.forkserver']\n"
        "held = dict.fromkeys(('stdin', 'stdout', 'stderr'), subprocess.PIPE)\n"
        "print(subprocess.Popen(argv, **held).pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    python = str(engine_vllm.python(engine_vllm.NEWEST))
    with subprocess.Popen(
        [sys.executable, "-c", script, python],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as supervisor:
        assert supervisor.stdout is not None
        child = int(supervisor.stdout.readline())
        # PyTorch is loaded after the kernel was told, and long before the server is ready.
        eventually(lambda: _maps_torch(child), engine_vllm.READY_S)
        supervisor.kill()

    eventually(lambda: not processes.alive(child))


def _maps_torch(pid: int) -> bool:
    """Whether a process has begun to import PyTorch."""
    try:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False

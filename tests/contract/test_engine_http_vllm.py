"""An attached `vllm serve`, a process that Forebay did not start: served, metered, and watched."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines import tinymodel
from engines.http import proxy, upstream
from engines.replica import app, state
from scheduler.contracts import clock, fleet, usage
from tests.contract import engine_vllm
from tests.unit.engines import asgi

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(1200)]
UP_S = 900.0  # a cold `vllm serve` takes 97 s on an idle machine
TEXTS = ["The water falls.", "A stone"]


@contextlib.contextmanager
def serving(folder: Path, convert: str) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Run `vllm serve` on a pooling model; yields its URL and the process."""
    engine_vllm.require(engine_vllm.NEWEST)
    weights = folder / "weights"
    if convert == "embed":
        tinymodel.make(weights)
    else:
        tinymodel.make_classifier(weights, labels=["score"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    vllm = engine_vllm.python(engine_vllm.NEWEST).with_name("vllm")
    argv = [
        *(str(vllm), "serve", str(weights), "--host=127.0.0.1", f"--port={port}"),
        *("--served-model-name=theirs", "--runner=pooling", f"--convert={convert}"),
        *("--enforce-eager", "--kv-cache-memory-bytes=16M", "--dtype=float32"),
    ]
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    with (folder / "serve.log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, env=env, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + UP_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health", trust_env=False, timeout=5).status_code == 200:
                    break
            assert process.poll() is None, (folder / "serve.log").read_text()[-3000:]
            assert time.monotonic() < end, (folder / "serve.log").read_text()[-3000:]
            time.sleep(0.5)
        yield url, process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def post(served: Any, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the answer and the prompt tokens that the replica counted."""
    who = asgi.identity(path)
    call = await asgi.run(served, "POST", path, asgi.headers(who), {"model": "mine", **body})
    value: dict[str, Any] = json.loads(call.client_bytes)
    assert not call.end.estimated
    assert call.end.output_tokens == 0
    assert call.end.prompt_tokens == value["usage"]["prompt_tokens"] > 0
    return value, call.end.prompt_tokens


@contextlib.asynccontextmanager
async def attached(url: str, sink: usage.MemorySink) -> Any:
    """Yield the engine and its replica."""
    arguments = {"model": "theirs", "probe-s": 0.2}
    spec = fleet.ReplicaSpec("mine", "1", fleet.EngineKind.HTTP, weights=url, engine_args=arguments)
    time_ = clock.SystemClock()
    async with proxy.opened(upstream.Options.from_spec(spec), time_) as inner:
        options = app.Options(asgi.SECRET, fleet.Role.SHARED, 4, 0, state.About(replica_id="r-1"))
        yield inner, app.build(inner, options, sink=sink, time=time_)


async def until(seconds: float, condition: Any) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - another process's state, which has no event
            await asyncio.sleep(0.05)


async def test_embeddings_are_metered_and_a_server_that_hangs_is_told(tmp_path: Path) -> None:
    sink = usage.MemorySink()
    with serving(tmp_path, "embed") as (url, process):
        async with attached(url, sink) as (inner, served):
            value, _ = await post(served, "/v1/embeddings", {"input": TEXTS})
            assert [len(row["embedding"]) for row in value["data"]] == [192, 192]
            ranked, _ = await post(
                served, "/v1/rerank", {"query": TEXTS[0], "documents": TEXTS, "top_n": 1}
            )
            assert [row["index"] for row in ranked["results"]] == [0]
            rows = [row for row in sink.rows if isinstance(row, usage.UsageRow)]
            assert [row.outcome for row in rows] == [usage.Outcome.OK] * 2
            os.killpg(process.pid, signal.SIGSTOP)
            await until(60.0, lambda: inner.stats().failure)
            assert inner.stats().failure == f"{url} does not answer"
            health = await asgi.run(served, "GET", "/health", asgi.headers())
            assert health.status == 503  # the slot takes it out of the routing by this
            os.killpg(process.pid, signal.SIGCONT)
            await until(60.0, lambda: not inner.stats().failure)
            await post(served, "/v1/embeddings", {"input": TEXTS[0]})


async def test_classes_and_rankings_of_a_classifier(tmp_path: Path) -> None:
    sink = usage.MemorySink()
    with serving(tmp_path, "classify") as (url, _):
        async with attached(url, sink) as (_, served):
            classes, _ = await post(served, "/v1/classify", {"input": TEXTS})
            assert [row["num_classes"] for row in classes["data"]] == [1, 1]
            ranked, _ = await post(served, "/v1/rerank", {"query": "water", "documents": TEXTS})
            assert sorted(row["index"] for row in ranked["results"]) == [0, 1]

"""Rollouts under load on a whole installation: back by hand and by itself, and how soon a route is seen.

``python -m tests.bench.models [--rounds 3]``; JSON on the last line. `forebay up` on the embedded Slurm; the
old version is a simulated replica, the new ones are external servers of this process (good, slow, failing),
which know the moment of each request. Streaming clients run all along; an answer that is not whole has
failed.
"""

import argparse
import asyncio
import dataclasses
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette import applications, requests, responses, routing

from tests.bench import gateway_report, models_adapters, models_staging, report_marks
from tests.integration.whole import running

CLIENTS = 8
TOKENS = 16
STEP_S = 0.01
SLOW_S = 1.0  # before the first token of the slow version
WAIT_S = 120.0
VERSION = {"engine": "http", "seats": 64, "gpus": 1, "reserved_seats": 1}


class External:
    """An OpenAI-compatible server of this process that notes when requests come.

    Args:
        delay_s: before the first token.
        failing: every answer is a 500.
    """

    def __init__(self, delay_s: float = 0.0, *, failing: bool = False) -> None:
        self.came: list[float] = []
        self._delay_s = delay_s
        self._failing = failing
        paths = [
            routing.Route("/health", self._health),
            routing.Route("/v1/chat/completions", self._chat, methods=["POST"]),
        ]
        config = uvicorn.Config(
            applications.Starlette(routes=paths), host="127.0.0.1", port=0, log_level="error"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def start(self) -> str:
        """Serve; returns the base URL."""
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}"

    def stop(self) -> None:
        """End it."""
        self._server.should_exit = True
        self._thread.join(10)

    async def _health(self, request: requests.Request) -> responses.Response:
        return responses.PlainTextResponse("ok")

    async def _chat(self, request: requests.Request) -> responses.Response:
        self.came.append(time.monotonic())
        if self._failing:
            return responses.JSONResponse({"error": {"message": "broken", "code": 500}}, 500)
        body = await request.json()
        return responses.StreamingResponse(self._stream(body), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        await asyncio.sleep(self._delay_s)
        common = {
            "id": "c",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": body["model"],
        }
        for at in range(TOKENS):
            delta = {"content": "word "} | ({"role": "assistant"} if at == 0 else {})
            choice = {"index": 0, "delta": delta, "finish_reason": None}
            yield _event({**common, "choices": [choice]})
            await asyncio.sleep(STEP_S)
        last = {"index": 0, "delta": {}, "finish_reason": "stop"}
        yield _event({**common, "choices": [last]})
        used = {"prompt_tokens": 8, "completion_tokens": TOKENS, "total_tokens": 8 + TOKENS}
        yield _event({**common, "choices": [], "usage": used})
        yield b"data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


@dataclasses.dataclass
class Load:
    """Clients that ask all along, each request a conversation of its own."""

    url: str
    key: str
    clients: int = CLIENTS
    asked: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)
    _ending: threading.Event = dataclasses.field(default_factory=threading.Event)
    _threads: list[threading.Thread] = dataclasses.field(default_factory=list)

    def start(self) -> None:
        """Begin to ask."""
        # Daemons: a run that breaks off must not be kept alive by its callers.
        self._threads = [
            threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(self.clients)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let the last answers end."""
        self._ending.set()
        for thread in self._threads:
            thread.join(WAIT_S)

    def _run(self, number: int) -> None:
        headers = {"Authorization": f"Bearer {self.key}"}
        with httpx.Client(timeout=WAIT_S, trust_env=False, headers=headers) as client:
            at = 0
            while not self._ending.is_set():
                at += 1
                content = f"client {number} asks for the {at}th time"
                body = {
                    "model": running.MODEL,
                    "messages": [{"role": "user", "content": content}],
                    "max_tokens": TOKENS,
                    "stream": True,
                }
                self.asked += 1
                try:
                    answer = client.post(f"{self.url}/v1/chat/completions", json=body)
                    if answer.status_code != 200 or "[DONE]" not in answer.text:
                        self.failures.append(f"{answer.status_code} {answer.text[:300]}")
                    elif '"error"' in answer.text:
                        self.failures.append(answer.text[-300:])
                except httpx.HTTPError as error:
                    self.failures.append(f"{type(error).__name__}: {error}")


class Bench:
    """One installation, its external servers and what is measured there.

    Attributes:
        wait_s: longest wait for a rollout to come to a state.
    """

    wait_s = WAIT_S

    def __init__(self, house: running.Running) -> None:
        self.house = house
        self.load = Load(house.http, house.admin_key)

    def declare(self, name: str, url: str) -> None:
        """Declare a version served by an external server."""
        spec = {**VERSION, "weights": url}
        body = {"model": running.MODEL, "name": name, "spec": spec}
        self.house.call("POST", "/admin/catalog/version", body)

    def shares(self, versions: dict[str, int]) -> None:
        """Set the route."""
        body = {"model": running.MODEL, "set": {"versions": versions}}
        self.house.call("PATCH", "/admin/catalog/route", body)

    def visible_s(self, versions: dict[str, int]) -> float:
        """Return seconds from a route's change until the gateway serves by it."""
        began = time.monotonic()
        self.shares(versions)
        while time.monotonic() - began < WAIT_S:
            (model,) = self.house.call("GET", "/v1/models")["data"]
            if model["forebay"]["versions"] == sorted(versions):
                return time.monotonic() - began
            time.sleep(0.005)
        raise TimeoutError("the route is not seen")

    def rollout(self, version: str, steps: list[int], **terms: Any) -> None:
        """Begin a rollout."""
        body = {"version": version, "steps": steps, "hold_s": 1.0, "least": 5, **terms}
        self.house.call("POST", f"/admin/models/{running.MODEL}/rollout", body)

    def wait(self, *states: str) -> dict[str, Any]:
        """Return the rollout once it is in one of ``states``."""
        began = time.monotonic()
        while time.monotonic() - began < self.wait_s:
            (one,) = self.house.call("GET", "/admin/rollouts")["rollouts"]
            if one["state"] in states:
                found: dict[str, Any] = one
                return found
            if one["state"] == "over":
                raise AssertionError(f"over, and not {' or '.join(states)}: {one['reason']}")
            time.sleep(0.05)
        raise TimeoutError(f"rollout is not {' or '.join(states)} but {one}")

    def back_s(self, good: External) -> float:
        """Roll all requests onto the good version and back; returns seconds to its last new request."""
        self.rollout("good", [50, 100], keep_s=3600)
        self.wait("keeping")
        time.sleep(1.0)
        began = time.monotonic()
        self.house.call("POST", f"/admin/models/{running.MODEL}/rollback", {"reason": "bench"})
        self.wait("over")
        time.sleep(3.0)
        late = [at - began for at in good.came if at > began]
        return max(late, default=0.0)


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Run it all; returns the figures."""
    servers = {"good": External(), "slow": External(SLOW_S), "failing": External(failing=True)}
    urls = {name: server.start() for name, server in servers.items()}
    scheduler = {"restart_backoff_s": 0.2, "idle_lease_s": 5.0}
    model = running.simulated(1, args=f'"step-base-ms" = {STEP_S * 1000}').replace(
        f"seats = {running.SEATS}", "seats = 64"
    )
    house = running.Running(
        folder, {"client": "embedded"}, models=model, replicas=1, scheduler=scheduler
    )
    found: dict[str, Any] = {"rounds": rounds}
    try:
        house.up()
        bench = Bench(house)
        for name, url in urls.items():
            bench.declare(name, url)
        seen = [
            bench.visible_s(versions)
            for _ in range(5)
            for versions in ({"v1": 100, "good": 0}, {"v1": 100})
        ]
        bench.load.start()
        automatic: dict[str, Any] = {}
        for name in ("failing", "slow"):
            bench.rollout(name, [20, 100], least=400)
            bench.wait("stepping")
            began = time.monotonic()
            over = bench.wait("over")
            automatic[name] = {
                "seconds": round(time.monotonic() - began, 2),
                "requests": len(servers[name].came),
                "reason": over["reason"],
                "outcome": over["outcome"],
            }
        back = [bench.back_s(servers["good"]) for _ in range(rounds)]
        bench.rollout("good", [50, 100], keep_s=1.0)
        done = bench.wait("over")
        time.sleep(2.0)
        bench.load.stop()
        found |= {
            "route_change_visible_s": spread(seen),
            "rollback_s": spread(back),
            "automatic": automatic,
            "rollout": done["outcome"],
            "requests": bench.load.asked,
            "failed_requests": len(bench.load.failures),
            "failures": bench.load.failures[:5],
        }
    except BaseException:
        print(house.log()[-6000:], file=sys.stderr)
        raise
    finally:
        house.close()
        for server in servers.values():
            server.stop()
    return found


def spread(values: list[float]) -> dict[str, float]:
    """Return the median and the ends."""
    return {
        "median": round(statistics.median(values), 3),
        "least": round(min(values), 3),
        "most": round(max(values), 3),
    }


def judged(automatic: dict[str, Any]) -> list[str]:
    """Return the table of versions that were taken back."""
    return [
        "| version | outcome | after its first request, s | requests it got | why |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {name} | {one['outcome']} | {one['seconds']} | {one['requests']} | {one['reason']} |"
            for name, one in automatic.items()
        ),
    ]


def section(found: dict[str, Any]) -> str:
    """Return the figures as a table."""
    automatic = found["automatic"]
    rows = [
        ("a change of a route until a gateway serves by it", "s", found["route_change_visible_s"]),
        (
            "a rollback from the command to the last new request on the new version",
            "s",
            found["rollback_s"],
        ),
    ]
    lines = ["| what | unit | median | least | most |", "| --- | --- | --- | --- | --- |"]
    lines += [
        f"| {what} | {unit} | {value['median']} | {value['least']} | {value['most']} |"
        for what, unit, value in rows
    ]
    lines += [
        "",
        *judged(automatic),
        "",
        f"{found['requests']} requests by {CLIENTS} streaming clients through all of it, "
        f"{found['failed_requests']} of them failed; {found['rounds']} rollbacks.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, and print JSON on the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gb", type=float, default=0.0, help="staging too, of so large a model")
    parser.add_argument("--adapters", type=int, default=0, help="so many on real vLLM too")
    parser.add_argument(
        "--vllm", type=int, default=0, help="so many rounds on real vLLM and Slurm too"
    )
    parser.add_argument("--report", type=Path, default=None, help="page to put the figures into")
    args = parser.parse_args()
    at = gateway_report.on_machine(gateway_report.machine())

    def told(name: str, text: str) -> None:
        """Put a part's figures into the page at once: what breaks off later takes none of them along."""
        text = f"{at}\n\n{text}"
        print(text, flush=True)
        if args.report is not None:
            report_marks.put(args.report, name, text)

    with tempfile.TemporaryDirectory(prefix="forebay-bench-models-") as name:
        found = measure(Path(name), args.rounds)
    told("rollouts", section(found))
    if args.gb:
        found["staging"] = models_staging.figures(args.gb, args.rounds)
        found["staging_mb_per_s"] = found["staging"]["staging_mb_per_s"]
        told("staging", models_staging.section(found["staging"]))
    if args.adapters:
        found["adapters"] = models_adapters.figures(args.adapters)
        told("adapters", models_adapters.section(found["adapters"]))
        found["adapter_load_ms"] = found["adapters"].pop("adapter_load_ms")
    if args.vllm:
        from tests.bench import models_vllm  # which stands on this module

        found["vllm"] = models_vllm.measure(args.vllm)
        found["failed_requests"] += found["vllm"]["failed_requests"]
        told("rollouts on vLLM", models_vllm.section(found["vllm"]))
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""What a line costs on its way: CPU of the gateway and of the runner, with replicas that answer at once.

Everything but the engine is a site's own: the gateway's process with its spool and routing, the runner's with
its journal. CPU is read from /proc between two looks at the job, so that neither process's start counts, and
neither does the machine's load.
"""

import asyncio
import dataclasses
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from batch_jobs import routes
from tests.bench import gateway_subjects, processes

REPLICAS = 1
_SETTLED = 0.1  # of the lines: until then connections are opened, windows grow, modules are loaded
_PATIENCE_S, _LINE_S = 120.0, 0.1  # that a job may take, and each of its lines


@dataclasses.dataclass(frozen=True, slots=True)
class _Look:
    """What had been done, and the CPU seconds of the two processes by then."""

    lines: int
    gateway_s: float
    runner_s: float


async def measure(data: bytes) -> dict[str, Any]:
    """Run a file; returns milliseconds a line."""
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as name:
        folder = Path(name)
        mock = gateway_subjects.python("gateway_mock", str(REPLICAS))
        async with gateway_subjects.process(mock, folder / "mock.log") as engines:
            said: Any = await gateway_subjects.told(engines, folder / "mock.log")
            argv = gateway_subjects.python("gateway_forebay", str(folder), *said)
            async with gateway_subjects.process(argv, folder / "gateway.log") as gateway:
                at: Any = await gateway_subjects.told(gateway, folder / "gateway.log")
                env = {
                    "FOREBAY_FOREBAY_STATE_DIR": str(folder / "state"),
                    "FOREBAY_SLURM_CLIENT": "embedded",
                    "FOREBAY_URL": at["http"],
                }
                runner = [sys.executable, "-P", "-m", "forebay", "batchd"]
                async with gateway_subjects.process(runner, folder / "batchd.log", env) as batchd:
                    key = (folder / "state" / "secrets" / "admin.key").read_text().strip()
                    return await _run(data, at["http"], key, (gateway.pid, batchd.pid))


async def submit(
    session: aiohttp.ClientSession, url: str, data: bytes, headers: Mapping[str, str] | None = None
) -> int:
    """Submit a file as a batch job; returns its id.

    Raises:
        gateway_subjects.BenchError: it was refused, in whose words.
    """
    options = {"options": '{"name": "bench"}'}
    async with session.post(url, params=options, data=data, headers=headers) as answer:
        said = await answer.text()
        if answer.status != 200:
            raise gateway_subjects.BenchError(f"the job was refused ({answer.status}): {said}")
    return int(json.loads(said)["job_id"])


async def _run(data: bytes, http: str, key: str, pids: tuple[int, int]) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"}
    url = http + routes.PREFIX
    limit_s = _PATIENCE_S + data.count(b"\n") * _LINE_S
    async with (
        asyncio.timeout(limit_s),
        aiohttp.ClientSession(trust_env=False, headers=headers) as session,
    ):
        job_id = await submit(session, url, data)
        first: _Look | None = None
        while True:
            async with session.get(f"{url}/{job_id}") as answer:
                job = await answer.json()
            lines = job["lines"]
            look = _Look(lines["done"], *(processes.cpu_s(pid) for pid in pids))
            if first is None and look.lines >= _SETTLED * lines["total"]:
                first = look
            if first is not None and look.lines == lines["total"]:
                break
            if job["state"] == "FAILED":
                raise gateway_subjects.BenchError(f"the job failed: {job['detail']}")
            await asyncio.sleep(0.5)
    count = look.lines - first.lines
    if not count:
        raise gateway_subjects.BenchError(
            "the file is too short: it was over before the first look"
        )
    return {
        "lines": count,
        "failed": lines["failed"],
        "gateway_ms": round(1_000 * (look.gateway_s - first.gateway_s) / count, 3),
        "runner_ms": round(1_000 * (look.runner_s - first.runner_s) / count, 3),
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(Path(sys.argv[1]).read_bytes()))))

"""Batch jobs beside `vllm run-batch` on real vLLM, and the runner alone on an engine that answers at once.

The same file (half of its lines share prefixes), the same model, one machine, one run, interleaved:
run-batch, Forebay, Forebay with preemptions; and both again with a KV pool that the shared prefixes exceed.
All are measured warm, from the first output to the last. A fresh engine for each arm: nobody finds another's
prefix cache.

The last line is JSON.
"""

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from batch_jobs import routes
from tests.bench import (
    batch_big,
    batch_lines,
    batch_report,
    gateway_report,
    gateway_subjects,
    processes,
)
from tests.contract import engine_vllm, vllm_sink

SEATS = 32
POOL = "128M"  # all shared texts, and what 32 sequences take
SMALL_POOL = "16M"  # not even half of them
ARGUMENTS: Mapping[str, Any] = {"enforce-eager": True, "dtype": "float32", "block-size": 32}
_SHARING = 25  # lines of the file for each shared text: half of them have one
_PIDS = ("gateway_pid", "runner_pid")
_MOST_SPIKES = 8  # at once
_WORDS = 100  # of a shared text, some 400 tokens


def prefixes(count: int) -> int:
    """Return how many shared texts a file of ``count`` lines has."""
    return max(1, count // _SHARING)


def written(count: int, seed: int) -> bytes:
    """Return the file: chat lines, each second one with a text before it that others share, in no order."""
    chance = random.Random(seed)
    rows = []
    words = [f"word{n}" for n in range(400)]
    shared = [" ".join(chance.choices(words, k=_WORDS)) for _ in range(prefixes(count))]
    for number in range(count):
        said = " ".join(chance.choices(words, k=20))
        if number % 2:
            said = f"{chance.choice(shared)} {said}"
        body = {
            "model": "chat",
            "messages": [{"role": "user", "content": said}],
            "max_tokens": chance.randint(16, 64),
            "temperature": 0,
            "ignore_eos": True,
        }
        rows.append(
            {
                "custom_id": f"c{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body,
            }
        )
    chance.shuffle(rows)
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def tokens(lines: Sequence[Mapping[str, Any]]) -> int:
    """Return the output tokens of result lines."""
    return sum(line["response"]["body"]["usage"]["completion_tokens"] for line in lines)


async def run_batch(
    folder: Path, data: Path, weights: Path, engine: Mapping[str, Any]
) -> dict[str, Any]:
    """Run the peer over the file."""
    out = folder / "out.jsonl"
    argv = [
        str(engine_vllm.python(engine_vllm.NEWEST)), "-P", "-m", "tests.bench.batch_peer", str(folder),
        "-i", str(data), "-o", str(out), "--model", str(weights), "--served-model-name", "chat",
        "--max-num-seqs", str(SEATS),
    ]  # fmt: skip
    for name, value in engine.items():
        argv += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    env = {"PYTHONPATH": str(engine_vllm.REPOSITORY)}
    async with gateway_subjects.process(argv, folder / "peer.log", env) as peer:
        assert peer.stdout is not None
        await peer.stdout.read()
        code = await peer.wait()
    if code or not (folder / "peer.json").exists():
        log = (folder / "peer.log").read_text()[-2000:]
        raise gateway_subjects.BenchError(f"run-batch ended with {code}; its log says:\n{log}")
    said: dict[str, Any] = json.loads((folder / "peer.json").read_text())
    lines = [json.loads(line) for line in out.read_bytes().splitlines()]
    return {**said, "tokens": tokens(lines), "lines": len(lines)}


@contextlib.asynccontextmanager
async def site(folder: Path, replica: engine_vllm.Replica) -> AsyncIterator[dict[str, str]]:
    """Run a gateway on the replica, and a batch runner; yields address and key."""
    state = {
        "FOREBAY_FOREBAY_STATE_DIR": str(folder / "state"),
        "FOREBAY_SLURM_CLIENT": "embedded",
    }
    argv = gateway_subjects.python(
        "prefix_forebay",
        str(folder),
        str(replica.log.parent / "secret"),
        str(SEATS),
        replica.address,
    )
    async with gateway_subjects.process(argv, folder / "gateway.log") as gateway:
        said: Any = await gateway_subjects.told(gateway, folder / "gateway.log")
        key = (folder / "state" / "secrets" / "admin.key").read_text().strip()
        runner = [*gateway_subjects.python("x")[:1], "-m", "forebay", "batchd"]
        env = {**state, "FOREBAY_URL": said["http"]}
        async with gateway_subjects.process(runner, folder / "batchd.log", env) as batchd:
            pids = {"gateway_pid": str(gateway.pid), "runner_pid": str(batchd.pid)}
            yield {"http": said["http"], "key": key, "token": said["token"], **pids}


async def forebay(
    folder: Path, data: Path, replica: engine_vllm.Replica, preemptions: int
) -> dict[str, Any]:
    """Run the file as a batch job."""
    async with site(folder, replica) as at, aiohttp.ClientSession(trust_env=False) as session:
        headers = {"Authorization": f"Bearer {at['key']}"}
        url = at["http"] + routes.PREFIX
        async with session.post(
            url, params={"options": '{"name": "bench"}'}, data=data.read_bytes(), headers=headers
        ) as answer:
            job_id = (await answer.json())["job_id"]
        asked = 0
        cpu = {name: processes.cpu_s(int(at[name])) for name in _PIDS}
        while True:
            async with session.get(f"{url}/{job_id}", headers=headers) as answer:
                job = await answer.json()
            if job["state"] in {"COMPLETED", "FAILED"}:
                break
            lines_done = job["lines"]["done"] / job["lines"]["total"]
            due = min(preemptions, int(lines_done * (preemptions + 1)))
            if due > asked:
                # One that found a seat free took none from a line: the next come in company.
                lacking = min(_MOST_SPIKES, due - job["lines"]["preempted"])
                await asyncio.gather(
                    *(_spike(session, at, due, one) for one in range(max(1, lacking)))
                )
                asked = due
            await asyncio.sleep(0.1 if preemptions else 0.5)
        async with session.get(f"{url}/{job_id}/output", headers=headers) as answer:
            lines = [json.loads(line) for line in (await answer.read()).splitlines()]
        cpu_s = sum(processes.cpu_s(int(at[name])) - cpu[name] for name in _PIDS)
        rss = processes.rss_mb(int(at["runner_pid"]))
    rows = [json.loads(line) for line in replica.rows_file.read_text().splitlines()]
    rows = [row for row in rows if row["tier"] == "batch"]
    ids = [line["custom_id"] for line in lines]
    prompts = sum(line["response"]["body"]["usage"]["prompt_tokens"] for line in lines)
    return {
        "seconds": (job["finalizing_us"] - min(row["ended_us"] for row in rows)) / 1e6,
        "wall_s": (job["ended_us"] - job["submitted_us"]) / 1e6,
        "tokens": tokens(lines),
        "lines": len(lines),
        "rss_mb": rss,
        "cpu_s": cpu_s,
        "preempted": job["lines"]["preempted"],
        "lost": job["lines"]["total"] - len(set(ids)),
        "duplicated": len(ids) - len(set(ids)),
        "cached": 1 - sum(row["uncached_prompt_tokens"] for row in rows) / max(1, prompts),
        "recomputed": batch_report.recomputed(rows),
    }


async def _spike(
    session: aiohttp.ClientSession, at: Mapping[str, str], number: int, one: int
) -> None:
    """Ask for one interactive token while every seat has a batch line: the youngest gives its own."""
    body = {"model": "chat", "prompt": f"spike {number}.{one}", "max_tokens": 1}
    headers = {"Authorization": f"Bearer {at['token']}"}
    async with session.post(f"{at['http']}/v1/completions", json=body, headers=headers) as answer:
        await answer.read()
        if answer.status != 200:
            raise gateway_subjects.BenchError(f"a spike was answered {answer.status}")


async def compare(options: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Run every arm in turn, so many rounds."""
    arms = [(arm, POOL) for arm in batch_report.ARMS]
    arms += [(batch_report.SMALL + arm, SMALL_POOL) for arm in batch_report.POOLED]
    arms = [(arm, pool) for arm, pool in arms if not options.arms or arm in options.arms]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name, _ in arms}
    data = folder / "requests.jsonl"
    data.write_bytes(written(options.lines, 11))
    server = engine_vllm.ForkServer(engine_vllm.NEWEST, folder)
    try:
        for number in range(options.rounds):
            turn = number % len(arms)
            for name, pool in arms[turn:] + arms[:turn]:
                home = folder / f"{name}-{number}"
                home.mkdir()
                got = await run_arm(server, home, data, name, pool)
                found[name].append(got)
                told = {key: round(value, 4) for key, value in got.items()}
                print(f"round {number + 1} {name}: {batch_report.rate(got):.0f} tokens/s {told}")
                sys.stdout.flush()
    finally:
        server.close()
    return found


async def run_arm(
    server: engine_vllm.ForkServer, home: Path, data: Path, name: str, pool: str
) -> dict[str, Any]:
    """Run one arm on an engine of its own."""
    engine = {**ARGUMENTS, "kv-cache-memory-bytes": pool}
    spec = engine_vllm.spec(home.parent, seats=SEATS, reserved_seats=0, engine_args=engine)
    if name.endswith(batch_report.ARMS[0]):
        return await run_batch(home, data, Path(spec.weights), engine)
    rows = home / "rows.jsonl"
    replica_id = engine_vllm.begin(server, spec, {vllm_sink.ROWS: str(rows)})
    replica = engine_vllm.listening(server, replica_id)
    replica.rows_file = rows
    count = batch_report.PREEMPTIONS if name == batch_report.ARMS[2] else 0
    try:
        return await forebay(home, data, replica, count)
    finally:
        engine_vllm.stop(server, replica_id, signal.SIGTERM)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=2_000, help="of the file for vLLM; 0: not")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--alone", type=int, default=1_000_000, help="lines for the runner alone; 0: not"
    )
    parser.add_argument(
        "--big", type=int, default=10_000_000, help="lines to take in, journal and resume; 0: not"
    )
    parser.add_argument("--arms", nargs="*", default=[], help="of these alone, by their names")
    parser.add_argument("--report", type=Path, help="write the report there")
    options = parser.parse_args()
    began = time.monotonic()
    said: dict[str, Any] = {
        "machine": gateway_report.machine(),
        "vllm": engine_vllm.NEWEST,
        "lines": options.lines,
        "prefixes": prefixes(options.lines),
        "rounds": options.rounds,
        "seats": SEATS,
        "pool": f"{POOL}iB",
        "small_pool": f"{SMALL_POOL}iB",
        "alone": {},
        "big": {},
        "runs": {},
    }
    for part, count, measure in (
        ("alone", options.alone, batch_lines.measure),
        ("big", options.big, batch_big.measure),
    ):
        if count:
            with tempfile.TemporaryDirectory(prefix="forebay-bench-") as name:
                said[part] = measure(Path(name), count)
            print(
                f"{part}, after {time.monotonic() - began:.0f} s: {json.dumps(said[part])}",
                flush=True,
            )
    if options.lines:
        with tempfile.TemporaryDirectory(prefix="forebay-bench-") as name:
            said["runs"] = asyncio.run(compare(options, Path(name)))
        print(json.dumps(batch_report.ratios(said["runs"])))
    if options.report:
        options.report.write_text(batch_report.report(said))
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    print(json.dumps(batch_report.result(said["runs"], said["alone"])))


if __name__ == "__main__":
    main()

"""Batch jobs beside `vllm run-batch` on real vLLM, and the runner alone on an engine that answers at once.

The same file (half of its lines share prefixes), the same model, one machine, one run, interleaved:
run-batch, Forebay, Forebay with preemptions; and both again with a KV pool that the shared prefixes exceed.
All are measured warm, from the first output to the last. A fresh engine for each arm: nobody finds another's
prefix cache.

Each part, and each arm of a round, is on disk as soon as it is over (`batch_kept`), and the report: what
fails costs itself alone. The last line is JSON.
"""

import argparse
import asyncio
import contextlib
import functools
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from batch_jobs import routes
from tests.bench import (
    batch_big,
    batch_kept,
    batch_lines,
    batch_path,
    batch_report,
    gateway_subjects,
    processes,
)
from tests.contract import engine_vllm, vllm_sink

SEATS = 32
POOL = "256M"  # all shared texts of 2,000 lines, and what 32 sequences take
SMALL_POOL = "16M"  # some seven of them: 1,536 bytes a token
ARGUMENTS: Mapping[str, Any] = {"enforce-eager": True, "dtype": "float32", "block-size": 32}
_SHARING = 25  # lines of the file for each shared text: half of them have one
_MOST_SPIKES = 8  # at once
_WORDS = 350  # of a shared text, some 1,400 tokens: a system prompt with a page of rules, or a short document
_ARM_S, _LINE_S = 300.0, 1.0  # that an arm may take, and each of its lines: one that hangs fails


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


def cached(lines: Sequence[Mapping[str, Any]]) -> float:
    """Return which share of the prompts' tokens came from the prefix cache."""
    used = [line["response"]["body"]["usage"] for line in lines]
    found = sum(
        (each.get("prompt_tokens_details") or {}).get("cached_tokens") or 0 for each in used
    )
    return float(found / max(1, sum(each["prompt_tokens"] for each in used)))


async def run_batch(
    folder: Path, data: Path, weights: Path, engine: Mapping[str, Any]
) -> dict[str, Any]:
    """Run the peer over the file."""
    out = folder / "out.jsonl"
    argv = [
        str(engine_vllm.python(engine_vllm.NEWEST)), "-P", "-m", "tests.bench.batch_peer", str(folder),
        "-i", str(data), "-o", str(out), "--model", str(weights), "--served-model-name", "chat",
        "--max-num-seqs", str(SEATS), "--enable-prompt-tokens-details",
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
    failed = [line for line in lines if line["error"] or line["response"]["status_code"] != 200]
    if failed:
        raise gateway_subjects.BenchError(f"run-batch refused {len(failed)} lines: {failed[0]}")
    return {**said, "tokens": tokens(lines), "lines": len(lines), "cached": cached(lines)}


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
        job_id = await batch_path.submit(session, url, data.read_bytes(), headers)
        job = await _ended(session, at, f"{url}/{job_id}", preemptions)
        async with session.get(f"{url}/{job_id}/output", headers=headers) as answer:
            lines = [json.loads(line) for line in (await answer.read()).splitlines()]
        rss = processes.rss_mb(int(at["runner_pid"]))
    rows = [json.loads(line) for line in replica.rows_file.read_text().splitlines()]
    rows = [row for row in rows if row["tier"] == "batch"]
    ids = [line["custom_id"] for line in lines]
    return {
        "seconds": (job["finalizing_us"] - min(row["ended_us"] for row in rows)) / 1e6,
        "wall_s": (job["ended_us"] - job["submitted_us"]) / 1e6,
        "tokens": tokens(lines),
        "lines": len(lines),
        "rss_mb": rss,
        "preempted": job["lines"]["preempted"],
        "lost": job["lines"]["total"] - len(set(ids)),
        "duplicated": len(ids) - len(set(ids)),
        "cached": cached(lines),
        "recomputed": batch_report.recomputed(rows),
    }


async def _ended(
    session: aiohttp.ClientSession, at: Mapping[str, str], url: str, preemptions: int
) -> dict[str, Any]:
    """Return a job once it has ended; meanwhile interactive requests take seats from its lines."""
    headers = {"Authorization": f"Bearer {at['key']}"}
    asked = 0
    while True:
        async with session.get(url, headers=headers) as answer:
            job: dict[str, Any] = await answer.json()
        if job["ended_us"]:
            break
        lines_done = job["lines"]["done"] / job["lines"]["total"]
        due = min(preemptions, int(lines_done * (preemptions + 1)))
        if due > asked:
            # One that found a seat free took none from a line: the next come in company.
            lacking = min(_MOST_SPIKES, due - job["lines"]["preempted"])
            await asyncio.gather(*(_spike(session, at, due, one) for one in range(max(1, lacking))))
            asked = due
        await asyncio.sleep(0.1 if preemptions else 0.5)
    if job["state"] != "COMPLETED" or not job["lines"]["ok"]:
        raise gateway_subjects.BenchError(
            f"the job ended {job['state']}, {job['lines']}: {job['reason']} {job['detail']}"
        )
    return job


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


class Engines:
    """The fork server of all arms; one that failed an arm is not used for the next."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server: engine_vllm.ForkServer | None = None

    def server(self) -> engine_vllm.ForkServer:
        """Return it, started if need be."""
        if self._server is None:
            self._server = engine_vllm.ForkServer(engine_vllm.NEWEST, self._folder)
        return self._server

    def close(self) -> None:
        """End it, and every replica."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def run(self, home: Path, data: Path, name: str, pool: str) -> dict[str, Any]:
        """Run one arm on an engine of its own.

        Raises:
            TimeoutError: it hangs.
        """
        engine = {**ARGUMENTS, "kv-cache-memory-bytes": pool}
        spec = engine_vllm.spec(home.parent, seats=SEATS, reserved_seats=0, engine_args=engine)
        limit_s = _ARM_S + _LINE_S * data.read_bytes().count(b"\n")
        if name.endswith(batch_report.ARMS[0]):
            return asyncio.run(
                asyncio.wait_for(run_batch(home, data, Path(spec.weights), engine), limit_s)
            )
        server, rows = self.server(), home / "rows.jsonl"
        replica_id = engine_vllm.begin(server, spec, {vllm_sink.ROWS: str(rows)})
        replica = engine_vllm.listening(server, replica_id)
        replica.rows_file = rows
        count = batch_report.PREEMPTIONS if name == batch_report.ARMS[2] else 0
        found = asyncio.run(asyncio.wait_for(forebay(home, data, replica, count), limit_s))
        engine_vllm.stop(server, replica_id, signal.SIGTERM)
        return found


def arms(wanted: Sequence[str]) -> list[tuple[str, str]]:
    """Return the arms and their KV pools, of these names alone if there are any."""
    found = [(arm, POOL) for arm in batch_report.ARMS]
    found += [(batch_report.SMALL + arm, SMALL_POOL) for arm in batch_report.POOLED]
    return [(arm, pool) for arm, pool in found if not wanted or arm in wanted]


def compare(
    options: argparse.Namespace, folder: Path, kept: batch_kept.Kept
) -> dict[str, list[dict[str, Any]]]:
    """Run every arm in turn, so many rounds; an arm that fails is left out of its round."""
    at, wanted = batch_kept.machine(), arms(options.arms)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name, _ in wanted}
    about = {
        "vllm": engine_vllm.NEWEST,
        "lines": options.lines,
        "prefixes": prefixes(options.lines),
        "seats": SEATS,
        "pool": f"{POOL}iB",
        "small_pool": f"{SMALL_POOL}iB",
    }
    data = folder / "requests.jsonl"
    data.write_bytes(written(options.lines, 11))
    engines = Engines(folder)
    try:
        for number in range(options.rounds):
            turn = number % len(wanted)
            for name, pool in wanted[turn:] + wanted[:turn]:
                home = folder / f"{name}-{number}"
                home.mkdir()
                arm = functools.partial(engines.run, home, data, name, pool)
                got = kept.attempt(f"round {number + 1} {name}", arm)
                if got is None:
                    engines.close()
                    continue
                found[name].append({**got, "round": number})
                told = {key: round(value, 4) for key, value in got.items()}
                rate = batch_report.rate(got)
                print(f"round {number + 1} {name}: {rate:.0f} tokens/s {told}", flush=True)
                kept.keep("vllm", {**about, "rounds": number + 1, "runs": found}, at)
    finally:
        engines.close()
    print(json.dumps(batch_report.ratios(found)), flush=True)
    return found


def _folder() -> "tempfile.TemporaryDirectory[str]":
    """Return a folder for a part; what a killed process still writes there fails nothing."""
    return tempfile.TemporaryDirectory(prefix="forebay-bench-", ignore_cleanup_errors=True)


def parser() -> argparse.ArgumentParser:
    """Return the parser."""
    found = argparse.ArgumentParser(description=__doc__)
    found.add_argument("--lines", type=int, default=2_000, help="of the file for vLLM; 0: not")
    found.add_argument("--rounds", type=int, default=1)
    found.add_argument(
        "--alone", type=int, default=1_000_000, help="lines for the runner alone; 0: not"
    )
    found.add_argument(
        "--big", type=int, default=10_000_000, help="lines to take in, journal and resume; 0: not"
    )
    found.add_argument(
        "--path", type=int, default=4_000, help="lines past replicas that answer at once; 0: not"
    )
    names = [name for name, _ in arms(())]
    found.add_argument("--arms", nargs="*", default=[], choices=names, help="of these alone")
    found.add_argument("--report", type=Path, help="write the report there")
    found.add_argument("--kept", type=Path, default=batch_kept.PLACE, help="where figures are kept")
    return found


def main() -> int:
    """Measure and print."""
    options = parser().parse_args()
    began = time.monotonic()

    def told(parts: Mapping[str, Any]) -> None:
        if options.report:
            options.report.write_text(batch_report.report(parts))

    kept = batch_kept.Kept(options.kept, told)
    said: dict[str, Any] = {}

    def part(name: str, measure: Callable[[Path], Any]) -> None:
        at = batch_kept.machine()
        with _folder() as folder:
            found = kept.attempt(name, lambda: measure(Path(folder)))
        if found is not None:
            said[name] = found
            kept.keep(name, found, at)
            print(f"{name}, after {time.monotonic() - began:.0f} s: {json.dumps(found)}")
            sys.stdout.flush()

    if options.path:
        data = written(options.path, 11)
        part("path", lambda _: asyncio.run(batch_path.measure(data)))
    if options.lines:
        with _folder() as folder:
            runs = kept.attempt("vllm", lambda: compare(options, Path(folder), kept))
        said["runs"] = runs or {}
    if options.alone:
        part("alone", lambda folder: batch_lines.measure(folder, options.alone))
    if options.big:
        part("big", lambda folder: batch_big.measure(folder, options.big))
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    return batch_kept.ended(kept, batch_report.result(said.get("runs", {}), said.get("alone", {})))


if __name__ == "__main__":
    sys.exit(main())

"""Batch jobs beside `vllm run-batch` on real vLLM, and the runner alone on an engine that answers at once.

The same file (half of its lines share prefixes), the same model, one machine, one run, interleaved:
run-batch, Forebay, Forebay with preemptions. Both are measured warm: run-batch from its first answer to its
last, Forebay from the start of its job to the end of its last line, so that what the runner and the gateway
do first counts against us. A fresh replica for each arm: nobody finds another's prefix cache.

The last line is JSON.
"""

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import platform
import random
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from batch_jobs import routes
from tests.bench import batch_lines, gateway_subjects, processes
from tests.contract import engine_vllm, vllm_sink

SEATS = 32
PREEMPTIONS = 10
ARGUMENTS: Mapping[str, Any] = {
    "enforce-eager": True,
    "dtype": "float32",
    "block-size": 32,
    "kv-cache-memory-bytes": "16M",
}
ARMS = ("run_batch", "forebay", "forebay_preempted")


def written(count: int, seed: int) -> bytes:
    """Return the file: chat lines, each second one with a prefix that fifty share, in no order."""
    chance = random.Random(seed)
    rows = []
    words = [f"word{n}" for n in range(400)]
    prefixes = [" ".join(chance.choices(words, k=90)) for _ in range(max(1, count // 100))]
    for number in range(count):
        said = " ".join(chance.choices(words, k=20))
        if number % 2:
            said = f"{chance.choice(prefixes)} {said}"
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


async def run_batch(folder: Path, data: Path, weights: Path) -> dict[str, Any]:
    """Run the peer over the file."""
    out = folder / "out.jsonl"
    argv = [
        str(engine_vllm.python(engine_vllm.NEWEST)), "-P", "-m", "tests.bench.batch_peer", str(folder),
        "-i", str(data), "-o", str(out), "--model", str(weights), "--served-model-name", "chat",
        "--max-num-seqs", str(SEATS),
    ]  # fmt: skip
    for name, value in ARGUMENTS.items():
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
            yield {"http": said["http"], "key": key, "pid": str(batchd.pid), "token": said["token"]}


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
        while True:
            async with session.get(f"{url}/{job_id}", headers=headers) as answer:
                job = await answer.json()
            if job["state"] in {"COMPLETED", "FAILED"}:
                break
            share = (asked + 1) / (preemptions + 1)
            if asked < preemptions and job["lines"]["done"] >= share * job["lines"]["total"]:
                asked += 1
                await _spike(session, at, asked)
            await asyncio.sleep(0.05)
        async with session.get(f"{url}/{job_id}/output", headers=headers) as answer:
            lines = [json.loads(line) for line in (await answer.read()).splitlines()]
        rss = processes.rss_mb(int(at["pid"]))
    seconds = (job["finalizing_us"] - job["started_us"]) / 1e6
    ids = [line["custom_id"] for line in lines]
    return {
        "seconds": seconds,
        "tokens": tokens(lines),
        "lines": len(lines),
        "rss_mb": rss,
        "preempted": job["lines"]["preempted"],
        "lost": job["lines"]["total"] - len(set(ids)),
        "duplicated": len(ids) - len(set(ids)),
        **recomputed(replica.rows_file),
    }


async def _spike(session: aiohttp.ClientSession, at: Mapping[str, str], number: int) -> None:
    """Ask for one interactive token while every seat has a batch line: the youngest gives its own."""
    body = {"model": "chat", "prompt": f"spike {number}", "max_tokens": 1}
    headers = {"Authorization": f"Bearer {at['token']}"}
    async with session.post(f"{at['http']}/v1/completions", json=body, headers=headers) as answer:
        await answer.read()


def recomputed(rows_file: Path) -> dict[str, float]:
    """Return the share of a run's tokens that were computed again, by the replica's own rows."""
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    seen: set[str] = set()
    again = total = 0
    for row in rows:
        if row.get("tier") != "batch":
            continue
        computed = row["uncached_prompt_tokens"]
        total += computed + row["output_tokens"]
        again += computed if row["custom_id"] in seen else 0
        seen.add(row["custom_id"])
    return {"recomputed_share": again / max(1, total)}


async def compare(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Run every arm in turn, so many rounds."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ARMS}
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as name:
        folder = Path(name)
        data = folder / "requests.jsonl"
        data.write_bytes(written(options.lines, 11))
        server = engine_vllm.ForkServer(engine_vllm.NEWEST, folder)
        try:
            spec = engine_vllm.spec(
                folder,
                seats=SEATS,
                reserved_seats=0,
                engine_args={**ARGUMENTS, "max-num-seqs": SEATS},
            )
            for number in range(options.rounds):
                order = ARMS[number % len(ARMS) :] + ARMS[: number % len(ARMS)]
                for arm in order:
                    home = folder / f"{arm}-{number}"
                    home.mkdir()
                    if arm == "run_batch":
                        got = await run_batch(home, data, Path(spec.weights))
                    else:
                        rows = {vllm_sink.ROWS: str(home / "rows.jsonl")}
                        replica = engine_vllm.listening(
                            server, engine_vllm.begin(server, spec, rows)
                        )
                        replica.rows_file = home / "rows.jsonl"
                        count = PREEMPTIONS if arm == "forebay_preempted" else 0
                        try:
                            got = await forebay(home, data, replica, count)
                        finally:
                            os.kill(replica.pid, signal.SIGTERM)
                    found[arm].append(got)
                    rate = got["tokens"] / got["seconds"]
                    print(f"round {number + 1} {arm}: {rate:.0f} tokens/s", flush=True)
        finally:
            server.close()
    return found


def result(
    arms: Mapping[str, Sequence[Mapping[str, Any]]], alone: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the JSON: medians over rounds."""

    def rates(arm: str) -> list[float]:
        return [each["tokens"] / each["seconds"] for each in arms.get(arm, ())]

    preempted = arms.get("forebay_preempted", ())
    ours = [each for arm in ("forebay", "forebay_preempted") for each in arms.get(arm, ())]
    medians = {arm: round(statistics.median(rates(arm)), 1) for arm in ARMS if rates(arm)}
    base = medians.get("run_batch")
    return {
        "tokens_per_s": medians,
        "of_run_batch": {arm: round(rate / base, 3) for arm, rate in medians.items()}
        if base
        else {},
        "spread": {arm: [round(rate, 1) for rate in sorted(rates(arm))] for arm in ARMS},
        "preemptions": [each["preempted"] for each in preempted],
        "recomputed_share": round(
            max((each["recomputed_share"] for each in preempted), default=0.0), 4
        ),
        "lines_per_cpu_s": alone.get("lines_per_cpu_s"),
        "rss_mb": {
            "1m_lines"
            if alone.get("lines") == 1_000_000
            else f"{alone.get('lines')}_lines": alone.get("rss_mb"),
            **{
                arm: round(max(each["rss_mb"] for each in arms[arm]))
                for arm in ARMS
                if arms.get(arm)
            },
        },
        "alone": alone,
        "lost": sum(each["lost"] for each in ours) + alone.get("lost", 0),
        "duplicated": sum(each["duplicated"] for each in ours) + alone.get("duplicated", 0),
    }


REPORT = """\
# Batch jobs

{day}, {machine}, {cores} cores, Python {python}, vLLM {vllm} on CPU.

`make bench-batch` runs one file of {lines} chat lines (half of them share one of {prefixes} prefixes, all
in random order) with `vllm run-batch`, with Forebay, and with Forebay while {preemptions} interactive
requests each take a seat from a batch line; {rounds} rounds, interleaved, a fresh engine each time, {seats}
sequences at once for both. run-batch is timed from its first answer to its last, Forebay from the start of
its job to the end of its last line. Then the runner alone feeds {alone} lines to a gateway that answers at
once, is killed half-way and resumed.

| | tokens/s (median) | of run-batch | every round |
| --- | --- | --- | --- |
{rows}

| what | measured |
| --- | --- |
| preemptions in a round | {preempted} |
| tokens computed again, worst round | {recomputed:.2%} |
| lines a CPU-second of the runner's process | {lines_per_cpu_s} |
| most memory of the runner | {rss} MiB |
| reading the journal half-way: with its checkpoint, without | {checkpoint} s, {journal} s |
| from a new runner's start to its first answer | {resume} s |
| custom ids lost, twice | {lost}, {duplicated} |

Not measured: GPUs; prefixes that exceed the KV pool by much; several replicas. The preempted arm's spikes
are one token each: longer ones take the seat for longer, which is the interactive users' gain and not a cost
of resuming. On a machine with more cores the gateway and the runner no longer share them with the engine.
"""


def report(options: argparse.Namespace, said: Mapping[str, Any]) -> str:
    """Return the report's text."""
    rows = "\n".join(
        f"| {arm} | {rate} | {said['of_run_batch'].get(arm, '')} | "
        f"{', '.join(map(str, said['spread'][arm]))} |"
        for arm, rate in said["tokens_per_s"].items()
    )
    alone = said["alone"]
    return REPORT.format(
        day=datetime.datetime.now(datetime.UTC).date(),
        machine=platform.machine(),
        cores=os.cpu_count(),
        python=platform.python_version(),
        vllm=engine_vllm.NEWEST,
        lines=options.lines,
        prefixes=max(1, options.lines // 100),
        preemptions=PREEMPTIONS,
        rounds=options.rounds,
        seats=SEATS,
        alone=alone.get("lines"),
        rows=rows,
        preempted=", ".join(map(str, said["preemptions"])),
        recomputed=said["recomputed_share"],
        lines_per_cpu_s=said["lines_per_cpu_s"],
        rss=alone.get("rss_mb"),
        checkpoint=alone.get("recover_s", {}).get("checkpoint"),
        journal=alone.get("recover_s", {}).get("journal_alone"),
        resume=alone.get("resume_s"),
        lost=said["lost"],
        duplicated=said["duplicated"],
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=2_000, help="of the file for vLLM; 0: not")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--alone", type=int, default=1_000_000, help="lines for the runner alone; 0: not"
    )
    parser.add_argument("--report", type=Path, help="write the report there")
    options = parser.parse_args()
    began = time.monotonic()
    alone: dict[str, Any] = {}
    if options.alone:
        with tempfile.TemporaryDirectory(prefix="forebay-bench-") as name:
            alone = batch_lines.measure(Path(name), options.alone)
        print(json.dumps(alone), flush=True)
    arms = asyncio.run(compare(options)) if options.lines else {}
    said = result(arms, alone)
    if options.report:
        options.report.write_text(report(options, said))
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    print(json.dumps(said))


if __name__ == "__main__":
    main()

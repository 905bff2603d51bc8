"""Staging throughput: a model from a folder and from S3 to a disk, whole and checked, beside plain copies.

``python -m tests.bench.models_staging [--gb 1] [--rounds 5]``; JSON on the last line. Peers are interleaved
in the same run: a copy of the folder with fsync, and boto3's own transfers from the same server. The server
is moto's, in Python: what it serves bounds both. Sources are read from the page cache where they fit, by all.
"""

import argparse
import json
import logging
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engines.weights import ledger, sources, staging, store, task
from scheduler.contracts import weights

MB = 1_000_000
SHARDS = 8
_HIDDEN = 1024  # a row of the only tensor that config.json says nothing of


def model(folder: Path, size: int) -> int:
    """Write a model of about ``size`` bytes that passes every check; returns its bytes."""
    folder.mkdir(parents=True)
    config = {"architectures": ["Other"], "hidden_size": _HIDDEN, "vocab_size": 16}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    rows = size // SHARDS // (4 * _HIDDEN)
    for n in range(SHARDS):
        span = rows * _HIDDEN * 4
        about = {f"t{n}": {"dtype": "F32", "shape": [rows, _HIDDEN], "data_offsets": [0, span]}}
        header = json.dumps(about).encode()
        name = f"model-{n + 1:05d}-of-{SHARDS:05d}.safetensors"
        with (folder / name).open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            for at in range(0, span, 16 * MB):
                file.write(os.urandom(min(16 * MB, span - at)))
    return sum(path.stat().st_size for path in folder.iterdir())


def _staged(uri: str, options: task.Options, root: Path) -> None:
    order = task.Order(uri)
    source = sources.of(weights.parse(uri), options)
    staging.Staging(order, source, store.Store(root)).run()


def _copied(place: Path, target: Path) -> None:
    shutil.copytree(place, target)
    for path in target.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _boto(bucket: Any, target: Path) -> None:
    target.mkdir(parents=True)
    for item in bucket.objects.filter(Prefix="bench/"):
        bucket.download_file(item.key, str(target / Path(item.key).name))
    for path in target.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _kept(place: Path, root: Path) -> float:
    """Return which part of what a killed staging had noted is not fetched again by the next one."""
    uri = f"file://{place}"
    order = task.Order(uri, parallel=2)
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "engines.weights"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    if child.stdin is None:
        raise AssertionError("a pipe was asked for")
    child.stdin.write(task.Task(str(root), order).to_json().encode() + b"\n")
    child.stdin.close()
    total = sum(path.stat().st_size for path in place.iterdir())
    noted = root / "staging" / weights.key(uri) / ledger.NAME
    while child.poll() is None and _noted(noted) < total / 2:
        time.sleep(0.002)
    child.kill()
    child.wait()
    before = _noted(noted)
    done = staging.Staging(order, sources.Folder(place), store.Store(root)).run()
    return (done.size - done.fetched) / before if before else 1.0


def _noted(path: Path) -> int:
    try:
        lines = path.read_bytes().splitlines(keepends=True)
        return sum(json.loads(line)[3] for line in lines if line.endswith(b"\n"))
    except OSError:
        return 0


def figures(gb: float = 1.0, rounds: int = 5) -> dict[str, Any]:
    """Measure, and return `staging_mb_per_s` and what stands beside it; see the module."""
    import boto3
    from moto import server as moto_server

    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as name:
        folder = Path(name)
        place = folder / "model"
        size = model(place, round(gb * 1000 * MB))
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each range
        server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        try:
            url = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
            keys = {"aws_access_key_id": "bench", "aws_secret_access_key": "bench"}
            s3 = boto3.resource("s3", endpoint_url=url, region_name="us-east-1", **keys)
            bucket = s3.create_bucket(Bucket="models")
            for path in place.iterdir():
                bucket.upload_file(str(path), f"bench/{path.name}")
            secret = folder / "aws"
            secret.write_text(
                "[default]\n" + "\n".join(f"{k} = {v}" for k, v in keys.items()) + "\n"
            )
            secret.chmod(0o600)
            options = task.Options(s3_endpoint=url, s3_credentials=str(secret))
            ways: dict[str, Callable[[Path], None]] = {
                "file": lambda to: _staged(f"file://{place}", options, to),
                "copy": lambda to: _copied(place, to),
                "s3": lambda to: _staged("s3://models/bench", options, to),
                "s3_boto3": lambda to: _boto(bucket, to),
            }
            times = _measured(ways, folder / "disk", rounds)
        finally:
            server.stop()
        kept = _kept(place, folder / "killed")
        cpu_s = _cpu(lambda: _staged(f"file://{place}", options, folder / "cpu"))
    return {
        "staging_mb_per_s": {
            way: _spread([size / MB / t for t in found]) for way, found in times.items()
        },
        "staging_size_mb": round(size / MB, 1),
        "staging_rounds": rounds,
        "staging_cpu_s_per_gb": round(cpu_s / size * 1000 * MB, 2),
        "staging_kept_after_kill": round(kept, 3),
    }


WAYS = {
    "file": "Forebay, from a folder",
    "copy": "a plain copy of the folder, with fsync",
    "s3": "Forebay, from S3",
    "s3_boto3": "boto3's own transfers from the same server, with fsync",
}


def section(found: Mapping[str, Any]) -> str:
    """Return the figures as a table.

    Args:
        found: what `figures` returned.
    """
    lines = ["| way | MB/s, median | least | most |", "| --- | --- | --- | --- |"]
    for way, told in WAYS.items():
        one = found["staging_mb_per_s"][way]
        lines.append(f"| {told} | {one['p50']} | {one['least']} | {one['most']} |")
    return "\n".join(
        [
            *lines,
            "",
            f"{found['staging_size_mb']} MB in {SHARDS} files, {found['staging_rounds']} rounds; "
            f"{found['staging_cpu_s_per_gb']} CPU-seconds a GB from a folder. Of what a staging that was "
            f"killed at half had noted, {found['staging_kept_after_kill']:.1%} were not fetched again.",
        ]
    )


def _cpu(act: Callable[[], None]) -> float:
    began = time.process_time()
    act()
    return time.process_time() - began


def _measured(
    ways: Mapping[str, Callable[[Path], None]], disk: Path, rounds: int
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, act in ways.items():
            began = time.monotonic()
            act(disk)
            times[way].append(time.monotonic() - began)
            shutil.rmtree(disk)
    return times


def _spread(found: list[float]) -> dict[str, float]:
    return {
        "p50": round(statistics.median(found), 1),
        "least": round(min(found), 1),
        "most": round(max(found), 1),
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    print(json.dumps(figures(asked.gb, asked.rounds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

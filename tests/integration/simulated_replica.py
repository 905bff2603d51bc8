"""A replica of the simulated engine in a process of its own, and the rows that it writes."""

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from engines import private, processes
from engines.replica import launch
from scheduler.contracts import fleet, ids, usage

ROOT = Path(__file__).parents[2]
ROWS = "FOREBAY_TEST_ROWS"  # environment: the file for a replica's rows


class FileSink:
    """Appends rows as JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, row: usage.Row) -> None:
        assert isinstance(row, usage.UsageRow)
        with self._path.open("a") as out:
            out.write(json.dumps(row.flat()) + "\n")

    async def sync(self) -> None:
        """Every line is written at once."""

    def ready(self) -> None:
        """There is always room."""


def file_sink(writer: str) -> FileSink:
    """Return the sink of a replica's process; named in its launch record."""
    return FileSink(Path(os.environ[ROWS]))


@dataclasses.dataclass
class Running:
    """A replica that answers."""

    replica: fleet.Replica
    process: asyncio.subprocess.Process
    rows_file: Path
    secret: str

    def rows(self) -> list[dict[str, Any]]:
        """Return its rows."""
        if not self.rows_file.exists():
            return []
        return [json.loads(line) for line in self.rows_file.read_text().splitlines()]


@contextlib.asynccontextmanager
async def running(tmp: Path, name: str, **engine_args: Any) -> AsyncIterator[Running]:
    """Start a replica of model chat with 4 seats, 1 of them reserved; yields once it listens."""
    spec = fleet.ReplicaSpec(
        "chat", "1", fleet.EngineKind.SIMULATED, engine_args=engine_args, seats=4, reserved_seats=1
    )
    secret_file, rows_file = tmp / f"{name}.secret", tmp / f"{name}.rows"
    secret = private.new_secret(secret_file)
    record = launch.Launch(
        replica_id=name,
        cluster="c1",
        lease_id="l-1",
        slot_id="l-1.s0",
        slurm_job_id="4711",
        node="n1",
        spec=spec,
        role=fleet.Role.SHARED,
        secret_file=str(secret_file),
        sink_factory="tests.integration.simulated_replica:file_sink",
    )
    spec_file = tmp / f"{name}.json"
    spec_file.write_text(json.dumps(record.to_json()))
    read_end, write_end = os.pipe()
    env = {
        **os.environ,
        ROWS: str(rows_file),
        launch.STATUS_FD: str(write_end),
        processes.PARENT: str(os.getpid()),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "engines.replica",
        "--spec",
        str(spec_file),
        cwd=ROOT,
        env=env,
        pass_fds=(write_end,),
    )
    os.close(write_end)
    try:
        address = await asyncio.wait_for(asyncio.to_thread(_address, read_end), 30)
        replica = fleet.Replica(
            replica_id=ids.ReplicaId(name),
            cluster="c1",
            lease_id=ids.LeaseId("l-1"),
            slot_id=ids.SlotId("l-1.s0"),
            slurm_job_id="4711",
            node="n1",
            spec=spec,
            state=fleet.ReplicaState.SERVING,
            role=fleet.Role.SHARED,
            address=address,
            incarnation=1,
            secret_file=str(secret_file),
            stats=fleet.ReplicaStats(at_us=1, seats=4),
        )
        yield Running(replica, process, rows_file, secret)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def _address(read_end: int) -> str:
    with os.fdopen(read_end) as lines:
        for line in lines:
            told = json.loads(line)
            if "address" in told:
                return str(told["address"])
            assert "failed" not in told, told
    raise AssertionError("the replica ended before it listened")

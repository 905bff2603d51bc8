"""Real vLLM under the engine contract: a replica forked for each test from the session's fork server."""

import contextlib
import json
import signal
from collections.abc import AsyncIterator

import aiohttp
import pytest

from scheduler.contracts import usage
from tests.contract import engine_subject, engine_vllm


@contextlib.asynccontextmanager
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[engine_subject.Subject]:
    """Yield a vLLM replica of the newest version."""
    make = request.getfixturevalue("tmp_path_factory")
    server = engine_vllm.shared(request, engine_vllm.NEWEST, make)
    wanted = engine_vllm.spec(
        server.folder,
        model="m",
        seats=engine_subject.SEATS,
        reserved_seats=engine_subject.RESERVED,
    )
    replica = engine_vllm.listening(server, engine_vllm.begin(server, wanted))
    old = len(_lines(replica))

    async def rows() -> list[usage.UsageRow]:
        return [_row(line) for line in _lines(replica)[old:]]

    try:
        async with aiohttp.ClientSession(trust_env=False) as session:
            yield engine_subject.Subject(
                replica.address,
                session,
                rows,
                secret=engine_vllm.SECRET,
                kill=replica.kill_engine,
                abort_s=0.1,
            )
    finally:
        engine_vllm.stop(server, replica.id, signal.SIGKILL)


def _lines(replica: engine_vllm.Replica) -> list[str]:
    return replica.rows_file.read_text().splitlines() if replica.rows_file.exists() else []


def _row(line: str) -> usage.UsageRow:
    fields = json.loads(line)
    names = list(usage.Identity.__dataclass_fields__)
    identity = usage.Identity(**{name: fields.pop(name) for name in names})
    fields["kind"] = usage.RowKind(fields["kind"])
    fields["outcome"] = usage.Outcome(fields["outcome"])
    fields["payer"] = usage.Payer(fields["payer"])
    return usage.UsageRow(identity=identity, **fields)

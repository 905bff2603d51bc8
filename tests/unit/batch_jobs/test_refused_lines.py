"""What the runner does with a line that is refused: whose window shrinks, and who may go meanwhile."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from batch_jobs import client, daemon, lines, verdicts
from scheduler.contracts import clock, errors
from tests.unit.batch_jobs import test_turns, world


@dataclasses.dataclass
class Run(test_turns.Run):
    """As much of a `runner.JobRun` as a line needs."""

    def dispatched(self, work: client.Work) -> None: ...

    def begun(self, work: client.Work) -> None: ...

    def heard(self, *_: object) -> None: ...

    def told(self, work: client.Work) -> client.Told:
        return client.FIRST

    def touch(self) -> None: ...

    def look(self) -> None: ...

    def conclude(self, *_: object) -> float:
        return 5.0

    @contextlib.contextmanager
    def retrying(self, name: str) -> Iterator[None]:
        yield


class Sender:
    """Refuses all lines alike."""

    def __init__(self, code: str) -> None:
        body = json.dumps({"error": {"code": code, "message": "no"}}).encode()
        self._answer = verdicts.Answer(errors.BY_CODE[code].status, body)

    async def send(self, *_: object) -> verdicts.Answer:
        return self._answer


@pytest.mark.parametrize(
    ("code", "body", "alone"),
    [
        ("overloaded", {}, False),
        ("no_replica", {}, False),
        ("no_replica", {"forebay_version": "2"}, True),
        ("quota_exceeded", {}, True),
    ],
)
async def test_a_refusal_takes_room_from_whom_it_speaks_of(
    fake_clock: clock.FakeClock, tmp_path: Path, code: str, body: dict[str, Any], alone: bool
) -> None:
    options = dataclasses.replace(world.QUICK, first_window=2, max_window=2)
    nothing = cast("Any", None)
    made = daemon.Daemon(options, nothing, nothing, tmp_path, Sender(code), fake_clock)
    table = made._turns
    one, other = (Run(each.job, each.ready) for each in (test_turns.run(1), test_turns.run(2)))
    other.job = dataclasses.replace(other.job, user="bob")
    work = client.Work.of(lines.Line(1, "c", "/v1/chat/completions", {"model": "chat", **body}))
    table.take(one, "chat")
    task = asyncio.create_task(made._line(cast("Any", one), work))
    await fake_clock.advance(0)
    assert (table.window("chat").size, table.allowance(one, "chat").size) == (
        (2, 1) if alone else (1, 2)
    )
    assert (table.pick([one]) is None, table.pick([other]) is None) == (True, not alone)
    await fake_clock.advance(5.0)
    await task
    assert table.pick([one]) == (one, "chat")
    assert one.ready.pop("chat") is work
    assert table.allowance(other, "chat").size == 2

"""One replica's life in a slot, with its process played by the test and its HTTP side real."""

import asyncio
import dataclasses
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engines import private
from engines.slot import children, wanted
from scheduler.contracts import clock, fleet
from tests.unit.engines import keeping

S = fleet.ReplicaState


async def test_start_serve_drain_stop_leaves_nothing(tmp_path: Path) -> None:
    async with keeping.play(tmp_path) as at:
        child = await at.starter.child
        assert child.order.extra_env["CUDA_VISIBLE_DEVICES"] == "0,1"
        assert at.one.report().state == "starting"
        assert sorted(note.name for note in (tmp_path / "gpus" / "n1").glob("[0-9]")) == ["6", "7"]
        secret_file = Path(at.one.report().secret_file)
        async with keeping.listening(child):
            report = await at.until(lambda r: r.state == "serving" and r.stats.seats == 4)
            assert dict(report.phases_s) == {"weights": 1.5, "engine": 2.0}
            person = asyncio.create_task(keeping.ask(report.address, private.read(secret_file)))
            await at.until(lambda r: r.stats.interactive == 1)
            at.one.want(dataclasses.replace(keeping.WISH, role=fleet.Role.BATCH))
            await at.until(lambda r: r.role == "batch")
            at.one.want(wanted.Wish(fleet.Role.BATCH, False, 60.0))
            await at.until(lambda r: r.state == "draining")
            assert child.signals == [], "it waits for the request"
            person.cancel()
            report = await at.end()
        assert (report.state, report.address, at.one.gpus) == ("stopped", "", ())
        assert child.signals[0] == signal.SIGTERM
        assert not secret_file.exists()
        assert list((tmp_path / "gpus" / "n1").glob("[0-9]")) == []
        at.one.want(keeping.WISH)
        assert at.one.final


async def test_a_drain_ends_when_its_time_is_over_and_kill_is_the_last_word(tmp_path: Path) -> None:
    async with keeping.play(tmp_path, signal.SIGKILL) as at:
        child = await at.starter.child
        async with keeping.listening(child):
            report = await at.until(lambda r: r.state == "serving")
            secret = private.read(Path(report.secret_file))
            person = asyncio.create_task(keeping.ask(report.address, secret))
            await at.until(lambda r: r.stats.interactive == 1)
            at.one.want(wanted.Wish(fleet.Role.SHARED, False, 0.05))
            assert (await at.end()).state == "stopped"
            assert child.signals[:2] == [signal.SIGTERM, signal.SIGKILL]
            person.cancel()
            await asyncio.wait({person})


@pytest.mark.parametrize("code", [1, -9])
async def test_an_end_by_itself_is_lost_with_reason_and_last_lines(
    tmp_path: Path, code: int
) -> None:
    (tmp_path / "r-1.log").write_text("Traceback\nCUDA out of memory\n")
    async with keeping.play(tmp_path) as at:
        child = await at.starter.child
        async with keeping.listening(child):
            await at.until(lambda r: r.state == "serving")
            child.end(code, "out of memory")
            report = await at.end()
    assert report.state == "lost"
    assert ("exit code 1" if code == 1 else "SIGKILL") in report.reason
    assert report.reason.endswith("log ends: Traceback | CUDA out of memory")
    assert "\n" not in report.reason


async def test_starts_that_fail(tmp_path: Path) -> None:
    async with keeping.play(tmp_path, error=children.StartError("no vLLM on this node")) as at:
        report = await at.end()
        assert (report.state, report.reason) == ("lost", "not started: no vLLM on this node")
        assert at.one.gpus == (), "its GPUs are free again"
        assert not Path(report.secret_file).exists()
    async with keeping.play(tmp_path) as at:
        (await at.starter.child).end(1, "weights are missing")
        assert "did not start: exit code 1: weights are missing" in (await at.end()).reason
    async with keeping.play(tmp_path, start_timeout_s=0.05) as at:
        report = await at.end()
        assert "did not start within 0.05 s" in report.reason
        assert (await at.starter.child).signals == [signal.SIGKILL]
    async with keeping.play(tmp_path, wish=dataclasses.replace(keeping.WISH, run=False)) as at:
        assert (await at.end()).state == "stopped"
        assert not at.starter.child.done()


async def test_told_to_stop_while_it_starts(tmp_path: Path) -> None:
    async with keeping.play(tmp_path) as at:
        child = await at.starter.child
        at.one.want(dataclasses.replace(keeping.WISH, run=False))
        assert (await at.end()).state == "stopped"
        assert child.signals[0] == signal.SIGTERM


async def test_a_failed_engine_is_lost_but_an_external_one_only_leaves_the_routes(
    tmp_path: Path,
) -> None:
    async with keeping.play(tmp_path) as at, keeping.listening(await at.starter.child) as inner:
        await at.until(lambda r: r.state == "serving")
        inner.failure = "EngineCore died"
        report = await at.end()
        assert (report.state, "engine failed: EngineCore died" in report.reason) == ("lost", True)
    async with (
        keeping.play(tmp_path, kind=fleet.EngineKind.HTTP) as at,
        keeping.listening(await at.starter.child) as inner,
    ):
        await at.until(lambda r: r.state == "serving")
        inner.failure = "no answer"
        assert (await at.until(lambda r: r.state == "warm")).reason == "no answer"
        inner.failure = ""
        assert (await at.until(lambda r: r.state == "serving")).reason == ""


async def test_an_engine_that_has_work_and_makes_no_step_leaves_the_routes(tmp_path: Path) -> None:
    """One that goes on comes back; one that does not is killed, and its log's end is told."""
    time = clock.FakeClock()
    async with (
        keeping.play(tmp_path, time=time, no_step_s=30.0) as at,
        keeping.listening(await at.starter.child) as inner,
    ):
        report = await at.until(lambda r: r.state == "serving")
        secret = private.read(Path(report.secret_file))
        person = asyncio.create_task(keeping.ask(report.address, secret))
        await asyncio.wait_for(inner.started.wait(), keeping.PATIENCE_S)
        await at.until(lambda r: r.stats.interactive == 1)
        await time.advance(31)
        report = await at.until(lambda r: r.state == "warm")
        assert "made no step for 31 s" in report.reason
        inner.steps = 2
        await at.until(lambda r: r.state == "serving")
        (tmp_path / "r-1.log").write_text("NCCL timeout\n")
        await time.advance(61)
        report = await at.end()
        assert report.state == "lost"
        assert report.reason.startswith("engine has work and made no step for 61 s: killed; log")
        assert report.reason.endswith("NCCL timeout")
        assert signal.SIGKILL in (await at.starter.child).signals
        person.cancel()
        await asyncio.wait({person})


async def test_an_engine_with_slow_steps_is_given_fifty_of_them(tmp_path: Path) -> None:
    time = clock.FakeClock()
    async with (
        keeping.play(tmp_path, time=time, no_step_s=30.0) as at,
        keeping.listening(await at.starter.child) as inner,
    ):
        inner.step_ms = 1_000.0
        report = await at.until(lambda r: r.state == "serving")
        secret = private.read(Path(report.secret_file))
        person = asyncio.create_task(keeping.ask(report.address, secret))
        await at.until(lambda r: r.stats.interactive == 1)
        await time.advance(49)
        before = at.one.report().stats.at_us
        assert (await at.until(lambda r: r.stats.at_us > before)).state == "serving"
        await time.advance(2)
        await at.until(lambda r: r.state == "warm")
        person.cancel()
        await asyncio.wait({person})


async def test_an_engine_that_never_makes_its_first_step_is_killed(tmp_path: Path) -> None:
    """Ranks that wait for one another hang in the first one: it kept its GPUs and its callers for ever."""
    time = clock.FakeClock()
    async with (
        keeping.play(tmp_path, time=time, no_step_s=30.0) as at,
        keeping.listening(await at.starter.child) as inner,
    ):
        inner.steps = 0
        report = await at.until(lambda r: r.state == "serving")
        secret = private.read(Path(report.secret_file))
        person = asyncio.create_task(keeping.ask(report.address, secret))
        await at.until(lambda r: r.stats.interactive == 1)
        await time.advance(119)
        before = at.one.report().stats.at_us
        assert (await at.until(lambda r: r.stats.at_us > before)).state == "serving"
        await time.advance(2)
        await at.until(lambda r: r.state == "warm")
        await time.advance(120)
        assert "made no step for 241 s: killed" in (await at.end()).reason
        person.cancel()
        await asyncio.wait({person})


async def test_an_external_server_that_counts_no_steps_is_left_alone(tmp_path: Path) -> None:
    time = clock.FakeClock()
    async with (
        keeping.play(tmp_path, time=time, no_step_s=30.0, kind=fleet.EngineKind.HTTP) as at,
        keeping.listening(await at.starter.child) as inner,
    ):
        inner.steps = 0
        report = await at.until(lambda r: r.state == "serving")
        person = asyncio.create_task(
            keeping.ask(report.address, private.read(Path(report.secret_file)))
        )
        await at.until(lambda r: r.stats.interactive == 1)
        await time.advance(500)
        before = at.one.report().stats.at_us
        assert (await at.until(lambda r: r.stats.at_us > before)).state == "serving"
        person.cancel()
        await asyncio.wait({person})


async def test_a_replica_that_does_not_answer_leaves_the_routes(tmp_path: Path) -> None:
    async with keeping.play(tmp_path, unhealthy_s=0.5) as at:
        child = await at.starter.child
        async with keeping.listening(child):
            await at.until(lambda r: r.state == "serving")
        report = await at.until(lambda r: r.state == "warm")
        assert "does not answer" in report.reason


async def test_a_replica_that_never_answers_again_is_killed(tmp_path: Path) -> None:
    """It kept its GPUs, and its callers' streams, until somebody looked."""
    time = clock.FakeClock()
    async with keeping.play(tmp_path, signal.SIGKILL, time=time, no_step_s=30.0) as at:
        child = await at.starter.child
        async with keeping.listening(child):
            await at.until(lambda r: r.state == "serving")
        await time.advance(59)
        report = await at.until(lambda r: r.state == "warm")
        assert "does not answer for 59 s" in report.reason
        await time.advance(2)
        report = await at.end()
    assert report.state == "lost"
    assert report.reason.startswith("does not answer for 61 s: killed")


async def test_a_fork_server_is_spoken_to_and_its_death_is_its_replicas_death(
    tmp_path: Path,
) -> None:
    fake = tmp_path / "python"
    fake.write_text(FAKE_SERVER.replace("PYTHON", os.path.realpath("/proc/self/exe")))
    fake.chmod(0o755)
    told: list[bool] = []
    forks = children.ForkServer(str(fake), tmp_path / "fork.log", lambda: told.append(True))
    heard: list[Mapping[str, Any]] = []
    record = _record()
    order = children.Order(
        record, tmp_path / "r.json", {}, {"A": "b"}, tmp_path / "r.log", heard.append
    )
    good = forks.order(order)
    bad = forks.order(
        dataclasses.replace(order, record=dataclasses.replace(record, replica_id="r-bad"))
    )
    assert str(await asyncio.wait_for(bad.wait(), keeping.PATIENCE_S)) == "exit code 1: no room"
    good.signal(signal.SIGTERM)
    assert await asyncio.wait_for(good.wait(), keeping.PATIENCE_S) == children.Exit(-15, "told")
    assert heard == [
        {"phase": "fork server", "seconds": 0.25},
        {"address": "h:1", "got": {"A": "b"}},
    ]
    last = forks.order(
        dataclasses.replace(order, record=dataclasses.replace(record, replica_id="r-die"))
    )
    assert (
        "the fork server ended" in (await asyncio.wait_for(last.wait(), keeping.PATIENCE_S)).reason
    )
    again = forks.order(order)
    again.signal(signal.SIGTERM)
    await asyncio.wait_for(again.wait(), keeping.PATIENCE_S)
    await forks.close()
    assert forks.ready is False
    assert told


def _record() -> Any:
    from engines.replica import launch

    what = fleet.ReplicaSpec("m", "1", fleet.EngineKind.VLLM)
    return launch.Launch("r-1", "c", "l-1", "s", "7", "n", what, fleet.Role.SHARED, "/s")


FAKE_SERVER = """#!PYTHON
import os, sys
from engines import forkproto as p


def tell(event):
    sys.stdout.buffer.write(p.encode(event))
    sys.stdout.buffer.flush()


tell(p.Ready(os.getpid(), "fake", "1", 0.25))
for line in sys.stdin.buffer:
    message = p.decode(line)
    if isinstance(message, p.Signal):
        tell(p.Exited(message.id, 0, -message.number, "told"))
    elif message.id == "r-bad":
        tell(p.Refused(message.id, "no room"))
    elif message.id == "r-die":
        os._exit(3)
    else:
        tell(p.Started(message.id, 0))
        tell(p.Status(message.id, {"address": "h:1", "got": message.env}))
"""


def test_a_logs_last_lines_are_whole_ones(tmp_path: Path) -> None:
    log = tmp_path / "r-1.log"
    assert children.last_lines(log) == ""
    log.write_text("x" * 700 + "\n\nload:   weights\nValueError: no such folder\n")
    assert children.last_lines(log) == "load: weights | ValueError: no such folder"
    log.write_text("y" * 700)
    assert children.last_lines(log) == "y" * 600

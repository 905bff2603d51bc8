"""One replica's life in a slot, with its process played by the test and its HTTP side real."""

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from engines import private, settings
from engines.replica import app, engine, server, state
from engines.slot import children, control, keeper, means, occupancy, spec, wanted
from engines.weights import stager
from scheduler.contracts import clock, fleet, usage
from tests.unit.engines import scripted

S = fleet.ReplicaState
PATIENCE_S = 10.0


class FakeChild:
    """A process that ends when the test, or a signal that it heeds, says so."""

    def __init__(self, order: children.Order, heeds: tuple[int, ...]) -> None:
        self.order = order
        self.heeds = heeds
        self.signals: list[int] = []
        self.pid = os.getpid()
        self.over: asyncio.Future[children.Exit] = asyncio.get_running_loop().create_future()

    async def wait(self) -> children.Exit:
        return await asyncio.shield(self.over)

    def signal(self, number: int) -> None:
        self.signals.append(number)
        if number in self.heeds:
            self.end(0 if number == signal.SIGTERM else -number)

    def end(self, code: int, reason: str = "") -> None:
        if not self.over.done():
            self.over.set_result(children.Exit(code, reason))


class FakeStarter:
    def __init__(self, *heeds: int) -> None:
        self.heeds = heeds
        self.error: Exception | None = None
        self.child: asyncio.Future[FakeChild] = asyncio.get_running_loop().create_future()

    def again(self) -> None:
        """Expect another process."""
        self.child = asyncio.get_running_loop().create_future()

    def start(self, order: children.Order) -> children.Child:
        if self.error is not None:
            raise self.error
        child = FakeChild(order, self.heeds)
        self.child.set_result(child)
        return child


@dataclasses.dataclass
class Play:
    """A keeper at work."""

    one: keeper.Keeper
    starter: FakeStarter
    task: "asyncio.Task[None]"
    news: asyncio.Event

    async def until(self, condition: Callable[[Any], bool]) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            while not condition(self.one.report()):
                self.news.clear()
                await self.news.wait()
        return self.one.report()

    async def end(self) -> Any:
        await asyncio.wait_for(self.task, PATIENCE_S)
        return self.one.report()


WISH = wanted.Wish(fleet.Role.SHARED, True, 5.0)


@contextlib.asynccontextmanager
async def play(
    folder: Path,
    *heeds: int,
    wish: wanted.Wish = WISH,
    kind: fleet.EngineKind = fleet.EngineKind.SIMULATED,
    error: Exception | None = None,
    time: clock.Clock | None = None,
    provider: stager.Provider | None = None,
    weights: str = "",
    **options: Any,
) -> AsyncIterator[Play]:
    """Run a keeper in a slot of two GPUs."""
    told = spec.SlotSpec(
        slot_id="l-1.s0",
        lease_id="l-1",
        cluster="c",
        slurm_job_id="7",
        agent_address="",
        agent_pid=0,
        agent_started=0,
        agent_machine="",
        token_file="",
        run_dir=str(private.folder(folder / "run")),
        log_dir=str(folder),
        gpus=2,
        replica_argv=(),
        sink_factory="",
        options=settings.EnginesSettings(
            gpu_lock_dir=folder / "gpus", **{"stats_s": 0.02, "term_s": 0.1, **options}
        ),
    )
    starter = FakeStarter(*(heeds or (signal.SIGTERM, signal.SIGKILL)))
    starter.error = error
    news = asyncio.Event()
    async with control.client() as session:
        given = means.Means(
            slot=told,
            node="n1",
            host="127.0.0.1",
            gpus={"0": "6", "1": "7"},
            held=dict,
            starter=starter,
            session=session,
            notes=occupancy.Occupancy(folder / "gpus", "n1"),
            stager=provider or stager.Stager(told.options, folder / "weights"),
            time=time or clock.SystemClock(),
            changed=lambda _: news.set(),
        )
        what = fleet.ReplicaSpec("m", "1", kind, weights, gpus=2)
        one = keeper.Keeper("r-1", what, wish, given)
        task = asyncio.create_task(one.run())
        task.add_done_callback(lambda _: news.set())
        try:
            yield Play(one, starter, task, news)
        finally:
            task.cancel()
            await asyncio.wait({task})


class Sick(scripted.Scripted):
    """An engine whose health a test sets."""

    step_ms = 0.0

    def __init__(self) -> None:
        super().__init__(scripted.endless)
        self.steps = 1

    def stats(self) -> engine.EngineStats:
        return engine.EngineStats(
            steps_total=self.steps, step_ms=self.step_ms, failure=self.failure
        )


@contextlib.asynccontextmanager
async def listening(child: FakeChild, incarnation: int = 1) -> AsyncIterator[Sick]:
    """Listen as the replica, and tell the keeper where."""
    inner = Sick()
    secret = private.read(Path(child.order.record.secret_file))
    about = state.About(replica_id="r-1")
    options = app.Options(secret, child.order.record.role, 4, 1, about)
    served = app.build(inner, options, sink=usage.MemorySink(), time=clock.SystemClock())
    async with contextlib.AsyncExitStack() as stack:
        with mock.patch.object(server, "GRACE_S", 0.1):  # for calls that hang when a test ends
            address, _ = await stack.enter_async_context(server.listening(served, "127.0.0.1"))
        child.order.heard({"phase": "weights", "seconds": 1.5})
        child.order.heard(
            {"address": address, "incarnation": incarnation, "phases_s": {"engine": 2.0}}
        )
        yield inner


async def ask(address: str, secret: str) -> None:
    """Keep a request running for ever."""
    async with (
        control.client() as session,
        session.post(
            f"http://{address}/v1/completions",
            json={"prompt": "x"},
            headers={"authorization": f"Bearer {secret}"},
        ) as response,
    ):
        await response.read()


async def test_start_serve_drain_stop_leaves_nothing(tmp_path: Path) -> None:
    async with play(tmp_path) as at:
        child = await at.starter.child
        assert child.order.extra_env["CUDA_VISIBLE_DEVICES"] == "0,1"
        assert at.one.report().state == "starting"
        assert sorted(note.name for note in (tmp_path / "gpus" / "n1").glob("[0-9]")) == ["6", "7"]
        secret_file = Path(at.one.report().secret_file)
        async with listening(child):
            report = await at.until(lambda r: r.state == "serving" and r.stats.seats == 4)
            assert dict(report.phases_s) == {"weights": 1.5, "engine": 2.0}
            person = asyncio.create_task(ask(report.address, private.read(secret_file)))
            await at.until(lambda r: r.stats.interactive == 1)
            at.one.want(dataclasses.replace(WISH, role=fleet.Role.BATCH))
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
        at.one.want(WISH)
        assert at.one.final


async def test_a_drain_ends_when_its_time_is_over_and_kill_is_the_last_word(tmp_path: Path) -> None:
    async with play(tmp_path, signal.SIGKILL) as at:
        child = await at.starter.child
        async with listening(child):
            report = await at.until(lambda r: r.state == "serving")
            secret = private.read(Path(report.secret_file))
            person = asyncio.create_task(ask(report.address, secret))
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
    async with play(tmp_path) as at:
        child = await at.starter.child
        async with listening(child):
            await at.until(lambda r: r.state == "serving")
            child.end(code, "out of memory")
            report = await at.end()
    assert report.state == "lost"
    assert ("exit code 1" if code == 1 else "SIGKILL") in report.reason
    assert report.reason.endswith("log ends: Traceback | CUDA out of memory")
    assert "\n" not in report.reason


async def test_starts_that_fail(tmp_path: Path) -> None:
    async with play(tmp_path, error=children.StartError("no vLLM on this node")) as at:
        report = await at.end()
        assert (report.state, report.reason) == ("lost", "not started: no vLLM on this node")
        assert at.one.gpus == (), "its GPUs are free again"
        assert not Path(report.secret_file).exists()
    async with play(tmp_path) as at:
        (await at.starter.child).end(1, "weights are missing")
        assert "did not start: exit code 1: weights are missing" in (await at.end()).reason
    async with play(tmp_path, start_timeout_s=0.05) as at:
        report = await at.end()
        assert "did not start within 0.05 s" in report.reason
        assert (await at.starter.child).signals == [signal.SIGKILL]
    async with play(tmp_path, wish=dataclasses.replace(WISH, run=False)) as at:
        assert (await at.end()).state == "stopped"
        assert not at.starter.child.done()


async def test_told_to_stop_while_it_starts(tmp_path: Path) -> None:
    async with play(tmp_path) as at:
        child = await at.starter.child
        at.one.want(dataclasses.replace(WISH, run=False))
        assert (await at.end()).state == "stopped"
        assert child.signals[0] == signal.SIGTERM


async def test_a_failed_engine_is_lost_but_an_external_one_only_leaves_the_routes(
    tmp_path: Path,
) -> None:
    async with play(tmp_path) as at, listening(await at.starter.child) as inner:
        await at.until(lambda r: r.state == "serving")
        inner.failure = "EngineCore died"
        report = await at.end()
        assert (report.state, "engine failed: EngineCore died" in report.reason) == ("lost", True)
    async with (
        play(tmp_path, kind=fleet.EngineKind.HTTP) as at,
        listening(await at.starter.child) as inner,
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
        play(tmp_path, time=time, no_step_s=30.0) as at,
        listening(await at.starter.child) as inner,
    ):
        report = await at.until(lambda r: r.state == "serving")
        secret = private.read(Path(report.secret_file))
        person = asyncio.create_task(ask(report.address, secret))
        await asyncio.wait_for(inner.started.wait(), PATIENCE_S)
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
        play(tmp_path, time=time, no_step_s=30.0) as at,
        listening(await at.starter.child) as inner,
    ):
        inner.step_ms = 1_000.0
        report = await at.until(lambda r: r.state == "serving")
        secret = private.read(Path(report.secret_file))
        person = asyncio.create_task(ask(report.address, secret))
        await at.until(lambda r: r.stats.interactive == 1)
        await time.advance(49)
        before = at.one.report().stats.at_us
        assert (await at.until(lambda r: r.stats.at_us > before)).state == "serving"
        await time.advance(2)
        await at.until(lambda r: r.state == "warm")
        person.cancel()
        await asyncio.wait({person})


async def test_a_replica_that_does_not_answer_leaves_the_routes(tmp_path: Path) -> None:
    async with play(tmp_path, unhealthy_s=0.5) as at:
        child = await at.starter.child
        async with listening(child):
            await at.until(lambda r: r.state == "serving")
        report = await at.until(lambda r: r.state == "warm")
        assert "does not answer" in report.reason


async def test_a_replica_that_never_answers_again_is_killed(tmp_path: Path) -> None:
    """It kept its GPUs, and its callers' streams, until somebody looked."""
    time = clock.FakeClock()
    async with play(tmp_path, signal.SIGKILL, time=time, no_step_s=30.0) as at:
        child = await at.starter.child
        async with listening(child):
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
    assert str(await asyncio.wait_for(bad.wait(), PATIENCE_S)) == "exit code 1: no room"
    good.signal(signal.SIGTERM)
    assert await asyncio.wait_for(good.wait(), PATIENCE_S) == children.Exit(-15, "told")
    assert heard == [
        {"phase": "fork server", "seconds": 0.25},
        {"address": "h:1", "got": {"A": "b"}},
    ]
    last = forks.order(
        dataclasses.replace(order, record=dataclasses.replace(record, replica_id="r-die"))
    )
    assert "the fork server ended" in (await asyncio.wait_for(last.wait(), PATIENCE_S)).reason
    again = forks.order(order)
    again.signal(signal.SIGTERM)
    await asyncio.wait_for(again.wait(), PATIENCE_S)
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

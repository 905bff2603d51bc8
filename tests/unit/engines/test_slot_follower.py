"""A rank past the first in its slot, and rank 0 that hears of its death; processes are played by the test."""

import asyncio
import contextlib
import dataclasses
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from engines import private
from engines.replica import launch
from engines.slot import children, follower, means
from scheduler.contracts import fleet
from tests.unit.engines import keeping

S = fleet.ReplicaState
RANK_0 = dataclasses.replace(keeping.WISH, nodes=2)
WISH = dataclasses.replace(RANK_0, rank=1)


@dataclasses.dataclass
class Play:
    one: follower.Follower
    starter: keeping.FakeStarter
    task: "asyncio.Task[None]"
    news: asyncio.Event

    async def until(self, state: str) -> None:
        async with asyncio.timeout(keeping.PATIENCE_S):
            while self.one.report().state != state:
                self.news.clear()
                await self.news.wait()


@contextlib.asynccontextmanager
async def play(folder: Path, wish: object = WISH) -> AsyncIterator[Play]:
    """Run a follower with the means of a keeper's test, whose own replica never starts."""
    asleep = dataclasses.replace(keeping.WISH, asleep=True)
    async with keeping.play(folder, wish=asleep) as other:
        given: means.Means = other.one._means
        news = asyncio.Event()
        starter = keeping.FakeStarter(signal.SIGKILL)
        given = dataclasses.replace(given, starter=starter, changed=lambda _: news.set())
        what = fleet.ReplicaSpec("m", "1", fleet.EngineKind.SIMULATED, gpus=4)
        one = follower.Follower("r-1", what, WISH, given)
        task = asyncio.create_task(one.run())
        try:
            yield Play(one, starter, task, news)
        finally:
            task.cancel()
            await asyncio.wait({task})


async def test_it_starts_where_rank_0_waits_with_its_share_and_ends_when_told(
    tmp_path: Path,
) -> None:
    async with play(tmp_path) as at:
        await at.until("asleep")
        assert not at.starter.child.done(), "it does not know yet where rank 0 waits"
        at.one.want(dataclasses.replace(WISH, meet="127.0.0.1:9"))
        child = await at.starter.child
        rank = child.order.record.rank
        assert rank is not None
        assert (rank.number, rank.nodes, rank.place) == (1, 2, ("127.0.0.1", 9))
        assert child.order.extra_env["CUDA_VISIBLE_DEVICES"] == "0,1", "2 of 4 GPUs are here"
        assert child.order.record_file.name == "r-1.1.json", "rank 0's lies beside it"
        await at.until("warm")
        at.one.want(dataclasses.replace(WISH, run=False))
        await asyncio.wait_for(at.task, keeping.PATIENCE_S)
        assert (at.one.state, at.one.gpus) == (S.STOPPED, ())
        assert signal.SIGKILL in child.signals
        assert not list((tmp_path / "run").glob("r-1.1.*"))


async def test_each_life_of_rank_0_gets_a_process_of_its_own(tmp_path: Path) -> None:
    async with play(tmp_path) as at:
        at.one.want(dataclasses.replace(WISH, meet="127.0.0.1:9"))
        first = await at.starter.child
        await at.until("warm")
        at.starter.again()
        at.one.want(WISH)  # parked: nothing is held
        await at.until("asleep")
        assert (first.signals[-1], at.one.gpus) == (signal.SIGKILL, ())
        at.one.want(dataclasses.replace(WISH, meet="127.0.0.1:10"))
        second = await at.starter.child
        assert second.order.record.rank is not None
        assert second.order.record.rank.meet == "127.0.0.1:10"
        assert second.order.record.incarnation == 2


async def test_its_own_end_is_told_as_lost_with_the_logs_last_lines(tmp_path: Path) -> None:
    async with play(tmp_path) as at:
        at.one.want(dataclasses.replace(WISH, meet="127.0.0.1:9"))
        child = await at.starter.child
        at.starter.again()
        child.order.log.write_text("Traceback\nout of memory\n")
        child.end(-9)
        await at.until("lost")
        report = at.one.report()
        assert report.reason == "killed by SIGKILL; log ends: Traceback | out of memory"
        assert (report.meet, at.one.gpus) == ("127.0.0.1:9", ())
        at.one.want(dataclasses.replace(WISH, meet="127.0.0.1:10"))
        again = await at.starter.child
        assert again.order.record.incarnation == 2, "for the next life of rank 0"
        at.one.stop(at_once=False)
        await asyncio.wait_for(at.task, keeping.PATIENCE_S)
        assert at.one.state is S.STOPPED


async def test_rank_0_says_where_it_waits_and_is_lost_with_another_rank(tmp_path: Path) -> None:
    async with keeping.play(tmp_path, wish=RANK_0) as at:
        child = await at.starter.child
        rank = child.order.record.rank
        assert rank is not None
        assert (rank.number, rank.nodes, rank.meet) == (0, 2, at.one.report().meet)
        assert child.order.extra_env["CUDA_VISIBLE_DEVICES"] == "0", "1 of 2 GPUs is here"
        async with keeping.listening(child):
            await at.until(lambda report: report.state == "serving")
            earlier = dataclasses.replace(RANK_0, fault="rank 1 on n2: old", meet="127.0.0.1:1")
            at.one.want(earlier)  # of a life that is over
            fault = "rank 1 on n2: exit code 1"
            at.one.want(dataclasses.replace(RANK_0, fault=fault, meet=rank.meet))
            report = await at.end()
        assert (report.state, report.reason) == ("lost", "rank 1 on n2: exit code 1")
        assert (report.meet, report.address) == ("", "")


async def test_rank_0_does_not_wait_for_a_rank_that_could_not_start(tmp_path: Path) -> None:
    async with keeping.play(tmp_path, wish=RANK_0) as at:
        await at.starter.child
        fault = "rank 1 on n2: not started: no disk"
        at.one.want(dataclasses.replace(RANK_0, fault=fault, meet=at.one.report().meet))
        report = await at.end()
        assert (report.state, report.reason) == ("lost", "rank 1 on n2: not started: no disk")


async def test_a_rank_that_ends_while_rank_0_drains_ends_the_drain(tmp_path: Path) -> None:
    async with keeping.play(tmp_path, wish=RANK_0) as at:
        child = await at.starter.child
        async with keeping.listening(child):
            report = await at.until(lambda report: report.state == "serving")
            secret = private.read(Path(report.secret_file))
            asked = asyncio.create_task(keeping.ask(report.address, secret))
            await at.until(lambda report: report.stats.interactive == 1)
            leaving = dataclasses.replace(RANK_0, run=False, drain_s=600.0, meet=report.meet)
            at.one.want(leaving)
            await at.until(lambda report: report.state == "draining")
            at.one.want(dataclasses.replace(leaving, fault="rank 1 on n2: exit code 1"))
            report = await at.end()
            asked.cancel()
            await asyncio.wait({asked})
        assert report.state == "stopped", "as it was told"


def test_slurms_sigterm_does_not_take_a_rank_from_rank_0_while_that_drains(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(keeping.PATIENCE_S)
        what = fleet.ReplicaSpec("m", "1", fleet.EngineKind.SIMULATED, gpus=2)
        order = launch.Launch(
            replica_id="r-1",
            cluster="c",
            lease_id="l",
            slot_id="l.s0.1",
            slurm_job_id="1",
            node="n2",
            spec=what,
            role=fleet.Role.SHARED,
            secret_file="",
            rank=launch.Rank(1, 2, f"127.0.0.1:{door.getsockname()[1]}"),
        )
        record = tmp_path / "r-1.1.json"
        private.write(record, children.record_text(order))
        line = [sys.executable, "-P", "-m", "engines.replica", "--spec", str(record)]
        env = children.environment({})
        with subprocess.Popen(line, env=env, stderr=subprocess.PIPE) as rank:
            try:
                link, _ = door.accept()
                rank.send_signal(signal.SIGTERM)
                link.close()
                _, said = rank.communicate(timeout=keeping.PATIENCE_S)
            finally:
                rank.kill()
    assert (rank.returncode, said.splitlines()[-1]) == (1, b"RuntimeError: rank 0 has gone")

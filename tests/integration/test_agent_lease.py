"""A lease from its start to its end, and what its sudden deaths leave: broker, agent, slot, replica."""

import asyncio
import itertools
import os
import signal
import time
from pathlib import Path
from typing import cast

import pytest

from engines import private, processes
from scheduler.contracts import frames
from scheduler.contracts.v1 import control_pb2 as pb
from tests.integration import agent_process, file_sink, lease_site
from tests.unit.engines import asgi

pytestmark = pytest.mark.timeout(90)


def kinds(found: list[frames.Frame]) -> list[frames.Kind]:
    return [frame.kind for frame in found]


def pid_of(site: lease_site.Site, mark: str, value: str) -> int:
    return next(processes.marked({mark: value, processes.LEASE: site.lease_id}))


def whole(value: object) -> int:
    return cast(int, value)


async def test_start_serve_role_stop_close(tmp_path: Path) -> None:
    async with lease_site.opened(tmp_path) as site:
        site.want(lease_site.desired(role="shared"))
        replica = await site.serving()
        assert replica.incarnation == 1
        assert set(replica.phases_s) == {"engine"}
        assert replica.spec.engine == "simulated"
        report = site.broker.last
        assert (report.slurm_job_id, report.gpus, report.epoch, report.revision) == (
            "4711",
            2,
            1,
            1,
        )
        assert list(report.slots[0].gpu_ids) == ["0", "1"]
        secret = Path(replica.secret_file)
        assert secret.stat().st_mode & 0o777 == 0o600

        found = await site.ask(replica, "q1")
        assert (kinds(found)[0], kinds(found)[-1]) == (frames.Kind.PROMPT, frames.Kind.END)

        batch = asyncio.create_task(site.ask(replica, "b1", "batch", 2000))
        await site.broker.until(lambda r: r.slots[0].replicas[0].stats.batch == 1)
        site.want(lease_site.desired(role="interactive"))
        began = time.monotonic()
        stopped = await batch
        assert frames.Error.parse(stopped[-1].payload).code == "preempted"
        assert time.monotonic() - began < 1.0, "rung 1"
        await site.broker.until(lambda r: r.slots[0].replicas[0].role == "interactive")

        running = asyncio.create_task(site.ask(replica, "q2", tokens=100))
        await site.broker.until(lambda r: r.slots[0].replicas[0].stats.interactive == 1)
        site.want(lease_site.desired(run=False))
        await site.broker.until(lambda r: lease_site.state(r, "r-1") == "draining")
        assert kinds(await running)[-1] is frames.Kind.END, "no stream is cut by a drain"
        await site.broker.until(lambda r: lease_site.state(r, "r-1") == "stopped")
        assert not secret.exists()

        site.want(lease_site.desired(run=False), close=True)
        assert await site.agent_exit() == 0
        assert site.broker.last.closing == "asked"
        assert [slot.state for slot in site.broker.last.slots] == ["closed"]

    used = file_sink.read(site.rows, "UsageRow")
    outcomes = {row["request_id"]: row["outcome"] for row in used}
    assert outcomes == {"q1": "ok", "b1": "preempted", "q2": "ok"}
    gpu = file_sink.read(site.rows, "GpuRow")
    assert sum(whole(row["end_us"]) - whole(row["start_us"]) for row in gpu) > 0
    times = file_sink.read(site.rows, "ReplicaTimeRow")
    assert [row["state"] for row in times] == ["starting", "serving", "draining"]
    assert all(a["end_us"] == b["start_us"] for a, b in itertools.pairwise(times))


async def test_a_drain_cuts_nothing_before_its_limit_and_says_so_after_it_s6(
    tmp_path: Path,
) -> None:
    """Case S6, on the lease's side: nothing new, no cut within the limit, then words to go on by."""
    async with lease_site.opened(tmp_path, term_s=0.5) as site:
        site.want(lease_site.desired())
        replica = await site.serving()
        streams = [
            asyncio.create_task(site.ask(replica, f"q{n}", tokens=tokens))
            for n, tokens in enumerate((100, 2000, 2000))
        ]
        await site.broker.until(lambda r: r.slots[0].replicas[0].stats.interactive == 3)
        began = time.monotonic()
        site.want(lease_site.desired(run=False, drain_s=3.0))
        await site.broker.until(lambda r: lease_site.state(r, "r-1") == "draining")
        status, _ = await site.post(
            replica,
            "/v1/completions",
            {"prompt": "x"},
            **asgi.headers(asgi.identity("late"), secret=private.read(Path(replica.secret_file))),
        )
        assert status == 429
        short, *long = await asyncio.gather(*streams)
        assert kinds(short)[-1] is frames.Kind.END
        assert time.monotonic() - began >= 3.0
        for found in long:
            assert frames.Kind.END not in kinds(found)
            assert frames.Error.parse(found[-1].payload).code == "draining"
            assert not any(b"[DONE]" in frame.payload for frame in found)
        await site.broker.until(lambda r: lease_site.state(r, "r-1") == "stopped")


async def test_a_closed_slot_gives_its_gpus_to_the_next_one(tmp_path: Path) -> None:
    async with lease_site.opened(tmp_path) as site:
        site.want(lease_site.desired())
        await site.serving()
        site.want(lease_site.desired(run=False), close_slot=True)
        report = await site.broker.until(lambda r: r.slots[0].state == "closed")
        assert lease_site.state(report, "r-1") == "stopped"
        site.want(lease_site.desired("r-2"), slot="s1")
        await site.serving("r-2")
        assert [slot.slot_id for slot in site.broker.last.slots] == [f"{site.lease_id}.s1"]
        assert list(site.broker.last.slots[0].gpu_ids) == ["0", "1"]


async def test_sigterm_many_times_drains_and_leaves_with_the_ledger_synced(tmp_path: Path) -> None:
    started = time.time_ns() // 1_000
    async with lease_site.opened(tmp_path, ledger_s=1.0) as site:
        site.want(lease_site.desired())
        replica = await site.serving()
        batch = asyncio.create_task(site.ask(replica, "b1", "batch", 2000))
        person = asyncio.create_task(site.ask(replica, "q1", tokens=300))
        await site.broker.until(
            lambda r: (
                r.slots[0].replicas[0].stats.batch == 1
                and r.slots[0].replicas[0].stats.interactive == 1
            )
        )
        for pid in (site.agent.pid, *site.alive(), site.agent.pid, *site.alive()):
            processes.kill(pid, signal.SIGTERM)  # as Slurm: everybody, more than once
        assert frames.Error.parse((await batch)[-1].payload).code == "preempted"
        assert kinds(await person)[-1] is frames.Kind.END
        assert await site.agent_exit() == 0
        assert site.broker.last.closing == "sigterm"
        ended = time.time_ns() // 1_000
    gpu = file_sink.read(site.rows, "GpuRow")
    assert [row["seq"] for row in gpu] == list(range(len(gpu)))
    assert all(a["end_us"] == b["start_us"] for a, b in itertools.pairwise(gpu))
    held = whole(gpu[-1]["end_us"]) - whole(gpu[0]["start_us"])
    assert abs(held - (ended - started)) < 1_000_000
    assert {row["outcome"] for row in file_sink.read(site.rows, "UsageRow")} == {"ok", "preempted"}


async def test_a_slot_that_hears_sigterm_tells_the_agent(tmp_path: Path) -> None:
    async with lease_site.opened(tmp_path) as site:
        site.want(lease_site.desired())
        await site.serving()
        slot = site.broker.last.slots[0].pid
        os.kill(slot, signal.SIGTERM)
        report = await site.broker.until(lambda r: r.closing != "")
        assert report.closing == "sigterm"
        assert await site.agent_exit() == 0


async def test_the_replica_dies_and_the_next_one_has_its_gpus(tmp_path: Path) -> None:
    async with lease_site.opened(tmp_path) as site:
        site.want(lease_site.desired())
        replica = await site.serving()
        stream = asyncio.create_task(site.ask(replica, "q1", tokens=2000))
        await site.broker.until(lambda r: r.slots[0].replicas[0].stats.interactive == 1)
        os.kill(pid_of(site, processes.REPLICA, "r-1"), signal.SIGKILL)
        report = await site.broker.until(lambda r: lease_site.state(r, "r-1") == "lost")
        lost = lease_site.replica(report, "r-1")
        assert lost is not None
        assert "SIGKILL" in lost.reason
        assert frames.Kind.END not in kinds(await stream)
        site.want(lease_site.desired("r-2"))
        await site.serving("r-2")
        assert lease_site.replica(site.broker.last, "r-1") is None


@pytest.mark.parametrize("when", ["serving", "starting"])
@pytest.mark.parametrize("victim", ["agent", "slot"])
async def test_nothing_outlives_a_killed_agent_or_supervisor(
    tmp_path: Path, victim: str, when: str
) -> None:
    async with lease_site.opened(tmp_path) as site:
        site.want(lease_site.desired())
        if when == "serving":
            await site.serving()
        else:
            await site.broker.until(lambda r: lease_site.state(r, "r-1") == "starting")
        slot = site.broker.last.slots[0].pid
        detached = await _detached(site)
        began = time.monotonic()
        if victim == "agent":
            os.kill(site.agent.pid, signal.SIGKILL)
            # What was detached from everything is Slurm's to end (its epilog), or the next start's.
            await site.until_dead(5.0, frozenset({detached}))
        else:
            os.kill(slot, signal.SIGKILL)
            await site.until_dead(5.0, frozenset({site.agent.pid}))
            report = await site.broker.until(lambda r: r.slots[0].state == "lost")
            assert lease_site.state(report, "r-1") == "lost"
        assert time.monotonic() - began < 5.0
        processes.kill(detached)


_reaping: set["asyncio.Future[int]"] = set()


@pytest.mark.parametrize("when", ["serving", "starting"])
async def test_slots_of_a_killed_agent_see_it_and_sweep_as_under_slurm(
    tmp_path: Path, when: str
) -> None:
    async with lease_site.opened(tmp_path, env={agent_process.FREE: "1"}) as site:
        site.want(lease_site.desired())
        if when == "serving":
            await site.serving()
        else:
            await site.broker.until(lambda r: lease_site.state(r, "r-1") == "starting")
        await _detached(site)
        os.kill(site.agent.pid, signal.SIGKILL)
        await site.until_dead(5.0)


async def test_a_replica_killed_while_it_starts_takes_its_strays_along(tmp_path: Path) -> None:
    async with lease_site.opened(tmp_path) as site:
        site.want(lease_site.desired())
        await site.broker.until(lambda r: lease_site.state(r, "r-1") == "starting")
        victim = pid_of(site, processes.REPLICA, "r-1")
        stray = await _detached(site)
        os.kill(victim, signal.SIGKILL)
        report = await site.broker.until(lambda r: lease_site.state(r, "r-1") == "lost")
        lost = lease_site.replica(report, "r-1")
        assert lost is not None
        assert "did not start: killed by SIGKILL" in lost.reason
        assert not processes.alive(stray)
        site.want(lease_site.desired("r-2"))
        await site.serving("r-2")


async def _detached(site: lease_site.Site) -> int:
    """Start a process in a session of its own that bears the slot's mark, as a stray worker does."""
    marks = {
        processes.LEASE: site.lease_id,
        processes.SLOT: f"{site.lease_id}.s0",
        processes.REPLICA: "r-1",
    }
    stray = await asyncio.create_subprocess_exec(
        "sleep", "60", env={**os.environ, **marks}, start_new_session=True
    )
    _reaping.add(asyncio.ensure_future(stray.wait()))
    return stray.pid


async def test_a_gpu_that_is_held_is_refused_and_the_holder_named(tmp_path: Path) -> None:
    async with lease_site.opened(tmp_path) as site:
        from engines import places
        from engines.slot import occupancy

        notes = occupancy.Occupancy(tmp_path / "gpus", places.node())
        me = os.getpid()
        notes.take(["1"], occupancy.Holder(me, processes.start_time(me), "l-0", "l-0.s0", "r-0"))
        site.want(lease_site.desired())
        report = await site.broker.until(lambda r: lease_site.state(r, "r-1") == "lost")
        lost = lease_site.replica(report, "r-1")
        assert lost is not None
        assert f"GPU 1 is held by replica r-0 of slot l-0.s0 (lease l-0, pid {me})" in lost.reason
        notes.give_back(["1"], "r-0")
        site.want(lease_site.desired("r-2"))
        await site.serving("r-2")
        site.want(lease_site.desired("r-2"), lease_site.desired("r-3", gpus=1))
        report = await site.broker.until(lambda r: lease_site.state(r, "r-3") == "lost")
        third = lease_site.replica(report, "r-3")
        assert third is not None
        assert "0 of 2 are free; held by r-2" in third.reason


@pytest.mark.parametrize(
    ("devices", "ids"),
    [
        ("GPU-aaaa-1,GPU-bbbb-2", ["GPU-aaaa-1", "GPU-bbbb-2"]),
        ("MIG-cccc,MIG-dd", ["MIG-cccc", "MIG-dd"]),
    ],
)
async def test_uuids_and_mig_ids_are_mapped(tmp_path: Path, devices: str, ids: list[str]) -> None:
    async with lease_site.opened(tmp_path, devices=devices) as site:
        site.want(lease_site.desired("r-1", gpus=1), lease_site.desired("r-2", gpus=1))
        await site.serving("r-1")
        await site.serving("r-2")
        assert list(site.broker.last.slots[0].gpu_ids) == ids
        visible = {
            processes.environment(pid_of(site, processes.REPLICA, name))["CUDA_VISIBLE_DEVICES"]
            for name in ("r-1", "r-2")
        }
        assert visible == set(ids)


async def test_bad_gpu_ids_are_one_clear_line_and_no_restart_loop(tmp_path: Path) -> None:
    async with lease_site.opened(tmp_path, devices="0,tpu:1") as site:
        site.want(lease_site.desired())
        report = await site.broker.until(lambda r: bool(r.slots) and r.slots[0].state == "lost")
        assert report.slots[0].reason.startswith("CUDA_VISIBLE_DEVICES=0,tpu:1: 'tpu:1' is no GPU")
        log = (tmp_path / "run" / "logs" / f"{site.lease_id}.s0.log").read_text()
        assert log.count("Traceback") == 0


async def test_without_its_broker_it_serves_and_a_newer_leader_is_followed(
    tmp_path: Path,
) -> None:
    async with lease_site.opened(tmp_path) as site:
        site.want(lease_site.desired(), epoch=5)
        replica = await site.serving()
        await site.server.stop(None)
        assert kinds(await site.ask(replica, "q1"))[-1] is frames.Kind.END

        import grpc.aio

        from scheduler.contracts.v1 import control_pb2_grpc

        successor = lease_site.Broker()
        server = grpc.aio.server()
        control_pb2_grpc.add_AgentLinkServicer_to_server(successor, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            (tmp_path / "broker.json").write_text(f'{{"address": "127.0.0.1:{port}", "epoch": 6}}')
            report = await successor.until(lambda r: lease_site.state(r, "r-1") == "serving")
            assert report.epoch == 5
            old = pb.LeaseDesired(epoch=4, revision=99, lease_id=site.lease_id, close=True)
            successor.want(old)
            slot = pb.SlotDesired(epoch=6, slot_id=f"{site.lease_id}.s0", gpus=2, cpus=1)
            slot.replicas.append(lease_site.desired(role="batch"))
            new = pb.LeaseDesired(epoch=6, revision=1, lease_id=site.lease_id, slots=[slot])
            await asyncio.sleep(0)
            successor.want(new)
            report = await successor.until(
                lambda r: r.epoch == 6 and r.slots[0].replicas[0].role == "batch"
            )
            assert report.closing == ""
        finally:
            await server.stop(None)


async def test_the_clusters_proxy_is_never_asked(tmp_path: Path) -> None:
    dead = dict.fromkeys(
        ("http_proxy", "https_proxy", "HTTP_PROXY", "ALL_PROXY"), "http://127.0.0.1:9"
    )
    async with lease_site.opened(tmp_path, env={**dead, "no_proxy": "", "NO_PROXY": ""}) as site:
        site.want(lease_site.desired())
        replica = await site.serving()
        await site.broker.until(lambda r: r.slots[0].replicas[0].stats.seats == 4)
        assert kinds(await site.ask(replica, "q1"))[-1] is frames.Kind.END

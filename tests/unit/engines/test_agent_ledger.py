"""The ledger of a lease's GPU time, and what the agent reads of its surroundings."""

import asyncio
import json
from pathlib import Path

import pytest

from engines import settings
from engines import told as tellings
from engines.agent import lease, ledger, spec
from engines.replica import work
from engines.slot import spec as slot_spec
from scheduler.contracts import clock, fleet, usage

S = fleet.ReplicaState


def told() -> spec.AgentSpec:
    return spec.AgentSpec(
        cluster="c",
        lease_id="l-1",
        kind="serve",
        team="t",
        gpus=4,
        broker_file="/b",
        token_file="/t",
        run_dir="/r",
        slot_argv=("slot",),
        replica_argv=("replica",),
        sink_factory="m:f",
    )


def make(
    sink: usage.MemorySink, time: clock.FakeClock, before_s: float = 0.5, run: int = 0
) -> ledger.Ledger:
    started = time.wall_us() - round(before_s * 1e6)
    return ledger.Ledger(told(), spec.Job("7", run, started), "n1", sink, time)


def gpu_rows(sink: usage.MemorySink) -> list[usage.GpuRow]:
    return [row for row in sink.rows if isinstance(row, usage.GpuRow)]


def held(state: fleet.ReplicaState) -> ledger.Held:
    return ledger.Held("m", "1", 4, state)


async def test_rows_tile_the_lease_from_the_scripts_first_line(
    sink: usage.MemorySink, fake_clock: clock.FakeClock
) -> None:
    book = make(sink, fake_clock, run=2)
    start = fake_clock.wall_us() - 500_000
    for seconds in (60.0, 60.0, 1.5):
        await fake_clock.advance(seconds)
        fake_clock.step_wall(-30_000_000)  # NTP must not make time run backwards
        book.cut()
    book.cut()
    rows = gpu_rows(sink)
    assert [(row.seq, row.run, row.gpus) for row in rows] == [(0, 2, 4), (1, 2, 4), (2, 2, 4)]
    assert rows[0].start_us == start
    assert [a.end_us for a in rows[:-1]] == [b.start_us for b in rows[1:]]
    assert rows[-1].end_us - start == 122_000_000


async def test_without_a_start_the_agents_own_is_taken(
    sink: usage.MemorySink, fake_clock: clock.FakeClock
) -> None:
    book = ledger.Ledger(told(), spec.Job("", 0, 0), "n1", sink, fake_clock)
    await fake_clock.advance(2)
    book.cut()
    assert gpu_rows(sink)[0].end_us - gpu_rows(sink)[0].start_us == 2_000_000


async def test_replicas_time_is_cut_at_each_change_of_state(
    sink: usage.MemorySink, fake_clock: clock.FakeClock
) -> None:
    book = make(sink, fake_clock)
    book.observe({"r-1": held(S.STARTING)})
    await fake_clock.advance(2)
    book.observe({"r-1": held(S.SERVING)})
    await fake_clock.advance(3)
    book.cut()
    await fake_clock.advance(1)
    book.observe({"r-1": held(S.DRAINING), "r-2": held(S.LOST)})
    await fake_clock.advance(1)
    book.observe({"r-1": held(S.STOPPED)})
    book.observe({})
    rows = [row for row in sink.rows if isinstance(row, usage.ReplicaTimeRow)]
    found = [(row.seq, row.state, (row.end_us - row.start_us) // 1_000_000) for row in rows]
    assert found == [(0, "starting", 2), (1, "serving", 3), (2, "serving", 1), (3, "draining", 1)]
    assert {row.replica_id for row in rows} == {"r-1"}


async def test_what_the_engine_did_goes_into_the_rows_between_cuts(
    sink: usage.MemorySink, fake_clock: clock.FakeClock
) -> None:
    def serving(busy_s: float, steps: int) -> dict[str, ledger.Held]:
        done = work.Work(round(busy_s * 1e6), 10 * steps, 2 * steps, steps)
        return {"r-1": ledger.Held("m", "1", 4, S.SERVING, "red", done)}

    book = make(sink, fake_clock)
    book.observe({"r-1": held(S.STARTING)})
    await fake_clock.advance(1)
    book.observe(serving(9.0, 4))  # warm-up before it served is no work of anybody's
    await fake_clock.advance(10)
    book.observe(serving(13.0, 8))
    book.cut()
    await fake_clock.advance(10)
    book.observe(serving(14.0, 10))
    await fake_clock.advance(1)
    book.observe(serving(0.5, 1))  # an engine that began anew
    book.cut()
    book.observe(serving(99.0, 2))
    await fake_clock.advance(1)
    book.cut()
    rows = [row for row in sink.rows if isinstance(row, usage.ReplicaTimeRow)][1:]
    found = [(row.busy_us, row.prefill_tokens, row.decode_tokens, row.steps) for row in rows]
    assert found == [
        (4_000_000, 40, 8, 4),
        (1_500_000, 30, 6, 3),
        (1_000_000, 10, 2, 1),  # never more than the interval has
    ]
    assert {(row.measured, row.dedicated) for row in rows} == {(1, "red")}


async def test_a_pulse_extends_the_newest_rows_so_that_a_kill_loses_no_minute(
    sink: usage.MemorySink, fake_clock: clock.FakeClock
) -> None:
    book = make(sink, fake_clock, before_s=0)
    book.observe({"r-1": held(S.SERVING)})
    task = asyncio.create_task(book.run(60.0, 1.0))
    await asyncio.sleep(0)
    for _ in range(95):
        await fake_clock.advance(1)
    task.cancel()
    times = [row for row in sink.rows if not isinstance(row, usage.UsageRow)]
    spans = {(type(row).__name__, row.seq): (row.start_us, row.end_us) for row in times}
    start = gpu_rows(sink)[0].start_us
    for kind in ("GpuRow", "ReplicaTimeRow"):
        assert spans[kind, 0] == (start, start + 60_000_000)
        assert spans[kind, 1] == (start + 60_000_000, start + 95_000_000)
    assert len(spans) == 4


async def test_a_full_disk_delays_rows_and_loses_none(
    sink: usage.MemorySink, fake_clock: clock.FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    book = make(sink, fake_clock)
    sink.full = True
    await fake_clock.advance(60)
    book.cut()
    assert gpu_rows(sink) == []
    assert "1 rows of GPU time wait" in caplog.text
    sink.full = False
    await fake_clock.advance(60)
    book.cut()
    assert [row.seq for row in gpu_rows(sink)] == [0, 1]


def test_slurms_environment() -> None:
    found = {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "3", "FOREBAY_LEASE_STARTED_US": "17"}
    assert spec.Job.from_environment(found) == spec.Job("12", 3, 17)
    assert spec.Job.from_environment({"SLURM_RESTART_COUNT": "x"}) == spec.Job("", 0, 0)


def test_specs_survive_their_files_and_name_their_faults(tmp_path: Path) -> None:
    path = tmp_path / "agent.json"
    path.write_text(json.dumps(told().to_json()))
    assert spec.AgentSpec.read(path) == told()
    assert told().logs == Path("/r/logs")
    path.write_text('{"cluster": "c"}')
    with pytest.raises(tellings.SpecError, match=r"agent\.json: AgentSpec.* missing .*'slot_argv'"):
        spec.AgentSpec.read(path)
    slot = slot_spec.SlotSpec(
        slot_id="l-1.s0",
        lease_id="l-1",
        cluster="c",
        slurm_job_id="7",
        agent_address="127.0.0.1:1",
        agent_pid=2,
        agent_started=3,
        agent_machine="n1",
        token_file="/t",
        run_dir="/r",
        log_dir="/l",
        gpus=2,
        replica_argv=("replica",),
        sink_factory="m:f",
        options=settings.EnginesSettings(drain_s=3.0),
    )
    path.write_text(json.dumps(slot.to_json()))
    assert slot_spec.SlotSpec.read(path) == slot
    with pytest.raises(tellings.SpecError, match="No such file"):
        slot_spec.SlotSpec.read(tmp_path / "none")


def test_the_brokers_address_is_read_anew_and_may_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "broker.json"
    assert lease.broker_address(path) is None
    path.write_text("{")
    assert lease.broker_address(path) is None
    path.write_text('{"address": "h:1", "epoch": 3}')
    assert lease.broker_address(path) == "h:1"

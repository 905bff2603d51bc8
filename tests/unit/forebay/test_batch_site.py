"""Models and prices for batch submissions, from the fleet's view and the price list."""

from pathlib import Path

from accounting import billing, rates
from accounting import settings as accounting_settings
from batch_jobs import model
from forebay import batch_site
from scheduler.contracts import clock, fleet, ids
from tests.unit.batch_jobs import world as batch_world

TABLE = accounting_settings.Accounting(prefill_weight=1, decode_weight=4)


def replica(name: str, **changes: object) -> fleet.Replica:
    fields: dict[str, object] = {
        "state": fleet.ReplicaState.SERVING,
        "role": fleet.Role.SHARED,
        "stats": fleet.ReplicaStats(at_us=1, seats=100, step_ms=50.0),
        **changes,
    }
    return fleet.Replica(
        replica_id=ids.ReplicaId(name),
        cluster="c",
        lease_id=ids.LeaseId("l"),
        slot_id=ids.SlotId("s"),
        slurm_job_id="1",
        node="n1",
        spec=fleet.ReplicaSpec("chat", "1", fleet.EngineKind.VLLM, gpus=4),
        **fields,  # type: ignore[arg-type]
    )


def test_a_token_takes_its_seats_part_of_a_step_of_all_gpus() -> None:
    view = fleet.FleetView(
        1,
        1,
        {
            "chat": fleet.Route("chat", {"1": 100}, adapters=("formal",)),
            "new": fleet.Route("new", {}),
        },
        (
            replica("a"),
            replica("idle", stats=fleet.ReplicaStats(at_us=1, seats=100, step_ms=10.0)),
            replica("other", role=fleet.Role.INTERACTIVE, stats=None),
            replica("gone", state=fleet.ReplicaState.DRAINING),
        ),
    )
    found = batch_site.models(view, TABLE)
    assert found is not None
    assert found["chat"].adapters == {"formal"}
    assert found["chat"].output_gpu_s == 4 * 0.05 / 100
    assert found["chat"].prompt_gpu_s == found["chat"].output_gpu_s / 4
    assert found["new"].output_gpu_s == 0
    assert batch_site.models(None, TABLE) is None


def test_the_price_is_that_of_now_for_tier_batch(tmp_path: Path) -> None:
    books, time = billing.Billing(tmp_path, TABLE), clock.FakeClock()
    tokens = {"chat:formal": (2_000, 1_000)}
    assert batch_site.price(books, time, tokens) == ""
    wanted = rates.body(
        "chat", "batch", {rates.Use.UNCACHED: 500_000, rates.Use.OUTPUT: 2_000_000}, 1
    )
    books.add_rates(wanted, author="root", reason="", now_us=time.wall_us())
    assert batch_site.price(books, time, tokens) == "3.00 EUR"


def test_why_a_runner_leaves_the_lines_of_a_job(
    tmp_path: Path,
) -> None:
    time = clock.FakeClock()
    store = batch_world.open_store(tmp_path)
    now = time.wall_us()
    wanted = (
        model.BatchJob(0, "t", "u", cancel_us=now),
        model.BatchJob(0, "t", "u", deadline_us=now - 1),
        model.BatchJob(0, "t", "u", started_us=now - 2_000_000, time_limit_s=1),
        model.BatchJob(0, "t", "u", started_us=now, deadline_us=now + 1, time_limit_s=1),
        model.BatchJob(0, "t", "u", started_us=now, requeue_us=now),
    )
    found = [store.add(job, lambda _: None).job_id for job in wanted]
    fates = [batch_site.fate(store, time, job_id).value for job_id in [*found, 99]]
    assert fates == [
        "cancelled", "expired", "expired", "client_gone", "preempted", "client_gone",
    ]  # fmt: skip
    store.close()

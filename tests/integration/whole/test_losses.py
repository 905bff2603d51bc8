"""Parts die while answers stream and a batch job runs: answers go on, nothing is lost or counted twice."""

import subprocess
from typing import Any

import httpx
import pytest

from tests.integration.whole import batches, clients, running, waiting

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]
LINES, TOKENS = 60, 60


def held(house: running.Running) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the replicas' ids, and the leases with their jobs."""
    leases = sorted((lease["lease_id"], lease["slurm_job_id"]) for lease in house.leases())
    return [each["replica_id"] for each in house.replicas()], leases


def open_row(house: running.Running, stream: clients.Stream) -> dict[str, Any]:
    """Return the row that says where a stream runs."""
    (row,) = house.attempts_of(stream.request_id)
    assert row["outcome"] == "open"
    return row


def survived(house: running.Running, stream: clients.Stream, tokens: int) -> None:
    """The client has its whole answer and noticed nothing; the rows say that a replica was lost."""
    assert stream.ended().whole, vars(stream)
    rows = house.attempts_of(stream.request_id)
    outcomes = [row["outcome"] for row in rows]
    assert outcomes[0] == "replica_lost", outcomes
    assert outcomes[-1] == "ok", outcomes
    assert set(outcomes[1:-1]) <= {"refused", "replica_lost"}, outcomes
    assert rows[0]["output_tokens"] >= 1
    assert rows[-1]["waste_tokens"] > 0
    assert sum(row["output_tokens"] for row in rows) == tokens


def answered(house: running.Running, key: str) -> None:
    """A request is served now, and there is one row for each of its tries."""
    request_id = clients.new_id()
    answer = clients.post(house, key, clients.chat(5), request_id=request_id)
    assert answer.status_code == 200, answer.text
    rows = house.attempts_of(request_id)
    assert [row["attempt"] for row in rows] == list(range(1, len(rows) + 1))
    assert [row["outcome"] for row in rows].count("ok") == 1
    assert rows[-1]["outcome"] == "ok"


def test_replica_killed(house: running.Running, key: str) -> None:
    job = batches.Job.submit(house, key, LINES, TOKENS)
    stream = clients.Stream(house, key, 300).begun()
    victim = open_row(house, stream)["replica_id"]
    house.replica_process(victim).kill()
    survived(house, stream, 300)
    answered(house, key)
    job.finished()
    house.settled()
    assert victim not in held(house)[0]
    assert {row["outcome"] for row in job.rows()} <= {"ok", "replica_lost", "preempted", "refused"}


def test_lease_cancelled(house: running.Running, key: str) -> None:
    job = batches.Job.submit(house, key, LINES, TOKENS)
    stream = clients.Stream(house, key, 300).begun()
    row = open_row(house, stream)
    subprocess.run(["scancel", row["slurm_job_id"]], env=house.env, check=True)
    survived(house, stream, 300)
    answered(house, key)
    job.finished()
    house.settled()
    assert row["lease_id"] not in [lease for lease, _ in held(house)[1]]
    ended = {lease["lease_id"]: lease["state"] for lease in house.leases(ended=True)}
    assert ended[row["lease_id"]] == "ended"

    def agrees() -> bool:
        books = house.call("GET", "/forebay/v1/usage/reconcile")["rows"]
        (mine,) = (each for each in books if each["lease_id"] == row["lease_id"])
        assert mine["agrees"], mine
        return True

    waiting.eventually(agrees, "both books to agree on the cancelled lease")
    report = house.command("freport", "reconcile", "-S", "today", key=house.admin_key)
    assert (report.code, row["lease_id"] in report.out) == (0, True), report


def slurm_word(house: running.Running) -> str:
    """Return what the broker says of Slurm."""
    return str(house.call("GET", "/admin/explain")["broker"]["slurm"])


def test_broker_killed(house: running.Running, key: str) -> None:
    before, jobs = held(house), house.slurm_jobs()
    job = batches.Job.submit(house, key, LINES, TOKENS)
    stream = clients.Stream(house, key, 200).begun()
    epoch = house.call("GET", "/admin/explain")["broker"]["epoch"]
    house.part("broker").kill()
    answered(house, key)
    assert stream.ended().whole
    waiting.eventually(
        lambda: house.call("GET", "/admin/explain")["broker"]["epoch"] > epoch, "a new leader"
    )
    answered(house, key)
    job.finished()
    house.settled()
    assert held(house) == before
    assert house.slurm_jobs() == jobs


def test_gateway_killed(house: running.Running, key: str) -> None:
    before = held(house)
    job = batches.Job.submit(house, key, LINES, TOKENS)
    stream = clients.Stream(house, key, 300).begun()
    house.part("gateway").kill()
    assert not stream.ended().whole
    assert stream.broken

    def back() -> bool:
        try:
            return clients.post(house, key, clients.chat(1)).status_code == 200
        except httpx.TransportError:
            return False

    waiting.eventually(back, "a new gateway")
    job.finished()
    house.settled()
    (row,) = house.attempts_of(stream.request_id)
    assert row["outcome"] == "client_gone"  # the replica's own word: its client was the gateway
    assert held(house) == before


def test_batch_runner_killed(house: running.Running, key: str) -> None:
    job = batches.Job.submit(house, key, LINES, TOKENS)
    house.part("batchd").kill()
    answered(house, key)
    job.finished()

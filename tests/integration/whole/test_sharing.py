"""A spike of interactive requests while a batch job fills every seat that it may."""

import json

import pytest

from tests.integration.whole import batches, clients, running, waiting

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]
LINES, TOKENS = 200, 60
SPIKE, SPIKE_TOKENS = 40, 25


def test_batch_gives_way_and_comes_back(house: running.Running, key: str) -> None:
    requests_file = house.folder / "requests.jsonl"
    requests_file.write_text(batches.text(LINES, TOKENS))
    answers = house.folder / "answers.jsonl"
    submitted = house.command(
        "fbatch", "--parsable", "--account=physics", f"--output={answers}", str(requests_file)
    )
    assert submitted.code == 0, submitted.err
    job = batches.Job(house, int(submitted.out.split(";")[0]), LINES)
    most = running.REPLICAS * (running.SEATS - 1)
    waiting.eventually(lambda: house.batch_seats() >= most - 2, "batch in nearly every seat")
    streams = [clients.Stream(house, key, SPIKE_TOKENS) for _ in range(SPIKE)]
    waiting.eventually(
        lambda: "interactive" in {each["role"] for each in house.replicas()},
        "a replica that turns interactive (rung 1)",
    )
    assert [stream.ended().whole for stream in streams] == [True] * SPIKE
    asked = {stream.request_id for stream in streams}
    job.finished()
    assert len(answers.read_text().splitlines()) == LINES
    assert (
        len({json.loads(line)["custom_id"] for line in answers.read_text().splitlines()}) == LINES
    )
    rows = [row for row in house.attempts(lines="0") if row["caller_request_id"] in asked]
    assert sorted(row["caller_request_id"] for row in rows if row["outcome"] == "ok") == sorted(
        asked
    )
    lines = job.rows()
    preempted = {row["custom_id"] for row in lines if row["outcome"] == "preempted"}
    assert preempted
    paid = [row["custom_id"] for row in lines if row["outcome"] == "ok"]
    assert len(paid) == len(set(paid)) == LINES
    assert all(row["payer"] == "platform" for row in lines if row["outcome"] == "preempted")
    assert job.state()["lines"]["preempted"] >= len(preempted)
    house.settled()  # roles are shared again

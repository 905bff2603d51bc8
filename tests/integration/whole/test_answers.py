"""What users get on a quiet day: both doors, the commands, and who may come in."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import openai
import pytest

from scheduler.contracts.v1 import forebay_pb2
from tests.integration.whole import batches, clients, conftest, running

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]
QUESTION: Any = [{"role": "user", "content": "Why does the tide come in twice a day?"}]


def test_openai_client(house: running.Running, key: str) -> None:
    whole_id, stream_id = clients.new_id(), clients.new_id()
    with openai.OpenAI(
        base_url=f"{house.http}/v1",
        api_key=key,
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False, verify=False, timeout=60),
    ) as client:
        assert [model.id for model in client.models.list()] == [running.MODEL]
        ask = {"model": running.MODEL, "messages": QUESTION, "max_tokens": 12, "temperature": 0}
        whole = client.chat.completions.create(**ask, extra_headers={"X-Request-Id": whole_id})
        chunks = list(
            client.chat.completions.create(
                **ask,
                stream=True,
                stream_options={"include_usage": True},
                extra_headers={"X-Request-Id": stream_id},
            )
        )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert text
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens
    for request_id in (whole_id, stream_id):
        (row,) = house.attempts_of(request_id)
        assert (row["outcome"], row["attempt"], row["team"], row["user"]) == (
            *("ok", 1),
            *("physics", "ada"),
        )
        assert row["output_tokens"] == whole.usage.completion_tokens
        prompt = row["uncached_prompt_tokens"] + row["cached_prompt_tokens"]
        assert prompt == whole.usage.prompt_tokens
        assert row["lease_id"] in {lease["lease_id"] for lease in house.leases()}


def test_grpc(house: running.Running, key: str) -> None:
    request_id = clients.new_id()
    metadata = (("authorization", f"Bearer {key}"), ("x-request-id", request_id))
    asked = forebay_pb2.GenerateRequest(
        model=running.MODEL, prompt="The river", max_tokens=8, priority="standard"
    )
    with clients.grpc_door(house) as door:
        call = door.Generate(asked, metadata=metadata, timeout=60)
        chunks = list(call)
        models = door.ListModels(
            forebay_pb2.ListModelsRequest(), metadata=metadata[:1], timeout=60
        ).models
    assert "".join(chunk.text for chunk in chunks)
    assert chunks[-1].usage.completion_tokens == sum(len(chunk.token_ids) for chunk in chunks)
    assert [(model.name, model.context_length) for model in models] == [
        (running.MODEL, running.CONTEXT)
    ]
    (row,) = house.attempts_of(request_id)
    assert (row["outcome"], row["tier"]) == ("ok", "standard")
    assert dict(call.initial_metadata())["x-forebay-request-id"] == row["request_id"]


def test_client_goes_away(house: running.Running, key: str) -> None:
    stream = clients.Stream(house, key, 600, leave_after=5).begun().ended()
    house.settled(5.0)
    (row,) = house.attempts_of(stream.request_id)
    assert row["outcome"] == "client_gone"
    assert 5 <= row["output_tokens"] < 100


def test_commands(house: running.Running, key: str) -> None:
    request_id = clients.new_id()
    assert clients.post(house, key, clients.chat(3), request_id=request_id).status_code == 200
    (row,) = house.attempts_of(request_id)
    shown = house.command("fctl", "show", "replicas", "--json", key=house.admin_key)
    serving = {each["replica_id"] for each in house.replicas()}
    assert {each["replica_id"] for each in json.loads(shown.out)["replicas"]} >= serving
    info = house.command("finfo", key=key)
    assert (info.code, running.MODEL in info.out) == (0, True), info
    mine = house.command(
        "facct", "-P", "-n", "-o", "jobid,state,user", "-j", row["request_id"], key=key
    )
    assert (mine.code, row["request_id"] in mine.out) == (0, True), mine
    report = house.command("freport", "team", "-S", "today", key=house.admin_key)
    assert (report.code, "physics" in report.out) == (0, True), report


def test_munge(house: running.Running) -> None:
    """On a login node the Unix user is credential enough, and only if Slurm knows the user's team."""
    as_root = house.command("fqueue", "-t", "all")
    assert as_root.code == 0, as_root.err
    with tempfile.TemporaryDirectory() as home:  # pytest's own folders are closed to other users
        shutil.chown(home, conftest.USER)
        file = Path(home) / "requests.jsonl"
        file.write_text(batches.text(3, 4))
        submitted = house.command(
            *("fbatch", "--parsable", "--wait", str(file)), user=conftest.USER, cwd=Path(home)
        )
        assert submitted.code == 0, submitted.err
        job = batches.Job(house, int(submitted.out.split(";")[0]), 3)
        answers = Path(home) / f"fbatch-{job.job_id}.jsonl"
        assert (answers.owner(), len(answers.read_text().splitlines())) == (conftest.USER, 3)
    job.finished()
    assert {(row["team"], row["user"]) for row in job.rows()} == {("physics", conftest.USER)}
    mine = house.command("fqueue", "--me", "-t", "all", "-h", "-o", "%i %u", user=conftest.USER)
    assert mine.out.split() == [str(job.job_id), conftest.USER]
    stranger = house.command("fqueue", user=conftest.STRANGER)
    assert stranger.code == 1
    assert stranger.err == (
        "fqueue: error: user daemon has no association in Slurm: ask an admin for one\n"
    )

"""The OpenAI Batch API, driven by the official client against a real gateway, replica scripted."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
import sqlalchemy as sa

from batch_jobs import tables
from forebay import api as clients
from tests.integration import openai_site
from tests.unit.batch_jobs import world
from tests.unit.gateway import harness


async def test_a_batch_from_upload_to_answers_seen_at_both_doors(tmp_path: Path) -> None:
    async def script(received: harness.Received, out: harness.Out) -> None:
        if received.identity.custom_id == "c2":
            error = {"message": "too long", "type": "x", "code": "context_length_exceeded"}
            await out.json(400, {"error": error})
        else:
            await harness.hello(received, out)

    async with openai_site.site(tmp_path, script) as here, here.client() as client:
        data = world.many(3) + world.line("c1")
        file = await client.files.create(file=("requests.jsonl", data), purpose="batch")
        assert (file.bytes, file.filename, file.purpose) == (len(data), "requests.jsonl", "batch")
        assert (await client.files.content(file.id)).content == data
        made = await client.batches.create(
            input_file_id=file.id,
            endpoint=openai_site.ENDPOINT,
            completion_window="24h",
            metadata={"night": "run"},
        )
        assert (made.status, made.metadata, made.in_progress_at) == (
            "validating",
            {"night": "run"},
            None,
        )
        await client.files.delete(file.id)  # the batch has its own copy
        async with here.runner():
            done = await openai_site.until(client, made.id, openai_site.ended)
        assert done.status == "completed"
        assert done.request_counts is not None
        assert done.request_counts.model_dump() == {"total": 4, "completed": 2, "failed": 2}
        stamps = (done.created_at, done.in_progress_at, done.finalizing_at, done.completed_at)
        assert all(stamps)
        assert list(stamps) == sorted(stamps, key=lambda at: at or 0)
        assert done.expires_at == done.created_at + 86_400
        assert done.usage is not None
        assert (done.usage.input_tokens, done.usage.output_tokens, done.usage.total_tokens) == (
            10,
            6,
            16,
        )
        assert done.output_file_id is not None
        assert done.error_file_id is not None
        good = (await client.files.content(done.output_file_id)).text.splitlines()
        bad = (await client.files.content(done.error_file_id)).text.splitlines()
        assert {json.loads(text)["custom_id"] for text in good} == {"c1", "c3"}
        codes = {json.loads(text)["error"]["code"] for text in bad}
        assert codes == {"bad_request", "duplicate_custom_id"}
        api = clients.GatewayApi(here.served.http, clients.Credential(key="ann"))
        said = await asyncio.to_thread(
            world.run_command, "fqueue", ("-h", "-t", "all", "-o", "%i %j %t %D"), api, tmp_path
        )
        assert said.out == "1 requests.jsonl CD 4/4\n"
        listed = [each.id async for each in client.files.list()]
        assert listed == [done.error_file_id, done.output_file_id] or listed == [
            done.output_file_id,
            done.error_file_id,
        ]
        await client.files.delete(done.output_file_id)
        with pytest.raises(openai.NotFoundError):
            await client.files.content(done.output_file_id)


async def test_a_job_of_fbatch_is_a_batch_with_files(tmp_path: Path) -> None:
    async with openai_site.site(tmp_path) as here, here.client() as client, here.runner():
        (tmp_path / "r.jsonl").write_bytes(world.many(2))
        api = clients.GatewayApi(here.served.http, clients.Credential(key="ann"))
        said = await asyncio.to_thread(world.run_command, "fbatch", ("r.jsonl",), api, tmp_path)
        assert said.code == 0
        done = await openai_site.until(client, "batch_1", openai_site.ended)
        assert done.status == "completed"
        assert done.output_file_id is not None
        assert (await client.files.content(done.input_file_id)).content == world.many(2)
        assert len((await client.files.content(done.output_file_id)).text.splitlines()) == 2


async def test_when_every_line_fails_there_is_no_output_file(tmp_path: Path) -> None:
    async def refuse(received: harness.Received, out: harness.Out) -> None:
        await out.json(400, {"error": {"message": "no", "type": "x", "code": "bad"}})

    async with openai_site.site(tmp_path, refuse) as here, here.client() as client, here.runner():
        done = await openai_site.until(
            client, (await openai_site.submit(client, world.many(3))).id, openai_site.ended
        )
        assert (done.status, done.output_file_id) == ("completed", None)
        assert done.error_file_id is not None


@pytest.mark.parametrize(
    ("how", "status", "code"),
    [("cancel", "cancelled", "batch_cancelled"), ("expire", "expired", "batch_expired")],
)
async def test_what_is_open_at_the_end_is_in_the_error_file(
    tmp_path: Path, how: str, status: str, code: str
) -> None:
    async def script(received: harness.Received, out: harness.Out) -> None:
        if received.identity.custom_id in {"c1", "c2"}:
            await harness.hello(received, out)
        else:
            await out.gone()

    async with openai_site.site(tmp_path, script) as here, here.client() as client, here.runner():
        made = await openai_site.submit(client, world.many(5))
        await openai_site.until(client, made.id, lambda b: b.request_counts.completed == 2)
        if how == "cancel":
            asked = await client.batches.cancel(made.id)
            assert asked.status in {"cancelling", "cancelled"}
            assert asked.cancelling_at
        else:
            with here.store.writing() as connection:
                connection.execute(sa.update(tables.JOBS).values(deadline_us=1))
        done = await openai_site.until(client, made.id, openai_site.ended)
        assert done.status == status
        assert getattr(done, f"{status}_at")
        assert done.request_counts is not None
        assert (done.request_counts.completed, done.request_counts.failed) == (2, 3)
        assert done.error_file_id is not None
        text = (await client.files.content(done.error_file_id)).text
        assert {json.loads(line)["error"]["code"] for line in text.splitlines()} == {code}
        with pytest.raises(openai.BadRequestError, match="only one under way"):
            await client.batches.cancel(made.id)


async def test_a_line_that_is_never_answered_is_a_request_timeout(tmp_path: Path) -> None:
    async def script(received: harness.Received, out: harness.Out) -> None:
        if received.identity.custom_id == "c1":
            await out.gone()
        else:
            await harness.hello(received, out)

    quick: dict[str, Any] = {"request_timeout_s": 0.3, "retry_cap": 1}
    async with (
        openai_site.site(tmp_path, script) as here,
        here.client() as client,
        here.runner(**quick),
    ):
        done = await openai_site.until(
            client, (await openai_site.submit(client, world.many(2))).id, openai_site.ended
        )
        assert done.status == "completed"
        assert done.error_file_id is not None
        (text,) = (await client.files.content(done.error_file_id)).text.splitlines()
        line = json.loads(text)
        assert (line["custom_id"], line["response"]) == ("c1", None)
        assert line["error"]["code"] == "request_timeout"


async def test_a_batch_that_is_put_back_stays_in_progress_there(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def script(received: harness.Received, out: harness.Out) -> None:
        if received.identity.custom_id != "c1":
            await release.wait()
        await harness.hello(received, out)

    async with (
        openai_site.site(tmp_path, script) as here,
        here.client() as client,
        here.client("root") as root,
    ):
        async with here.runner():
            made = await openai_site.submit(client, world.many(3))
            await openai_site.until(client, made.id, lambda b: b.request_counts.completed == 1)
            api = clients.GatewayApi(here.served.http, clients.Credential(key="root"))
            await asyncio.to_thread(api.call, "PATCH", "/forebay/v1/jobs/1", json={"comment": "x"})
            await asyncio.to_thread(api.call, "POST", "/forebay/v1/jobs/1/requeue")
            # The runner puts it back when it next looks: answers that come before would end it instead.
            put_back = await openai_site.until(
                root, made.id, lambda b: here.store.must(1).requeues == 1
            )
            assert put_back.status == "in_progress"
            release.set()
            done = await openai_site.until(client, made.id, openai_site.ended)
        assert done.status == "completed"
        assert here.store.must(1).requeues == 1
        assert done.request_counts is not None
        assert done.request_counts.completed == 3


async def test_a_teams_queued_tokens_have_their_bound_at_this_door_too(tmp_path: Path) -> None:
    data = world.line("a", max_tokens=600)
    async with (
        openai_site.site(tmp_path, team_queued_tokens=1_000) as here,
        here.client() as client,
    ):
        one = await openai_site.submit(client, data)
        with pytest.raises(openai.RateLimitError, match="1000 tokens queued"):
            await openai_site.submit(client, data)
        assert [batch.id async for batch in client.batches.list()] == [one.id]
        await client.batches.cancel(one.id)

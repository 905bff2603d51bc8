"""The OpenAI Batch API, driven by the official client against a real gateway, replica scripted."""

import asyncio
import contextlib
import dataclasses
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import sqlalchemy as sa

from batch_jobs import files, intake, model, openai_api, openai_shape, results, routes, tables
from forebay import api as clients
from scheduler.contracts import clock, ports, requests
from tests.unit.batch_jobs import world
from tests.unit.gateway import harness

CAROL = requests.Caller("physics", "carol", "key-carol", tuple(requests.Tier), coordinator=True)
DAN = requests.Caller("physics", "dan", "key-dan", tuple(requests.Tier))
ROOT = requests.Caller("ops", "root", "key-root", tuple(requests.Tier), admin=True)
EVE = requests.Caller("chem", "eve", "key-eve", tuple(requests.Tier))
KEYS = {**harness.KEYS, "carol": CAROL, "dan": DAN, "root": ROOT, "eve": EVE}
ENDPOINT: Any = "/v1/chat/completions"


@dataclasses.dataclass
class Site:
    state_dir: Path
    store: world.TellingStore
    served: harness.Served
    options: Any

    def client(self, key: str = "ann") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            api_key=key, base_url=f"{self.served.http}/v1", max_retries=0, timeout=30
        )

    def runner(self, **changes: Any) -> contextlib.AbstractAsyncContextManager[asyncio.Task[None]]:
        options = dataclasses.replace(world.QUICK, **changes)
        return world.daemon_running(
            self.store, self.state_dir, self.served.http, options, key="svc"
        )


@contextlib.asynccontextmanager
async def site(
    tmp_path: Path, script: harness.Script = harness.hello, **changes: Any
) -> AsyncIterator[Site]:
    store = world.open_store(tmp_path)
    options = dataclasses.replace(world.QUICK, **changes)
    time = clock.SystemClock()
    routers = tuple(
        each.router(store, state_dir=tmp_path, options=options, clock=time)
        for each in (routes, openai_api)
    )
    async with harness.one_replica(
        script, routers=routers, authenticator=ports.StaticKeys(KEYS)
    ) as (served, _):
        yield Site(tmp_path, store, served, options)
    store.close()


async def until(
    client: openai.AsyncOpenAI, batch_id: str, holds: Callable[[Any], bool]
) -> openai.types.Batch:
    async with asyncio.timeout(30):
        while True:
            found = await client.batches.retrieve(batch_id)
            if holds(found):
                return found
            await asyncio.sleep(0.02)


def ended(batch: Any) -> bool:
    return batch.status in {"completed", "failed", "expired", "cancelled"}


async def submit(client: openai.AsyncOpenAI, data: bytes, **more: Any) -> openai.types.Batch:
    file = await client.files.create(file=("requests.jsonl", data), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h", **more
    )


async def test_a_batch_from_upload_to_answers_seen_at_both_doors(tmp_path: Path) -> None:
    async def script(received: harness.Received, out: harness.Out) -> None:
        if received.identity.custom_id == "c2":
            error = {"message": "too long", "type": "x", "code": "context_length_exceeded"}
            await out.json(400, {"error": error})
        else:
            await harness.hello(received, out)

    async with site(tmp_path, script) as here, here.client() as client:
        data = world.many(3) + world.line("c1")
        file = await client.files.create(file=("requests.jsonl", data), purpose="batch")
        assert (file.bytes, file.filename, file.purpose) == (len(data), "requests.jsonl", "batch")
        assert (await client.files.content(file.id)).content == data
        made = await client.batches.create(
            input_file_id=file.id,
            endpoint=ENDPOINT,
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
            done = await until(client, made.id, ended)
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
    async with site(tmp_path) as here, here.client() as client, here.runner():
        (tmp_path / "r.jsonl").write_bytes(world.many(2))
        api = clients.GatewayApi(here.served.http, clients.Credential(key="ann"))
        said = await asyncio.to_thread(world.run_command, "fbatch", ("r.jsonl",), api, tmp_path)
        assert said.code == 0
        done = await until(client, "batch_1", ended)
        assert done.status == "completed"
        assert done.output_file_id is not None
        assert (await client.files.content(done.input_file_id)).content == world.many(2)
        assert len((await client.files.content(done.output_file_id)).text.splitlines()) == 2


async def test_when_every_line_fails_there_is_no_output_file(tmp_path: Path) -> None:
    async def refuse(received: harness.Received, out: harness.Out) -> None:
        await out.json(400, {"error": {"message": "no", "type": "x", "code": "bad"}})

    async with site(tmp_path, refuse) as here, here.client() as client, here.runner():
        done = await until(client, (await submit(client, world.many(3))).id, ended)
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

    async with site(tmp_path, script) as here, here.client() as client, here.runner():
        made = await submit(client, world.many(5))
        await until(client, made.id, lambda b: b.request_counts.completed == 2)
        if how == "cancel":
            asked = await client.batches.cancel(made.id)
            assert asked.status in {"cancelling", "cancelled"}
            assert asked.cancelling_at
        else:
            with here.store.writing() as connection:
                connection.execute(sa.update(tables.JOBS).values(deadline_us=1))
        done = await until(client, made.id, ended)
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
    async with site(tmp_path, script) as here, here.client() as client, here.runner(**quick):
        done = await until(client, (await submit(client, world.many(2))).id, ended)
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

    async with site(tmp_path, script) as here, here.client() as client, here.client("root") as root:
        async with here.runner():
            made = await submit(client, world.many(3))
            await until(client, made.id, lambda b: b.request_counts.completed == 1)
            api = clients.GatewayApi(here.served.http, clients.Credential(key="root"))
            await asyncio.to_thread(api.call, "PATCH", "/forebay/v1/jobs/1", json={"comment": "x"})
            await asyncio.to_thread(api.call, "POST", "/forebay/v1/jobs/1/requeue")
            # The runner puts it back when it next looks: answers that come before would end it instead.
            put_back = await until(root, made.id, lambda b: here.store.must(1).requeues == 1)
            assert put_back.status == "in_progress"
            release.set()
            done = await until(client, made.id, ended)
        assert done.status == "completed"
        assert here.store.must(1).requeues == 1
        assert done.request_counts is not None
        assert done.request_counts.completed == 3


async def test_files_and_batches_belong_to_who_made_them(tmp_path: Path) -> None:
    async with site(tmp_path) as here, contextlib.AsyncExitStack() as stack:
        by = {
            name: await stack.enter_async_context(here.client(name))
            for name in ("ann", "dan", "carol", "eve", "root")
        }
        made = await submit(by["ann"], world.many(2))
        assert made.input_file_id is not None
        for name, may in (("dan", False), ("eve", False), ("carol", True), ("root", True)):
            client = by[name]
            assert [b.id async for b in client.batches.list()] == ([made.id] if may else [])
            assert [f.id async for f in client.files.list()] == (
                [made.input_file_id] if may else []
            )
            asks: list[Any] = [
                client.files.retrieve(made.input_file_id),
                client.files.content(made.input_file_id),
                client.batches.retrieve(made.id),
            ]
            for ask in asks:
                if may:
                    await ask
                else:
                    with pytest.raises(openai.NotFoundError):
                        await ask
            if not may:
                for again in (
                    client.files.delete(made.input_file_id),
                    client.batches.cancel(made.id),
                    client.batches.create(
                        input_file_id=made.input_file_id,
                        endpoint=ENDPOINT,
                        completion_window="24h",
                    ),
                ):
                    with pytest.raises(openai.NotFoundError):
                        await again


async def test_lists_come_newest_first_in_pages(tmp_path: Path) -> None:
    async with site(tmp_path) as here, here.client() as client:
        made = [(await submit(client, world.many(1))).id for _ in range(5)]
        first = await client.batches.list(limit=2)
        assert [b.id for b in first.data] == [made[4], made[3]]
        assert first.has_more
        assert [b.id async for b in client.batches.list(limit=2)] == made[::-1]
        page = await client.batches.list(limit=2, after=made[2])
        assert [b.id for b in page.data] == [made[1], made[0]]
        assert len([f async for f in client.files.list(limit=2)]) == 5
        with pytest.raises(openai.BadRequestError, match="limit"):
            await client.batches.list(limit=1000)


async def test_a_teams_storage_has_its_bound_and_deleting_makes_room(tmp_path: Path) -> None:
    data = world.many(4)
    async with site(tmp_path, team_storage_bytes=2 * len(data)) as here, here.client() as client:
        one = await client.files.create(file=("a", data), purpose="batch")
        await client.files.create(file=("b", data), purpose="batch")
        with pytest.raises(openai.RateLimitError, match="storage left"):
            await client.files.create(file=("c", data), purpose="batch")
        with pytest.raises(openai.RateLimitError, match="storage left"):
            await client.batches.create(
                input_file_id=one.id, endpoint=ENDPOINT, completion_window="24h"
            )
        async with here.client("eve") as other:  # another team has its own
            await other.files.create(file=("d", data), purpose="batch")
        await client.files.delete(one.id)
        await client.files.create(file=("c", data), purpose="batch")


async def test_a_teams_queued_tokens_have_their_bound_at_this_door_too(tmp_path: Path) -> None:
    data = world.line("a", max_tokens=600)
    async with site(tmp_path, team_queued_tokens=1_000) as here, here.client() as client:
        one = await submit(client, data)
        with pytest.raises(openai.RateLimitError, match="1000 tokens queued"):
            await submit(client, data)
        assert [batch.id async for batch in client.batches.list()] == [one.id]
        await client.batches.cancel(one.id)


async def test_results_that_are_deleted_are_gone_and_make_room(tmp_path: Path) -> None:
    """Their journal holds every answer too, and what it takes counts."""
    async with site(tmp_path) as here, here.client() as client:
        async with here.runner():
            done = await until(client, (await submit(client, world.many(3))).id, ended)
        assert done.output_file_id is not None
        folder = intake.job_folder(tmp_path, 1)
        before = here.store.must(1).stored_bytes
        await client.files.delete(done.output_file_id)
        assert not any(b"choices" in path.read_bytes() for path in folder.iterdir())
        left = sum(path.stat().st_size for path in folder.iterdir())
        assert here.store.must(1).stored_bytes == left < before
        with pytest.raises(openai.NotFoundError):
            await client.files.content(done.output_file_id)


async def test_a_whole_file_that_breaks_the_rules_is_a_failed_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_shape, "MAX_LINES", 3)
    async with site(tmp_path) as here, here.client() as client:
        for data, words in ((world.many(4), "more than 3"), (b"\n\n", "no request")):
            made = await submit(client, data)
            assert made.status == "failed"
            assert made.failed_at
            assert made.errors is not None
            assert made.errors.data is not None
            assert words in str(made.errors.data[0].message)
        monkeypatch.setattr(openai_shape, "MAX_BYTES", 100)
        with pytest.raises(openai.APIStatusError, match="split it") as refused:
            await client.files.create(file=("big", b"x" * 101), purpose="batch")
        assert refused.value.status_code == 413
        monkeypatch.setattr(openai_shape, "MAX_BYTES", -50_000)  # beyond what a form may add
        answer = await _in_chunks(here, b"x" * 20_000)
        assert (answer.status_code, "split it" in answer.text) == (413, True)


async def _in_chunks(here: Site, data: bytes) -> httpx.Response:
    """Upload without saying how much it will be."""
    form = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n%b\r\n--b--\r\n'
    )

    async def pieces() -> AsyncIterator[bytes]:
        yield form % data

    headers = {"Content-Type": "multipart/form-data; boundary=b", "Authorization": "Bearer ann"}
    async with httpx.AsyncClient(trust_env=False, timeout=30) as plain:
        return await plain.post(f"{here.served.http}/v1/files", content=pieces(), headers=headers)


async def test_bad_fields_are_refused_by_name(tmp_path: Path) -> None:
    async with site(tmp_path) as here, here.client() as client:
        file = await client.files.create(file=("a", world.many(1)), purpose="batch")
        good: dict[str, Any] = {
            "input_file_id": file.id,
            "endpoint": ENDPOINT,
            "completion_window": "24h",
        }
        for change, words in (
            ({"endpoint": "/v1/images"}, "endpoint: must be one of"),
            ({"completion_window": "24"}, "completion_window"),
            ({"completion_window": "15d"}, "completion_window"),
            ({"metadata": {str(n): "x" for n in range(17)}}, "17 pairs"),
            ({"metadata": {"k" * 65: "x"}}, "too long"),
            ({"metadata": {"k": "x" * 513}}, "too long"),
            ({"metadata": {"k": 5}}, "must be a text"),
            ({"output_expires_after": {"anchor": "now", "seconds": 5000}}, "anchor"),
            ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "seconds"),
            ({"extra_body": {"unheard_of": 1}}, "unheard_of"),
        ):
            with pytest.raises(openai.BadRequestError, match=words):
                await client.batches.create(**{**good, **change})
        with pytest.raises(openai.NotFoundError):
            await client.batches.create(**{**good, "input_file_id": "file-none"})
        with pytest.raises(openai.BadRequestError, match="purpose"):
            await client.files.create(file=("a", b"x"), purpose="fine-tune")
        async with here.client("bob") as bob:  # his key has no tier batch
            theirs = await bob.files.create(file=("a", world.many(1)), purpose="batch")
            with pytest.raises(openai.PermissionDeniedError, match="tier batch"):
                await bob.batches.create(**{**good, "input_file_id": theirs.id})
        mixed = world.line("a") + world.line("b").replace(b"/chat", b"")
        made = await submit(client, mixed)
        assert made.request_counts is not None
        assert made.request_counts.failed == 1


async def test_what_has_expired_is_swept_away(tmp_path: Path) -> None:
    expiry = {"anchor": "created_at", "seconds": 3600}
    async with site(tmp_path) as here, here.client() as client:
        async with here.runner():
            keep: Any = expiry
            file = await client.files.create(
                file=("a", world.many(1)), purpose="batch", expires_after=keep
            )
            assert file.expires_at == file.created_at + 3600
            made = await client.batches.create(
                input_file_id=file.id,
                endpoint=ENDPOINT,
                completion_window="24h",
                output_expires_after=keep,
            )
            done = await until(client, made.id, ended)
        assert done.output_file_id is not None
        assert done.completed_at is not None
        output = await client.files.retrieve(done.output_file_id)
        assert output.expires_at == done.completed_at + 3600
        kept = files.Files(here.store, tmp_path)
        now = clock.SystemClock().wall_us()
        assert files.sweep(kept, here.store, tmp_path, now, keep_s=0) == []
        later = now + 3_700_000_000
        assert len(files.sweep(kept, here.store, tmp_path, later, keep_s=0)) == 2
        assert files.sweep(kept, here.store, tmp_path, later, keep_s=0) == []
        assert world.file_lines(tmp_path, 1, results.OUTPUT) == []
        for gone in (file.id, done.output_file_id):
            with pytest.raises(openai.NotFoundError):
                await client.files.retrieve(gone)
        again = await client.batches.retrieve(made.id)
        assert (again.status, again.output_file_id) == ("completed", None)
        assert here.store.must(1).stored_bytes == 0
        assert here.store.must(1).state is model.State.COMPLETED


async def test_what_no_job_knows_is_swept_when_a_jobs_files_would_be(tmp_path: Path) -> None:
    """What an insert left that was undone, and uploads of gateways that were killed, were there for ever."""
    store = world.open_store(tmp_path)
    kept = files.Files(store, tmp_path)
    mine = await asyncio.to_thread(world.AppApi(store, tmp_path).submit, world.many(1))
    old, new, broken = (tmp_path / intake.FOLDER / name for name in ("77", "78", "incoming-x"))
    for folder, age_s in ((old, 7_200), (new, 60), (broken, 90_000)):
        folder.mkdir()
        (folder / results.INPUT).write_bytes(world.many(1))
        at = time.time() - age_s
        for path in (folder / results.INPUT, folder):
            os.utime(path, (at, at))
    os.utime(intake.job_folder(tmp_path, mine), (1, 1))
    now = clock.SystemClock().wall_us()
    assert files.sweep(kept, store, tmp_path, now, keep_s=0) == []
    assert [path.exists() for path in (old, new, broken)] == [True, True, False]
    (word,) = files.sweep(kept, store, tmp_path, now, keep_s=3_600)
    assert "of no job" in word
    assert [path.exists() for path in (old, new)] == [False, True]
    assert intake.job_folder(tmp_path, mine).exists()
    store.close()

"""Files of the OpenAI Batch API: whose they are, how many there may be, and what is swept away."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from batch_jobs import files, intake, model, openai_shape, results
from scheduler.contracts import clock
from tests.integration import openai_site
from tests.unit.batch_jobs import world


async def test_files_and_batches_belong_to_who_made_them(tmp_path: Path) -> None:
    async with openai_site.site(tmp_path) as here, contextlib.AsyncExitStack() as stack:
        by = {
            name: await stack.enter_async_context(here.client(name))
            for name in ("ann", "dan", "carol", "eve", "root")
        }
        made = await openai_site.submit(by["ann"], world.many(2))
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
                        endpoint=openai_site.ENDPOINT,
                        completion_window="24h",
                    ),
                ):
                    with pytest.raises(openai.NotFoundError):
                        await again


async def test_lists_come_newest_first_in_pages(tmp_path: Path) -> None:
    async with openai_site.site(tmp_path) as here, here.client() as client:
        made = [(await openai_site.submit(client, world.many(1))).id for _ in range(5)]
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
    async with (
        openai_site.site(tmp_path, team_storage_bytes=2 * len(data)) as here,
        here.client() as client,
    ):
        one = await client.files.create(file=("a", data), purpose="batch")
        await client.files.create(file=("b", data), purpose="batch")
        with pytest.raises(openai.RateLimitError, match="storage left"):
            await client.files.create(file=("c", data), purpose="batch")
        with pytest.raises(openai.RateLimitError, match="storage left"):
            await client.batches.create(
                input_file_id=one.id, endpoint=openai_site.ENDPOINT, completion_window="24h"
            )
        async with here.client("eve") as other:  # another team has its own
            await other.files.create(file=("d", data), purpose="batch")
        await client.files.delete(one.id)
        await client.files.create(file=("c", data), purpose="batch")


async def test_results_that_are_deleted_are_gone_and_make_room(tmp_path: Path) -> None:
    """Their journal holds every answer too, and what it takes counts."""
    async with openai_site.site(tmp_path) as here, here.client() as client:
        async with here.runner():
            done = await openai_site.until(
                client, (await openai_site.submit(client, world.many(3))).id, openai_site.ended
            )
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
    async with openai_site.site(tmp_path) as here, here.client() as client:
        for data, words in ((world.many(4), "more than 3"), (b"\n\n", "no request")):
            made = await openai_site.submit(client, data)
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


async def _in_chunks(here: openai_site.Site, data: bytes) -> httpx.Response:
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
    async with openai_site.site(tmp_path) as here, here.client() as client:
        file = await client.files.create(file=("a", world.many(1)), purpose="batch")
        good: dict[str, Any] = {
            "input_file_id": file.id,
            "endpoint": openai_site.ENDPOINT,
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
        made = await openai_site.submit(client, mixed)
        assert made.request_counts is not None
        assert made.request_counts.failed == 1


async def test_what_has_expired_is_swept_away(tmp_path: Path) -> None:
    expiry = {"anchor": "created_at", "seconds": 3600}
    async with openai_site.site(tmp_path) as here, here.client() as client:
        async with here.runner():
            keep: Any = expiry
            file = await client.files.create(
                file=("a", world.many(1)), purpose="batch", expires_after=keep
            )
            assert file.expires_at == file.created_at + 3600
            made = await client.batches.create(
                input_file_id=file.id,
                endpoint=openai_site.ENDPOINT,
                completion_window="24h",
                output_expires_after=keep,
            )
            done = await openai_site.until(client, made.id, openai_site.ended)
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

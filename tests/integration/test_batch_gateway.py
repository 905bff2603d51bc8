"""Batch jobs through the real gateway: one door for commands and lines, one usage row a dispatch."""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import json
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

import pytest

from accounting import merge
from batch_jobs import intake, journal, model, results, routes
from forebay import api as clients
from forebay import batch_site
from scheduler.contracts import clock, frames, resume, usage
from tests.unit.batch_jobs import world
from tests.unit.gateway import harness


@dataclasses.dataclass
class Site:
    """A gateway with a scripted replica, its batch routes, and a store."""

    state_dir: Path
    store: world.TellingStore
    served: harness.Served
    replica: harness.FakeReplica
    api: clients.GatewayApi

    async def command(self, name: str, *argv: str) -> world.Said:
        return await asyncio.to_thread(world.run_command, name, argv, self.api, self.state_dir)

    def runner(self) -> contextlib.AbstractAsyncContextManager[asyncio.Task[None]]:
        return world.daemon_running(self.store, self.state_dir, self.served.http, key="svc")


@contextlib.asynccontextmanager
async def site(tmp_path: Path, script: harness.Script) -> AsyncIterator[Site]:
    store = world.open_store(tmp_path)
    router = routes.router(
        store, state_dir=tmp_path, options=world.QUICK, clock=clock.SystemClock()
    )
    fate = functools.partial(batch_site.fate, store, clock.SystemClock())
    async with harness.one_replica(script, routers=(router,), job_fate=fate) as (served, replica):
        api = clients.GatewayApi(served.http, clients.Credential(key="ann"))
        yield Site(tmp_path, store, served, replica, api)
    store.close()


async def test_a_file_runs_through_the_gateway_and_is_billed_line_by_line(tmp_path: Path) -> None:
    tries: collections.Counter[str] = collections.Counter()

    async def script(received: harness.Received, out: harness.Out) -> None:
        custom_id = received.identity.custom_id
        tries[custom_id] += 1
        if custom_id == "c3":
            error = {"message": "too long", "type": "x", "code": "context_length_exceeded"}
            await out.json(400, {"error": error})
        elif custom_id == "naïve 5" and tries[custom_id] <= 2:
            lost = frames.Error("preempted", "gave its seat back", 503, prompt_tokens=5)
            await out.send(harness.PROMPT)
            await out.error(lost)
        else:
            await harness.hello(received, out)

    data = world.many(4) + world.line("naïve 5") + b"not json\n"
    (tmp_path / "requests.jsonl").write_bytes(data)
    async with site(tmp_path, script) as here, here.runner():
        said = await here.command("fbatch", "--wait", "requests.jsonl")
        assert (said.code, said.out) == (1, "Submitted batch job 1\n")
        assert "line 6: not JSON" in said.err
        listed = await here.command("fqueue", "-h", "-t", "all", "-o", "%i %a %u %t %D")
        assert listed.out == "1 physics ann CD 6/6\n"
        target = tmp_path / "fbatch-1.jsonl"
        assert f"wrote {target}" in said.err
        rows = await here.served.rows(7)
    answers = [json.loads(text) for text in target.read_bytes().splitlines()]
    assert {line["custom_id"] for line in answers} == {"c1", "c2", "c4", "naïve 5"}
    for line in answers:
        assert line["response"]["body"]["choices"][0]["message"]["content"] == "Hello world"
        assert line["response"]["request_id"] in {row.identity.request_id for row in rows}
    assert len((tmp_path / "fbatch-1.err.jsonl").read_bytes().splitlines()) == 2
    assert not list(tmp_path.glob(".*.part"))
    job = here.store.must(1)
    assert job.counts == model.Counts(total=6, ok=4, failed=2, preempted=2)
    outcomes = collections.Counter((row.identity.custom_id, row.outcome) for row in rows)
    assert outcomes == {
        ("c1", usage.Outcome.OK): 1,
        ("c2", usage.Outcome.OK): 1,
        ("c4", usage.Outcome.OK): 1,
        ("naïve 5", usage.Outcome.OK): 1,
        ("naïve 5", usage.Outcome.PREEMPTED): 2,
        ("c3", usage.Outcome.REFUSED): 1,
    }
    for row in rows:
        identity = row.identity
        assert (identity.team, identity.user, identity.tier) == ("physics", "ann", "batch")
        assert identity.batch_job_id == 1


async def test_only_the_lines_that_kill_a_replica_are_set_aside(tmp_path: Path) -> None:
    """Two of eight do, and take along whoever stands beside them; all eight begin together."""
    poisonous = {"c3", "c6"}
    tries: collections.Counter[str] = collections.Counter()
    deaths, together, there = [asyncio.Event()], asyncio.Event(), set[str]()

    async def script(received: harness.Received, out: harness.Out) -> None:
        custom_id, death = received.identity.custom_id, deaths[-1]
        tries[custom_id] += 1
        if poisonous <= tries.keys():
            together.set()
        await together.wait()
        if custom_id in poisonous:
            there.update(tries if not there else ())
            deaths.append(asyncio.Event())
            death.set()
        try:
            await asyncio.wait_for(death.wait(), 0.2)
            await out.reset()
        except TimeoutError:
            await harness.hello(received, out)

    (tmp_path / "requests.jsonl").write_bytes(world.many(8))
    async with site(tmp_path, script) as here, here.runner():
        assert (await here.command("fbatch", "requests.jsonl")).code == 0
        job = await here.store.ended(1)
    assert (job.counts.ok, job.counts.failed) == (6, 2)
    folder = intake.job_folder(tmp_path, 1)
    failed = [json.loads(text) for text in (folder / results.ERRORS).read_bytes().splitlines()]
    assert {line["custom_id"] for line in failed} == poisonous
    assert {line["error"]["code"] for line in failed} == {"poisonous_line"}
    assert max(tries[name] for name in poisonous) <= 3
    assert poisonous < there
    assert min(tries[name] for name in there) >= 2, "all that were there when the first one killed"


async def test_polls_of_three_clients_and_a_restart_cost_nothing_a3(tmp_path: Path) -> None:
    """Case A3: the bill is the sum of the lines' own rows, however often and by whom it is looked at."""
    (tmp_path / "requests.jsonl").write_bytes(world.many(4))
    async with site(tmp_path, harness.hello) as here:
        async with here.runner():
            assert (await here.command("fbatch", "--wait", "requests.jsonl")).code == 0
            rows = await here.served.rows(4)
        pollers = [
            clients.GatewayApi(here.served.http, clients.Credential(key="ann")) for _ in range(3)
        ]
        async with here.runner():  # a new one, on the same job
            for _ in range(20):
                asked = [
                    asyncio.to_thread(api.call, "GET", "/forebay/v1/jobs/1") for api in pollers
                ]
                assert {said.json["state"] for said in await asyncio.gather(*asked)} == {
                    "COMPLETED"
                }
        assert here.served.closed() == rows
        assert len(here.replica.received) == 4
        assert sum(row.output_tokens for row in rows) == 4 * harness.USED["completion_tokens"]


async def test_impossible_tokens_are_null_in_a_result_line_g11(tmp_path: Path) -> None:
    """Case G11: the null that the replica puts there stays, and the file is strict JSON."""

    async def script(received: harness.Received, out: harness.Out) -> None:
        answer = harness.whole(received)
        top: list[dict[str, Any]] = [
            {"token": "y", "logprob": -0.5, "bytes": [121]},
            {"token": "n", "logprob": None},
        ]
        answer["choices"][0]["logprobs"] = {"content": [{**top[0], "top_logprobs": top}]}
        await out.send(harness.PROMPT, harness.data(json.dumps(answer).encode(), 7))
        await out.finish()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    (tmp_path / "requests.jsonl").write_bytes(world.many(1))
    async with site(tmp_path, script) as here, here.runner():
        assert (await here.command("fbatch", "--wait", "requests.jsonl")).code == 0
    (text,) = (tmp_path / "fbatch-1.jsonl").read_bytes().splitlines()
    (choice,) = json.loads(text, parse_constant=refuse)["response"]["body"]["choices"]
    (entry,) = choice["logprobs"]["content"]
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, None]


async def test_fcancel_frees_the_replica_at_once(tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_bytes(world.many(3))
    async with site(tmp_path, harness.hang) as here, here.runner():
        assert (await here.command("fbatch", "requests.jsonl")).code == 0
        await harness.until(lambda: here.replica.running == 3)
        assert (await here.command("fcancel", "1")).code == 0
        job = await here.store.ended(1)
        await harness.until(lambda: here.replica.running == 0)
        await here.served.idle()
    assert job.state is model.State.CANCELLED
    assert job.counts == model.Counts(total=3, failed=3)
    assert len(world.file_lines(tmp_path, 1, results.ERRORS)) == 3


LEFT = {
    "cancelled": usage.Outcome.CANCELLED,
    "out of time": usage.Outcome.EXPIRED,
    "put back": usage.Outcome.PREEMPTED,
    "runner gone": usage.Outcome.CLIENT_GONE,
}


@pytest.mark.parametrize("how", LEFT)
async def test_what_its_team_gave_up_it_pays_and_what_a_runner_left_it_does_not(
    tmp_path: Path, how: str
) -> None:
    """Three lines have computed 5 prompt tokens and 2 of their answers each when they are left."""
    told: list[str] = []

    async def script(received: harness.Received, out: harness.Out) -> None:
        await out.send(harness.PROMPT, frames.Frame.of(frames.Kind.DATA, b"", (7, 8)))
        told.append(received.identity.custom_id)
        await out.gone()

    (tmp_path / "requests.jsonl").write_bytes(world.many(3))
    path = intake.job_folder(tmp_path, 1) / results.JOURNAL
    async with site(tmp_path, script) as here:
        async with here.runner():
            assert (await here.command("fbatch", "requests.jsonl")).code == 0
            await harness.until(lambda: len(told) == 3 and len(partials(path, 3)) == 3)
            rows = [row for row in here.served.sink.rows if isinstance(row, usage.UsageRow)]
            first = {row.identity.request_id for row in rows}
            if how == "cancelled":
                assert (await here.command("fcancel", "1")).code == 0
            elif how == "out of time":
                here.store.update(1, {"deadline_us": 1})
            elif how == "put back":
                here.store.update(1, {"requeue_us": 1})
                await here.store.until(1, lambda job: job.requeues == 1)
            if how in {"cancelled", "out of time"}:
                assert (await here.store.ended(1)).counts.failed == 3
        await here.served.idle()
        bill = [row for row in here.served.sink.rows if isinstance(row, usage.UsageRow)]
    paid = [row for row in merge.merge(bill) if row.payer is usage.Payer.TEAM]
    seen = [row for row in merge.merge(bill) if row.identity.request_id in first]
    assert [row.outcome for row in seen] == [LEFT[how]] * 3
    if how in {"put back", "runner gone"}:
        assert paid == []
        return
    assert len(paid) == 3
    for row in paid:
        assert (row.uncached_prompt_tokens + row.cached_prompt_tokens, row.output_tokens) == (5, 2)


def partials(path: Path, lines: int) -> Collection[int]:
    """Return the lines of which a journal has a beginning."""
    return journal.recover(path, lines).partials if path.exists() else ()


async def test_a_line_goes_on_from_its_tokens_after_preemption_loss_and_a_new_runner(
    tmp_path: Path,
) -> None:
    """Tokens come with the hop, go into the journal, and every next try begins with all of them."""
    begun: list[resume.Resume | None] = []
    versions: list[str] = []

    def ids(*told: int, ahead: tuple[int, ...] = ()) -> frames.Frame:
        return frames.Frame.of(frames.Kind.DATA, b"", told, ahead=ahead)

    async def script(received: harness.Received, out: harness.Out) -> None:
        value = received.body.get(resume.FIELD)
        begun.append(resume.Resume.from_json(value) if value else None)
        versions.append(received.identity.version)
        match len(begun):
            case 1:  # preempted in the middle
                await out.send(harness.PROMPT, ids(7, 8), ids(9))
                await out.send(ids(ahead=(10,)))
                await out.error(frames.Error("preempted", "gave its seat back", 503, 5, 0, 4))
            case 2:  # the replica dies
                await out.send(frames.Frame.of(frames.Kind.PROMPT), ids(10, 11))
                await out.reset()
            case 3:  # the runner dies
                await out.send(frames.Frame.of(frames.Kind.PROMPT), ids(12))
                told.set()
                await out.gone()
            case _:
                answer = json.dumps(harness.whole(received)).encode()
                await out.send(frames.Frame.of(frames.Kind.PROMPT), harness.data(answer, 13))
                await out.finish(output=7)

    told = asyncio.Event()
    (tmp_path / "requests.jsonl").write_bytes(world.many(1))
    async with site(tmp_path, script) as here:
        async with here.runner():
            assert (await here.command("fbatch", "requests.jsonl")).code == 0
            await told.wait()
            path = intake.job_folder(tmp_path, 1) / results.JOURNAL
            want = (7, 8, 9, 10, 11, 12)

            def kept() -> bool:
                found = journal.recover(path, 1).partials.get(1)
                return found is not None and frames.unpack(found.tokens) == want

            await harness.until(kept)
        async with here.runner():
            job = await here.store.ended(1)
        rows = await here.served.rows(4)
    assert job.counts == model.Counts(total=1, ok=1, preempted=1, retried=1)
    prompt = (1, 2, 3, 4, 5)
    assert begun == [
        None,
        resume.Resume(prompt, (7, 8, 9, 10), 3),
        resume.Resume(prompt, (7, 8, 9, 10, 11), 5),
        resume.Resume(prompt, (7, 8, 9, 10, 11, 12), 6),
    ]
    assert set(versions) == {"1"}
    paid = [row for row in rows if row.payer is usage.Payer.TEAM]
    assert max(row.output_tokens for row in paid) == 7
    (line,) = world.file_lines(tmp_path, 1, results.OUTPUT)
    assert line["response"]["body"]["choices"][0]["message"]["content"] == "Hello world"


async def test_a_beginning_whose_version_is_gone_is_forgotten_and_the_line_judged_anew(
    tmp_path: Path,
) -> None:
    seen: list[bool] = []

    async def script(received: harness.Received, out: harness.Out) -> None:
        seen.append(resume.FIELD in received.body)
        if len(seen) == 1:
            await out.send(harness.PROMPT, frames.Frame.of(frames.Kind.DATA, b"", (7, 8)))
            await out.error(frames.Error("preempted", "gave its seat back", 503))
        elif len(seen) == 2:
            await out.json(400, {"error": {"message": "no such ids", "type": "x", "code": 400}})
        else:
            await harness.hello(received, out)

    (tmp_path / "requests.jsonl").write_bytes(world.many(1))
    async with site(tmp_path, script) as here, here.runner():
        assert (await here.command("fbatch", "--wait", "requests.jsonl")).code == 0
    assert seen == [False, True, False]

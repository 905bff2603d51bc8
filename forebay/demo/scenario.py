"""The demo's story: warm replicas, answers over both doors, batch in the gaps, spikes, the bill."""

import asyncio
import contextlib
import json
import os
import pwd
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
from rich import console, progress

from forebay import api, installation, tree, up
from forebay import config as configs
from forebay.demo import load, outcome, site
from scheduler.contracts import clock, command_line, fleet, slurm
from scheduler.contracts.v1 import forebay_pb2, forebay_pb2_grpc
from scheduler.runtime import client

LINES = 200
LINE_TOKENS = 320
QUIET = 30
SPIKES = 3
SPIKE = 24
SPIKE_TOKENS = 24
_READY_S = 240.0
_POLL_S = 0.1


class DemoError(command_line.CommandError):
    """The demo did not go as it should; the message says where."""


def main() -> int:
    """Run the demo; returns 0 only if every promise of its closing table was kept."""
    try:
        return up.interruptible(_main())
    except tree.StartError as error:
        print(f"forebay demo: error: {error}", file=sys.stderr)  # with the log's end: several lines
        return 1
    except slurm.SlurmError as error:
        raise command_line.CommandError(f"Slurm can't be used: {error}") from error


async def _main() -> int:
    show = Show()
    async with site.prepared(show.line) as where:
        here = installation.Installation.open(configs.load(where.config_file))
        os.environ.update(where.env)
        async with up.running(here, where.config_file, show.line) as addresses:
            result = await Demo(where, here, addresses, show).run()
    Path("build/demo.json").write_text(json.dumps(result.to_json(), indent=2) + "\n")
    result.print(show.console)
    show.line("the same as JSON: build/demo.json; logs: build/demo/")
    faults = result.faults()
    for fault in faults:
        print(f"forebay demo: error: {fault}", file=sys.stderr)
    return 1 if faults else 0


class Show:
    """Status for people: one line each, and a bar on a terminal."""

    def __init__(self) -> None:
        self.console = console.Console(highlight=False)
        self._start = time.monotonic()

    def line(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        stamp = f"[{time.monotonic() - self._start:6.1f} s]"
        self.console.print(f"{stamp} {text}", markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def bar(self, text: str, total: int) -> "Iterator[Any]":
        """Show a bar on a terminal; yields a function that takes what is done."""
        if not command_line.colour(sys.stdout):
            self.line(text)
            yield lambda done: None
            return
        with progress.Progress(console=self.console, transient=True) as bars:
            task = bars.add_task(text, total=total)
            yield lambda done: bars.update(task, completed=done)


class Demo:
    """One run of the story on a running installation."""

    def __init__(
        self,
        where: site.Site,
        here: installation.Installation,
        addresses: Mapping[str, str],
        show: Show,
    ) -> None:
        self._where = where
        self._state = here.state
        self._http, self._grpc = addresses["http"], addresses["grpc"]
        self._show = show
        self._admin = api.GatewayApi(
            self._http, api.Credential(here.secret(installation.ADMIN_KEY))
        )
        self._fleet = client.FleetClient(here.state, "demo", clock.SystemClock())
        self._env = {**os.environ, **where.env, "FOREBAY_URL": self._http}
        self._bin = Path(sys.executable).parent

    async def run(self) -> outcome.Outcome:
        """Tell the story; returns what was measured."""
        self._fleet.start()
        try:
            return await self._story()
        finally:
            await self._fleet.close()

    async def _story(self) -> outcome.Outcome:
        result = outcome.Outcome(slurm=self._where.slurm, slurm_kind=self._slurm_kind())
        await self._warm(site.REPLICAS)
        users_key = await self._key(site.USERS_TEAM, "ada", "interactive,standard")
        users = load.Users(self._http, users_key, site.MODEL)
        result.engine = await self._engine()
        await self._two_doors(users, users_key)
        quiet = await users.burst(QUIET, SPIKE_TOKENS, concurrency=1)
        result.ttft_ms["before"] = load.ttft(quiet)
        self._show.line(f"quiet: TTFT p50 {result.ttft_ms['before']['p50']} ms")
        job = await self._submit()
        during = await self._spikes(users, result, job)
        result.ttft_ms["during"] = load.ttft(during)
        result.sent = len(during)
        result.answered = sum(answer.complete for answer in during)
        result.complaints = sorted({answer.error for answer in during if answer.error})
        await self._finish(job)
        after = await users.burst(QUIET, SPIKE_TOKENS, concurrency=1)
        result.ttft_ms["after"] = load.ttft(after)
        result.read_lines(self._where.folder / "answers.jsonl", LINES)
        result.preempted = await self._preempted(job)
        await self._give_back(result)
        result.reports = await self._reports()
        return result

    def _slurm_kind(self) -> str:
        return "devcluster" if self._where.munge else "embedded"

    async def _warm(self, count: int) -> None:
        """Wait until ``count`` replicas serve."""
        with self._show.bar(
            f"broker: asks Slurm for leases and warms {count} replicas of vLLM", count
        ) as bar:
            deadline = time.monotonic() + _READY_S
            while (serving := len(self._serving())) < count:
                bar(serving)
                if time.monotonic() > deadline:
                    raise DemoError(
                        f"{serving} of {count} replicas serve after {_READY_S:g} s; "
                        f"see {self._state}/logs and {self._state}/leases"
                    )
                await asyncio.sleep(_POLL_S)
        for replica in self._serving():
            phases = ", ".join(f"{name} {took:.1f} s" for name, took in replica.phases_s.items())
            self._show.line(
                f"replica {replica.replica_id} on {replica.node}, Slurm job "
                f"{replica.slurm_job_id}, {replica.spec.gpus} GPUs ({phases})"
            )

    def _serving(self) -> list[fleet.Replica]:
        view = self._fleet.view()
        replicas = () if view is None else view.replicas
        return [each for each in replicas if each.state is fleet.ReplicaState.SERVING]

    async def _key(self, team: str, user: str, tiers: str) -> str:
        answer = await self._call(
            "POST", "/admin/keys", {"team": team, "user": user, "tiers": tiers.split(",")}
        )
        return str(answer["token"])

    async def _call(self, method: str, path: str, body: Any = None, **params: str) -> Any:
        answer = await asyncio.to_thread(
            self._admin.call, method, path, json=body, params=params or None
        )
        return answer.json

    async def _engine(self) -> dict[str, str]:
        python = site.engine_python()
        code = "import importlib.metadata as m; print(m.version('vllm'))"
        done = await asyncio.to_thread(
            subprocess.run, [str(python), "-P", "-c", code], capture_output=True, text=True
        )
        return {"name": str(self._serving()[0].spec.engine), "version": done.stdout.strip()}

    async def _two_doors(self, users: load.Users, key: str) -> None:
        (answer,) = await users.burst(1, SPIKE_TOKENS, concurrency=1)
        if not answer.complete:
            raise DemoError(f"no whole answer over HTTP: {answer.error}")
        self._show.line("two answers; the tiny Llama has random weights, so their words are noise")
        self._show.line(f"HTTP stream: {answer.text!r}")
        asked = forebay_pb2.GenerateRequest(
            model=site.MODEL,
            max_tokens=SPIKE_TOKENS,
            messages=[forebay_pb2.Message(role="user", content="Why is the sky dark at night?")],
        )
        options = (("grpc.enable_http_proxy", 0),)
        async with grpc.aio.insecure_channel(self._grpc, options=options) as channel:
            stub = forebay_pb2_grpc.InferenceStub(channel)
            call = stub.Generate(asked, metadata=(("authorization", f"Bearer {key}"),))
            text = "".join([chunk.text async for chunk in call])
        self._show.line(f"gRPC stream: {text!r}")

    async def _submit(self) -> int:
        """Submit the batch file with `fbatch`, as a user on a login node would."""
        requests_file = self._where.folder / "requests.jsonl"
        with requests_file.open("w") as file:
            for number in range(LINES):
                text = f"Line {number}: tell a story about a river and the number {number}."
                body = {
                    "model": site.MODEL,
                    "messages": [{"role": "user", "content": text}],
                    "max_tokens": LINE_TOKENS,
                    "temperature": 0,
                    "ignore_eos": True,
                }
                line = {
                    "custom_id": f"story-{number:03}",
                    "method": "POST",
                    "url": "/v1/chat/completions",
                    "body": body,
                }
                file.write(json.dumps(line) + "\n")
        if not self._where.munge:
            # Files are written for a Unix user alone, and without root for the one who runs this.
            user = pwd.getpwuid(os.geteuid()).pw_name
            self._env["FOREBAY_API_KEY"] = await self._key(site.BATCH_TEAM, user, "batch")
        said = await self._command(
            "fbatch",
            "--parsable",
            f"--account={site.BATCH_TEAM}",
            "--job-name=stories",
            f"--output={self._where.folder / 'answers.jsonl'}",
            f"--error={self._where.folder / 'errors.jsonl'}",
            str(requests_file),
        )
        job = int(said.strip().split(";")[0])
        who = "the Unix user by MUNGE" if self._where.munge else "an API key"
        self._show.line(f"fbatch: job {job}, {LINES} lines of {LINE_TOKENS} tokens ({who})")
        return job

    async def _command(self, name: str, *options: str) -> str:
        process = await asyncio.create_subprocess_exec(
            str(self._bin / name),
            *options,
            env=self._env,
            cwd=self._where.folder,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        if process.returncode != 0:
            raise DemoError(f"{name} ended with {process.returncode}: {err.decode().strip()}")
        return out.decode()

    async def _job(self, job: int) -> dict[str, Any]:
        found: dict[str, Any] = await self._call("GET", f"/forebay/v1/jobs/{job}")
        return found

    async def _spikes(
        self, users: load.Users, result: outcome.Outcome, job: int
    ) -> list[load.Answer]:
        answers: list[load.Answer] = []
        for number in range(SPIKES):
            seats = await self._batch_is_back(job)
            wave = await users.burst(SPIKE, SPIKE_TOKENS, concurrency=SPIKE)
            answers += wave
            took = load.seated_s(wave)
            result.reclaim_s.append(took)
            figures = load.ttft(wave)
            self._show.line(
                f"spike {number + 1}: {SPIKE} requests at once while batch held {seats} seats: "
                f"capacity back in {took:.2f} s, TTFT p50 {figures['p50']} ms, "
                f"p95 {figures['p95']} ms"
            )
        return answers

    async def _batch_is_back(self, job: int) -> int:
        """Wait until batch holds nearly every seat that it may; return how many it holds."""
        may = site.REPLICAS * (site.SEATS - 1)
        deadline = time.monotonic() + 60
        while True:
            stats = [replica.stats for replica in self._serving() if replica.stats is not None]
            held = sum(each.batch for each in stats)
            if held >= 0.8 * may:
                self._show.line(f"batch holds {held} of {site.REPLICAS * site.SEATS} seats")
                return held
            state = await self._job(job)
            if time.monotonic() > deadline or state["ended_us"]:
                raise DemoError(f"batch holds {held} seats, {may} were to be filled: {state}")
            await asyncio.sleep(_POLL_S)

    async def _finish(self, job: int) -> None:
        with self._show.bar(f"job {job}: the rest of {LINES} lines", LINES) as bar:
            deadline = time.monotonic() + 240
            while not (state := await self._job(job))["ended_us"]:
                bar(state["lines"]["done"])
                if time.monotonic() > deadline:
                    raise DemoError(f"job {job} has not ended: {state}")
                await asyncio.sleep(_POLL_S * 3)
        counts = ", ".join(f"{count} {name}" for name, count in state["lines"].items())
        self._show.line(f"job {job}: {state['state']} ({counts})")

    async def _preempted(self, job: int) -> int:
        answer = await self._call(
            "GET", "/forebay/v1/usage/requests", outcome="preempted", attempts="1", job=str(job)
        )
        return len(answer["rows"])

    async def _give_back(self, result: outcome.Outcome) -> None:
        """Scale to nothing, so that every lease ends and both books can be compared."""
        await self._call("POST", f"/admin/models/{site.MODEL}/scale", {"replicas": 0})
        self._show.line("fctl scale chat 0: the leases go back to Slurm")
        deadline = time.monotonic() + 60
        while True:
            answer = await self._call("GET", "/forebay/v1/usage/reconcile")
            leases = answer["rows"]
            if len(leases) >= site.REPLICAS and all(
                row["note"] != "still running" for row in leases
            ):
                break
            if time.monotonic() > deadline:
                raise DemoError(f"the leases have not ended in both books: {leases}")
            await asyncio.sleep(_POLL_S * 5)
        result.leases = leases

    async def _reports(self) -> list[tuple[str, str]]:
        admin = {"FOREBAY_API_KEY": self._admin_key()}
        self._env |= admin
        wanted = (
            ("facct", "-X", "-S", "today", "-A", site.BATCH_TEAM),
            ("facct", "-X", "-S", "today", "-A", site.USERS_TEAM),
            ("freport", "team", "-S", "today", "-T", "gpu,tokens"),
            ("freport", "reconcile", "-S", "today"),
        )
        return [(" ".join(words), await self._command(*words)) for words in wanted]

    def _admin_key(self) -> str:
        return (self._state / "secrets" / installation.ADMIN_KEY).read_text().strip()

"""What every step launcher must do: local processes, and srun in a real allocation."""

import asyncio
import dataclasses
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from scheduler.contracts import ports, slurm
from slurm_plugins import cli, steps
from tests.contract import slurm_subject

LOOP = "echo gpus=$CUDA_VISIBLE_DEVICES foo=$FOO READY; while :; do sleep 0.05; done"


@dataclasses.dataclass
class Site:
    """A launcher in a lease of four GPUs."""

    launcher: ports.StepLauncher
    folder: Path

    async def start(
        self, script: str, name: str = "log", gpus: int = 2, node: int | None = None
    ) -> ports.Step:
        return await self.launcher.start(
            ["/bin/sh", "-c", script],
            gpus=gpus,
            cpus=1,
            env={"FOO": "b 'a' $r"},
            log=self.folder / name,
            node=node,
        )

    async def text(self, ends: str, name: str = "log") -> str:
        file = self.folder / name
        await eventually(lambda: file.exists() and ends in file.read_text())
        return file.read_text()


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait for a real process, which tells nobody."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - another process changes it
            await asyncio.sleep(0.02)


@pytest.fixture(params=["local", pytest.param("srun", marks=pytest.mark.slurm)])
async def site(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Site]:
    if request.param == "local":
        yield Site(steps.LocalLauncher("0,1,GPU-aa,MIG-bb"), tmp_path)
        return
    where = request.getfixturevalue("slurm_site")
    port = cli.CliClient(where.slurm_conf)
    tmp_path.chmod(0o755)
    subject = slurm_subject.Subject(port, tmp_path, True, True, True, "physics")
    spec = dataclasses.replace(subject.spec("sleep 300", gpus=4), cpus_per_node=4)
    job_id = await asyncio.to_thread(lambda: port.submit(spec).job_id)
    try:
        await asyncio.to_thread(subject.until, job_id, slurm_subject.running)
        monkeypatch.setenv("SLURM_CONF", str(where.slurm_conf))
        yield Site(steps.SrunLauncher(job_id, start_timeout_s=6.0), tmp_path)
    finally:
        port.cancel(job_id)
        await asyncio.to_thread(subject.until, job_id, slurm_subject.final)


async def test_steps_have_gpus_of_their_own_and_give_them_back(site: Site) -> None:
    first = await site.start(LOOP, "first")
    second = await site.start(LOOP, "second")
    gpus = [
        (await site.text("READY", name)).split("gpus=")[1].split()[0]
        for name in ("first", "second")
    ]
    held = [set(text.split(",")) for text in gpus]
    assert [len(names) for names in held] == [2, 2]
    assert not held[0] & held[1]
    assert "foo=b 'a' $r" in await site.text("READY", "first")
    with pytest.raises(slurm.SlurmUnavailable):
        await site.start("true", "third")
    await first.kill()
    assert await first.wait() != 0
    again = await site.start("echo gpus=$CUDA_VISIBLE_DEVICES; exit 7", "fourth")
    assert await again.wait() == 7
    assert (await site.text("gpus=", "fourth")).split("gpus=")[1].split()[0] == gpus[0]
    await second.kill()
    await second.wait()


@pytest.mark.parametrize("kind", ["local", pytest.param("srun", marks=pytest.mark.slurm)])
async def test_a_step_goes_to_the_node_that_is_named(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "local":
        told = '{"n1": "0,1", "n2": "2,3"}'
        local = Site(steps.LocalLauncher(nodes=told), tmp_path)
        await _over_two_nodes(local, ["n1", "n2"])
        with pytest.raises(slurm.SlurmRefused, match="none is number 2"):
            await local.start("true", "none", gpus=0, node=2)
        return
    where = request.getfixturevalue("slurm_site")
    port = cli.CliClient(where.slurm_conf)
    tmp_path.chmod(0o755)
    subject = slurm_subject.Subject(port, tmp_path, True, True, True, "physics")
    spec = dataclasses.replace(subject.spec("sleep 300"), nodes=2, cpus_per_node=2)
    job_id = await asyncio.to_thread(lambda: port.submit(spec).job_id)
    try:
        await asyncio.to_thread(subject.until, job_id, slurm_subject.running)
        (job,) = (one for one in port.jobs() if one.job_id == job_id)
        monkeypatch.setenv("SLURM_CONF", str(where.slurm_conf))
        site = Site(steps.SrunLauncher(job_id, start_timeout_s=6.0), tmp_path)
        await _over_two_nodes(site, list(job.nodes))
    finally:
        port.cancel(job_id)
        await asyncio.to_thread(subject.until, job_id, slurm_subject.final)


async def _over_two_nodes(site: Site, nodes: list[str]) -> None:
    told = "echo node=$SLURMD_NODENAME gpus=$CUDA_VISIBLE_DEVICES READY; sleep 60"
    begun = [await site.start(told, f"on-{place}", node=place) for place in (1, 0)]
    said = [(await site.text("READY", f"on-{place}")).split("node=")[1].split() for place in (0, 1)]
    assert [words[0] for words in said] == nodes
    assert [words[1].count(",") for words in said] == [1, 1], "each has the GPUs of its own node"
    with pytest.raises(slurm.SlurmUnavailable):
        await site.start("true", "third", gpus=1, node=0)
    for step in begun:
        await step.kill()
        await step.wait()


async def test_terminate_lets_the_task_say_goodbye(site: Site) -> None:
    step = await site.start("trap 'echo BYE; exit 5' TERM; " + LOOP)
    await site.text("READY")
    await step.terminate()
    assert await step.wait() == 5
    assert "BYE" in await site.text("BYE")
    await step.terminate()
    await step.kill()


async def test_kill_ends_who_ignores_sigterm_and_its_children(site: Site) -> None:
    step = await site.start("trap '' TERM; sleep 300 & echo child=$! READY; " + LOOP)
    child = int((await site.text("READY")).split("child=")[1].split()[0])
    await step.terminate()
    assert Path(f"/proc/{child}").exists()
    await step.kill()
    assert await step.wait() != 0
    await eventually(lambda: not _alive(child))


async def test_a_step_that_can_not_be_started_is_an_error(site: Site) -> None:
    with pytest.raises(slurm.SlurmError):
        await site.start("true", gpus=5)
    step = await site.start("exit 3", gpus=0)
    assert await step.wait() == 3
    assert step.pid > 0
    assert list(site.folder.glob("*.step*")) == []


def _alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


async def test_a_local_step_dies_with_its_agent(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = (
        "import asyncio, os, pathlib, sys\n"
        "from slurm_plugins import steps\n"
        "async def main():\n"
        "    log = pathlib.Path(sys.argv[1])\n"
        "    argv = ['/bin/sh', '-c', 'echo $$ READY; exec sleep 300']\n"
        "    await steps.LocalLauncher('0').start(argv, gpus=1, cpus=1, env={}, log=log)\n"
        "    while 'READY' not in log.read_text():\n"
        "        await asyncio.sleep(0.02)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    root = Path(__file__).parents[2]
    agent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(log), env={**os.environ, "PYTHONPATH": str(root)}
    )  # fmt: skip
    assert await agent.wait() == -9
    pid = int(log.read_text().split()[0])
    await eventually(lambda: not _alive(pid))

"""Slurm jobs that depend on batch jobs, on a real cluster: the companion ends as its batch job does."""

import asyncio
import functools
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from batch_jobs import commands
from forebay import api as clients
from forebay import batch_companion
from slurm_plugins import devcluster
from tests.integration.test_batch_gateway import Site, site
from tests.unit.batch_jobs import world
from tests.unit.gateway import harness

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]
BIN = Path(sys.executable).parent


def slurm(env: dict[str, str], *argv: str) -> str:
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{argv}: {done.stderr}"
    return done.stdout.strip()


async def submit(here: Site, env: dict[str, str], data: bytes, *options: str) -> tuple[int, str]:
    """Submit a batch job with its companion; returns both ids."""
    (here.state_dir / "requests.jsonl").write_bytes(data)
    out, err = io.StringIO(), io.StringIO()
    code = await asyncio.to_thread(
        commands.fbatch,
        ["--parsable", "--companion", *options, "requests.jsonl"],
        api=clients.GatewayApi(here.served.http, clients.Credential(key="ann")),
        out=out,
        err=err,
        env=env,
        cwd=here.state_dir,
        stdin=io.StringIO(),
        companion=functools.partial(batch_companion.submit, env=env),
    )
    assert code == 0, err.getvalue()
    ours, _, theirs = out.getvalue().strip().partition(";slurm:")
    return int(ours), theirs


async def test_a_slurm_job_starts_when_a_batch_job_has_succeeded_or_failed(
    slurm_site: devcluster.Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One succeeds, one has a bad line, one is held: its companion is told of its time limit's coming.

    And one is submitted, and waited for, from inside a Slurm job.
    """
    monkeypatch.setattr(sys, "argv", [str(BIN / "fbatch")])
    monkeypatch.chdir(tmp_path)  # where the companions write
    async with site(tmp_path, harness.hello) as here, here.runner():
        env = {
            **os.environ,
            **slurm_site.env(),
            "FOREBAY_URL": here.served.http,
            "FOREBAY_API_KEY": "ann",
            "SBATCH_ACCOUNT": "physics",
            "SBATCH_GRES": "gpu:4",  # a companion takes none all the same
        }

        async def run(*argv: str) -> str:
            return await asyncio.to_thread(slurm, env, *argv)

        async def told(words: str, *argv: str) -> None:
            async with asyncio.timeout(120):
                while words not in await run(*argv):  # noqa: ASYNC110 - Slurm has no event
                    await asyncio.sleep(0.2)

        _, good = await submit(here, env, world.many(2))
        _, bad = await submit(here, env, world.many(2) + b"not json\n")
        held, waits = await submit(here, env, world.many(1), "--hold")
        nexts = [
            await run(
                "sbatch", "--parsable", "--gres=none", f"--dependency={kind}:{job}",
                f"--output={tmp_path}/next-%j", "--wrap=echo started",
            )
            for kind, job in (("afterok", good), ("afternotok", bad))
        ]  # fmt: skip
        (tmp_path / "inside.jsonl").write_bytes(world.many(3))
        inside = await run(
            "sbatch", "--parsable", "--gres=none", f"--output={tmp_path}/inside-%j",
            f"--wrap={BIN}/fbatch --wait inside.jsonl",
        )  # fmt: skip
        try:
            for job in nexts:
                await told("COMPLETED", "sacct", "-X", "-n", "-P", "-o", "state", "-j", job)
                assert (tmp_path / f"next-{job}").read_text() == "started\n"
            # slurmdbd hears of one job's end in a later message than of another's start at times.
            await told("COMPLETED|", "sacct", "-X", "-n", "-P", "-o", "state,alloctres", "-j", good)
            of_good = await run("sacct", "-X", "-n", "-P", "-o", "alloctres", "-j", good)
            assert of_good
            assert "gpu" not in of_good
            await told("FAILED", "sacct", "-X", "-n", "-P", "-o", "state", "-j", bad)
            await told("COMPLETED", "sacct", "-X", "-n", "-P", "-o", "state", "-j", inside)
            said = (tmp_path / f"inside-{inside}").read_text()
            assert "COMPLETED: 3 of 3 lines answered" in said
            (ours,) = re.findall(r"Submitted batch job (\d+)", said)
            assert len((tmp_path / f"fbatch-{ours}.jsonl").read_text().splitlines()) == 3
            log = tmp_path / f"fbatch-{held}-slurm-{waits}.out"
            await harness.until(lambda: log.exists() and "PENDING" in log.read_text(), 120)
            await run("scancel", "--batch", "--signal=USR1", waits)
            await told("Restarts=1", "scontrol", "show", "job", waits)
            # Its epilog is waited for first.
            await told("JobState=PENDING", "scontrol", "show", "job", waits)
        finally:
            await run("scancel", waits, inside, *nexts)

"""`forebay up`: a whole installation on this machine, until it is told to end."""

import asyncio
import contextlib
import fcntl
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

from forebay import installation, tree
from scheduler.contracts import ids, slurm

_LEAVE_S = 60.0
_POLL_S = 0.25


@contextlib.asynccontextmanager
async def running(
    here: installation.Installation, config_file: Path, say: Callable[[str], None]
) -> AsyncIterator[dict[str, str]]:
    """Run broker, gateway and batch runner; yields the gateway's addresses.

    At the end everything that was started is gone, leases included, however the body ended.

    Raises:
        tree.StartError: a part did not come up, or another such tree has this state folder.
        slurm.SlurmError: Slurm can't be reached.
    """
    with alone(here.state):
        port = await asyncio.to_thread(here.connect_slurm)
        env = {**os.environ, "FOREBAY_CONFIG": str(config_file)}
        options = ("--config", str(config_file))
        parts = tree.Tree(options, here.state / "logs", env, say, here.stable_s)
        try:
            await parts.start("broker")
            addresses = await parts.start("gateway")
            parts.settle(kept(addresses))
            await parts.start("batchd")
            yield addresses
        finally:
            await _leave(parts, port, port.cluster, say)


def kept(addresses: Mapping[str, str]) -> dict[str, str]:
    """Return what keeps a gateway at its addresses: port 0 means any port once, not a new one each time."""
    ports = {name: where.rsplit(":", 1)[1] for name, where in addresses.items()}
    return {
        "FOREBAY_GATEWAY_HTTP_PORT": ports["http"],
        "FOREBAY_GATEWAY_GRPC_PORT": ports["grpc"],
        "FOREBAY_URL": addresses["http"],
    }


@contextlib.contextmanager
def alone(state: Path) -> Iterator[None]:
    """Hold a state folder: of two trees on it, the first to end would take the other's leases away.

    Raises:
        tree.StartError: another process holds it.
    """
    with (state / "run" / "up.lock").open("a") as file:
        try:
            # The kernel gives it back with the process, however that ends.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise tree.StartError(
                f"another `forebay up` runs on {state}: end it first, or set another state_dir"
            ) from None
        yield


async def _leave(
    parts: tree.Tree, port: slurm.SlurmPort, cluster: str, say: Callable[[str], None]
) -> None:
    say("ending what was started here, which takes some seconds")
    await parts.stop()
    left = await asyncio.to_thread(release, port, cluster)
    deadline = asyncio.get_running_loop().time() + _LEAVE_S
    while left and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(_POLL_S)
        states = await asyncio.to_thread(port.states, left)
        left = [job_id for job_id in left if not states[job_id].final]
    if left:
        say(f"Slurm has not ended {', '.join(left)} yet; `scancel` ends them for good")
    shutdown = getattr(port, "shutdown", None)  # the embedded Slurm: its jobs are our processes
    if shutdown is not None:
        await asyncio.to_thread(shutdown)


def release(port: slurm.SlurmPort, cluster: str) -> list[ids.SlurmJobId]:
    """Cancel every lease of ``cluster``, known by its stamp, and return the jobs' ids."""
    leases = [
        job.job_id
        for job in port.jobs()
        if job.stamp is not None
        and job.stamp.cluster == cluster
        and job.user in port.users
        and not job.state.final
    ]
    for job_id in leases:
        port.cancel(job_id)
    return leases


def interruptible(body: Coroutine[Any, Any, int]) -> int:
    """Run ``body`` to its end; SIGINT or SIGTERM cancel it once, and its clean-up is then left alone.

    Returns:
        The body's exit code, or 128 + the signal's number.
    """

    async def watched() -> int:
        task = asyncio.ensure_future(body)
        heard: list[int] = []

        def hear(number: int) -> None:
            if not heard:
                task.cancel()
            heard.append(number)

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, hear, number)
        try:
            return await task
        except asyncio.CancelledError:
            return 128 + heard[0] if heard else 1

    return asyncio.run(watched())


def examples(addresses: dict[str, str], state: Path, config_file: Path, model: str) -> str:
    """Return examples to paste: environment, curl, the `openai` package, gRPC, the commands."""
    http, grpc = addresses["http"], addresses["grpc"]
    programs = Path(sys.executable).parent
    key = state / "secrets" / installation.ADMIN_KEY
    question = "Why does the tide come in twice a day?"
    return f"""\
export PATH={programs}:$PATH FOREBAY_URL={http} FOREBAY_API_KEY_FILE={key}
export FOREBAY_CONFIG={config_file.absolute()}

curl -N {http}/v1/chat/completions -H "Authorization: Bearer $(cat {key})" \\
  -H 'Content-Type: application/json' \\
  -d '{{"model": "{model}", "stream": true, "max_tokens": 32,
       "messages": [{{"role": "user", "content": "{question}"}}]}}'

python - <<'PYTHON'
import openai
client = openai.OpenAI(base_url="{http}/v1", api_key=open("{key}").read().strip())
for chunk in client.chat.completions.create(model="{model}", stream=True, max_tokens=32,
                                            messages=[{{"role": "user", "content": "{question}"}}]):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
PYTHON

python - <<'PYTHON'
import grpc
from scheduler.contracts.v1 import forebay_pb2, forebay_pb2_grpc
stub = forebay_pb2_grpc.InferenceStub(grpc.insecure_channel("{grpc}"))
asked = forebay_pb2.GenerateRequest(model="{model}", max_tokens=32, messages=[
    forebay_pb2.Message(role="user", content="{question}")])
key = open("{key}").read().strip()
for chunk in stub.Generate(asked, metadata=[("authorization", "Bearer " + key)]):
    print(chunk.text, end="", flush=True)
print()
PYTHON

cat >requests.jsonl <<'JSONL'
{{"custom_id": "tide", "method": "POST", "url": "/v1/chat/completions", "body": {{"model": "{model}", \
"max_tokens": 32, "messages": [{{"role": "user", "content": "{question}"}}]}}}}
JSONL
fbatch --wait requests.jsonl; fqueue; finfo; fctl show replicas; facct; freport team -S today
"""

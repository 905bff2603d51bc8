"""The prefix bench's arms: their replicas, the routers before them, and Forebay's routing without its hop."""

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from gateway import fingerprints
from scheduler.contracts import ids, requests
from scheduler.core import load, router, routing
from tests.bench import gateway_subjects, prefix_forebay, prefix_replay
from tests.bench import prefix_workload as workload
from tests.contract import engine_vllm

REPLICAS, SEATS = 3, 16
DIRECT = "forebay_direct_"
POLICIES = {
    "random": "random",
    "round_robin": "round_robin",
    "vllm_router": "cache_aware",
}  # of vllm-router
ALONE = ("random_direct", "round_robin_direct")  # the load generator's own choice, and no router
SLACKS = (0, 512, 1024, 2048)
ARMS = (
    "random",
    "round_robin",
    "vllm_router",
    "forebay",
    "forebay_events",
    *ALONE,
    *[f"{DIRECT}{slack}" for slack in SLACKS],
)


@dataclasses.dataclass(frozen=True)
class Arm:
    """Where an arm's requests go: one address, or several to choose from.

    Attributes:
        addresses: of its router, or of its replicas where the load generator chooses itself.
        token: what it asks for.
        pids: of its replicas.
        chooser: routes to ``addresses`` in the load generator's own process.
    """

    name: str
    addresses: Sequence[str]
    token: str
    pids: Sequence[int] = ()
    chooser: "Chooser | None" = None


class Chooser:
    """Forebay's routing in the load generator's own process: what its choices are worth without the hop."""

    def __init__(self, addresses: Sequence[str], blocks: int, slack: int) -> None:
        self._addresses = {ids.ReplicaId(f"r-{n:012x}"): each for n, each in enumerate(addresses)}
        self._router = router.Router(
            load.Loads(), routing.Policy(slack_tokens=slack), workload.CHUNK_BYTES
        )
        self._router.observe(
            [prefix_replay.standing(each, blocks) for each in self._addresses], 0.0
        )
        self._draws = random.Random(5)

    def place(self, row: workload.Request) -> tuple[str, router.Placed]:
        """Return the address to send a request to; whoever takes it closes its guard."""
        ask = routing.Ask(
            "chat", "1", requests.Tier.INTERACTIVE, prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens,
            prefix=fingerprints.chain(0, row.text.encode(), workload.CHUNK_BYTES),
        )  # fmt: skip
        placed = self._router.place(ask, router.Moment(0.1), self._draws.random())
        if placed is None:
            raise gateway_subjects.BenchError("forebay_direct: no seat; lower --at-once")
        return self._addresses[placed.replica.replica_id], placed

    def returned(self, placed: router.Placed, prompt_tokens: int, cached_tokens: int) -> None:
        """Learn from an answer."""
        self._router.returned(placed, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)


def replicas(
    server: engine_vllm.ForkServer, folder: Path, blocks: int
) -> list[engine_vllm.Replica]:
    """Start an arm's replicas."""
    arguments = {
        "enforce-eager": True,
        "dtype": "float32",
        "block-size": workload.BLOCK_TOKENS,
        "kv-cache-memory-bytes": blocks * workload.BLOCK_BYTES,
    }
    spec = engine_vllm.spec(folder, seats=SEATS, reserved_seats=0, engine_args=arguments)
    names = [engine_vllm.begin(server, spec) for _ in range(REPLICAS)]
    return [engine_vllm.listening(server, name) for name in names]


@contextlib.asynccontextmanager
async def started(
    name: str, engines: Sequence[engine_vllm.Replica], folder: Path, env_dir: Path, blocks: int
) -> AsyncIterator[Arm]:
    """Run what an arm needs before its replicas.

    Args:
        name: of `ARMS`.
        engines: its replicas.
        folder: for logs and state.
        env_dir: vllm-router's environment.
        blocks: KV blocks of each replica.
    """
    addresses, pids = [engine.address for engine in engines], [engine.pid for engine in engines]
    if name.startswith(DIRECT):
        slack = int(name.removeprefix(DIRECT))
        yield Arm(name, addresses, engine_vllm.SECRET, pids, Chooser(addresses, blocks, slack))
    elif name.startswith("forebay"):
        home = folder / name
        home.mkdir()
        argv = gateway_subjects.python(
            "prefix_forebay", str(home), str(folder / "secret"), str(SEATS), *addresses
        )
        env = {}
        if name == "forebay_events":
            env[prefix_forebay.ENDPOINTS] = ",".join(
                f"ipc://{folder}/events/{engine.pid}" for engine in engines
            )
        async with gateway_subjects.process(argv, folder / f"{name}.log", env) as process:
            said: Any = await gateway_subjects.told(process, folder / f"{name}.log")
            yield Arm(name, [said["http"].removeprefix("http://")], said["token"], pids)
    elif name in POLICIES:
        port = gateway_subjects.free_port()
        argv = [
            str(env_dir / "bin" / "vllm-router"), "--host", "127.0.0.1", "--port", str(port),
            "--policy", POLICIES[name], "--log-level", "warning", "--api-key", engine_vllm.SECRET,
            "--prometheus-port", str(gateway_subjects.free_port()),
            "--worker-urls", *[f"http://{address}" for address in addresses],
        ]  # fmt: skip
        async with gateway_subjects.process(argv, folder / f"{name}.log"):
            await _answers(f"127.0.0.1:{port}")
            yield Arm(name, [f"127.0.0.1:{port}"], engine_vllm.SECRET, pids)
    else:
        yield Arm(name, addresses, engine_vllm.SECRET, pids)


async def _answers(address: str) -> None:
    """Wait until a router takes connections."""
    host, _, port = address.rpartition(":")
    for _ in range(600):
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.close()
            return
        await asyncio.sleep(0.1)
    raise gateway_subjects.BenchError(f"{address} takes no connection")

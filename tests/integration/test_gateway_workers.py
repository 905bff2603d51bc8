"""Four workers and the process that admits for them, as `forebay up` runs them, on the simulated engine.

Fairness and quotas hold across workers; whoever is killed gives back what it held, and running streams of
the others go on.
"""

import concurrent.futures
import time
from collections.abc import Iterator

import grpc
import pytest

from scheduler.contracts.v1 import forebay_pb2, forebay_pb2_grpc
from tests.integration.whole import clients, processes, running, waiting

pytestmark = pytest.mark.timeout(300)
WORKERS = 4
SEATS = running.REPLICAS * running.SEATS


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[running.Running]:
    """An installation on the embedded Slurm whose gateway has four workers."""
    slurm = {"client": "embedded", "embedded_kill_wait_s": 5.0}
    folder = tmp_path_factory.mktemp("crowd")
    made = running.Running(folder, slurm, gateway={"workers": WORKERS, "drain_s": 5.0})
    try:
        made.up()
        yield made
    finally:
        made.close()


def workers(crowd: running.Running) -> list[processes.Process]:
    return [each for each in crowd.processes() if each.part == "gateway-worker"]


def metric(crowd: running.Running, name: str, **labels: str) -> float:
    """Return the sum of a metric's samples, as any worker tells it."""
    headers = {"Authorization": f"Bearer {crowd.admin_key}"}
    total = 0.0
    for line in crowd.client.get(f"{crowd.http}/metrics", headers=headers).text.splitlines():
        head, _, value = line.rpartition(" ")
        if head.partition("{")[0] == name and all(
            f'{key}="{want}"' in head for key, want in labels.items()
        ):
            total += float(value)
    return total


def used(crowd: running.Running) -> float:
    """Return the seats in use, as the process that admits counts them."""
    return metric(crowd, "forebay_seats", state="used")


def test_workers_share_ports_and_numbers_add_up(crowd: running.Running) -> None:
    assert len(workers(crowd)) == WORKERS
    before = metric(crowd, "forebay_requests_total", result="ok")
    for _ in range(20):
        assert clients.post(crowd, crowd.key, clients.chat(2)).status_code == 200
    told = {metric(crowd, "forebay_requests_total", result="ok") for _ in range(8)}
    assert told == {before + 20}  # whichever worker is asked
    crowd.settled()


@pytest.mark.long
def test_a_flood_through_every_worker_does_not_hold_up_another_team(crowd: running.Running) -> None:
    other = _key(crowd, "chem")
    flood = [clients.Stream(crowd, crowd.key, 100) for _ in range(4 * SEATS)]
    waiting.eventually(lambda: metric(crowd, "forebay_queue_depth") >= SEATS, "a queue")
    began = time.monotonic()
    assert clients.post(crowd, other, clients.chat(2)).status_code == 200
    ours = time.monotonic() - began
    ended = [stream.ended().whole for stream in flood]
    whole_flood = time.monotonic() - began
    assert all(ended)
    # One place of the next that comes free, against three quarters of the flood first come, first served.
    assert ours < whole_flood / 2
    crowd.settled()


@pytest.mark.long
def test_a_quota_holds_whichever_workers_are_asked(crowd: running.Running) -> None:
    key = _key(crowd, "poor")
    done = crowd.command(
        *("fctl", "quota", "set", "team=poor", "concurrent=3", "--reason", "a test"),
        key=crowd.admin_key,
    )
    assert done.code == 0, done.err
    waiting.eventually(lambda: _refused(crowd, key) > 0, "the limit to be in force", 30)
    assert _refused(crowd, key) == 7
    crowd.settled()


def _refused(crowd: running.Running, key: str) -> int:
    """Return how many of ten requests at once were refused for their quota."""

    def ask(_: int) -> int:
        return clients.post(crowd, key, clients.chat(60)).status_code

    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        codes = list(pool.map(ask, range(10)))
    assert set(codes) <= {200, 429}, codes
    return codes.count(429)


def _key(crowd: running.Running, team: str) -> str:
    done = crowd.command(
        *("fctl", "key", "create", "--team", team, "--user", "ada", "--tiers", "interactive"),
        key=crowd.admin_key,
    )
    assert done.code == 0, done.err
    return done.out.splitlines()[0]


def test_a_request_is_cancelled_whichever_worker_hears_of_it(crowd: running.Running) -> None:
    """Each `Cancel` comes on a connection of its own, so mostly to a worker that has not got the request."""
    bearer = f"Bearer {crowd.key}"
    body = clients.chat(1900, stream=True)
    options = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))
    for _ in range(6):
        with crowd.client.stream(
            "POST", crowd.http + clients.CHAT, json=body, headers={"Authorization": bearer}
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            asked = forebay_pb2.CancelRequest(request_id=answer.headers["x-forebay-request-id"])
            with grpc.insecure_channel(crowd.grpc, options=options) as channel:
                stub = forebay_pb2_grpc.InferenceStub(channel)
                who = (("authorization", bearer),)
                assert stub.Cancel(asked, metadata=who, timeout=20).cancelled
            assert any('"cancelled"' in line for line in lines)
    crowd.settled()


def test_a_worker_that_is_killed_gives_back_its_seats(crowd: running.Running) -> None:
    streams = [clients.Stream(crowd, crowd.key, 400).begun() for _ in range(8)]
    waiting.eventually(lambda: used(crowd) == 8, "eight seats in use")
    victim = workers(crowd)[0]
    victim.kill()
    whole = sum(stream.ended().whole for stream in streams)
    assert all(stream.whole or stream.broken or stream.cut for stream in streams)
    assert whole >= 1, "the streams of other workers go on"
    waiting.eventually(lambda: used(crowd) == 0, "every seat given back")
    waiting.eventually(lambda: len(workers(crowd)) == WORKERS, "a new worker")
    crowd.settled()
    for _ in range(2 * SEATS):  # what the dead one held does not count for ever
        assert clients.post(crowd, crowd.key, clients.chat(2)).status_code == 200
    crowd.settled()


def test_the_admitting_process_is_killed_and_streams_do_not_notice(crowd: running.Running) -> None:
    short = clients.Stream(crowd, crowd.key, 300)
    streams = [clients.Stream(crowd, crowd.key, 1900).begun() for _ in range(5)]
    waiting.eventually(lambda: used(crowd) >= 5, "five seats in use")
    before = crowd.part("gateway-admission")
    before.kill()
    late = clients.post(crowd, crowd.key, clients.chat(2))  # waits for the next one, or is told so
    assert late.status_code == 200 or (late.status_code == 503 and late.headers["retry-after"])
    assert short.ended().whole
    waiting.eventually(lambda: crowd.part("gateway-admission").pid != before.pid, "an heir")
    waiting.eventually(lambda: used(crowd) == 5, "the heir to count what runs")
    so_far = [len(stream.pieces) for stream in streams]
    waiting.eventually(
        lambda: all(len(each.pieces) > n for each, n in zip(streams, so_far, strict=True)),
        "the streams to go on",
    )
    for stream in streams:
        stream.leave()
    assert not any(stream.ended().error or stream.broken for stream in streams)
    waiting.eventually(lambda: used(crowd) == 0, "every seat given back")
    assert clients.post(crowd, crowd.key, clients.chat(2)).status_code == 200
    crowd.settled()


def test_nothing_is_left(crowd: running.Running) -> None:
    crowd.down()
    waiting.eventually(lambda: crowd.processes() == [], "the last process to end", 10)
    assert "Traceback" not in crowd.log()

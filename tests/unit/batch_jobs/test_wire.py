"""The connection of a line: what the gateway may answer, cut anywhere, and what becomes of connections."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from batch_jobs import client, lines, model, partial, verdicts
from scheduler.contracts import frames

JOB = model.BatchJob(7, "a/team", "ann e")
SHORT = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nX-Forebay-Request-Id: r1\r\n\r\n{}"
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\nx-forebay-version: v2\r\nx-forebay-request-id: r2\r\n"
    b"transfer-encoding: chunked\r\n\r\n" % frames.MEDIA_TYPE.encode()
)


def work(number: int = 1) -> client.Work:
    line = lines.Line(number, f"c {number}", "/v1/chat/completions", {"model": "chat", "n": 1})
    return client.Work.of(line)


def chunk(*found: frames.Frame) -> bytes:
    data = b"".join(frame.encode() for frame in found)
    return b"%x\r\n%b\r\n" % (len(data), data)


class Gateway:
    """Says prepared bytes, one after the other, to whoever asks; b"" closes the connection."""

    def __init__(self, answers: Sequence[bytes], piece: int = 0) -> None:
        self.answers = list(answers)
        self.piece = piece
        self.asked: list[bytes] = []
        self.connections = 0
        self.gone = asyncio.Event()
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.gone.clear()
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.asked.append(head + await reader.readexactly(size))
                answer = self.answers.pop(0) if self.answers else None
                if answer is None:
                    await reader.read()  # until it is gone
                    break
                for at in range(0, len(answer), self.piece or max(1, len(answer))):
                    writer.write(answer[at : at + (self.piece or len(answer))])
                    await writer.drain()
                    await asyncio.sleep(0)
                if not answer or b"connection: close" in answer:
                    break
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        self.gone.set()


@contextlib.asynccontextmanager
async def talking(
    answers: Sequence[bytes], piece: int = 0, timeout_s: float = 30.0
) -> AsyncIterator[tuple[Gateway, client.HttpSender]]:
    gateway = Gateway(answers, piece)
    server = await asyncio.start_server(gateway.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base/"
    async with client.HttpSender(url, "key", timeout_s) as sender:
        yield gateway, sender
    if gateway.connections:
        await asyncio.wait_for(gateway.gone.wait(), 5)
    server.close()
    await server.wait_closed()


def nothing(frame: frames.Frame, version: str) -> None:
    raise AssertionError(frame)


async def send(
    sender: client.HttpSender,
    heard: Callable[[frames.Frame, str], None] = nothing,
    begun: partial.Partial | None = None,
    told: client.Told = client.FIRST,
) -> verdicts.Answer:
    return await sender.send(JOB, work(), begun, heard, told)


async def test_a_request_says_for_whom_it_is_and_connections_are_used_again() -> None:
    async with talking([SHORT, SHORT]) as (gateway, sender):
        for _ in range(2):
            assert await send(sender) == verdicts.Answer(200, b"{}", "r1")
        assert gateway.connections == 1
    head, _, body = gateway.asked[0].partition(b"\r\n\r\n")
    said = head.decode().split("\r\n")
    assert said[0] == "POST /base/v1/chat/completions HTTP/1.1"
    assert {
        "Authorization: Bearer key",
        f"Accept: {frames.MEDIA_TYPE}",
        "X-Forebay-Priority: batch",
        "X-Forebay-Batch-Job: 7",
        "X-Forebay-Custom-Id: c%201",
        "X-Forebay-Team: a%2Fteam",
        "X-Forebay-User: ann%20e",
    } <= set(said)
    assert json.loads(body) == {"model": "chat", "n": 1}
    assert b"X-Forebay-Preempted" not in head
    assert b"X-Forebay-Lost" not in head


async def test_a_line_says_what_became_of_its_earlier_tries() -> None:
    async with talking([SHORT]) as (gateway, sender):
        await send(sender, told=client.Told(preempted=2, lost=1))
    assert b"\r\nX-Forebay-Preempted: 2\r\n" in gateway.asked[0]
    assert b"\r\nX-Forebay-Lost: 1\r\n" in gateway.asked[0]


@pytest.mark.parametrize("piece", [0, 1, 7])
async def test_an_answer_in_frames_may_be_cut_anywhere(piece: int) -> None:
    heard: list[tuple[frames.Frame, str]] = []
    prompt = frames.Frame.of(frames.Kind.PROMPT, b"", (1, 2, 3))
    ids = frames.Frame.of(frames.Kind.DATA, b"", (7, 8))
    text = frames.Frame(frames.Kind.DATA, b'{"a":1}')
    answer = HEAD + chunk(prompt) + chunk(ids) + chunk(text, frames.Frame(frames.Kind.END, b"{}"))
    async with talking([answer + b"0\r\n\r\n", SHORT], piece) as (gateway, sender):
        said = await send(sender, lambda frame, version: heard.append((frame, version)))
        assert said == verdicts.Answer(200, b'{"a":1}', "r2")
        assert heard == [(prompt, "v2"), (ids, "v2")]
        assert (await send(sender)).status == 200
        assert gateway.connections == 1


async def test_an_error_among_frames_is_the_answer() -> None:
    said = {"error": {"code": "preempted"}, "status": 503, "retry_after_s": 2}
    error = frames.Frame(frames.Kind.ERROR, json.dumps(said).encode())
    async with talking([HEAD + chunk(error) + b"0\r\n\r\n"]) as (_, sender):
        answer = await send(sender)
    assert (answer.status, answer.retry_after_s) == (503, 2.0)
    assert verdicts.judge(answer).verdict is verdicts.Verdict.PREEMPTED


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-length: 20\r\nconnection: close\r\n\r\n{}",
        HEAD.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n") + b"0\r\n\r\n",
        HEAD + chunk(frames.Frame(frames.Kind.DATA, b"{}")) + b"0\r\n\r\n",
        HEAD + b"14\r\n" + b"\xff" * 20 + b"\r\n",
        HEAD + chunk(frames.Frame(frames.Kind.ERROR, b"no json")),
        b"SSH-2.0-OpenSSH_9.2\r\n",
    ],
    ids=["closed", "body cut", "no frame", "no last frame", "no frames", "no error", "no http"],
)
async def test_an_answer_that_is_not_whole_is_cut(answer: bytes) -> None:
    async with talking([answer, SHORT]) as (_, sender):
        assert (await send(sender)).status == verdicts.CUT
        assert (await send(sender)).status == 200


async def test_an_answer_that_ends_its_connection_is_one_and_the_next_line_opens_another() -> None:
    last = SHORT.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    async with talking([b"HTTP/1.1 103 Early Hints\r\n\r\n" + last, SHORT]) as (gateway, sender):
        assert (await send(sender)).status == 200
        await asyncio.wait_for(gateway.gone.wait(), 5)
        assert (await send(sender)).status == 200
        assert gateway.connections == 2


@pytest.mark.parametrize("more", [b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{", SHORT, b"HT"])
async def test_what_nobody_asked_for_is_no_part_of_the_next_answer(more: bytes) -> None:
    async with talking([SHORT + more, SHORT]) as (gateway, sender):
        for _ in range(2):
            assert await send(sender) == verdicts.Answer(200, b"{}", "r1")
        assert gateway.connections == 2


async def test_a_refusal_tells_when_to_come_again() -> None:
    refusal = b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 1.5\r\ncontent-length: 0\r\n\r\n"
    wrong = refusal.replace(b"1.5", b"soon")
    async with talking([refusal, wrong]) as (_, sender):
        assert await send(sender) == verdicts.Answer(429, retry_after_s=1.5)
        assert await send(sender) == verdicts.Answer(429)


async def test_nobody_there_is_told_from_an_answer_that_broke_off() -> None:
    async with client.HttpSender("http://127.0.0.1:9", "key", 30.0) as sender:
        assert (await send(sender)).status == verdicts.NOT_SENT


async def test_no_answer_in_time_closes_the_connection() -> None:
    async with talking([], timeout_s=0.01) as (gateway, sender):
        assert (await send(sender)).status == verdicts.TOO_LATE
        await asyncio.wait_for(gateway.gone.wait(), 5)


async def test_a_line_that_is_called_off_closes_its_connection() -> None:
    async with talking([]) as (gateway, sender):
        task = asyncio.create_task(send(sender))
        while not gateway.asked:  # noqa: ASYNC110 - the server's task says nothing
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(gateway.gone.wait(), 5)


async def test_a_fault_of_who_hears_is_its_own() -> None:
    answer = HEAD + chunk(frames.Frame.of(frames.Kind.PROMPT, b"", (1,)))
    async with talking([answer]) as (_, sender):
        with pytest.raises(AssertionError):
            await send(sender)


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="no http or https address"):
        client.HttpSender("gateway:8000", "key", 1.0)

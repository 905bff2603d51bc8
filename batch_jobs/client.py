"""Sends one line to the gateway and says what came back; knows nothing of jobs' lives or retries."""

import asyncio
import dataclasses
import re
import urllib.parse
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from batch_jobs import jsontext, lines, model, partial, verdicts, wire
from scheduler.contracts import frames, requests

_CONNECT_S = 10.0
_HEADS = 1_024  # jobs' heads that are kept
_PLAIN = re.compile(r"[A-Za-z0-9_.~-]+", re.ASCII).fullmatch  # ids that quoting leaves as they are


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """A line ready to be sent: its body is encoded once, however often it is tried.

    Attributes:
        line: with nothing of its body but the model's name: thousands of these wait.
        payload: the body.
    """

    line: lines.Line
    payload: bytes

    @classmethod
    def of(cls, line: lines.Line) -> Self:
        """Encode a line's body."""
        payload = jsontext.write(line.body)
        slim = dataclasses.replace(line, body={"model": line.model})
        return cls(slim, payload)


class Told(NamedTuple):
    """What the gateway is told of a line's earlier tries.

    Attributes:
        preempted: how often it gave its seat back.
        lost: how many replicas were lost with it, and perhaps by it.
    """

    preempted: int = 0
    lost: int = 0


FIRST = Told()


class Sender(Protocol):
    """What the runner needs of the gateway."""

    async def send(
        self,
        job: model.BatchJob,
        work: Work,
        begun: partial.Partial | None,
        heard: wire.Heard,
        told: Told = FIRST,
    ) -> verdicts.Answer:
        """Send a line for its job's team and user; whatever goes wrong is in the answer.

        Args:
            job: the line's job.
            work: the line.
            begun: the beginning of its answer, if an earlier try has come so far.
            heard: called with the ids of this try as they come.
            told: what became of its earlier tries.
        """
        ...


class HttpSender:
    """The gateway over HTTP, as Forebay's own service. An async context manager.

    Args:
        url: the gateway's base URL.
        service_key: the credential that may act for the jobs' teams and users.
        timeout_s: longest wait for an answer.
    """

    def __init__(self, url: str, service_key: str, timeout_s: float) -> None:
        self._pool = wire.Pool(url, _CONNECT_S)
        self._timeout_s = timeout_s
        self._common = (
            f"Host: {self._pool.host}\r\nAuthorization: Bearer {service_key}\r\n"
            f"Content-Type: application/json\r\nAccept: {frames.MEDIA_TYPE}\r\n"
            f"X-Forebay-Priority: {requests.Tier.BATCH}\r\n"
        )
        self._heads: dict[tuple[int, str], bytes] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.close()

    async def send(
        self,
        job: model.BatchJob,
        work: Work,
        begun: partial.Partial | None,
        heard: wire.Heard,
        told: Told = FIRST,
    ) -> verdicts.Answer:
        """Send a line; see `Sender.send`."""
        payload, more = work.payload, ""
        if begun is not None:
            payload = begun.into(payload)
            if begun.version:
                more = f"X-Forebay-Version: {_quoted(begun.version)}\r\n"
        if told.preempted:
            more += f"X-Forebay-Preempted: {told.preempted}\r\n"
        if told.lost:
            more += f"X-Forebay-Lost: {told.lost}\r\n"
        custom_id = work.line.custom_id
        if not _PLAIN(custom_id):
            custom_id = urllib.parse.quote(custom_id, safe="")
        tail = f"X-Forebay-Custom-Id: {custom_id}\r\n{more}Content-Length: {len(payload)}\r\n\r\n"
        try:
            connection = await self._pool.get()
        except OSError:
            return verdicts.Answer(verdicts.NOT_SENT)
        head = self._head(job, work.line.endpoint)
        answer = connection.send((head, tail.encode("latin-1", "replace"), payload), heard)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await answer
        except TimeoutError:
            return verdicts.Answer(verdicts.TOO_LATE)
        finally:
            if answer.cancelled():
                connection.abort()

    def _head(self, job: model.BatchJob, endpoint: str) -> bytes:
        """Return what all lines of a job send to an endpoint."""
        found = self._heads.get((job.job_id, endpoint))
        if found is None:
            if len(self._heads) >= _HEADS:
                self._heads.clear()
            team, user = (urllib.parse.quote(name, safe="") for name in (job.team, job.user))
            found = (
                f"POST {self._pool.path}{endpoint} HTTP/1.1\r\n{self._common}"
                f"X-Forebay-Batch-Job: {job.job_id}\r\n"
                f"X-Forebay-Team: {team}\r\nX-Forebay-User: {user}\r\n"
            ).encode()
            self._heads[job.job_id, endpoint] = found
        return found


def _quoted(text: str) -> str:
    """Return a header's value that can't end its line."""
    return "".join(letter for letter in text if letter.isprintable())

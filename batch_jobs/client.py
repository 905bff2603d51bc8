"""Sends one line to the gateway and says what came back; knows nothing of jobs' lives or retries."""

import dataclasses
import json
import urllib.parse
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

import aiohttp

from batch_jobs import grouping, lines, model, partial, verdicts
from scheduler.contracts import frames, requests

Heard = Callable[[frames.Frame, str], None]
"""Called with each frame of ids of an answer under way, and the version that they belong to."""


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """A line ready to be sent: its body is encoded once, however often it is tried.

    Attributes:
        line: with nothing of its body but the model's name: thousands of these wait.
        payload: the body.
        prefix: its model and the beginning of its prompt, for `grouping`.
    """

    line: lines.Line
    payload: bytes
    prefix: tuple[str, bytes] = ("", b"")

    @classmethod
    def of(cls, line: lines.Line) -> Self:
        """Encode a line's body."""
        payload = json.dumps(line.body, separators=(",", ":")).encode()
        slim = dataclasses.replace(line, body={"model": line.model})
        return cls(slim, payload, (line.model, grouping.prefix(line.body)))


class Sender(Protocol):
    """What the runner needs of the gateway."""

    async def send(
        self, job: model.BatchJob, work: Work, begun: partial.Partial | None, heard: Heard
    ) -> verdicts.Answer:
        """Send a line for its job's team and user; whatever goes wrong is in the answer.

        Args:
            job: the line's job.
            work: the line.
            begun: the beginning of its answer, if an earlier try has come so far.
            heard: called with the ids of this try as they come.
        """
        ...


class HttpSender:
    """The gateway over HTTP, as Forebay's own service. An async context manager."""

    def __init__(self, url: str, service_key: str, timeout_s: float) -> None:
        self._url = url.rstrip("/")
        self._headers = {
            "Authorization": f"Bearer {service_key}",
            "Content-Type": "application/json",
            "Accept": frames.MEDIA_TYPE,
            "X-Forebay-Priority": str(requests.Tier.BATCH),
        }
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=10.0)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # limit=0: how many lines are in flight is the windows' business.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=self._timeout, trust_env=False
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(
        self, job: model.BatchJob, work: Work, begun: partial.Partial | None, heard: Heard
    ) -> verdicts.Answer:
        """Send a line; see `Sender.send`."""
        if self._session is None:
            raise RuntimeError("the sender was not entered")
        headers = {
            **self._headers,
            "X-Forebay-Batch-Job": str(job.job_id),
            "X-Forebay-Custom-Id": urllib.parse.quote(work.line.custom_id, safe=""),
            "X-Forebay-Team": urllib.parse.quote(job.team, safe=""),
            "X-Forebay-User": urllib.parse.quote(job.user, safe=""),
        }
        payload = work.payload
        if begun is not None:
            payload = begun.into(payload)
            if begun.version:
                headers["X-Forebay-Version"] = begun.version
        url = self._url + work.line.endpoint
        try:
            async with self._session.post(url, data=payload, headers=headers) as response:
                if response.content_type == frames.MEDIA_TYPE:
                    return await _framed(response, heard)
                body = await response.read()
                return verdicts.Answer(
                    status=response.status,
                    body=body,
                    request_id=response.headers.get("X-Forebay-Request-Id", ""),
                    retry_after_s=_seconds(response.headers.get("Retry-After", "")),
                )
        except aiohttp.ClientConnectorError:
            return verdicts.Answer(verdicts.NOT_SENT)
        except TimeoutError:
            return verdicts.Answer(verdicts.TOO_LATE)
        except (aiohttp.ClientError, OSError, frames.FrameError):
            return verdicts.Answer(verdicts.CUT)


async def _framed(response: aiohttp.ClientResponse, heard: Heard) -> verdicts.Answer:
    """Read an answer that came in frames, see the gateway's `line_outlet`."""
    decoder, body = frames.Decoder(), b""
    version = response.headers.get("X-Forebay-Version", "")
    request_id = response.headers.get("X-Forebay-Request-Id", "")
    async for chunk in response.content.iter_any():
        for frame in decoder.feed(chunk):
            if frame.kind is frames.Kind.END:
                return verdicts.Answer(200, body, request_id)
            if frame.kind is frames.Kind.ERROR:
                said = json.loads(frame.payload)
                return verdicts.Answer(
                    int(said["status"]), frame.payload, request_id, float(said["retry_after_s"])
                )
            if frame.kind is frames.Kind.DATA and frame.payload:
                body += frame.payload
            else:
                heard(frame, version)
    return verdicts.Answer(verdicts.CUT, request_id=request_id)


def _seconds(text: str) -> float:
    try:
        return max(0.0, min(float(text), 86_400.0))
    except ValueError:
        return 0.0

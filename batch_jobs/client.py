"""Sends one line to the gateway and says what came back; knows nothing of jobs' lives or retries."""

import dataclasses
import json
import urllib.parse
from types import TracebackType
from typing import Protocol, Self

import aiohttp

from batch_jobs import lines, model, verdicts
from scheduler.contracts import requests


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """A line ready to be sent: its body is encoded once, however often it is tried."""

    line: lines.Line
    payload: bytes

    @classmethod
    def of(cls, line: lines.Line) -> Self:
        """Encode a line's body."""
        return cls(line, json.dumps(line.body, separators=(",", ":")).encode())


class Sender(Protocol):
    """What the runner needs of the gateway."""

    async def send(self, job: model.BatchJob, work: Work) -> verdicts.Answer:
        """Send a line for its job's team and user; whatever goes wrong is in the answer."""
        ...


class HttpSender:
    """The gateway over HTTP, as Forebay's own service. An async context manager."""

    def __init__(self, url: str, service_key: str, timeout_s: float) -> None:
        self._url = url.rstrip("/")
        self._headers = {
            "Authorization": f"Bearer {service_key}",
            "Content-Type": "application/json",
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

    async def send(self, job: model.BatchJob, work: Work) -> verdicts.Answer:
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
        url = self._url + work.line.endpoint
        try:
            async with self._session.post(url, data=work.payload, headers=headers) as response:
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
        except (aiohttp.ClientError, OSError):
            return verdicts.Answer(verdicts.CUT)


def _seconds(text: str) -> float:
    try:
        return max(0.0, min(float(text), 86_400.0))
    except ValueError:
        return 0.0

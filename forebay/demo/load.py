"""Interactive users for the demo: streamed chat requests whose first token is timed."""

import asyncio
import dataclasses
import json
import math
import time
from collections.abc import Sequence

import aiohttp

_TIMEOUT = aiohttp.ClientTimeout(total=120)
_QUESTIONS = (
    "Why does the tide come in twice a day?",
    "Name three uses for a pool of water kept above a turbine.",
    "How long does light take from the sun to the earth?",
    "What is a good name for a queue that is always empty?",
    "Which came first, the job or the scheduler?",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What one request got.

    Attributes:
        sent: monotonic seconds when it was sent.
        ttft_ms: milliseconds from sending to the first token, None if none came.
        text: the whole text.
        complete: whether it ended with a finish reason and `[DONE]`.
        error: one line if it did not.
    """

    sent: float
    ttft_ms: float | None
    text: str
    complete: bool
    error: str = ""


class Users:
    """Sends requests to one gateway with one API key."""

    def __init__(self, url: str, key: str, model: str) -> None:
        self._url = f"{url}/v1/chat/completions"
        self._key = key
        self._model = model

    async def burst(self, count: int, max_tokens: int, concurrency: int) -> list[Answer]:
        """Send ``count`` requests, at most ``concurrency`` at a time, and return their answers."""
        gate = asyncio.Semaphore(concurrency)
        connector = aiohttp.TCPConnector(limit=0)
        headers = {"Authorization": f"Bearer {self._key}"}
        async with aiohttp.ClientSession(
            connector=connector, headers=headers, timeout=_TIMEOUT
        ) as session:

            async def one(number: int) -> Answer:
                async with gate:
                    return await self._ask(session, number, max_tokens)

            return list(await asyncio.gather(*(one(number) for number in range(count))))

    async def _ask(self, session: aiohttp.ClientSession, number: int, max_tokens: int) -> Answer:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": _QUESTIONS[number % len(_QUESTIONS)]}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
        sent = time.monotonic()
        first: float | None = None
        text: list[str] = []
        reason, done = "", False
        try:
            async with session.post(self._url, json=body) as response:
                if response.status != 200:
                    return Answer(sent, None, "", False, (await response.text())[:300])
                async for line in response.content:
                    if not line.startswith(b"data: "):
                        continue
                    data = line[6:].strip()
                    if data == b"[DONE]":
                        done = True
                        continue
                    chunk = json.loads(data)
                    if "error" in chunk:
                        return Answer(
                            sent, None, "".join(text), False, str(chunk["error"]["message"])
                        )
                    for choice in chunk.get("choices", ()):
                        piece = choice["delta"].get("content") or ""
                        if piece and first is None:
                            first = time.monotonic()
                        text.append(piece)
                        reason = choice.get("finish_reason") or reason
        except (aiohttp.ClientError, TimeoutError) as error:
            return Answer(sent, None, "".join(text), False, str(error) or type(error).__name__)
        ttft_ms = None if first is None else (first - sent) * 1000
        complete = done and bool(reason)
        return Answer(sent, ttft_ms, "".join(text), complete, "" if complete else "stream was cut")


def percentile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile of ``values`` (``share`` in 0…1); 0.0 if there are none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered) + 0.5) - 1))]


def ttft(answers: Sequence[Answer]) -> dict[str, float]:
    """Return TTFT p50 and p95 in milliseconds over the answers that got a token."""
    values = [answer.ttft_ms for answer in answers if answer.ttft_ms is not None]
    return {"p50": round(percentile(values, 0.5), 1), "p95": round(percentile(values, 0.95), 1)}


def seated_s(answers: Sequence[Answer]) -> float:
    """Return the seconds from the first request of a spike until the last of them had its first token.

    By then batch has given back every seat that the spike needed: the users' own view, prefill included,
    so never less than what reclaiming took. Infinite if one of them never got a token.
    """
    began = min(answer.sent for answer in answers)
    return max(
        math.inf if answer.ttft_ms is None else answer.sent - began + answer.ttft_ms / 1000
        for answer in answers
    )

"""gRPC's Embed as the OpenAI request that means the same, and the engine's answer as its response."""

import base64
import binascii
import sys
from array import array
from typing import Any

import msgspec

from gateway import resolve
from scheduler.contracts import errors, frames, quota, requests
from scheduler.contracts.v1 import forebay_pb2


def openai_body(message: forebay_pb2.EmbedRequest) -> tuple[requests.Endpoint, dict[str, Any]]:
    """Return the OpenAI request that means the same; base64 is a third of the digits' length.

    Raises:
        errors.BadRequest: not exactly one of texts and token ids.
    """
    if bool(message.texts) == bool(message.token_ids):
        raise errors.BadRequest("texts: give either texts or token_ids", param="texts")
    if message.deadline_ms < 0:
        raise errors.BadRequest("deadline_ms: must be positive", param="deadline_ms")
    given: list[Any] = list(message.texts) or [list(each.ids) for each in message.token_ids]
    body: dict[str, Any] = {"model": message.model, "input": given, "encoding_format": "base64"}
    if message.HasField("dimensions"):
        body["dimensions"] = message.dimensions
    return requests.Endpoint.EMBEDDINGS, body


def wishes(message: forebay_pb2.EmbedRequest) -> resolve.Wishes:
    """Read Forebay's own fields of a request."""
    return resolve.Wishes(
        priority=resolve.bounded("priority", message.priority),
        deadline_ms=resolve.deadline("deadline_ms", message.deadline_ms or None),
        version=resolve.bounded("version", message.version),
    )


class Whole:
    """Collects an engine's answer.

    Attributes:
        limits: what is left of the caller's quotas.
    """

    begun = False

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.limits: quota.Headers = ()

    def prompt(self, frame: frames.Frame, version: str) -> None:
        """Its client did not ask for the prompt's ids."""

    def data(self, frame: frames.Frame) -> bool:
        """Keep a frame's bytes."""
        self._parts.append(frame.payload)
        return True

    def quotas(self, told: quota.Headers) -> None:
        """Keep them for the end."""
        self.limits = told

    async def drained(self) -> None:
        """Memory is never behind."""

    def restart(self) -> None:
        """Forget what a lost replica said."""
        self._parts.clear()

    def response(self, end: frames.End) -> forebay_pb2.EmbedResponse:
        """Return the answer.

        Raises:
            errors.EngineFailed: the engine's is no list of embeddings.
        """
        try:
            value = msgspec.json.decode(b"".join(self._parts))
            found = [_embedding(place, row) for place, row in enumerate(value["data"])]
        except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as fault:
            raise errors.EngineFailed(
                f"the engine's answer holds no embeddings: {fault}"
            ) from fault
        used = forebay_pb2.Usage(prompt_tokens=end.prompt_tokens, cached_tokens=end.cached_tokens)
        return forebay_pb2.EmbedResponse(embeddings=found, usage=used)


def _embedding(place: int, row: Any) -> forebay_pb2.Embedding:
    vector, index = row["embedding"], row.get("index", place)
    if vector is None:
        why = (row.get("error") or {}).get("message") or "the engine gives no vector for it"
        return forebay_pb2.Embedding(index=index, error=why)
    if isinstance(vector, str):
        vector = _floats(vector)
    return forebay_pb2.Embedding(index=index, values=vector)


def _floats(packed: str) -> "array[float]":
    """Return base64 of little-endian float32 as numbers.

    Raises:
        ValueError: it is none.
    """
    try:
        found = array("f", base64.b64decode(packed, validate=True))
    except binascii.Error as error:
        raise ValueError(str(error)) from error
    if sys.byteorder == "big":
        found.byteswap()
    return found

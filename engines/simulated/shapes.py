"""OpenAI answers as the simulated engine writes them: chunks, whole answers, log probabilities, vectors."""

import base64
import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from engines.simulated import bodies, tokens

DIMENSIONS = 64


def event(value: Mapping[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def error(message: str, kind: str, param: str | None, status: int) -> dict[str, Any]:
    """Return an error body."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def usage(prompt: int, output: int, cached: int) -> dict[str, Any]:
    """Return the usage object."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Shape:
    """Writes the objects of one answer.

    Args:
        asked: what was asked.
        answer_id: its ``id``.
        created: its ``created``, in seconds.
    """

    def __init__(self, asked: bodies.Generation, answer_id: str, created: int) -> None:
        self._asked = asked
        self._common = {"id": answer_id, "created": created, "model": asked.model}

    def _object(self, *, chunk: bool) -> str:
        if not self._asked.chat:
            return "text_completion"
        return "chat.completion.chunk" if chunk else "chat.completion"

    def first(self, index: int) -> dict[str, Any]:
        """Return the chunk that names a chat choice's role."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self.chunk([choice])

    def chunk(self, choices: list[dict[str, Any]], used: Any = None) -> dict[str, Any]:
        """Return one chunk; ``used`` is its usage, if it carries one."""
        value = {**self._common, "object": self._object(chunk=True), "choices": choices}
        return value if used is None else {**value, "usage": used}

    def piece(
        self, index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None
    ) -> dict[str, Any]:
        """Return a choice of a chunk."""
        ends = {"logprobs": logprobs, "finish_reason": reason}
        if self._asked.chat:
            return {"index": index, "delta": {"content": text} if text else {}, **ends}
        return {"index": index, "text": text, **ends}

    def whole(self, choices: list[dict[str, Any]], used: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole answer."""
        return {
            **self._common,
            "object": self._object(chunk=False),
            "choices": choices,
            "usage": used,
        }

    def choice(
        self, index: int, text: str, logprobs: dict[str, Any] | None, reason: str
    ) -> dict[str, Any]:
        """Return a choice of a whole answer."""
        ends = {"logprobs": logprobs, "finish_reason": reason}
        if self._asked.chat:
            return {"index": index, "message": {"role": "assistant", "content": text}, **ends}
        return {"index": index, "text": text, **ends}

    def logprobs(self, token_ids: Sequence[int], offset: int = 0) -> dict[str, Any] | None:
        """Return the log probabilities of some tokens, in the endpoint's own form; None if not asked."""
        count = self._asked.logprobs
        if count is None:
            return None
        tops = [_alternatives(token_id, count) for token_id in token_ids]
        if self._asked.chat:
            content = [
                {**_named(token_id, _logprob(token_id)), "top_logprobs": [_named(*t) for t in top]}
                for token_id, top in zip(token_ids, tops, strict=True)
            ]
            return {"content": content}
        texts = [tokens.token_bytes(t).decode(errors="replace") for t in token_ids]
        starts = [offset + sum(map(len, texts[:i])) for i in range(len(texts))]
        return {
            "tokens": texts,
            "token_logprobs": [_logprob(t) for t in token_ids],
            "top_logprobs": [
                {tokens.token_bytes(t).decode(errors="replace"): value for t, value in top}
                for top in tops
            ],
            "text_offset": starts,
        }


def _logprob(token_id: int) -> float:
    """Return a made-up log probability: fixed for an id, between -1 and 0."""
    return -((token_id * 2654435761) % 1000) / 1000


def _alternatives(token_id: int, count: int) -> list[tuple[int, float]]:
    best = _logprob(token_id)
    others = [(tokens.BYTES + (token_id + step) % len(tokens.WORDS)) for step in range(1, count)]
    return [(token_id, best), *((t, best - 1 - i) for i, t in enumerate(others))][:count]


def _named(token_id: int, value: float) -> dict[str, Any]:
    raw = tokens.token_bytes(token_id)
    return {"token": raw.decode(errors="replace"), "logprob": value, "bytes": list(raw)}


def vector(token_ids: Sequence[int]) -> list[float]:
    """Return a unit vector that depends on the ids alone."""
    packed = struct.pack(f"!{len(token_ids)}I", *token_ids)
    noise = hashlib.shake_256(packed).digest(DIMENSIONS * 2)
    raw = [value / 32768 for value in struct.unpack(f"!{DIMENSIONS}h", noise)]
    norm = math.sqrt(sum(value * value for value in raw)) or 1.0
    floats = struct.pack(f"<{DIMENSIONS}f", *(value / norm for value in raw))
    return list(struct.unpack(f"<{DIMENSIONS}f", floats))


def embeddings(
    inputs: Sequence[Sequence[int]], model: str, body: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the answer of ``/v1/embeddings``; base64 is of little-endian float32."""
    rows: list[dict[str, Any]] = []
    for index, ids in enumerate(inputs):
        values: Any = vector(ids)
        if body.get("encoding_format") == "base64":
            values = base64.b64encode(struct.pack(f"<{DIMENSIONS}f", *values)).decode()
        rows.append({"object": "embedding", "index": index, "embedding": values})
    return {"object": "list", "data": rows, "model": model, "usage": _read(inputs)}


def classes(inputs: Sequence[Sequence[int]], model: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer of ``/v1/classify``: two classes that depend on the ids alone."""
    del body
    rows = []
    for index, ids in enumerate(inputs):
        first = (vector(ids)[0] + 1) / 2
        label = "LABEL_0" if first >= 1 - first else "LABEL_1"
        probs = [first, 1 - first]
        rows.append({"index": index, "label": label, "probs": probs, "num_classes": 2})
    return {"object": "list", "data": rows, "model": model, "usage": _read(inputs)}


def ranked(inputs: Sequence[Sequence[int]], model: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer of ``/v1/rerank``, the best document first."""
    results: list[dict[str, Any]] = [
        {
            "index": index,
            "document": {"text": body["documents"][index]},
            "relevance_score": (vector(ids)[0] + 1) / 2,
        }
        for index, ids in enumerate(inputs)
    ]
    results.sort(key=lambda each: -each["relevance_score"])
    most = body.get("top_n") or len(results)
    return {"id": "rerank", "model": model, "results": results[:most], "usage": _read(inputs)}


def _read(inputs: Sequence[Sequence[int]]) -> dict[str, int]:
    count = sum(map(len, inputs))
    return {"prompt_tokens": count, "total_tokens": count}

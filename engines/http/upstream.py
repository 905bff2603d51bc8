"""How an external server is reached, and what its answers say about usage. Pure."""

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from engines.http import estimate
from engines.replica import engine, responses_api, sse
from scheduler.contracts import fleet, requests


class OptionsError(ValueError):
    """The spec of an external replica can't be used; the message names the key."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """An external server.

    Attributes:
        base_url: scheme, host and port, without ``/v1``.
        model: what it calls the model; "" keeps the served name.
        api_key: its bearer token, "" for none.
        idle_s: seconds without a byte after which an answer counts as lost.
        probe_s: seconds between health probes.
    """

    base_url: str
    model: str = ""
    api_key: str = ""
    idle_s: float = 300.0
    probe_s: float = 2.0

    @classmethod
    def from_spec(
        cls, spec: fleet.ReplicaSpec, environment: Mapping[str, str] = os.environ
    ) -> "Options":
        """Read a replica's spec: ``weights`` is the URL; ``engine_args`` may hold the rest.

        Raises:
            OptionsError: the URL or an argument is wrong.
        """
        url = spec.weights.rstrip("/").removesuffix("/v1")
        if not url.startswith(("http://", "https://")):
            raise OptionsError(
                f"weights {spec.weights!r}: want the server's http:// or https:// URL"
            )
        known = {"model", "api-key-env", "idle-s", "probe-s"}
        if unknown := sorted(set(spec.engine_args) - known):
            raise OptionsError(f"engine argument {unknown[0]!r}: want one of {sorted(known)}")
        variable = str(spec.engine_args.get("api-key-env", ""))
        if variable and variable not in environment:
            raise OptionsError(f"api-key-env: {variable} is not set in the environment")
        return cls(
            base_url=url,
            model=str(spec.engine_args.get("model", "")),
            api_key=environment[variable] if variable else "",
            idle_s=float(spec.engine_args.get("idle-s", 300.0)),
            probe_s=float(spec.engine_args.get("probe-s", 2.0)),
        )


# Where servers have what OpenAI's interface does not name: vLLM's own path, which others took over.
PATHS: Mapping[str, str] = {requests.Endpoint.CLASSIFY.value: "/classify"}


@dataclasses.dataclass(frozen=True, slots=True)
class Forwarded:
    """A body as it goes upstream, and whether the usage chunk that we asked for must be taken out."""

    body: bytes
    strip_usage: bool = False


def prepare(raw: bytes, model: str, path: str = "") -> Forwarded:
    """Return the body to send: the server's own model name, and usage asked for in a stream.

    A stream of `/v1/responses` ends with its usage in any case.
    """
    try:
        value = json.loads(raw)
    except ValueError:
        return Forwarded(raw)  # the server refuses it in its own words
    if not isinstance(value, dict):
        return Forwarded(raw)
    changed = dict(value)
    if model:
        changed["model"] = model
    options = value.get("stream_options")
    asked = isinstance(options, dict) and options.get("include_usage") is True
    if (
        value.get("stream") is True
        and path != responses_api.PATH
        and not asked
        and not (options and not isinstance(options, dict))
    ):
        changed["stream_options"] = {**(options or {}), "include_usage": True}
        return Forwarded(json.dumps(changed).encode(), strip_usage=True)
    return Forwarded(json.dumps(changed).encode() if changed != value else raw)


class Watch:
    """Reads usage from an answer that passes by, into the request's tap.

    Args:
        tap: the tap, or None for a request that has none.
        strip_usage: take the chunk out that carries usage and no choice.
    """

    def __init__(self, tap: engine.Tap | None, *, strip_usage: bool) -> None:
        self._told = False
        self._tap = tap
        self._strip = strip_usage
        self._splitter = sse.Splitter()

    def events(self, chunk: bytes) -> bytes:
        """Take bytes of a stream, cut anywhere; return the whole events to pass on.

        Raises:
            ValueError: an event is beyond all size.
        """
        return b"".join(event for event in self._splitter.feed(chunk) if self._pass(event))

    def _pass(self, event: bytes) -> bool:
        if self._tap is not None and (b'"choices"' in event or b'_text.delta"' in event):
            self._count(event)
        if b'"usage"' not in event:
            return True
        try:
            value = json.loads(sse.data(event))
        except ValueError:
            return True
        if isinstance(value, dict) and isinstance(value.get("response"), dict):
            value = value["response"]
        if not isinstance(value, dict) or not isinstance(value.get("usage"), dict):
            return True
        self.usage(value["usage"])
        return not (self._strip and value.get("choices") == [])

    def _count(self, event: bytes) -> None:
        """Count a chunk with text as one token, the least it can be, until usage says it exactly."""
        if self._tap is not None and _HAS_TEXT.search(event):
            self._tap.sampled(1)

    def usage(self, used: Mapping[str, Any]) -> None:
        """Note the server's own count; one that leaves the prompt out is none."""
        if self._tap is None:
            return
        prompt, output, details = (used.get(name) for name in _CHAT)
        if prompt is None:
            prompt, output, details = (used.get(name) for name in _RESPONSE)
        if prompt is None and used.get("total_tokens") is not None:
            # Rankers tell no more than the sum.
            prompt = _count(used["total_tokens"]) - _count(output)
        if prompt is None:
            return
        self._told = True
        cached = details.get("cached_tokens") if isinstance(details, dict) else 0
        self._tap.prompt_tokens = _count(prompt)
        self._tap.cached_tokens = min(_count(cached), self._tap.prompt_tokens)
        sampled = _count(output)
        self._tap.sampled(max(0, sampled - self._tap.output_tokens))
        self._tap.output_tokens = sampled

    def whole(self, request: bytes, answer: Any) -> None:
        """Read a whole answer's usage, or estimate it."""
        used = answer.get("usage") if isinstance(answer, dict) else None
        if isinstance(used, dict):
            self.usage(used)
        self.estimate(request, answer)

    def estimate(self, request: bytes, answer: Any = None) -> None:
        """Count by characters where the server told nothing; the count is marked.

        Args:
            request: the body that it was sent.
            answer: the whole answer; None after a stream, whose chunks were counted as they came, to its end
                or until it broke off.
        """
        if self._tap is None or self._told:
            return
        self._tap.estimated = True
        self._tap.prompt_tokens = estimate.prompt_tokens(request)
        if answer is not None:
            self._tap.sampled(estimate.output_tokens(answer))


_CHAT = ("prompt_tokens", "completion_tokens", "prompt_tokens_details")
_RESPONSE = ("input_tokens", "output_tokens", "input_tokens_details")
_HAS_TEXT = re.compile(rb'"(content|text|arguments|reasoning|reasoning_content|delta)"\s*:\s*"[^"]')


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0

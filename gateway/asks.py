"""What a checked request needs of a replica, and whether any could ever give it. Pure."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from scheduler.contracts import errors, fleet, requests
from scheduler.core import routing


@dataclasses.dataclass(frozen=True, slots=True)
class Needs:
    """A request's shape: requests with equal needs can take each other's place."""

    version: str
    adapter: str | None
    seats: int
    context_tokens: int  # 0 where the prompt's length is not known before the engine sees it


def needs(request: requests.InferenceRequest, view: fleet.FleetView, draw: float) -> Needs:
    """Return what ``request`` needs, its version drawn by the route's weights.

    Raises:
        errors.ModelNotFound: the route names no version.
        errors.ContextTooLong: prompt ids plus max_tokens exceed the context.
        errors.BadRequest: more sequences at once than any replica has seats.
    """
    route = view.routes.get(request.model)
    version = request.version or (routing.pick_version(route, draw) if route else None)
    if route is None or version is None:
        raise errors.ModelNotFound(
            f"model {request.model}: it has no version in service; see /v1/models", param="model"
        )
    tokens = context_tokens(request.body)
    if tokens > route.max_context:
        raise errors.ContextTooLong(
            f"the prompt and max_tokens need {tokens} tokens, the context of {request.model} is "
            f"{route.max_context}: shorten one of them"
        )
    seats = sequences(request.body)
    room = [
        replica.spec.seats
        - (replica.spec.reserved_seats if request.tier is requests.Tier.BATCH else 0)
        for replica in view.replicas
        if replica.spec.model == request.model
    ]
    if room and seats > max(room):
        raise errors.BadRequest(
            f"the request asks for {seats} sequences at once, a replica of {request.model} runs "
            f"{max(room)}: lower n or send fewer prompts"
        )
    return Needs(version, request.adapter, seats, tokens)


def context_tokens(body: Mapping[str, Any]) -> int:
    """Return prompt plus output tokens where the prompt came as token ids, else 0."""
    prompt = body.get("prompt")
    if not isinstance(prompt, list) or not prompt:
        return 0
    if isinstance(prompt[0], int):
        length = len(prompt)
    elif isinstance(prompt[0], list):
        length = max(map(len, prompt))
    else:
        return 0
    return length + int(body.get("max_tokens") or 0)


def sequences(body: Mapping[str, Any]) -> int:
    """Return how many sequences a request runs at once: choices times prompts."""
    prompt = body.get("prompt")
    count = 1
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], Sequence):
        count = len(prompt)  # strings, or lists of ids; a flat list of ids is one prompt
    return count * int(body.get("n") or 1)

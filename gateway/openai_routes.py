"""The OpenAI interface: models, chat, completions, embeddings, responses, rerank, classify."""

from collections.abc import Awaitable, Callable
from typing import Any

import fastapi
from starlette import responses

from gateway import assembly, catalog, resolve
from scheduler.contracts import errors, requests

_WISHES = """

Beside OpenAI's fields: `forebay_priority` (tier: interactive, standard, batch), `forebay_deadline_ms`,
`forebay_cache_hint` (requests that share a prefix), `forebay_version`, `forebay_adapter`; or the headers
`X-Forebay-Priority`, `X-Forebay-Deadline-Ms`, `X-Forebay-Cache-Hint`, `X-Forebay-Version`,
`X-Forebay-Adapter`.
A token that can't occur has `null` for a log probability, and an input without a finite vector has
`null` for an embedding beside its own `error`. An adapter may be named as `model:adapter`, too. The answer's
`x-request-id` (and `x-forebay-request-id`) is Forebay's own id; `x-ratelimit-*` tell what is left of
the minute's quotas, where there are any.
"""
_SUMMARIES = {
    requests.Endpoint.CHAT: "Answer a chat, streamed or whole.",
    requests.Endpoint.COMPLETIONS: "Continue a prompt (text or token ids), streamed or whole.",
    requests.Endpoint.EMBEDDINGS: "Embed texts or token ids.",
    requests.Endpoint.RESPONSES: "Answer items, streamed or whole, where the engine can; nothing is stored.",
    requests.Endpoint.RERANK: "Order documents by how well they answer a query.",
    requests.Endpoint.CLASSIFY: "Classify texts or token ids.",
}


def router(gateway: assembly.Gateway) -> fastapi.APIRouter:
    """Return the routes."""
    made = fastapi.APIRouter(tags=["openai"])

    @made.get("/v1/models", summary="List the models that this key may use.")
    async def list_models(request: fastapi.Request) -> dict[str, Any]:
        found = catalog.models(gateway.room, request.state.caller)
        return {"object": "list", "data": [item for model in found for item in model.openai()]}

    @made.get("/v1/models/{name:path}", summary="Describe one model.")
    async def one_model(request: fastapi.Request, name: str) -> dict[str, Any]:
        for model in catalog.models(gateway.room, request.state.caller):
            for item in model.openai():
                if item["id"] == name:
                    return item
        raise errors.ModelNotFound(
            f"model {resolve.short(name)} is not known here: see /v1/models", param="model"
        )

    for endpoint in requests.Endpoint:
        made.add_api_route(
            endpoint.value,
            _elsewhere(endpoint),
            methods=["POST"],
            summary=_SUMMARIES[endpoint],
            description=_SUMMARIES[endpoint] + _WISHES,
            response_class=responses.Response,
            openapi_extra={
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": {"type": "object"}}},
                }
            },
        )

    @made.api_route(
        requests.Endpoint.RESPONSES.value + "/{rest:path}",
        methods=["GET", "POST", "DELETE"],
        include_in_schema=False,
    )
    async def stored_response(rest: str) -> None:
        raise errors.NotFound(
            f"response {resolve.short(rest)} is not here: no response is stored, send its input again"
        )

    return made


def _elsewhere(endpoint: requests.Endpoint) -> Callable[[], Awaitable[None]]:
    """Return the route that documents what `hotpath` answers before FastAPI hears of it."""

    async def serve() -> None:
        raise errors.Internal("an inference route was asked past the gateway's own protocol")

    serve.__name__ = endpoint.name.lower()
    return serve

"""The gateway's HTTP application."""

from collections.abc import Sequence

import fastapi
from fastapi import exceptions as fastapi_exceptions
from starlette import exceptions as starlette_exceptions
from starlette import responses

from gateway import assembly, door, error_map, openai_routes
from scheduler.contracts import errors


def create(gateway: assembly.Gateway, routers: Sequence[fastapi.APIRouter] = ()) -> fastapi.FastAPI:
    """Return the application.

    Args:
        gateway: the running parts.
        routers: further routes (batch, accounting, admin); on every path of theirs
            ``request.state.caller`` is the authenticated `requests.Caller`.
    """
    app = fastapi.FastAPI(title="Forebay", version="1", docs_url=None, redoc_url=None)
    app.add_middleware(
        door.Door,
        authenticator=gateway.deps.authenticator,
        options=gateway.deps.settings,
        room=gateway.bodies,
    )
    for kind in (
        errors.ForebayError,
        fastapi_exceptions.RequestValidationError,
        starlette_exceptions.HTTPException,
        Exception,  # a surprise has OpenAI's shape too
    ):
        app.add_exception_handler(kind, _explain)
    app.include_router(openai_routes.router(gateway))

    @app.get("/health", summary="Whether this gateway knows the fleet.", tags=["operation"])
    async def health() -> responses.Response:
        gateway.room.view()
        return responses.JSONResponse({"status": "ok"})

    @app.get("/metrics", summary="Numbers for Prometheus.", tags=["operation"])
    async def show_metrics() -> responses.Response:
        return responses.Response(
            gateway.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    for router in routers:
        app.include_router(router)
    return app


async def _explain(request: fastapi.Request, error: Exception) -> responses.Response:
    return error_map.response(error_map.from_framework(error))

"""The gRPC interface, forebay.v1.Inference, on the same request path as HTTP."""

import dataclasses
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf import message as protobuf
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from gateway import (
    assembly,
    catalog,
    checks,
    error_map,
    grpc_embed,
    grpc_endings,
    resolve,
    settings,
    sse,
)
from scheduler.contracts import errors, frames, ids, quota, requests, tracing
from scheduler.contracts.v1 import forebay_pb2, forebay_pb2_grpc

SERVICE = "forebay.v1.Inference"
_METADATA_BYTES = 64 * 1024  # as of an HTTP head
_UNREAD_BYTES = 64 * 1024  # of an answer that gRPC sends ahead of its reader, at the least
Context = grpc.aio.ServicerContext[Any, Any]
Asked = tuple[tuple[requests.Endpoint, dict[str, Any]], resolve.Wishes]
_Answer = TypeVar("_Answer")
_Message = TypeVar("_Message", bound=protobuf.Message)


def options(table: settings.GatewaySettings) -> list[tuple[str, int]]:
    """Return the server's channel options.

    gRPC's own defaults end a call with GOAWAY ("too many pings") when a client that waits in silence
    pings more often than each 5 minutes; a queued request does just that.
    """
    return [
        ("grpc.max_receive_message_length", table.body_limit),
        ("grpc.max_metadata_size", _METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _METADATA_BYTES),
        ("grpc.max_concurrent_streams", table.grpc_streams),
        ("grpc.max_connection_idle_ms", int(table.idle_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", int(table.keepalive_min_ping_s * 1000)),
        ("grpc.keepalive_time_ms", int(table.keepalive_time_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(table.keepalive_timeout_s * 1000)),
        ("grpc.so_reuseport", int(table.workers > 1)),
        ("grpc.enable_http_proxy", 0),
    ]


class _Stream:
    """Turns DATA frames into TokenChunks on a gRPC stream."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._unsent: list[forebay_pb2.TokenChunk] = []
        self.limits: quota.Headers = ()
        self.begun = False

    def prompt(self, frame: frames.Frame, version: str) -> None:
        """Its client did not ask for the prompt's ids."""

    def data(self, frame: frames.Frame) -> bool:
        piece = sse.read(frame.payload)
        if piece.text or piece.finish_reason or frame.packed:
            self.begun = True
            self._unsent.append(
                forebay_pb2.TokenChunk(
                    text=piece.text, token_ids=frame.token_ids, finish_reason=piece.finish_reason
                )
            )
        return not self._unsent

    def quotas(self, told: quota.Headers) -> None:
        """Keep them for the end: the initial metadata is sent before anything is reserved."""
        self.limits = told

    async def drained(self) -> None:
        unsent, self._unsent = self._unsent, []
        for chunk in unsent:
            await self._context.write(chunk)

    def restart(self) -> None:
        """Nothing is collected here."""


class Inference(forebay_pb2_grpc.InferenceServicer):
    """The servicer. A cancellation is never swallowed: gRPC would leak the stream's memory."""

    def __init__(self, gateway: assembly.Gateway) -> None:
        self._gateway = gateway

    async def Generate(  # type: ignore[override]  # noqa: N802 - generated name; grpc.aio also takes a coroutine that writes
        self, request: forebay_pb2.GenerateRequest, context: Context
    ) -> None:
        """Stream an answer."""
        await self._explained(context, lambda: self._generate(request, context))

    async def _checked(
        self,
        read: Callable[[], "Asked"],
        size: int,
        context: Context,
        request_id: ids.RequestId,
        name: str,
    ) -> requests.InferenceRequest:
        """Return the request that ``read`` finds in a message; one that is none is counted.

        Args:
            read: called once it is known who asks.
            size: of the message, in bytes.
            context: the call's.
            request_id: the request's.
            name: of the call, in the log.
        """
        try:
            arrived_us = self._gateway.deps.clock.wall_us()
            metadata = _metadata(context)
            caller = await self._caller(context)
            (endpoint, body), wanted = await self._gateway.apart.do(size, lambda: _judged(read))
            wanted = dataclasses.replace(
                wanted,
                caller_request_id=metadata.get("x-request-id", "")[: resolve.MAX_ID_CHARS] or None,
                traceparent=tracing.parent(metadata.get("traceparent")),
            )
            source = resolve.Source(endpoint, body, caller, wanted, arrived_us)
            made = resolve.request(source, self._gateway.room.view(), request_id)
            return dataclasses.replace(made, size=size)
        except Exception as error:
            known = error_map.known(error)
            self._gateway.path.turned_away(known, request_id, name)
            # In the trailers: headers would tell the client not to try again by itself.
            known.limits = (*known.limits, *error_map.named(request_id).items())
            raise known from error

    async def _generate(self, message: forebay_pb2.GenerateRequest, context: Context) -> None:
        request_id = ids.RequestId(ids.uuid7())

        def read() -> Asked:
            asked = _readable(message)
            return openai_body(asked), wishes(asked)

        checked = await self._checked(read, _size(message), context, request_id, "grpc Generate")
        # Sent at once, so that a request that waits can be cancelled by its id.
        await context.send_initial_metadata(tuple(error_map.named(request_id).items()))
        stream = _Stream(context)
        try:
            end = await self._gateway.path.answer(checked, stream)
        except errors.ForebayError as error:
            error.limits = error.limits or stream.limits
            raise
        self._ends()
        context.set_trailing_metadata(stream.limits)
        used = forebay_pb2.Usage(
            prompt_tokens=end.prompt_tokens,
            cached_tokens=end.cached_tokens,
            completion_tokens=end.output_tokens,
        )
        await context.write(forebay_pb2.TokenChunk(usage=used))

    async def Embed(  # noqa: N802 - the generated base class names it
        self, request: forebay_pb2.EmbedRequest, context: Context
    ) -> forebay_pb2.EmbedResponse:
        """Embed texts or token ids."""

        async def embed() -> forebay_pb2.EmbedResponse:
            request_id = ids.RequestId(ids.uuid7())

            def read() -> Asked:
                message = _readable(request)
                return grpc_embed.openai_body(message), grpc_embed.wishes(message)

            checked = await self._checked(read, _size(request), context, request_id, "grpc Embed")
            await context.send_initial_metadata(tuple(error_map.named(request_id).items()))
            whole = grpc_embed.Whole()
            try:
                end = await self._gateway.path.answer(checked, whole)
            except errors.ForebayError as error:
                error.limits = error.limits or whole.limits
                raise
            context.set_trailing_metadata(whole.limits)
            return whole.response(end)

        return await self._explained(context, embed)

    async def Cancel(  # noqa: N802 - the generated base class names it
        self, request: forebay_pb2.CancelRequest, context: Context
    ) -> forebay_pb2.CancelResponse:
        """Cancel one of the caller's own requests."""

        async def cancel() -> forebay_pb2.CancelResponse:
            caller = await self._caller(context)
            # Owners of queues are asked for it, over links that a long word would break.
            request_id = resolve.bounded("request_id", _readable(request).request_id)
            done = await self._gateway.path.cancel(request_id or "", caller)
            return forebay_pb2.CancelResponse(cancelled=done)

        return await self._explained(context, cancel)

    async def ListModels(  # noqa: N802 - the generated base class names it
        self, request: forebay_pb2.ListModelsRequest, context: Context
    ) -> forebay_pb2.ListModelsResponse:
        """List what the caller may use."""

        async def models() -> forebay_pb2.ListModelsResponse:
            caller = await self._caller(context)
            return forebay_pb2.ListModelsResponse(
                models=[_info(model) for model in catalog.models(self._gateway.room, caller)]
            )

        return await self._explained(context, models)

    async def _explained(self, context: Context, call: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Run ``call``; its error becomes the status of the call. A cancellation passes."""
        try:
            answer = await call()
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            self._ends()
            await _abort(context, error_map.known(error))
        self._ends(_size(answer) if isinstance(answer, protobuf.Message) else 0)
        return answer

    def _ends(self, size: int = 0) -> None:
        """Let the call go if its client does not read the end of it, of ``size`` bytes."""
        table = self._gateway.deps.settings
        paced_s = (_UNREAD_BYTES + size) / table.body_bytes_per_s
        grpc_endings.within(table.client_stall_s + paced_s)

    async def _caller(self, context: Context) -> requests.Caller:
        credential = _metadata(context).get("authorization")
        return await self._gateway.deps.authenticator.authenticate(credential)


def openai_body(
    message: forebay_pb2.GenerateRequest,
) -> tuple[requests.Endpoint, dict[str, Any]]:
    """Return the OpenAI request that means the same.

    Raises:
        errors.BadRequest: not exactly one of prompt and messages, or no max_tokens.
    """
    if bool(message.prompt) == bool(message.messages):
        raise errors.BadRequest("prompt: give either prompt or messages", param="prompt")
    if message.max_tokens <= 0:
        raise errors.BadRequest("max_tokens: must be at least 1", param="max_tokens")
    if message.deadline_ms < 0:
        raise errors.BadRequest("deadline_ms: must be positive", param="deadline_ms")
    body: dict[str, Any] = {
        "model": message.model,
        "max_tokens": message.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    for name in ("temperature", "top_p"):
        if message.HasField(name):
            # A float32's own digits: 0.7, not 0.699999988079071.
            body[name] = float(f"{getattr(message, name):.7g}")
    if message.HasField("seed"):
        body["seed"] = message.seed
    if message.stop:
        body["stop"] = list(message.stop)
    if message.prompt:
        return requests.Endpoint.COMPLETIONS, {**body, "prompt": message.prompt}
    body["messages"] = [{"role": m.role, "content": m.content} for m in message.messages]
    return requests.Endpoint.CHAT, body


def wishes(message: forebay_pb2.GenerateRequest) -> resolve.Wishes:
    """Read Forebay's own fields of a request."""
    return resolve.Wishes(
        priority=resolve.bounded("priority", message.priority),
        deadline_ms=resolve.deadline("deadline_ms", message.deadline_ms or None),
        cache_hint=resolve.bounded("cache_hint", message.cache_hint),
        version=resolve.bounded("version", message.version),
        adapter=resolve.bounded("adapter", message.adapter),
    )


def _handlers(inference: Inference) -> grpc.GenericRpcHandler:
    """Return the service's handlers.

    Not the generated ones: they answer UNKNOWN, in protobuf's words, to a message that can't be read.
    """
    found: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Generate": grpc.unary_stream_rpc_method_handler(
            inference.Generate,
            _reader(forebay_pb2.GenerateRequest),
            forebay_pb2.TokenChunk.SerializeToString,
        ),
        "Embed": grpc.unary_unary_rpc_method_handler(
            inference.Embed,
            _reader(forebay_pb2.EmbedRequest),
            forebay_pb2.EmbedResponse.SerializeToString,
        ),
        "Cancel": grpc.unary_unary_rpc_method_handler(
            inference.Cancel,
            _reader(forebay_pb2.CancelRequest),
            forebay_pb2.CancelResponse.SerializeToString,
        ),
        "ListModels": grpc.unary_unary_rpc_method_handler(
            inference.ListModels,
            _reader(forebay_pb2.ListModelsRequest),
            forebay_pb2.ListModelsResponse.SerializeToString,
        ),
    }
    return grpc.method_handlers_generic_handler(SERVICE, found)


def _reader(kind: type[_Message]) -> Callable[[bytes], _Message | errors.BadRequest]:
    def read(raw: bytes) -> _Message | errors.BadRequest:
        try:
            return kind.FromString(raw)
        except protobuf.DecodeError as error:
            return errors.BadRequest(f"request: {str(error)[:200]}")

    return read


def _readable(asked: _Message | errors.BadRequest) -> _Message:
    """Return the message; raises the error that stands in its place."""
    if isinstance(asked, errors.BadRequest):
        raise asked
    return asked


def _size(asked: protobuf.Message | errors.BadRequest) -> int:
    return asked.ByteSize() if isinstance(asked, protobuf.Message) else 0


def _judged(read: Callable[[], Asked]) -> Asked:
    asked = read()
    checks.check(*asked[0])
    return asked


def server(gateway: assembly.Gateway) -> "Served":
    """Return the server with its services, not yet bound or started."""
    table = gateway.deps.settings
    made = grpc.aio.server(options=options(table), maximum_concurrent_rpcs=table.grpc_calls)
    made.add_generic_rpc_handlers((_handlers(Inference(gateway)),))
    state = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(state, made)
    names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, made)
    return Served(made, state)


class Served:
    """A gRPC server and its health service."""

    def __init__(self, made: grpc.aio.Server, state: Any) -> None:
        self.server = made
        self._health = state

    async def start(self, address: str) -> int:
        """Bind, start, report SERVING; returns the port.

        Raises:
            RuntimeError: the address can't be bound.
        """
        port = self.server.add_insecure_port(address)
        await self.server.start()
        for name in ("", SERVICE):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return port

    async def leave(self) -> None:
        """Report NOT_SERVING, so that balancers go elsewhere."""
        await self._health.enter_graceful_shutdown()


async def _abort(context: Context, error: errors.ForebayError) -> NoReturn:
    await context.abort(error_map.grpc_status(error), error.message, error_map.grpc_trailers(error))
    raise error  # abort always raises; this line tells the type checker so


def _metadata(context: Context) -> dict[str, str]:
    pairs: Iterable[tuple[str, str | bytes]] = context.invocation_metadata() or ()
    return {key: value for key, value in pairs if isinstance(value, str)}


def _info(model: catalog.Model) -> forebay_pb2.ModelInfo:
    return forebay_pb2.ModelInfo(
        name=model.name,
        versions=model.versions,
        adapters=model.adapters,
        context_length=model.context_length,
        tiers=model.tiers,
        status=model.status,
    )

"""One answer over HTTP: streamed or whole, and the end of it when the client leaves."""

import asyncio
import contextlib

from starlette import responses, types

from gateway import dispatch, error_map, requestpath, sse
from scheduler.contracts import frames, requests


class _Whole:
    """Collects an answer that is not streamed; nothing is sent before it is complete."""

    begun = False

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def data(self, frame: frames.Frame) -> bool:
        self._parts.append(frame.payload)
        return True

    async def drained(self) -> None:
        """Memory is never behind."""

    def restart(self) -> None:
        self._parts.clear()

    def body(self) -> bytes:
        return b"".join(self._parts)


class _Stream:
    """Sends SSE bytes as they come; the status line goes out with the first of them."""

    def __init__(self, send: types.Send, headers: dict[str, str]) -> None:
        self._send = send
        self._headers = headers
        self._unsent = b""
        self.begun = False

    def data(self, frame: frames.Frame) -> bool:
        self._unsent += frame.payload
        return not self._unsent

    async def drained(self) -> None:
        unsent, self._unsent = self._unsent, b""
        await self.put(unsent, more=True)

    def restart(self) -> None:
        """Nothing is collected here."""

    async def put(self, payload: bytes, *, more: bool) -> None:
        if not self.begun:
            self.begun = True
            raw = [(k.encode(), v.encode()) for k, v in self._headers.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": raw})
        await self._send({"type": "http.response.body", "body": payload, "more_body": more})


class Answer(responses.Response):
    """The response of an inference route: runs the request path while it watches the client."""

    def __init__(self, path: requestpath.RequestPath, request: requests.InferenceRequest) -> None:
        self.background = None
        self._path = path
        self._request = request

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        """Serve; returns early, with the replica told, if the client leaves."""
        if self._request.stream:
            await self._streamed(receive, send)
        else:
            await self._whole(scope, receive, send)

    async def _whole(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        outlet = _Whole()
        work = await self._run(outlet, receive)
        if work.cancelled():
            return
        request_id = self._request.request_id
        if (error := work.exception()) is not None:
            response = error_map.response(error_map.known(error), request_id)
        else:
            response = responses.Response(
                outlet.body(), 200, {"x-forebay-request-id": request_id}, "application/json"
            )
        await response(scope, receive, send)

    async def _streamed(self, receive: types.Receive, send: types.Send) -> None:
        request_id = self._request.request_id
        outlet = _Stream(send, {**sse.HEADERS, "x-forebay-request-id": request_id})
        work = await self._run(outlet, receive)
        if work.cancelled():
            return
        error = work.exception()
        if error is None:
            await outlet.put(b"", more=False)
        elif outlet.begun:
            await outlet.put(sse.error_event(error_map.known(error)), more=False)
        else:
            response = error_map.response(error_map.known(error), request_id)
            await response({"type": "http"}, receive, send)

    async def _run(
        self, outlet: dispatch.Outlet, receive: types.Receive
    ) -> "asyncio.Task[frames.End]":
        """Run the path until it ends or the client leaves; the task is done when this returns."""
        work = asyncio.create_task(self._path.answer(self._request, outlet))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            tasks = {work, gone}
            for task in tasks:
                task.cancel()  # nothing happens to one that is done
            await asyncio.wait(tasks)
        return work


async def _disconnected(receive: types.Receive) -> None:
    with contextlib.suppress(OSError):
        while (await receive())["type"] != "http.disconnect":
            pass

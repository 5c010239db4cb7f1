"""The HTTP side that workers and router share: bounded bodies, errors as OpenAI bodies, streams that end with the client.

Owns: `read_body`, `until_disconnect`, `first_event`, `EventStream`, `install_error_handlers`. What a client gets for a
failure:

    ApiError                        its status and body
    other ScdError                  500; the text is meant for people, so it is told
    unknown path, wrong method      404, 405
    anything else                   500 without details; the trace goes to the server's log

A stream whose first event fails has sent no header yet and gets the right status; a later failure ends the stream with an
`error` event and without `[DONE]`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from scd_trt.config import ScdError
from scd_trt.serving.metrics import CLIENT_CLOSED_REQUEST
from scd_trt.serving.openai_answer import encode
from scd_trt.serving.openai_schema import ApiError

logger = logging.getLogger(__name__)
T = TypeVar("T")


class ClientGoneError(Exception):
    """The client has closed the connection; there is nobody to answer."""


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """The body of a request.

    Raises:
        ApiError: status 413, before more than `max_bytes` are held.
        ClientGoneError: the client left before it had sent all of it.
    """
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > max_bytes:
                raise ApiError(413, f"The body is larger than {max_bytes} bytes", code="request_too_large")
            parts.append(part)
    except ClientDisconnect as error:
        raise ClientGoneError from error
    return b"".join(parts)


def json_response(data: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(encode(data), status_code=status, media_type="application/json", headers=dict(headers or {}))


def error_response(error: ApiError) -> Response:
    """The answer to a request that failed."""
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    return json_response(error.body(), status=error.status, headers=headers)


def as_api_error(error: Exception) -> ApiError:
    """The error as a client may see it."""
    if isinstance(error, ApiError):
        return error
    text = str(error) if isinstance(error, ScdError) else "The server failed to answer; its log says why"
    return ApiError(500, text, kind="server_error", code="internal_error")


def install_error_handlers(app: FastAPI) -> None:
    """Turn every failure of a handler into an OpenAI error body."""

    async def on_api_error(_: Request, error: Exception) -> Response:
        return error_response(as_api_error(error))

    async def on_http_error(_: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        return error_response(ApiError(status, str(getattr(error, "detail", error)), code="unknown_url"))

    async def on_gone(_: Request, _error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(ScdError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientGoneError, on_gone)
    app.add_exception_handler(Exception, on_api_error)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, but cancel it when the client goes away. The body must have been read.

    Raises:
        ClientGoneError: the client went first; `work` has been cancelled and has ended.
    """
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def first_event(events: AsyncGenerator[bytes, None], receive: Receive) -> bytes:
    """The first event, awaited before any header is sent: a failure before it is still an HTTP status.

    The generator is closed if that fails or the client goes away. The body of the request must have been read.
    """
    try:
        return await until_disconnect(receive, _next(events))
    except BaseException:
        await events.aclose()
        raise


async def _next(events: AsyncGenerator[bytes, None]) -> bytes:
    return await events.__anext__()


class EventStream(Response):
    """Server-sent events: `first`, then those of a generator, which is closed when the client goes away.

    Nothing is buffered here: the next event is asked for when the previous one has been handed to the socket.
    """

    media_type = "text/event-stream"

    def __init__(
        self, first: bytes, events: AsyncGenerator[bytes, None], *, headers: Mapping[str, str] | None = None
    ) -> None:
        self._first = first
        self._events = events
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await until_disconnect(receive, self._send(send))
        except ClientGoneError:
            logger.debug("client left during a stream")
        finally:
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

"""The end of a worker that was asked to stop: what it holds is finished, what is new is refused, then it leaves.

Owns: `Admission`, which knows the requests under way and lets only those in that belong to a transfer the worker holds once
it drains; `DrainingServer`, which turns the first signal into a drain and the second into the end of the process.

A refused request is answered 503 with code `draining`: nothing of it was begun, and a router tries another worker.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from scd_trt.serving.metrics import ENDPOINTS, ServerMetrics
from scd_trt.serving.openai_http import error_response
from scd_trt.serving.openai_schema import ApiError
from scd_trt.serving.worker_clients import DRAINING_CODE, TRANSFER_HEADER

RETRY_AFTER_S = 1
_LOOK_S = 0.05


class Admission:
    """Who may still enter. For one event loop.

    Args:
        holds: True for the id of a transfer that the worker has yet to finish.
        metrics: refusals are counted there.
    """

    def __init__(self, holds: Callable[[str], bool], *, metrics: ServerMetrics) -> None:
        self.is_draining = False
        self._holds = holds
        self._metrics = metrics
        self._num_active = 0
        self._quiet_since_s = time.monotonic()

    def close(self) -> None:
        """From now on nothing new is let in."""
        self.is_draining = True
        self._quiet_since_s = time.monotonic()

    async def quiet(self, *, for_s: float, timeout_s: float) -> bool:
        """Wait until no request has been under way for `for_s`; False where that did not come within `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while self._num_active or time.monotonic() - self._quiet_since_s < for_s:
            if time.monotonic() >= deadline_s:
                return False
            await asyncio.sleep(_LOOK_S)
        return True

    async def pass_on(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """One request to a generating endpoint."""
        if self.is_draining and not self._holds(Headers(scope=scope).get(TRANSFER_HEADER, "")):
            self._metrics.count_request(scope["path"], status=503, seconds=0.0)
            message = "This worker shuts down and takes no new requests; ask another one"
            error = ApiError(503, message, kind="server_error", code=DRAINING_CODE, retry_after_s=RETRY_AFTER_S)
            await error_response(error)(scope, receive, send)
            return
        self._num_active += 1
        try:
            await app(scope, receive, send)
        finally:
            self._num_active -= 1
            self._quiet_since_s = time.monotonic()


class AdmissionLayer:
    """ASGI layer that asks an `Admission` about requests to generating endpoints; others pass."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in ENDPOINTS:
            await self._admission.pass_on(self._app, scope, receive, send)
        else:
            await self._app(scope, receive, send)


class DrainingServer(uvicorn.Server):
    """Runs `drain` at the first SIGTERM or SIGINT, then stops listening and returns; the second signal ends the process.

    uvicorn itself raises the signal again when all is done, which would end the process before its owner has cleaned up.
    """

    def __init__(self, config: uvicorn.Config, drain: Callable[[], Coroutine[Any, Any, None]]) -> None:
        super().__init__(config)
        self._drain = drain
        self._draining: asyncio.Task[None] | None = None
        self._is_asked_to_stop = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal has come."""
        if self._is_asked_to_stop:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        self._is_asked_to_stop = True

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second."""
        if self._is_asked_to_stop and self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        if self._draining is not None and self._draining.done():
            self._draining.result()
            self.should_exit = True
        return await super().on_tick(counter)

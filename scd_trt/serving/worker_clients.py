"""The workers as the router sees them over HTTP: requests out, answers or reasons back.

`DecodeClient` forwards a request and hands its answer on as it comes. A worker's failures, before or after the first byte,
become `DecodeFailedError` (502: unreachable, broken connection, nonsense; 504: too slow); too many requests at once are an
`ApiError` 503; an error status of the worker itself is `DecodeRefusedError`, which keeps status, body and `Retry-After` as
they were. Nothing is read ahead: the worker is slowed down by a slow client.

`PrefillClient` runs a prompt for the sake of its codes. Its failures are reasons, never exceptions: nobody waits for a
prefill but the router, and the answer does not depend on it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
from fastapi.responses import Response

from scd_trt.serving.decision import prefill_request
from scd_trt.serving.handover import RouterReason, cached_tokens
from scd_trt.serving.openai_schema import ApiError

logger = logging.getLogger(__name__)

TRANSFER_HEADER = "x-scd-transfer-id"
DRAINING_CODE = "draining"
CONNECT_TIMEOUT_S = 2.0
HEALTH_TIMEOUT_S = 2.0
MAX_EVENT_BYTES = 1 << 20
_END_OF_EVENT = b"\n\n"


async def is_alive(client: httpx.AsyncClient, url: str) -> bool:
    """True where GET `url`/health answers 200 soon."""
    try:
        response = await client.get(f"{url}/health", timeout=HEALTH_TIMEOUT_S)
    except httpx.TransportError:
        return False
    return response.status_code == httpx.codes.OK


class DecodeFailedError(ApiError):
    """The decode worker gave no answer, or no whole one."""


class DecodeRefusedError(Exception):
    """The decode worker answered with an error status; it is passed on unchanged."""

    def __init__(self, status: int, body: bytes, retry_after: str | None) -> None:
        super().__init__(f"the decode worker answered {status}")
        self.status = status
        self.body = body
        self.retry_after = retry_after

    @property
    def is_draining(self) -> bool:
        """True where the worker is about to stop."""
        return self.status == httpx.codes.SERVICE_UNAVAILABLE and _error_code(self.body) == DRAINING_CODE

    def response(self) -> Response:
        """The same answer for our client."""
        headers = {} if self.retry_after is None else {"Retry-After": self.retry_after}
        return Response(self.body, status_code=self.status, media_type="application/json", headers=headers)


class DecodeClient:
    """Requests to decode workers.

    Args:
        client: not closed here.
        timeout_s: longest silence of a worker.
    """

    def __init__(self, client: httpx.AsyncClient, *, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s

    @asynccontextmanager
    async def answer(
        self, url: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[httpx.Response]:
        """Forward a request to the worker at `url`; the answer's body has not been read yet.

        Raises:
            ApiError, DecodeRefusedError: see the module; also while the body is read inside the block.
        """
        all_headers = {**headers, "content-type": "application/json"}
        try:
            async with self._client.stream(
                "POST", url + path, content=body, headers=all_headers, timeout=_limits(self._timeout_s)
            ) as response:
                if response.status_code != httpx.codes.OK:
                    retry_after = response.headers.get("retry-after")
                    raise DecodeRefusedError(response.status_code, await response.aread(), retry_after)
                yield response
        except httpx.PoolTimeout as error:
            message = "The router has too many requests under way"
            raise ApiError(503, message, kind="server_error", code="router_busy", retry_after_s=1) from error
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise decode_failed(f"cannot be reached at {url}: {error}") from error
        except httpx.TimeoutException as error:
            raise decode_failed(f"was silent for {self._timeout_s:g} s", status=504) from error
        except httpx.TransportError as error:
            raise decode_failed(f"closed the connection before its answer was complete: {error}") from error


async def events(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Whole server-sent events, their blank line included, each as soon as it is complete.

    Raises:
        ApiError: an event of more than `MAX_EVENT_BYTES`.
    """
    waiting = b""
    async for part in response.aiter_bytes():
        *whole, waiting = (waiting + part).split(_END_OF_EVENT)
        for event in whole:
            yield event + _END_OF_EVENT
        if len(waiting) > MAX_EVENT_BYTES:
            raise decode_failed(f"sent an event of more than {MAX_EVENT_BYTES} bytes")
    if waiting:
        yield waiting


def decode_failed(what: str, *, status: int = 502) -> DecodeFailedError:
    """The error that a client gets when the decode worker fails."""
    return DecodeFailedError(status, f"The decode worker {what}", kind="server_error", code="decode_unavailable")


@dataclass(frozen=True)
class PrefillResult:
    """How a prefill went: None or the reason why it failed, its time, and the prompt tokens that were cached there."""

    reason: RouterReason | None
    seconds: float
    cached_tokens: int = 0


class PrefillClient:
    """Requests to prefill workers.

    Args:
        client: not closed here.
        model: the name that the workers know.
    """

    def __init__(self, client: httpx.AsyncClient, *, model: str) -> None:
        self._client = client
        self._model = model

    async def run(
        self, url: str, prompt: Sequence[int], *, salt: str, headers: Mapping[str, str], timeout_s: float
    ) -> PrefillResult:
        """Run a prompt on the worker at `url`, with one token of answer."""
        # less than a tenth of what `json` takes for thousands of token ids; the event loop stands still meanwhile
        body = msgspec.json.encode(prefill_request(prompt, model=self._model, salt=salt))
        all_headers = {**headers, "content-type": "application/json"}
        begin_s = time.perf_counter()
        try:
            posting = self._client.post(
                f"{url}/v1/completions", content=body, headers=all_headers, timeout=_limits(timeout_s)
            )
            response = await asyncio.wait_for(posting, timeout_s)
        except (httpx.TransportError, asyncio.TimeoutError) as error:
            logger.warning("prefill worker %s: %s %s", url, type(error).__name__, error)
            return PrefillResult(_transport_reason(error), time.perf_counter() - begin_s)
        reason = _status_reason(response)
        if reason is not None:
            logger.warning("prefill worker %s answered %d: %s", url, response.status_code, response.text[:500])
        return PrefillResult(reason, time.perf_counter() - begin_s, cached_tokens(_usage(response)))


def _error_code(body: bytes) -> Any:
    try:
        return json.loads(body)["error"]["code"]
    except (ValueError, TypeError, KeyError):
        return None


def _transport_reason(error: Exception) -> RouterReason:
    if isinstance(error, httpx.PoolTimeout):  # the router's own limit, not the worker's fault
        return "prefill_busy"
    if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
        return "prefill_unreachable"
    if isinstance(error, (httpx.TimeoutException, asyncio.TimeoutError)):
        return "prefill_timeout"
    return "prefill_died"


def _status_reason(response: httpx.Response) -> RouterReason | None:
    if response.status_code == httpx.codes.OK:
        return None
    if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        return "prefill_busy"
    return "prefill_error" if response.is_server_error else "prefill_refused"


def _usage(response: httpx.Response) -> Mapping[str, Any] | None:
    try:
        answer = response.json()
    except ValueError:
        return None
    usage = answer.get("usage") if isinstance(answer, dict) else None
    return usage if isinstance(usage, dict) else None


def _limits(timeout_s: float) -> httpx.Timeout:
    return httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S))

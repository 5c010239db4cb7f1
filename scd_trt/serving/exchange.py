"""One request on its way through the router: choose workers, bring the codes, forward it, pass the answer on, settle.

Until the first byte of an answer has come nothing has reached the client, so a decode worker that cannot be reached, breaks
off or is busy is replaced by another one: at most `max_retries` times, each worker once, all within `request_timeout_s`.
Afterwards a failure ends the stream with an `error` event. Every try brings the codes anew, to the worker that will answer.

Bringing codes may take half of the time that is left: the rest belongs to the decode worker, which can do without them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi.responses import Response

from scd_trt.serving import openai_answer, worker_clients
from scd_trt.serving.api import FIRST_TOKEN_HEADER
from scd_trt.serving.courier import Courier, Prompted
from scd_trt.serving.handover import Handover
from scd_trt.serving.metrics import ServerMetrics
from scd_trt.serving.openai_http import json_response
from scd_trt.serving.openai_schema import ApiError, GenerationRequest
from scd_trt.serving.rotation import Rotation, Worker
from scd_trt.serving.routes import Route
from scd_trt.serving.worker_clients import (
    TRANSFER_HEADER,
    DecodeClient,
    DecodeFailedError,
    DecodeRefusedError,
    decode_failed,
)

BUSY_STATUSES = (502, 503)
BRINGING_SHARE = 0.5
T = TypeVar("T")


@dataclass(frozen=True)
class Pair:
    """The parts of the router that serve one pair."""

    route: Route
    prefill: Rotation
    decode: Rotation
    courier: Courier
    client: DecodeClient


@dataclass(frozen=True)
class Forwarded:
    """A request as it came."""

    path: str
    body: bytes
    request: GenerationRequest


@dataclass
class Exchange:
    """One request. Exactly one of `whole` and `events` is used, once."""

    pair: Pair
    metrics: ServerMetrics
    forwarded: Forwarded
    prompted: Prompted
    handover: Handover
    _tried: set[str] = field(default_factory=set)

    async def whole(self) -> Response:
        """An answer in one piece, with `usage.scd`."""
        while True:
            attempt = self._begin()
            try:
                return await self._in_time(attempt.whole())
            except (ApiError, DecodeRefusedError) as error:
                if not self._tries_again(attempt.decode, error):
                    raise

    async def events(self) -> AsyncGenerator[bytes, None]:
        """A streamed answer: its events unchanged, but for `usage.scd` in the chunk that carries usage."""
        while True:
            attempt, is_open = self._begin(), False
            try:
                async with aclosing(attempt.events()) as events:
                    first = await self._in_time(_next(events))
                    is_open = True
                    yield first
                    async for event in events:
                        yield event
                return
            except ApiError as error:
                if is_open:
                    # The status line is out: the error can only be told inside the stream, and without [DONE].
                    self._note(attempt.decode, error)
                    yield openai_answer.event(error.body())
                    return
                if not self._tries_again(attempt.decode, error):
                    raise
            except DecodeRefusedError as error:
                if not self._tries_again(attempt.decode, error):
                    raise

    def _begin(self) -> _Attempt:
        """The next try, on a worker that was not tried yet."""
        if self._tried:
            self.handover = Handover(start_s=self.handover.start_s)
        self.handover.prompt_tokens = self.prompted.num_tokens
        return _Attempt(self, self._worker(), timeout_s=BRINGING_SHARE * self._left_s())

    def _worker(self) -> Worker:
        keys, now_s = self.prompted.keys, time.monotonic()
        worker = self.pair.decode.pick(keys, now_s=now_s, exclude=self._tried)
        if worker is None and not self._tried:
            worker = self.pair.decode.pick_any(keys, now_s=now_s)
        if worker is None:
            message = f"No decode worker of {self.pair.route.model!r} is registered"
            raise ApiError(503, message, kind="server_error", code="no_decode_worker", retry_after_s=1)
        self._tried.add(worker.url)
        return worker

    def _tries_again(self, worker: Worker, error: ApiError | DecodeRefusedError) -> bool:
        """Note the failure; True where another worker is to be tried."""
        is_fault = self._note(worker, error)
        is_busy = isinstance(error, DecodeRefusedError) and error.status in BUSY_STATUSES
        if not (is_fault or is_busy) or len(self._tried) > self.pair.route.config.servers.router.max_retries:
            return False
        others = self.pair.decode.pick(self.prompted.keys, now_s=time.monotonic(), exclude=self._tried)
        if others is None or self._left_s() <= 0:
            return False
        self.metrics.count_retry("decode")
        return True

    def _note(self, worker: Worker, error: ApiError | DecodeRefusedError) -> bool:
        """Take a worker that failed or is about to stop out of rotation; True where it was its fault."""
        is_leaving = isinstance(error, DecodeRefusedError) and error.is_draining
        if not is_leaving and not isinstance(error, DecodeFailedError):
            return False
        self.pair.decode.failed(worker, now_s=time.monotonic())
        return True

    def _left_s(self) -> float:
        return self.pair.route.config.servers.router.request_timeout_s - self.handover.elapsed_s()

    async def _in_time(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await asyncio.wait_for(work, max(0.0, self._left_s()))
        except asyncio.TimeoutError as error:
            timeout_s = self.pair.route.config.servers.router.request_timeout_s
            raise decode_failed(f"gave no answer within {timeout_s:g} s", status=504) from error


class _Attempt:
    """One try of a request, with one decode worker.

    Args:
        timeout_s: for bringing the codes.
    """

    def __init__(self, exchange: Exchange, decode: Worker, *, timeout_s: float) -> None:
        self.decode = decode
        self._pair = exchange.pair
        self._metrics = exchange.metrics
        self._forwarded = exchange.forwarded
        self._prompted = exchange.prompted
        self._handover = exchange.handover
        self._timeout_s = timeout_s
        self._forwarded_s = 0.0

    async def whole(self) -> Response:
        is_settled = False
        try:
            with self.decode.busy():
                await self._bring()
                async with self._answer() as response:
                    answer, usage = _with_usage(await response.aread())
            self._pair.decode.succeeded(self.decode)
            first_token_ms = _as_float(response.headers.get(FIRST_TOKEN_HEADER))
            if first_token_ms is not None:
                self._note_first_token(self._forwarded_s + first_token_ms / 1000)
            is_settled = True
            usage["scd"] = await self._settle(usage)
            return json_response(answer)
        finally:
            self._leave(is_settled=is_settled)

    async def events(self) -> AsyncGenerator[bytes, None]:
        is_open = is_settled = False
        include_usage = self._forwarded.request.include_usage
        try:
            with self.decode.busy():
                await self._bring()
                async with self._answer() as response, aclosing(worker_clients.events(response)) as events:
                    async for event in events:
                        if not is_open:
                            self._note_first_token(self._handover.elapsed_s())
                            self._pair.decode.succeeded(self.decode)
                            is_open = True
                        chunk = _usage_chunk(event) if include_usage else None
                        if chunk is None:
                            yield event
                            continue
                        is_settled = True
                        chunk["usage"]["scd"] = await self._settle(chunk["usage"])
                        yield openai_answer.event(chunk)
            if not is_open:
                raise decode_failed("sent an empty stream")
        finally:
            self._leave(is_settled=is_settled)

    async def _bring(self) -> None:
        await self._pair.courier.bring(self._handover, self._prompted, self.decode, timeout_s=self._timeout_s)
        self._forwarded_s = self._handover.elapsed_s()

    def _answer(self) -> Any:
        headers = self._prompted.trace.next_hop() | {TRANSFER_HEADER: self._handover.transfer_id}
        return self._pair.client.answer(self.decode.url, self._forwarded.path, self._forwarded.body, headers)

    async def _settle(self, usage: dict[str, Any] | None) -> dict[str, Any]:
        return await self._pair.courier.settle(self._handover, self._prompted, self.decode, usage=usage)

    def _leave(self, *, is_settled: bool) -> None:
        """Nobody waits for the account: the client has left, has got all it asked for, or is served by another try."""
        if not is_settled:
            self._pair.courier.settle_soon(self._handover, self._prompted, self.decode)

    def _note_first_token(self, seconds: float) -> None:
        self._handover.stages_s["first_token"] = seconds
        self._handover.own_prefill_s = seconds - self._forwarded_s
        self._metrics.observe_first_token(self._forwarded.path, seconds)


async def _next(events: AsyncGenerator[bytes, None]) -> bytes:
    return await events.__anext__()


def _with_usage(body: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """An answer in one piece, and its usage.

    Raises:
        DecodeFailedError: it is no JSON object, or has no usage.
    """
    try:
        answer = json.loads(body)
    except ValueError as error:
        raise decode_failed(f"sent an answer that is not JSON: {error}") from error
    if not isinstance(answer, dict) or not isinstance(answer.get("usage"), dict):
        raise decode_failed("sent an answer without usage")
    return answer, answer["usage"]


def _usage_chunk(event: bytes) -> dict[str, Any] | None:
    """The chunk of this event, if it is the one that a stream's usage comes in."""
    if b'"usage"' not in event or not event.startswith(b"data:"):
        return None
    try:
        chunk = json.loads(event.removeprefix(b"data:"))
    except ValueError:
        return None
    is_last = isinstance(chunk, dict) and chunk.get("choices") == [] and isinstance(chunk.get("usage"), dict)
    return chunk if is_last else None


def _as_float(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None

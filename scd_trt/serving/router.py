"""The endpoint that clients talk to: brings a prompt's codes to the decode worker, then lets it answer.

    POST /v1/completions  /v1/chat/completions     forwarded to the decode worker as they came
    GET  /v1/models  /version  /metrics
    GET  /health     200 while the decode worker is alive ("ok", or "degraded" without prefill worker), else 503

Owns: the order of one request (`courier.Courier`, then the decode worker), the pass-through of its answer, and `usage.scd`,
which is added to the usage of an answer in one piece and to the last chunk of a stream that carries usage. A stream without
usage is passed on byte for byte. The transfer id is always in the header `x-scd-transfer-id`. `traceparent` and
`tracestate` are passed on to both workers.

Without codes the decode worker prefills by itself: the prefill worker being down, slow or wrong costs time, never the
answer. The decode worker's own refusals (400, 503 with `Retry-After`, ...) reach the client unchanged; a decode worker
that cannot be reached is 502, one that does not answer in time 504. A client that leaves cancels the requests to both.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from scd_trt import __version__
from scd_trt.config import DecisionSettings, PairConfig
from scd_trt.serving import openai_answer, worker_clients
from scd_trt.serving.api import FIRST_TOKEN_HEADER, install_information
from scd_trt.serving.courier import Courier
from scd_trt.serving.handover import CodeTerms, Handover
from scd_trt.serving.metrics import HttpMetrics, ServerMetrics
from scd_trt.serving.openai_http import (
    EventStream,
    error_response,
    first_event,
    install_error_handlers,
    json_response,
    read_body,
    until_disconnect,
)
from scd_trt.serving.openai_schema import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    check_model,
    parse_request,
)
from scd_trt.serving.prompts import Tokenizer, prompt_tokens
from scd_trt.serving.worker_clients import DecodeClient, DecodeRefusedError, decode_failed, worker_url
from scd_trt.transfer.control import ControlClient

TRANSFER_HEADER = "x-scd-transfer-id"
TRACE_HEADERS = ("traceparent", "tracestate")
MAX_TRACE_HEADER_CHARS = 512
MAX_CONNECTIONS = 1024
# uvicorn closes idle connections after 5 s; ours leave first, so that no request meets a connection being closed.
KEEPALIVE_S = 2.0


def create_router(
    config: PairConfig,
    *,
    tokenizer: Tokenizer,
    terms: CodeTerms,
    metrics: ServerMetrics,
    settings: DecisionSettings = DecisionSettings(),
) -> FastAPI:
    """The application of the router; its connections open on first use and close with the application.

    Args:
        tokenizer: the consumer's.
        terms: of the translator that both workers have loaded.
        metrics: made with `fallback_reasons=handover.REASONS`.
    """
    client = httpx.AsyncClient(
        limits=httpx.Limits(max_connections=MAX_CONNECTIONS, keepalive_expiry=KEEPALIVE_S),
        # Workers are addressed directly, whatever proxy the environment names.
        trust_env=False,
    )
    decode = config.servers.decode
    control = ControlClient(f"{decode.host}:{decode.control_port}", config.control)
    courier = Courier(config, terms=terms, settings=settings, client=client, control=control, metrics=metrics)
    router = _Router(config, tokenizer=tokenizer, client=client, courier=courier, metrics=metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await courier.close()
        await client.aclose()
        await control.close()

    app = FastAPI(
        title="scd-trt router", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None
    )
    app.add_middleware(HttpMetrics, metrics=metrics)
    install_error_handlers(app)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await router.answer(request, CompletionRequest)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await router.answer(request, ChatRequest)

    @app.get("/health")
    async def health() -> Response:
        return await router.health()

    install_information(app, model_id=config.name, metrics=metrics)
    return app


class _Router:
    """Handles requests; one per application."""

    def __init__(
        self,
        config: PairConfig,
        *,
        tokenizer: Tokenizer,
        client: httpx.AsyncClient,
        courier: Courier,
        metrics: ServerMetrics,
    ) -> None:
        servers = config.servers
        self._model_id = config.name
        self._max_request_bytes = servers.router.max_request_bytes
        self._tokenizer = tokenizer
        self._client = client
        self._courier = courier
        self._metrics = metrics
        self._prefill_url = worker_url(servers.prefill.host, servers.prefill.port)
        decode_url = worker_url(servers.decode.host, servers.decode.port)
        self._decode = DecodeClient(client, decode_url, timeout_s=servers.router.request_timeout_s)

    async def health(self) -> Response:
        """Alive while the decode worker is."""
        decode, prefill = await asyncio.gather(
            self._decode.is_alive(), worker_clients.is_alive(self._client, self._prefill_url)
        )
        status = "unavailable" if not decode else "ok" if prefill else "degraded"
        return json_response({"status": status, "decode": decode, "prefill": prefill}, status=200 if decode else 503)

    async def answer(self, http: Request, schema: type[CompletionRequest | ChatRequest]) -> Response:
        """Answer one request."""
        handover = Handover()
        try:
            response = await self._answer(http, schema, handover)
        except ApiError as error:
            response = error_response(error)
        except DecodeRefusedError as refused:
            response = refused.response()
        response.headers[TRANSFER_HEADER] = handover.transfer_id
        return response

    async def _answer(
        self, http: Request, schema: type[CompletionRequest | ChatRequest], handover: Handover
    ) -> Response:
        body = await read_body(http, max_bytes=self._max_request_bytes)
        request = parse_request(schema, body)
        check_model(request.model, self._model_id)
        prompts = await run_in_threadpool(prompt_tokens, request, self._tokenizer)
        handover.prompt_tokens = sum(map(len, prompts))
        exchange = _Exchange(
            decode=self._decode,
            courier=self._courier,
            metrics=self._metrics,
            path=http.url.path,
            body=body,
            headers=_passed_on(http.headers) | {TRANSFER_HEADER: handover.transfer_id},
            request=request,
            prompts=prompts,
            handover=handover,
        )
        if not request.stream:
            return await until_disconnect(http.receive, exchange.whole())
        events = exchange.events()
        return EventStream(await first_event(events, http.receive), events)


@dataclass
class _Exchange:
    """One request: bring its codes, forward it, pass the answer on, settle the account."""

    decode: DecodeClient
    courier: Courier
    metrics: ServerMetrics
    path: str
    body: bytes
    headers: Mapping[str, str]
    request: GenerationRequest
    prompts: list[list[int]]
    handover: Handover
    _brought_s: float = 0.0

    async def whole(self) -> Response:
        """An answer in one piece, with `usage.scd`."""
        usage = None
        try:
            await self._bring()
            async with self.decode.answer(self.path, self.body, self.headers) as response:
                answer, usage = _with_usage(await response.aread())
            first_token_ms = _as_float(response.headers.get(FIRST_TOKEN_HEADER))
            if first_token_ms is not None:
                self._note_first_token(self._brought_s + first_token_ms / 1000)
        finally:
            summary = await self.courier.settle(self.handover, usage=usage)
        usage["scd"] = summary
        return json_response(answer)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """A streamed answer: its events unchanged, but for `usage.scd` in the chunk that carries usage."""
        is_open = is_settled = False
        try:
            await self._bring()
            async with (
                self.decode.answer(self.path, self.body, self.headers) as response,
                aclosing(worker_clients.events(response)) as events,
            ):
                async for event in events:
                    if not is_open:
                        self._note_first_token(self.handover.elapsed_s())
                        is_open = True
                    chunk = _usage_chunk(event) if self.request.include_usage else None
                    if chunk is None:
                        yield event
                        continue
                    is_settled = True
                    chunk["usage"]["scd"] = await self.courier.settle(self.handover, usage=chunk["usage"])
                    yield openai_answer.event(chunk)
            if not is_open:
                raise decode_failed("sent an empty stream")
        except ApiError as error:
            if not is_open:
                raise
            # The status line is out: the error can only be told inside the stream, and without [DONE].
            yield openai_answer.event(error.body())
        finally:
            if not is_settled:
                await self.courier.settle(self.handover, usage=None)

    async def _bring(self) -> None:
        salt = self.request.cache_salt or ""
        await self.courier.bring(self.handover, self.prompts, salt=salt, headers=self.headers)
        self._brought_s = self.handover.elapsed_s()

    def _note_first_token(self, seconds: float) -> None:
        self.handover.stages_s["first_token"] = seconds
        self.metrics.observe_first_token(self.path, seconds)


def _with_usage(body: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """An answer in one piece, and its usage.

    Raises:
        ApiError: status 502: it is no JSON object, or has no usage.
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


def _passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    found = {name: headers[name] for name in TRACE_HEADERS if name in headers}
    return {name: value for name, value in found.items() if len(value) <= MAX_TRACE_HEADER_CHARS}


def _as_float(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None

"""The endpoint that clients talk to: brings a prompt's codes to a decode worker, then lets it answer.

    POST /v1/completions  /v1/chat/completions     forwarded to a decode worker as they came; `model` chooses the pair
    GET  /v1/models  /version  /metrics
    GET  /health     asks the workers: 200 while each pair has a live decode worker ("ok", or "degraded" without a prefill
                     worker), else 503
    GET  /ready      200 while each pair has workers of both roles in rotation, else 503; asks nobody

and, for pairs with `cluster_name`, the storage of TensorRT-LLM's discovery (`discovery.py`).

Owns the application: pairs, their rotations, health checks, and the passage of a client's request to its `Exchange`.
`usage.scd` is added to the usage of an answer in one piece and to the last chunk of a stream that carries usage. A stream
without usage is passed on byte for byte, no faster than the client reads. The transfer id is always in the header
`x-scd-transfer-id`. The client's W3C trace goes on to every worker that is asked.

Without codes the decode worker prefills by itself: a prefill worker being down, slow or wrong costs time, never the answer.
A decode worker's own refusals (400, 503 with `Retry-After`, ...) reach the client unchanged where no other worker can take
the request; one that cannot be reached is 502, one that does not answer in time 504. A client that leaves cancels the
requests to all workers that work for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from scd_trt import __version__
from scd_trt.serving.api import install_information
from scd_trt.serving.courier import Courier, Prompted
from scd_trt.serving.discovery import Cluster, install_storage
from scd_trt.serving.exchange import Exchange, Forwarded, Pair
from scd_trt.serving.handover import Handover
from scd_trt.serving.health import HealthWatch
from scd_trt.serving.metrics import HttpMetrics, ServerMetrics, WorkerRole
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
from scd_trt.serving.prompts import is_quick, prompt_tokens
from scd_trt.serving.rotation import Rotation
from scd_trt.serving.routes import Route, check_together
from scd_trt.serving.trace_context import TraceContext
from scd_trt.serving.worker_clients import TRANSFER_HEADER, DecodeClient, DecodeRefusedError
from scd_trt.transfer.wire import new_transfer_id

MAX_CONNECTIONS = 1024
# uvicorn closes idle connections after 5 s; ours leave first, so that no request meets a connection being closed.
KEEPALIVE_S = 2.0
SWEEP_INTERVAL_S = 1.0


def create_router(routes: Sequence[Route], *, metrics: ServerMetrics) -> FastAPI:
    """The application of the router; its connections open on first use and close with the application.

    Args:
        routes: one per pair; what concerns the process (request size, health checks) is taken from the first.
        metrics: made with `fallback_reasons=handover.REASONS`.

    Raises:
        RouteError: two pairs have one name.
    """
    check_together(routes)
    client, checking = _http_client(), _http_client()
    pairs = {route.model: _pair(route, client=client, metrics=metrics) for route in routes}
    clusters = _clusters(pairs.values())
    prefill, decode = [pair.prefill for pair in pairs.values()], [pair.decode for pair in pairs.values()]
    settings = routes[0].config.servers.router
    watch = HealthWatch([*prefill, *decode], client=checking, interval_s=settings.health_interval_s)
    router = _Router(pairs, watch=watch, metrics=metrics, max_request_bytes=settings.max_request_bytes)
    _show_workers(metrics, "prefill", prefill)
    _show_workers(metrics, "decode", decode)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        timers = [asyncio.create_task(watch.run()), asyncio.create_task(_sweep(clusters))]
        yield
        for timer in timers:
            timer.cancel()
        await asyncio.gather(*timers, return_exceptions=True)
        await watch.close()
        for pair in pairs.values():
            await pair.courier.close()
        await client.aclose()
        await checking.aclose()

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

    @app.get("/ready")
    async def ready() -> Response:
        return router.ready()

    if clusters:
        install_storage(app, clusters)
    install_information(app, model_ids=list(pairs), metrics=metrics)
    return app


class _Router:
    """Handles requests; one per application."""

    def __init__(
        self, pairs: dict[str, Pair], *, watch: HealthWatch, metrics: ServerMetrics, max_request_bytes: int
    ) -> None:
        self._pairs = pairs
        self._watch = watch
        self._metrics = metrics
        self._max_request_bytes = max_request_bytes

    async def health(self) -> Response:
        """Alive while decode workers are."""
        await self._watch.check()
        alive = {
            role: all(any(worker.answers_checks for worker in getattr(pair, role).workers) for pair in self._all())
            for role in ("decode", "prefill")
        }
        status = "unavailable" if not alive["decode"] else "ok" if alive["prefill"] else "degraded"
        return json_response({"status": status, **alive}, status=200 if alive["decode"] else 503)

    def ready(self) -> Response:
        """Ready while codes can be brought to every pair's decode workers."""
        now_s = time.monotonic()
        numbers = {
            pair.route.model: {"decode": pair.decode.num_up(now_s), "prefill": pair.prefill.num_up(now_s)}
            for pair in self._all()
        }
        is_ready = all(number for roles in numbers.values() for number in roles.values())
        return json_response({"ready": is_ready, "workers": numbers}, status=200 if is_ready else 503)

    async def answer(self, http: Request, schema: type[CompletionRequest | ChatRequest]) -> Response:
        """Answer one request."""
        exchange = None
        try:
            exchange = await self._accept(http, schema)
            response = await _answer(exchange, http)
        except ApiError as error:
            response = error_response(error)
        except DecodeRefusedError as refused:
            response = refused.response()
        response.headers[TRANSFER_HEADER] = new_transfer_id() if exchange is None else exchange.handover.transfer_id
        return response

    async def _accept(self, http: Request, schema: type[CompletionRequest | ChatRequest]) -> Exchange:
        handover = Handover()
        body = await read_body(http, max_bytes=self._max_request_bytes)
        request = parse_request(schema, body)
        check_model(request.model, *self._pairs)
        pair = self._pairs[request.model]
        trace = TraceContext.of(http.headers)
        if is_quick(request):
            prompted = _cut(pair, request, trace)
        else:
            prompted = await run_in_threadpool(_cut, pair, request, trace)
        return Exchange(pair, self._metrics, Forwarded(http.url.path, body, request), prompted, handover)

    def _all(self) -> list[Pair]:
        return list(self._pairs.values())


async def _answer(exchange: Exchange, http: Request) -> Response:
    if not exchange.forwarded.request.stream:
        return await until_disconnect(http.receive, exchange.whole())
    events = exchange.events()
    return EventStream(await first_event(events, http.receive), events)


def _cut(pair: Pair, request: GenerationRequest, trace: TraceContext) -> Prompted:
    prompts = prompt_tokens(request, pair.route.tokenizer)
    return pair.courier.prompted(prompts, request.cache_salt or "", trace)


def _pair(route: Route, *, client: httpx.AsyncClient, metrics: ServerMetrics) -> Pair:
    router = route.config.servers.router
    rotating: dict[str, Any] = {"policy": router.policy, "retry_s": router.decision.prefill_retry_s}
    # with discovery the workers say themselves where they are
    prefill = Rotation(() if router.cluster_name and not router.prefill_workers else route.prefill, **rotating)
    decode = Rotation(() if router.cluster_name and not router.decode_workers else route.decode, **rotating)
    courier = Courier(route, prefill=prefill, decode=decode, client=client, metrics=metrics)
    return Pair(route, prefill, decode, courier, DecodeClient(client, timeout_s=router.request_timeout_s))


def _clusters(pairs: Collection[Pair]) -> list[Cluster]:
    found = []
    for pair in pairs:
        servers = pair.route.config.servers
        if servers.router.cluster_name is not None:
            ports = servers.prefill.control_port, servers.decode.control_port
            name = servers.router.cluster_name
            found.append(Cluster(name, prefill=pair.prefill, decode=pair.decode, control_ports=ports))
    return found


async def _sweep(clusters: Sequence[Cluster]) -> None:
    while True:
        await asyncio.sleep(SWEEP_INTERVAL_S)
        for cluster in clusters:
            cluster.sweep(now_s=time.monotonic())


def _show_workers(metrics: ServerMetrics, role: WorkerRole, rotations: Sequence[Rotation]) -> None:
    metrics.watch_workers(
        role,
        lambda: sum(rotation.num_up(time.monotonic()) for rotation in rotations),
        lambda: sum(len(rotation.workers) for rotation in rotations),
    )


def _http_client() -> httpx.AsyncClient:
    return httpx.AsyncClient(
        limits=httpx.Limits(max_connections=MAX_CONNECTIONS, keepalive_expiry=KEEPALIVE_S),
        # Workers are addressed directly, whatever proxy the environment names.
        trust_env=False,
    )

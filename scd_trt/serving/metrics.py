"""Prometheus metrics of one server process: a registry of its own, base units, labels from fixed lists only.

Owns: names, label values, and `HttpMetrics`, the ASGI layer that counts requests. The router knows all of a transfer and
fills the `scd_*` transfer metrics from its `TransferSample`; workers fill the gauges of what they hold. A label value that
is not in its list is counted as "other", so that no peer or client can make series.

    scd_requests_total{endpoint,status}   scd_request_seconds{endpoint}   scd_first_token_seconds{endpoint}
    scd_tokens_total{kind}                prompt | cached | completion
    scd_kv_bytes_total{kind}              dense_equivalent | sent
    scd_compression_ratio                 dense equivalent / sent, of the latest transfer that sent anything
    scd_encode_seconds  scd_transfer_seconds  scd_decode_seconds
    scd_transfers_total{outcome}          landed | stored | failed
    scd_fallback_total{reason}            requests whose consumer prefilled by itself, and why
    scd_guarded_requests_total{extent}    part | whole: the guard refused some blocks of a prompt, or all that were to be sent
    scd_guarded_blocks_total              blocks that it refused, those behind the first beyond its limit included
    scd_code_store_bytes  scd_inflight_transfers  scd_translator_info{fingerprint}  scd_transport_info{lane}

of the router alone:

    scd_decisions_total{choice,reason}    what was decided of a request, and why (`decision.Decision`)
    scd_estimated_seconds{way}            send | local: what the decision took each way to cost, where both were known
    scd_measured_rate{rate}               link_bytes_per_s, prefill_tokens_per_s, local_tokens_per_s,
                                          reconstruct_s_per_token of the latest request's workers; absent where not measured
    scd_retries_total{role}               further workers that a request was tried on
    scd_workers{role,state}               up | down
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from scd_trt.serving.decision import Decision, Rates

ENDPOINTS = {"/v1/completions": "completions", "/v1/chat/completions": "chat_completions"}
STATUSES = (200, 400, 404, 413, 499, 500, 502, 503, 504)
CLIENT_CLOSED_REQUEST = 499
Outcome = Literal["landed", "stored", "failed"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
WorkerRole = Literal["prefill", "decode"]
OTHER = "other"
_STAGE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_REQUEST_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Any]
Send = Callable[[Message], Any]


@dataclass(frozen=True)
class TransferSample:
    """What one transfer cost; times that are not known are None.

    Attributes:
        dense_bytes: KV of the same blocks in the pool's dtype.
    """

    outcome: Outcome
    sent_bytes: int
    dense_bytes: int
    encode_s: float | None = None
    transfer_s: float | None = None
    decode_s: float | None = None


class ServerMetrics:
    """All metrics of one process.

    Args:
        fallback_reasons: the reasons that may be counted by name.
    """

    def __init__(self, *, fallback_reasons: Iterable[str] = ()) -> None:
        self._registry = CollectorRegistry()
        self._reasons = frozenset(fallback_reasons)
        self._shown_rates: set[str] = set()
        self._requests = self._counter("scd_requests", "HTTP requests answered", "endpoint", "status")
        self._request_s = self._histogram(
            "scd_request_seconds", "From a request's arrival to the end of its answer", _REQUEST_BUCKETS_S, "endpoint"
        )
        self._first_token_s = self._histogram(
            "scd_first_token_seconds", "From a request's arrival to its first token", _REQUEST_BUCKETS_S, "endpoint"
        )
        self._tokens = self._counter("scd_tokens", "Tokens of answered requests", "kind")
        self._kv_bytes = self._counter("scd_kv_bytes", "Codes sent, and the KV they stand for", "kind")
        self._ratio = self._gauge("scd_compression_ratio", "Dense bytes over sent bytes of the latest transfer")
        self._encode_s = self._histogram("scd_encode_seconds", "Encoding of one prompt's codes", _STAGE_BUCKETS_S)
        self._transfer_s = self._histogram("scd_transfer_seconds", "First post to last write done", _STAGE_BUCKETS_S)
        self._decode_s = self._histogram("scd_decode_seconds", "Decoding of one prompt's codes", _STAGE_BUCKETS_S)
        self._transfers = self._counter("scd_transfers", "Transfers that are over", "outcome")
        self._fallbacks = self._counter("scd_fallback", "Requests whose consumer prefilled by itself", "reason")
        self._guarded = self._counter("scd_guarded_requests", "Prompts cut by the guard", "extent")
        self._guarded_blocks = self._counter("scd_guarded_blocks", "Blocks that the guard refused")
        self._store_bytes = self._gauge("scd_code_store_bytes", "Bytes in the code store")
        self._engine_requests = self._gauge("scd_engine_requests", "Requests that the engine holds", "state")
        self._engine_blocks = self._gauge("scd_engine_free_blocks", "Blocks that a new request could get")
        self._in_flight = self._gauge("scd_inflight_transfers", "Transfers that are going on")
        self._translator = self._gauge("scd_translator_info", "Translator in use", "fingerprint")
        self._transport = self._gauge("scd_transport_info", "Transport in use", "lane")
        self._decisions = self._counter("scd_decisions", "What was decided of requests, and why", "choice", "reason")
        self._estimated_s = self._histogram(
            "scd_estimated_seconds", "What a decision took each way to cost", _STAGE_BUCKETS_S, "way"
        )
        self._rate = self._gauge("scd_measured_rate", "Rates that decisions rest on", "rate")
        self._retries = self._counter("scd_retries", "Further workers that requests were tried on", "role")
        self._workers = self._gauge("scd_workers", "Workers in and out of rotation", "role", "state")

    def render(self) -> tuple[bytes, str]:
        """Text of all metrics, and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def count_request(self, endpoint: str, *, status: int, seconds: float) -> None:
        """One answered request; a status that is not in `STATUSES` counts as "other"."""
        name = ENDPOINTS.get(endpoint, OTHER)
        self._requests.labels(name, str(status) if status in STATUSES else OTHER).inc()
        self._request_s.labels(name).observe(seconds)

    def observe_first_token(self, endpoint: str, seconds: float) -> None:
        """Time to first token of one request."""
        self._first_token_s.labels(ENDPOINTS.get(endpoint, OTHER)).observe(seconds)

    def count_tokens(self, *, prompt: int, cached: int, completion: int) -> None:
        """Tokens of one request."""
        for kind, number in (("prompt", prompt), ("cached", cached), ("completion", completion)):
            self._tokens.labels(kind).inc(number)

    def count_transfer(self, sample: TransferSample) -> None:
        """One transfer that is over."""
        self._transfers.labels(sample.outcome).inc()
        self._kv_bytes.labels("sent").inc(sample.sent_bytes)
        self._kv_bytes.labels("dense_equivalent").inc(sample.dense_bytes)
        if sample.sent_bytes:
            self._ratio.set(sample.dense_bytes / sample.sent_bytes)
        stages = (
            (self._encode_s, sample.encode_s),
            (self._transfer_s, sample.transfer_s),
            (self._decode_s, sample.decode_s),
        )
        for histogram, seconds in stages:
            if seconds is not None:
                histogram.observe(seconds)

    def count_fallback(self, reason: str) -> None:
        """One request whose consumer prefilled by itself."""
        self._fallbacks.labels(reason if reason in self._reasons else OTHER).inc()

    def count_guarded(self, *, num_kept: int, num_refused: int) -> None:
        """One prompt cut by the guard: blocks sent before the cut, and blocks refused."""
        self._guarded.labels("part" if num_kept else "whole").inc()
        self._guarded_blocks.inc(num_refused)

    def watch_code_store(self, num_bytes: Callable[[], float]) -> None:
        """Ask `num_bytes` at every scrape."""
        self._store_bytes.set_function(num_bytes)

    def watch_engine(
        self, running: Callable[[], float], waiting: Callable[[], float], blocks_free: Callable[[], float]
    ) -> None:
        """Ask at every scrape what the engine holds."""
        self._engine_requests.labels("running").set_function(running)
        self._engine_requests.labels("waiting").set_function(waiting)
        self._engine_blocks.set_function(blocks_free)

    def watch_transfers(self, number: Callable[[], float]) -> None:
        """Ask `number` of transfers in flight at every scrape."""
        self._in_flight.set_function(number)

    def transfer_began(self) -> None:
        """One more transfer in flight; for processes that do not use `watch_transfers`."""
        self._in_flight.inc()

    def transfer_ended(self) -> None:
        """One transfer in flight less."""
        self._in_flight.dec()

    def set_translator(self, fingerprint: str) -> None:
        """The translator in use."""
        self._translator.clear()
        self.add_translator(fingerprint)

    def add_translator(self, fingerprint: str) -> None:
        """One more translator in use; for processes that serve several pairs."""
        self._translator.labels(fingerprint).set(1)

    def count_decision(self, decision: Decision) -> None:
        """What was decided of one request, in the end."""
        self._decisions.labels(decision.choice, decision.reason).inc()
        if decision.send_s is not None and decision.local_s is not None:
            self._estimated_s.labels("send").observe(decision.send_s)
            self._estimated_s.labels("local").observe(decision.local_s)

    def show_rates(self, rates: Rates) -> None:
        """What is measured at present."""
        for name, value in asdict(rates).items():
            if value is not None:
                self._rate.labels(name).set(value)
            elif name in self._shown_rates:
                self._rate.remove(name)
        self._shown_rates = {name for name, value in asdict(rates).items() if value is not None}

    def count_retry(self, role: WorkerRole) -> None:
        """A request is tried on a further worker."""
        self._retries.labels(role).inc()

    def watch_workers(self, role: WorkerRole, num_up: Callable[[], int], num_all: Callable[[], int]) -> None:
        """Ask at every scrape how many workers there are, and how many of them are in rotation."""
        self._workers.labels(role, "up").set_function(num_up)
        self._workers.labels(role, "down").set_function(lambda: num_all() - num_up())

    def set_transport(self, lane: str) -> None:
        """The transport in use."""
        self._transport.clear()
        self._transport.labels(lane).set(1)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self._registry)


class HttpMetrics:
    """ASGI layer that counts requests to the OpenAI endpoints, by their status and the time to the end of the answer.

    A client that leaves before the end counts as status 499, whatever was answered so far.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Any], metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in ENDPOINTS:
            await self._app(scope, receive, send)
            return
        start, status, complete = time.perf_counter(), 500, False

        async def observed(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, observed)
        finally:
            status = status if complete or status == 500 else CLIENT_CLOSED_REQUEST
            self._metrics.count_request(scope["path"], status=status, seconds=time.perf_counter() - start)

"""The OpenAI endpoints of one worker, prefill or decode, over an engine.

    POST /v1/completions          text or token ids; several prompts give several choices
    POST /v1/chat/completions     the model's chat template
    GET  /v1/models  /health  /metrics  /version

Owns: the path of one request: parse, tokenise, submit, detokenise, answer. A generation is cancelled as soon as its client
goes away or a stop string is found. What is refused, and how, is in `openai_schema.py`; a busy engine answers 503 with
`Retry-After`, a prompt that does not fit 400 with code `context_length_exceeded`. The header `x-scd-first-token-ms` of an
answer in one piece tells when its first token came, counted from the request's arrival.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from scd_trt import __version__
from scd_trt.config import ScdError
from scd_trt.serving import openai_answer
from scd_trt.serving.choice_stream import ChoiceStream, Generation
from scd_trt.serving.cpu_engine import (
    EngineBusyError,
    EngineClosedError,
    InvalidPromptError,
    PromptTooLongError,
)
from scd_trt.serving.metrics import HttpMetrics, ServerMetrics
from scd_trt.serving.openai_answer import Answer, ChatAnswer, CompletionAnswer, Usage
from scd_trt.serving.openai_http import (
    EventStream,
    as_api_error,
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
from scd_trt.serving.sampling import SamplingParams
from scd_trt.serving.text_stream import TextStream, TokenText

logger = logging.getLogger(__name__)

DEFAULT_MAX_REQUEST_BYTES = 16 << 20
FIRST_TOKEN_HEADER = "x-scd-first-token-ms"
BUSY_RETRY_AFTER_S = 1


class Engine(Protocol):
    """What the endpoints need of an engine."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the model that is served."""

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that leaves room for one token."""

    def submit(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, cache_salt: str = "") -> Generation:
        """Queue a prompt; raises `EngineBusyError` or `PromptTooLongError`."""


@dataclass(frozen=True)
class _Job:
    """One request on its way, and the shape that its answer will have."""

    request: GenerationRequest
    endpoint: str
    answer: Answer
    choices: tuple[ChoiceStream, ...]
    start_s: float

    def cancel(self) -> None:
        """Cancel what is still running."""
        for choice in self.choices:
            choice.generation.cancel()

    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(
            prompt_tokens=sum(choice.generation.prompt_tokens for choice in self.choices),
            completion_tokens=sum(choice.completion_tokens for choice in self.choices),
            cached_tokens=sum(choice.generation.cached_tokens for choice in self.choices),
        )

    def first_token_s(self) -> float | None:
        """Seconds from the request's arrival to its first token."""
        times = [choice.first_token_s for choice in self.choices if choice.first_token_s is not None]
        return min(times) - self.start_s if times else None


def create_app(
    engine: Engine,
    *,
    model_id: str,
    metrics: ServerMetrics,
    max_request_bytes: int = DEFAULT_MAX_REQUEST_BYTES,
    is_healthy: Callable[[], bool] = lambda: True,
) -> FastAPI:
    """The application of one worker.

    Args:
        model_id: the name that requests must use.
        is_healthy: asked at every GET /health; False answers 503.
    """
    app = FastAPI(title="scd-trt worker", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(HttpMetrics, metrics=metrics)
    install_error_handlers(app)
    worker = _Worker(engine, model_id, metrics, max_request_bytes)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await worker.answer(request, CompletionRequest, CompletionAnswer)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await worker.answer(request, ChatRequest, ChatAnswer)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if is_healthy() else 503)

    install_information(app, model_ids=(model_id,), metrics=metrics)
    return app


def install_information(app: FastAPI, *, model_ids: Sequence[str], metrics: ServerMetrics) -> None:
    """GET /v1/models, /v1/models/{id}, /metrics and /version."""
    created = int(time.time())
    cards = {
        model_id: {"id": model_id, "object": "model", "created": created, "owned_by": "scd-trt"}
        for model_id in model_ids
    }

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": list(cards.values())})

    @app.get("/v1/models/{name}")
    async def one_model(name: str) -> Response:
        check_model(name, *cards)
        return json_response(cards[name])

    @app.get("/metrics")
    async def prometheus() -> Response:
        body, content_type = metrics.render()
        return Response(body, media_type=content_type)

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})


class _Worker:
    """Handles the two generating endpoints."""

    def __init__(self, engine: Engine, model_id: str, metrics: ServerMetrics, max_request_bytes: int) -> None:
        self._engine = engine
        self._model_id = model_id
        self._metrics = metrics
        self._max_request_bytes = max_request_bytes
        self._token_text = TokenText(engine.tokenizer)

    async def answer(
        self,
        http: Request,
        schema: type[CompletionRequest | ChatRequest],
        dialect: type[CompletionAnswer | ChatAnswer],
    ) -> Response:
        """Answer one request."""
        start_s = time.perf_counter()
        request = parse_request(schema, await read_body(http, max_bytes=self._max_request_bytes))
        check_model(request.model, self._model_id)
        prompts = await run_in_threadpool(prompt_tokens, request, self._engine.tokenizer)
        job = _Job(
            request=request,
            endpoint=http.url.path,
            answer=dialect(self._model_id, include_usage=request.include_usage),
            choices=self._submit(request, prompts),
            start_s=start_s,
        )
        if not request.stream:
            return await until_disconnect(http.receive, self._whole(job))
        events = self._events(job)
        return EventStream(await first_event(events, http.receive), events)

    def _submit(self, request: GenerationRequest, prompts: list[list[int]]) -> tuple[ChoiceStream, ...]:
        generations: list[Generation] = []
        try:
            for prompt in prompts:
                sampling = self._sampling(request, num_prompt_tokens=len(prompt))
                generations.append(self._engine.submit(prompt, sampling, cache_salt=request.cache_salt or ""))
        except ScdError as error:
            for generation in generations:
                generation.cancel()
            raise _refusal(error, "messages" if isinstance(request, ChatRequest) else "prompt") from error
        token_text = None if request.num_logprobs is None else self._token_text
        tokenizer = self._engine.tokenizer
        return tuple(
            ChoiceStream(generation, TextStream(tokenizer, request.stops), token_text=token_text)
            for generation in generations
        )

    def _sampling(self, request: GenerationRequest, *, num_prompt_tokens: int) -> SamplingParams:
        room = max(1, self._engine.max_prompt_tokens + 1 - num_prompt_tokens)
        return SamplingParams(
            max_tokens=room if request.answer_tokens is None else request.answer_tokens,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=request.top_k or None,
            seed=request.seed,
            stop_token_ids=tuple(request.stop_token_ids or ()),
            ignore_eos=bool(request.ignore_eos),
            num_logprobs=request.num_logprobs,
        )

    async def _whole(self, job: _Job) -> Response:
        try:
            choices = [await choice.whole() for choice in job.choices]
        finally:
            job.cancel()
            self._observe(job)
        first_token_s = job.first_token_s()
        headers = {} if first_token_s is None else {FIRST_TOKEN_HEADER: f"{1000 * first_token_s:.3f}"}
        return json_response(job.answer.whole(choices, job.usage()), headers=headers)

    async def _events(self, job: _Job) -> AsyncGenerator[bytes, None]:
        is_open = False
        try:
            for index, choice in enumerate(job.choices):
                opening = job.answer.opening(index)
                async for delta in choice.deltas():
                    # The opening waits for the first token: until then a failure can still be an HTTP status.
                    is_open = True
                    if opening is not None:
                        yield openai_answer.event(opening)
                        opening = None
                    if delta.text or delta.logprobs or delta.finish_reason:
                        yield openai_answer.event(job.answer.delta(index, delta))
            if job.request.include_usage:
                yield openai_answer.event(job.answer.usage_chunk(job.usage()))
            yield openai_answer.DONE
        except Exception as error:
            if not is_open:
                raise
            # The status line is out: the error can only be told inside the stream, and without [DONE].
            logger.exception("a stream failed after it had begun")
            yield openai_answer.event(as_api_error(error).body())
        finally:
            job.cancel()
            self._observe(job)

    def _observe(self, job: _Job) -> None:
        usage, first_token_s = job.usage(), job.first_token_s()
        self._metrics.count_tokens(
            prompt=usage.prompt_tokens, cached=usage.cached_tokens, completion=usage.completion_tokens
        )
        if first_token_s is not None:
            self._metrics.observe_first_token(job.endpoint, first_token_s)


def _refusal(error: ScdError, prompt_field: str) -> ApiError:
    """The engine's refusal of a prompt as HTTP."""
    if isinstance(error, EngineBusyError):
        return ApiError(503, str(error), kind="server_error", code="engine_busy", retry_after_s=BUSY_RETRY_AFTER_S)
    if isinstance(error, EngineClosedError):
        return ApiError(503, str(error), kind="server_error", code="engine_closed")
    if isinstance(error, PromptTooLongError):
        return ApiError(400, str(error), param=prompt_field, code="context_length_exceeded")
    if isinstance(error, InvalidPromptError):
        return ApiError(400, str(error), param=prompt_field, code="invalid_value")
    return ApiError(400, str(error), code="invalid_value")

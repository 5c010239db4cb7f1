"""The embedded CPU engine: queue, thread and sampling around a `PagedExecutor`.

One thread runs the model. One step computes one request: a chunk of its prompt (`max_num_tokens`), or one token. A waiting
request is admitted as soon as blocks for its prompt and whole answer are free, first come first served, and begins at once;
running requests take turns. Nothing is batched.

Failures: an exception in a step fails that request alone; if cleaning up after it fails too, the engine closes. Whoever
waits for a request is told in either case (`GenerationError`).

    ScdError
     +- EngineBusyError       more than `max_waiting` requests wait
     +- EngineClosedError     the engine was closed, or its thread died
     +- InvalidPromptError    no tokens, or token ids outside the vocabulary
         +- PromptTooLongError
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scd_trt.config import EngineConfig, ScdError
from scd_trt.models import LoadedModel
from scd_trt.serving.connector import ScdConnectorScheduler, ScdConnectorWorker
from scd_trt.serving.generation import FinishReason, Generation, GenerationError, TokenEvent
from scd_trt.serving.paged_executor import PagedExecutor, PagedRequest
from scd_trt.serving.sampling import Sampler, SamplingError, SamplingParams

__all__ = [
    "CpuEngine",
    "EngineBusyError",
    "EngineClosedError",
    "EngineStats",
    "Generation",
    "GenerationError",
    "InvalidPromptError",
    "PromptTooLongError",
    "SamplingError",
    "SamplingParams",
    "TokenEvent",
]

logger = logging.getLogger(__name__)

_IDLE_BEAT_S = 0.5


class EngineBusyError(ScdError):
    """Too many requests wait; try again later."""


class EngineClosedError(ScdError):
    """The engine takes no requests any more."""


class InvalidPromptError(ScdError):
    """The model cannot run this prompt."""


class PromptTooLongError(InvalidPromptError):
    """The prompt and one answer token do not fit the model's context or the pool."""


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of the engine.

    Attributes:
        running, waiting: requests.
        blocks_free: blocks that a new request could get, those kept for reuse included.
        blocks_cached: of these, blocks kept for reuse.
        blocks_total: blocks of the pool.
        tokens_generated: since the start.
        last_step_age_s: since the engine's thread last went round its loop; at rest it does so twice a second.
    """

    running: int
    waiting: int
    blocks_free: int
    blocks_cached: int
    blocks_total: int
    tokens_generated: int
    last_step_age_s: float


@dataclass
class _Request:
    """What the engine adds to a request of the executor."""

    paged: PagedRequest
    generation: Generation
    sampler: Sampler
    max_tokens: int
    stop_token_ids: frozenset[int]

    @property
    def num_generated(self) -> int:
        return len(self.paged.tokens) - self.paged.num_prompt


class CpuEngine:
    """See the module's docstring. `submit`, `stats`, `close` and `Generation.cancel` may be called from any thread.

    Args:
        loaded: the model.
        config: pool, chunk size, queue length.
        connector: the scheduler and worker halves, or None for a server of its own.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        *,
        connector: tuple[ScdConnectorScheduler, ScdConnectorWorker] | None = None,
    ) -> None:
        self.tokenizer: Any = loaded.tokenizer
        self._loaded, self._config = loaded, config
        self._executor = PagedExecutor(loaded, config, connector)
        self._max_total_tokens = min(loaded.spec.max_position, config.num_blocks * config.tokens_per_block)
        self._changed = threading.Condition()
        self._waiting: deque[_Request] = deque()
        self._running: deque[_Request] = deque()
        self._ids = itertools.count(1)
        self._is_closing = False
        self._num_generated = 0
        self._beat_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="cpu-engine", daemon=True)
        self._thread.start()

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt: one answer token must fit behind it, in the model's context and in the pool."""
        return self._max_total_tokens - 1

    def submit(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, cache_salt: str = "") -> Generation:
        """Queue a request; an answer that reaches the end of the context ends there with `length`.

        Args:
            cache_salt: prompts share blocks and codes only where their salts are equal.
        Raises:
            InvalidPromptError, PromptTooLongError, EngineBusyError, EngineClosedError.
        """
        request = self._request(self._checked(prompt_token_ids), sampling, cache_salt)
        with self._changed:
            if self._is_closing:
                raise EngineClosedError("the engine is closed")
            if len(self._waiting) >= self._config.max_waiting:
                raise EngineBusyError(f"{len(self._waiting)} requests wait (engine.max_waiting); try again later")
            self._waiting.append(request)
            self._changed.notify_all()
        return request.generation

    def stats(self) -> EngineStats:
        """Counters and ages, now."""
        with self._changed:
            blocks = self._executor.blocks
            return EngineStats(
                running=len(self._running),
                waiting=len(self._waiting),
                blocks_free=blocks.num_available,
                blocks_cached=blocks.num_cached,
                blocks_total=blocks.num_blocks,
                tokens_generated=self._num_generated,
                last_step_age_s=time.monotonic() - self._beat_s,
            )

    def close(self) -> None:
        """End after the present step; requests that are not complete fail. May be repeated."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join()
        self._executor.close()

    def _request(self, tokens: list[int], sampling: SamplingParams, cache_salt: str) -> _Request:
        max_tokens = min(sampling.max_tokens, self._max_total_tokens - len(tokens))
        eos = frozenset() if sampling.ignore_eos else self._loaded.eos_token_ids
        paged = PagedRequest(
            request_id=next(self._ids),
            tokens=tokens,
            num_prompt=len(tokens),
            # the last token is never run, so it needs no room
            num_reserved=len(tokens) + max_tokens - 1,
            cache_salt=cache_salt,
        )
        return _Request(
            paged=paged,
            generation=Generation(paged.request_id, len(tokens), self._wake),
            sampler=Sampler(sampling),
            max_tokens=max_tokens,
            stop_token_ids=eos | frozenset(sampling.stop_token_ids),
        )

    def _checked(self, prompt_token_ids: Sequence[int]) -> list[int]:
        tokens = [int(token) for token in prompt_token_ids]
        vocab_size = self._loaded.spec.vocab_size
        if not tokens:
            raise InvalidPromptError("the prompt has no tokens")
        if len(tokens) > self.max_prompt_tokens:
            raise PromptTooLongError(
                f"the prompt has {len(tokens)} tokens; at most {self.max_prompt_tokens} fit (model context "
                f"{self._loaded.spec.max_position}, pool {self._config.num_blocks} x {self._config.tokens_per_block})"
            )
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            raise InvalidPromptError(
                f"token ids {min(tokens)}..{max(tokens)} are outside the vocabulary of {vocab_size}"
            )
        return tokens

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # From here on: the engine's thread only.

    def _run(self) -> None:
        torch.set_num_threads(self._config.num_threads)
        error: Exception = EngineClosedError("the engine was closed")
        try:
            with torch.inference_mode():
                while self._beat():
                    self._work_or_rest()
                for request in tuple(self._running):
                    self._end(request)
                    request.generation.fail(error)
        except Exception as failure:
            logger.exception("the engine's thread died")
            error = failure
        with self._changed:
            self._is_closing = True
            left = (*self._running, *self._waiting)
            self._running.clear()
            self._waiting.clear()
        for request in left:
            request.generation.fail(error)

    def _beat(self) -> bool:
        with self._changed:
            self._beat_s = time.monotonic()
            return not self._is_closing

    def _work_or_rest(self) -> None:
        self._drop_cancelled()
        request = self._next()
        if request is not None:
            self._serve(request)
            return
        with self._changed:
            if not self._waiting and not self._is_closing:
                self._changed.wait(_IDLE_BEAT_S)

    def _drop_cancelled(self) -> None:
        with self._changed:
            waiting = [request for request in self._waiting if not request.generation.is_cancelled]
            self._waiting = deque(waiting)
        for request in tuple(self._running):
            if request.generation.is_cancelled:
                self._end(request)

    def _next(self) -> _Request | None:
        """The request to step: a waiting one for which there are blocks, else the running one whose turn it is."""
        with self._changed:
            if self._waiting and self._executor.reserve(self._waiting[0].paged):
                self._running.appendleft(self._waiting.popleft())
            return self._running[0] if self._running else None

    def _serve(self, request: _Request) -> None:
        try:
            event = self._step(request)
        except Exception as error:
            logger.exception("request %d failed", request.paged.request_id)
            self._end(request)
            request.generation.fail(error)
            return
        if event is not None and event.finish_reason is not None:
            self._end(request)
        else:
            with self._changed:
                self._running.rotate(-1)
        if event is not None:
            request.generation.put(event)

    def _step(self, request: _Request) -> TokenEvent | None:
        logits_V = self._executor.step(request.paged)
        request.generation.cached_tokens = request.paged.num_cached
        return None if logits_V is None else self._choose(request, logits_V)

    def _choose(self, request: _Request, logits_V: Tensor) -> TokenEvent:
        choice = request.sampler.choose(logits_V)
        request.paged.tokens.append(choice.token_id)
        with self._changed:
            self._num_generated += 1
        reason: FinishReason | None = None
        if choice.token_id in request.stop_token_ids:
            reason = "stop"
        elif request.num_generated >= request.max_tokens:
            reason = "length"
        return TokenEvent(choice.token_id, choice.logprob, choice.top_logprobs, reason)

    def _end(self, request: _Request) -> None:
        # in this order: a request whose clean-up fails is still listed, so its consumer is told when the thread ends
        self._executor.end(request.paged)
        with self._changed:
            self._running.remove(request)

"""One request's tokens on their way from the engine's thread to whoever asked for them.

A `Generation` has one consumer, a plain loop or an asyncio task. It ends after the event that carries a finish reason, when
it was cancelled, or by raising `GenerationError` where the engine failed it. It holds at most `max_tokens` events.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]


class GenerationError(RuntimeError):
    """The engine failed this request; the cause is chained. A bug or a lack of memory, never a user's mistake."""


@dataclass(frozen=True)
class TokenEvent:
    """One generated token.

    Attributes:
        token_id: also reported where it ends the request (an end-of-sequence token, say).
        logprob: log-probability that the model gave it, before temperature, top-k and top-p.
        top_logprobs: the most likely tokens and theirs, as many as were asked for.
        finish_reason: of the last event; `stop`: a stop token, `length`: `max_tokens` or the end of the context.
    """

    token_id: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]
    finish_reason: FinishReason | None


class Generation:
    """Handle of a submitted request.

    Attributes:
        request_id: of this engine.
        prompt_tokens: length of the prompt.
        cached_tokens: prompt tokens that the engine did not compute; known once the first event is there.
    """

    def __init__(self, request_id: int, prompt_tokens: int, on_cancel: Callable[[], None]) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self._on_cancel = on_cancel
        self._condition = threading.Condition()
        self._events: deque[TokenEvent] = deque()
        self._wake: Callable[[], None] | None = None
        self._error: BaseException | None = None
        self._is_cancelled = False
        self._is_closed = False

    @property
    def is_cancelled(self) -> bool:
        """`cancel` was called."""
        return self._is_cancelled

    def __iter__(self) -> Iterator[TokenEvent]:
        """Events as they come; blocks.

        Raises:
            GenerationError: the engine failed the request.
        """
        while True:
            with self._condition:
                self._condition.wait_for(self._has_news)
                event = self._take()
            if event is None:
                return
            yield event

    async def events_async(self) -> AsyncIterator[TokenEvent]:
        """Events as they come. A task that stops listening (it was cancelled, its client left) cancels the request.

        Raises:
            GenerationError: the engine failed the request.
        """
        loop = asyncio.get_running_loop()
        news = asyncio.Event()
        try:
            while True:
                with self._condition:
                    self._wake = lambda: _call_if_open(loop, news.set)
                    news.clear()
                    is_ready = self._has_news()
                    event = self._take() if is_ready else None
                if not is_ready:
                    await news.wait()
                elif event is None:
                    return
                else:
                    yield event
        finally:
            self._wake = None
            self.cancel()

    def cancel(self) -> None:
        """Stop generating, soon. Does nothing on a request that has ended; the stream ends without further events."""
        with self._condition:
            if self._is_closed or self._is_cancelled:
                return
            self._is_cancelled = True
            self._notify()
        self._on_cancel()

    def put(self, event: TokenEvent) -> None:
        """The engine has a token; one with a finish reason is the last."""
        with self._condition:
            self._events.append(event)
            self._is_closed = event.finish_reason is not None
            self._notify()

    def fail(self, error: BaseException) -> None:
        """The engine cannot go on with this request."""
        with self._condition:
            self._error = error
            self._is_closed = True
            self._notify()

    def _has_news(self) -> bool:
        return bool(self._events) or self._is_closed or self._is_cancelled

    def _take(self) -> TokenEvent | None:
        if self._events and not self._is_cancelled:
            return self._events.popleft()
        if self._error is not None and not self._is_cancelled:
            raise GenerationError(f"request {self.request_id} failed: {self._error}") from self._error
        return None

    def _notify(self) -> None:
        self._condition.notify_all()
        if self._wake is not None:
            self._wake()


def _call_if_open(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        # the loop was closed: nobody listens any more, and the engine's thread must not suffer for it
        if not loop.is_closed():
            raise

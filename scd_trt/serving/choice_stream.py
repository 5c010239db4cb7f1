"""One prompt's generation as OpenAI deltas: text without taking anything back, log probabilities beside it, one ending.

Owns: the order "token -> text -> stop string -> delta", and cancelling a generation that a stop string has ended. The last
delta, and only it, has a finish reason. A token that ends the text (end of sequence, `stop_token_ids`) is counted in
`completion_tokens` but neither shown nor reported with a log probability.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from typing import Protocol

from scd_trt.serving.generation import TokenEvent
from scd_trt.serving.openai_answer import Candidate, Delta, TokenLogprob
from scd_trt.serving.text_stream import TextStream, TextToken, TokenText

# JSON has no minus infinity; OpenAI writes this for a token of no probability.
LOWEST_LOGPROB = -9999.0


class Generation(Protocol):
    """One submitted prompt."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed; known once the first event has come."""

    def events_async(self) -> AsyncIterator[TokenEvent]:
        """The tokens, as they come."""

    def cancel(self) -> None:
        """Stop soon. May be repeated, also after the end."""


class ChoiceStream:
    """One choice of an answer on its way.

    Args:
        text: fresh; owned by this object from here on.
        token_text: None when the client asked for no log probabilities.
    """

    def __init__(self, generation: Generation, text: TextStream, *, token_text: TokenText | None) -> None:
        self.generation = generation
        self.completion_tokens = 0
        self.first_token_s: float | None = None  # time.perf_counter() of the first token
        self._text = text
        self._token_text = token_text
        self._waiting: dict[int, TokenEvent] = {}

    async def deltas(self) -> AsyncIterator[Delta]:
        """Everything the client sees of this choice; may hold deltas without text."""
        async for event in self.generation.events_async():
            if self.first_token_s is None:
                self.first_token_s = time.perf_counter()
            delta = self._take(event)
            self.completion_tokens += 1
            yield delta
            if delta.finish_reason is not None:
                return

    async def whole(self) -> Delta:
        """All deltas as one."""
        deltas = [delta async for delta in self.deltas()]
        logprobs = [token for delta in deltas for token in delta.logprobs or ()]
        text = "".join(delta.text for delta in deltas)
        return Delta(text, tuple(logprobs) if self._token_text else None, deltas[-1].finish_reason)

    def _take(self, event: TokenEvent) -> Delta:
        if event.finish_reason == "stop":
            return self._end("", (), "stop")
        self._waiting[self.completion_tokens] = event
        piece = self._text.push(event.token_id)
        if piece.stopped:
            self.generation.cancel()
            return Delta(piece.text, self._logprobs(piece.tokens), "stop")
        if event.finish_reason is None:
            return Delta(piece.text, self._logprobs(piece.tokens))
        return self._end(piece.text, piece.tokens, event.finish_reason)

    def _end(self, text: str, tokens: tuple[TextToken, ...], finish_reason: str) -> Delta:
        rest = self._text.close()
        is_stop = rest.stopped or finish_reason == "stop"
        return Delta(text + rest.text, self._logprobs(tokens + rest.tokens), "stop" if is_stop else "length")

    def _logprobs(self, tokens: Iterable[TextToken]) -> tuple[TokenLogprob, ...] | None:
        events = [(token, self._waiting.pop(token.index)) for token in tokens]
        if self._token_text is None:
            return None
        return tuple(
            TokenLogprob(
                chosen=_candidate(self._token_text, event.token_id, event.logprob),
                offset=token.start,
                top=tuple(_candidate(self._token_text, *pair) for pair in event.top_logprobs),
            )
            for token, event in events
        )


def _candidate(token_text: TokenText, token_id: int, logprob: float) -> Candidate:
    return Candidate(token_text.text(token_id), token_text.utf8(token_id), max(logprob, LOWEST_LOGPROB))

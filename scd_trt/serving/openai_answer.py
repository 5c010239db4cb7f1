"""Answers of the OpenAI endpoints: whole ones, chunks of a stream, log probabilities, usage, server-sent events.

Owns: the exact shapes. `CompletionAnswer` and `ChatAnswer` are the two dialects of one small protocol: `whole(...)` for
an answer in one piece; `opening`, `delta`, `closing`, `usage_chunk` for a stream. All are plain dicts, ready for JSON.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

FinishReason = Literal["stop", "length"]
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Usage:
    """Tokens of one request, over all its prompts."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_json(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True)
class Candidate:
    """A token that could have come, its text and its log probability; no bytes where it is part of a character."""

    text: str
    utf8: list[int] | None
    logprob: float

    def as_json(self) -> dict[str, Any]:
        """As the chat endpoint writes it."""
        return {"token": self.text, "logprob": self.logprob, "bytes": self.utf8}


@dataclass(frozen=True)
class TokenLogprob:
    """The token that came, where its text begins in the answer, and the likeliest candidates at its place."""

    chosen: Candidate
    offset: int
    top: tuple[Candidate, ...]


@dataclass(frozen=True)
class Delta:
    """What one step adds to a choice; `logprobs` is None when the client did not ask for any."""

    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None


class Answer(Protocol):
    """One answer in one of the two dialects."""

    def whole(self, choices: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        """The answer in one piece, one choice per prompt."""
        ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """Chunk that opens a choice of a stream, if the dialect has one."""
        ...

    def delta(self, index: int, delta: Delta) -> dict[str, Any]:
        """Chunk with more text of a choice, or with its end."""
        ...

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """Last chunk of a stream whose client asked for usage."""
        ...


@dataclass(frozen=True)
class _Envelope:
    model: str
    # Chunks carry `"usage": null` when the client asked for usage, and no such key otherwise.
    include_usage: bool = False
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def _wrap(self, prefix: str, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _chunk(self, prefix: str, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._wrap(prefix, kind, choices) | ({"usage": None} if self.include_usage else {})


class CompletionAnswer(_Envelope):
    """POST /v1/completions."""

    def whole(self, choices: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        body = [_completion_choice(index, choice) for index, choice in enumerate(choices)]
        return self._wrap("cmpl", "text_completion", body) | {"usage": usage.as_json()}

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def delta(self, index: int, delta: Delta) -> dict[str, Any]:
        return self._chunk("cmpl", "text_completion", [_completion_choice(index, delta)])

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._wrap("cmpl", "text_completion", []) | {"usage": usage.as_json()}


class ChatAnswer(_Envelope):
    """POST /v1/chat/completions."""

    def whole(self, choices: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        body = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": _chat_logprobs(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return self._wrap("chatcmpl", "chat.completion", body) | {"usage": usage.as_json()}

    def opening(self, index: int) -> dict[str, Any] | None:
        return self._chat_chunk(index, {"role": "assistant", "content": ""}, Delta(""))

    def delta(self, index: int, delta: Delta) -> dict[str, Any]:
        return self._chat_chunk(index, {"content": delta.text} if delta.text else {}, delta)

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._wrap("chatcmpl", "chat.completion.chunk", []) | {"usage": usage.as_json()}

    def _chat_chunk(self, index: int, content: dict[str, str], delta: Delta) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": content,
            "logprobs": _chat_logprobs(delta.logprobs),
            "finish_reason": delta.finish_reason,
        }
        return self._chunk("chatcmpl", "chat.completion.chunk", [choice])


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(data) + b"\n\n"


def encode(data: Any) -> bytes:
    """Compact JSON in UTF-8; a number that JSON does not have is a bug, not output."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def _completion_choice(index: int, delta: Delta) -> dict[str, Any]:
    return {
        "index": index,
        "text": delta.text,
        "logprobs": _completion_logprobs(delta.logprobs),
        "finish_reason": delta.finish_reason,
    }


def _completion_logprobs(logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    return {
        "tokens": [token.chosen.text for token in logprobs],
        "token_logprobs": [token.chosen.logprob for token in logprobs],
        "top_logprobs": [{candidate.text: candidate.logprob for candidate in token.top} for token in logprobs],
        "text_offset": [token.offset for token in logprobs],
    }


def _chat_logprobs(logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    content = [
        token.chosen.as_json() | {"top_logprobs": [candidate.as_json() for candidate in token.top]}
        for token in logprobs
    ]
    return {"content": content, "refusal": None}

"""From a request to the token ids of its prompts: the one place, so that router and workers cut the same blocks.

Text of /v1/completions gets the tokenizer's special tokens (unless the request says no); a conversation goes through the
model's own chat template, which writes them itself. Token ids are taken as they are, once each is known to exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from jinja2 import TemplateError

from scd_trt.serving.openai_schema import ApiError, ChatRequest, CompletionRequest, GenerationRequest

MAX_QUICK_TOKENS = 4096


class Tokenizer(Protocol):
    """What the servers need of a tokenizer; those of `models.load_tokenizer` have it."""

    chat_template: Any

    def __len__(self) -> int:
        """Token ids that exist."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD."""

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool = False, tokenize: bool = True
    ) -> Any:
        """Text of a conversation."""


def is_quick(request: GenerationRequest) -> bool:
    """True for a few thousand token ids: to check and cut them takes an event loop less than a change of threads."""
    if not isinstance(request, CompletionRequest):
        return False
    prompts = request.prompts
    return not any(isinstance(prompt, str) for prompt in prompts) and sum(map(len, prompts)) <= MAX_QUICK_TOKENS


def prompt_tokens(request: GenerationRequest, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of the prompts of a request; slow for text, so not for an event loop unless it `is_quick`.

    Raises:
        ApiError: status 400: an empty prompt, an unknown token id, or a conversation that the template refuses.
    """
    if isinstance(request, ChatRequest):
        return [_checked(_conversation_tokens(request, tokenizer), len(tokenizer), "messages")]
    if not isinstance(request, CompletionRequest):
        raise TypeError(f"{type(request).__name__} has no prompt")
    special = request.add_special_tokens is not False
    return [
        _checked(
            tokenizer.encode(prompt, add_special_tokens=special) if isinstance(prompt, str) else prompt,
            len(tokenizer),
            "prompt",
        )
        for prompt in request.prompts
    ]


def _conversation_tokens(request: ChatRequest, tokenizer: Tokenizer) -> list[int]:
    if not tokenizer.chat_template:
        raise ApiError(
            400, "This model has no chat template; use /v1/completions", param="messages", code="no_chat_template"
        )
    messages = [message.as_template_input() for message in request.messages]
    try:
        text: str = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        raise ApiError(400, f"The model's chat template refuses these messages: {error}", param="messages") from error
    return tokenizer.encode(text, add_special_tokens=False)


def _checked(token_ids: list[int], num_known: int, param: str) -> list[int]:
    if not token_ids:
        raise ApiError(400, f"{param} is empty: there is nothing to continue", param=param, code="empty_prompt")
    if max(token_ids) >= num_known:
        raise ApiError(
            400,
            f"{param} has token id {max(token_ids)}; this model knows 0 to {num_known - 1}",
            param=param,
            code="invalid_value",
        )
    return token_ids

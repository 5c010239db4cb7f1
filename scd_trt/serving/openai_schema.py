"""Requests of the OpenAI endpoints as strict models, and the errors that their answers can be.

Owns: which fields are understood, which are refused, and the error body `{"error": {message, type, param, code}}`.
A field that is unknown is ignored, as OpenAI's servers do, unless it would change the answer: those of `REFUSED` are
answered with status 400 as soon as they hold anything but a neutral value. Types are strict: "0.5" is no temperature.

Extensions, named as in `trtllm-serve`: `top_k`, `ignore_eos`, `stop_token_ids`, `cache_salt`, `add_special_tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from scd_trt.config import ScdError

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_PROMPTS = 64
MAX_LOGPROBS = 20
MAX_SEED = (1 << 63) - 1

# Fields that change the answer and are not supported, with the values that mean "not used"; null always means that.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "disaggregated_params": (),
    "documents": ([],),
    "echo": (False,),
    "early_stopping": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "lora_request": (),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_p_min": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class ApiError(ScdError):
    """A request that cannot be answered: HTTP status and the fields of OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """OpenAI's error body."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(_Strict):
    """Options of a streamed answer."""

    include_usage: bool = False


class GenerationRequest(_Strict):
    """Fields that both endpoints share; null means the default."""

    model_config = ConfigDict(extra="allow")

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        """True when a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def answer_tokens(self) -> int | None:
        """Most tokens of the answer; None: as many as fit."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report per token; None: no log probabilities at all."""
        raise NotImplementedError


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one choice each."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(cast("list[str | list[int]]", self.prompt))

    @property
    def answer_tokens(self) -> int | None:
        """OpenAI's default for this endpoint is 16."""
        return self.max_tokens or 16

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class TextPart(_Strict):
    """One text part of a message."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def as_template_input(self) -> dict[str, str]:
        """The message as chat templates take it; they know the developer's role as `system`."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: Literal[True] | None = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only allowed when logprobs is true")
        return self

    @property
    def answer_tokens(self) -> int | None:
        """`max_tokens` is the older name of `max_completion_tokens`."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


RequestT = TypeVar("RequestT", bound=GenerationRequest)


def parse_request(schema: type[RequestT], body: bytes) -> RequestT:
    """Read a request body.

    Raises:
        ApiError: status 400, naming the first field that is wrong.
    """
    try:
        request = schema.model_validate_json(body)
    except ValidationError as error:
        raise _bad_request(error) from error
    for name, value in (request.model_extra or {}).items():
        if name in REFUSED and value is not None and not _is_neutral(value, REFUSED[name]):
            raise ApiError(
                400,
                f"{name}={_short(value)} is not supported here; leave it out",
                param=name,
                code="unsupported_parameter",
            )
    return request


def check_model(requested: str, *known: str) -> None:
    """Raise `ApiError` 404 unless the request names a model that is served."""
    if requested not in known:
        raise ApiError(
            404,
            f"The model {_short(requested)} does not exist; this server has {', '.join(map(repr, known))}",
            param="model",
            code="model_not_found",
        )


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    # `True == 1` in Python, not in JSON
    return any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in neutral)


def _bad_request(error: ValidationError) -> ApiError:
    details = error.errors(include_url=False)
    # A union reports every branch that did not fit: the one that got furthest into the value is the one that was meant.
    first = max(
        (item for item in details if item["loc"][:1] == details[0]["loc"][:1]), key=lambda item: len(item["loc"])
    )
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not valid JSON: {first['msg']}", code="invalid_json")
    param = ".".join(str(part) for part in first["loc"] if not _is_union_branch(part)) or None
    message = first["msg"].removeprefix("Value error, ")
    found = "" if first["type"] in ("missing", "value_error") else f"; found {_short(first['input'])}"
    return ApiError(400, f"{param or 'request'}: {message}{found}", param=param, code="invalid_value")


def _is_union_branch(part: int | str) -> bool:
    """Pydantic adds the branch of a union to the location; it is no key of the body."""
    return isinstance(part, str) and (part == "str" or "[" in part or "-" in part)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

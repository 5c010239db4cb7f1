"""What becomes of a request: codes, the decode side's own store, or a prefill by the decode worker; and what the prefill
worker is asked. A pure cost model over measured rates and pure rewriting: no clock, no I/O, no event loop, so that the
same code can serve inside another orchestrator.

For a prompt of T tokens of which K are at the decode worker already and S more would travel as `bytes`:

    prefill_s     = (T - C) / prefill_tokens_per_s     on the prefill worker, C of them cached there
    transfer_s    = bytes / link_bytes_per_s           runs beside the prefill, layer by layer
    reconstruct_s = tokens * reconstruct_s_per_token   on the decode worker, of all codes that it would use
    local_s       = (T - K) / local_tokens_per_s       the consumer's own prefill of what it does not have

    objective "offload":  send_s = max(0, transfer_s - prefill_s) + reconstruct_s
    objective "latency":  send_s = max(prefill_s, transfer_s) + reconstruct_s

Codes are sent while `send_s <= max_ratio * local_s`. "offload" is the default because a prefill server exists to take
prefills off the decode server: its own prefill is the price of that, and only what codes add to it counts against them.
"latency" counts it, and so sends only where the prefill server is much faster or has the prefix cached.

A rate that was not measured lately is None. Codes are then sent and the reason is "unmeasured": only sending measures the
link, and a landing deadline bounds what the try can cost. An old measurement is forgotten, so a link that was slow once is
tried again. A consumer that has not prefilled lately has no measured speed. Where both models compute the same per token
(`consumer_speed`, 1.0 for equal shapes) the producer's stands for it and `local_source` says "assumed": the hosts may
differ all the same, and the first prefill that the consumer is left with measures it. Where they do not, it is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from scd_trt.config import DecisionSettings

Choice = Literal["send", "stored", "local"]
DecisionReason = Literal[
    "cheaper",
    "unmeasured",
    "stored",
    "mostly_stored",
    "too_short",
    "several_prompts",
    "prefill_down",
    "too_costly",
]
LocalSource = Literal["measured", "assumed"]
CHOICES: tuple[Choice, ...] = get_args(Choice)
DECISION_REASONS: tuple[DecisionReason, ...] = get_args(DecisionReason)


@dataclass(frozen=True)
class Rates:
    """What was measured lately; None where nothing was."""

    link_bytes_per_s: float | None = None
    prefill_tokens_per_s: float | None = None
    local_tokens_per_s: float | None = None
    reconstruct_s_per_token: float | None = None


@dataclass(frozen=True)
class DecisionInputs:
    """All that a decision looks at.

    Attributes:
        sent_tokens: tokens of the blocks that would travel.
        sent_bytes: their codes.
        stored_tokens: tokens in front of them that the decode worker need not compute.
        stored_code_tokens: those of them that it would decode from codes.
        prefill_cached_tokens: tokens that the prefill worker need not compute.
        consumer_speed: the consumer's prefill speed over the producer's on equal hardware; None where nobody knows.
    """

    num_prompts: int
    prompt_tokens: int
    sent_tokens: int
    sent_bytes: int
    is_prefill_alive: bool
    rates: Rates
    stored_tokens: int = 0
    stored_code_tokens: int = 0
    prefill_cached_tokens: int = 0
    consumer_speed: float | None = None

    @property
    def local_tokens(self) -> int:
        """Tokens that the decode worker would compute by itself."""
        return self.prompt_tokens - self.stored_tokens


@dataclass(frozen=True)
class Decision:
    """What to do, why, and the numbers it rests on; the estimates are None where they were not needed or not possible."""

    choice: Choice
    reason: DecisionReason
    inputs: DecisionInputs
    send_s: float | None = None
    local_s: float | None = None
    local_source: LocalSource | None = None


def decide(inputs: DecisionInputs, settings: DecisionSettings) -> Decision:
    """Choose for one request."""
    if inputs.num_prompts != 1:
        return Decision("local", "several_prompts", inputs)
    if inputs.sent_tokens + inputs.stored_tokens < settings.min_sent_tokens:
        return Decision("local", "too_short", inputs)
    own: Choice = "stored" if inputs.stored_tokens else "local"
    if inputs.sent_tokens == 0:
        return Decision("stored", "stored", inputs)
    if inputs.local_tokens <= settings.max_local_prefill_tokens:
        return Decision(own, "mostly_stored" if inputs.stored_tokens else "too_short", inputs)
    if not inputs.is_prefill_alive:
        return Decision("local", "prefill_down", inputs)
    return _cheaper(inputs, settings, own)


def _cheaper(inputs: DecisionInputs, settings: DecisionSettings, own: Choice) -> Decision:
    send_s = _send_s(inputs, settings)
    local_s, source = _local_s(inputs)
    if send_s is None or local_s is None:
        return Decision("send", "unmeasured", inputs, send_s, local_s, source)
    if send_s <= settings.max_ratio * local_s:
        return Decision("send", "cheaper", inputs, send_s, local_s, source)
    return Decision(own, "too_costly", inputs, send_s, local_s, source)


def _send_s(inputs: DecisionInputs, settings: DecisionSettings) -> float | None:
    rates = inputs.rates
    if rates.link_bytes_per_s is None or rates.prefill_tokens_per_s is None:
        return None
    prefill_s = (inputs.prompt_tokens - inputs.prefill_cached_tokens) / rates.prefill_tokens_per_s
    transfer_s = inputs.sent_bytes / rates.link_bytes_per_s
    waited_s = max(0.0, transfer_s - prefill_s) if settings.objective == "offload" else max(prefill_s, transfer_s)
    return waited_s + _reconstruct_s(inputs, inputs.sent_tokens + inputs.stored_code_tokens)


def _local_s(inputs: DecisionInputs) -> tuple[float | None, LocalSource | None]:
    rate, source = _local_rate(inputs)
    if rate is None:
        return None, None
    return inputs.local_tokens / rate + _reconstruct_s(inputs, inputs.stored_code_tokens), source


def _local_rate(inputs: DecisionInputs) -> tuple[float | None, LocalSource | None]:
    rates = inputs.rates
    if rates.local_tokens_per_s is not None:
        return rates.local_tokens_per_s, "measured"
    if rates.prefill_tokens_per_s is None or inputs.consumer_speed is None:
        return None, None
    return rates.prefill_tokens_per_s * inputs.consumer_speed, "assumed"


def _reconstruct_s(inputs: DecisionInputs, num_tokens: int) -> float:
    return num_tokens * (inputs.rates.reconstruct_s_per_token or 0.0)


def prefill_changes() -> dict[str, Any]:
    """Fields of an OpenAI request that become others on its way to the prefill worker; None: the field is left out.

    One token of answer, in one piece, that nobody reads. The decode worker gets the request as it came.
    """
    one_token = {"max_tokens": 1, "temperature": 0, "stream": False}
    unread = ("stream_options", "stop", "stop_token_ids", "logprobs", "top_logprobs", "max_completion_tokens")
    return one_token | dict.fromkeys(unread)


def prefill_request(prompt: Sequence[int], *, model: str, salt: str) -> dict[str, Any]:
    """Body of the prefill worker's POST /v1/completions.

    Token ids, not text: the producer's own chat template could cut the conversation differently.
    """
    body: dict[str, Any] = {"model": model, "prompt": list(prompt), **prefill_changes()}
    if salt:
        body["cache_salt"] = salt
    return _without_nones(body)


def _without_nones(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}

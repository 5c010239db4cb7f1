"""Send codes, or let the consumer prefill by itself? A pure cost model over measured rates; no clock, no I/O.

For a prompt of T tokens whose first S tokens would travel as `bytes`:

    prefill_s     = T / prefill_tokens_per_s           on the prefill worker
    transfer_s    = bytes / link_bytes_per_s           runs beside the prefill, layer by layer
    reconstruct_s = S * reconstruct_s_per_token        on the decode worker
    local_s       = T / local_tokens_per_s             the consumer's own prefill

    objective "offload":  send_s = max(0, transfer_s - prefill_s) + reconstruct_s
    objective "latency":  send_s = max(prefill_s, transfer_s) + reconstruct_s

Codes are sent while `send_s <= max_ratio * local_s`. "offload" is the default because a prefill server exists to take
prefills off the decode server: its own prefill is the price of that, and only what codes add to it counts against them.
"latency" counts it, and so sends only where the prefill server is much faster or has the prefix cached.

A rate that was not measured lately is None. Codes are then sent: only sending measures the link, and a landing deadline
bounds what the try can cost. An old measurement is forgotten, so a link that was slow once is tried again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from scd_trt.config import DecisionSettings

SMOOTHING = 0.3
Choice = Literal["send", "local"]
DecisionReason = Literal["cheaper", "unmeasured", "too_short", "several_prompts", "prefill_down", "too_costly"]


@dataclass(frozen=True)
class Rates:
    """What was measured lately; None where nothing was."""

    link_bytes_per_s: float | None = None
    prefill_tokens_per_s: float | None = None
    local_tokens_per_s: float | None = None
    reconstruct_s_per_token: float | None = None


@dataclass(frozen=True)
class DecisionInputs:
    """All that a decision looks at."""

    num_prompts: int
    prompt_tokens: int
    sent_tokens: int
    sent_bytes: int
    is_prefill_alive: bool
    rates: Rates


@dataclass(frozen=True)
class Decision:
    """What to do, why, and the numbers it rests on; the estimates are None where they were not needed or not possible."""

    choice: Choice
    reason: DecisionReason
    inputs: DecisionInputs
    send_s: float | None = None
    local_s: float | None = None


def decide(inputs: DecisionInputs, settings: DecisionSettings) -> Decision:
    """Choose for one request."""
    if inputs.num_prompts != 1:
        return Decision("local", "several_prompts", inputs)
    if inputs.sent_tokens < settings.min_sent_tokens:
        return Decision("local", "too_short", inputs)
    if not inputs.is_prefill_alive:
        return Decision("local", "prefill_down", inputs)
    send_s, local_s = _send_s(inputs, settings), _local_s(inputs)
    if send_s is None or local_s is None:
        return Decision("send", "unmeasured", inputs, send_s, local_s)
    if send_s <= settings.max_ratio * local_s:
        return Decision("send", "cheaper", inputs, send_s, local_s)
    return Decision("local", "too_costly", inputs, send_s, local_s)


def _send_s(inputs: DecisionInputs, settings: DecisionSettings) -> float | None:
    rates = inputs.rates
    if rates.link_bytes_per_s is None or rates.prefill_tokens_per_s is None:
        return None
    prefill_s = inputs.prompt_tokens / rates.prefill_tokens_per_s
    transfer_s = inputs.sent_bytes / rates.link_bytes_per_s
    reconstruct_s = inputs.sent_tokens * (rates.reconstruct_s_per_token or 0.0)
    waited_s = max(0.0, transfer_s - prefill_s) if settings.objective == "offload" else max(prefill_s, transfer_s)
    return waited_s + reconstruct_s


def _local_s(inputs: DecisionInputs) -> float | None:
    # Until the consumer has prefilled something, the producer's speed stands for it: same architecture.
    rate = inputs.rates.local_tokens_per_s or inputs.rates.prefill_tokens_per_s
    return None if rate is None else inputs.prompt_tokens / rate


@dataclass
class _Average:
    """Exponential average of a ratio that forgets itself."""

    ttl_s: float
    value: float | None = None
    updated_s: float = 0.0

    def add(self, numerator: float, denominator: float, now_s: float) -> None:
        if numerator <= 0 or denominator <= 0:
            return
        ratio, previous = numerator / denominator, self.at(now_s)
        self.value = ratio if previous is None else previous + SMOOTHING * (ratio - previous)
        self.updated_s = now_s

    def at(self, now_s: float) -> float | None:
        return self.value if now_s - self.updated_s <= self.ttl_s else None


class Measurements:
    """Rates learned from finished requests; times are given by the caller. A sample of nothing is ignored."""

    def __init__(self, *, ttl_s: float) -> None:
        self._link, self._prefill, self._local, self._reconstruct = (_Average(ttl_s) for _ in range(4))

    def note_transfer(self, num_bytes: int, seconds: float, *, now_s: float) -> None:
        """Codes have crossed the link."""
        self._link.add(num_bytes, seconds, now_s)

    def note_prefill(self, num_tokens: int, seconds: float, *, now_s: float) -> None:
        """The prefill worker has computed tokens."""
        self._prefill.add(num_tokens, seconds, now_s)

    def note_local(self, num_tokens: int, seconds: float, *, now_s: float) -> None:
        """The decode worker has computed tokens of a prompt."""
        self._local.add(num_tokens, seconds, now_s)

    def note_reconstruction(self, num_tokens: int, seconds: float, *, now_s: float) -> None:
        """The decode worker has decoded codes."""
        self._reconstruct.add(seconds, num_tokens, now_s)

    def rates(self, now_s: float) -> Rates:
        """What is known now."""
        return Rates(self._link.at(now_s), self._prefill.at(now_s), self._local.at(now_s), self._reconstruct.at(now_s))


@dataclass
class PrefillHealth:
    """Whether the prefill worker is worth asking: one failure keeps requests away from it for `retry_s`."""

    retry_s: float
    _down_until_s: float = field(default=float("-inf"))

    def failed(self, now_s: float) -> None:
        """A request could not be served by it."""
        self._down_until_s = now_s + self.retry_s

    def succeeded(self) -> None:
        """A request was served by it."""
        self._down_until_s = float("-inf")

    def is_alive(self, now_s: float) -> bool:
        """False while it is left alone."""
        return now_s >= self._down_until_s

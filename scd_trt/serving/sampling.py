"""How the next token is chosen from a model's logits.

Shapes: V vocabulary. Order as in transformers: temperature, then top-k, then top-p, then one draw; temperature 0 takes the
most likely token. Reported log-probabilities are the model's own (float32 log-softmax of its logits), before temperature,
top-k and top-p: they say what the model believes, whatever the sampler did.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scd_trt.config import ScdError

MAX_LOGPROBS = 20
GREEDY_BELOW = 1e-6
"""Lower temperatures are greedy: float32 logits divided by them would overflow."""


class SamplingError(ScdError):
    """A sampling parameter out of range."""


@dataclass(frozen=True)
class SamplingParams:
    """How a request wants its tokens.

    Attributes:
        max_tokens: tokens to generate at most.
        temperature: 0 is greedy.
        top_p: smallest set of tokens with at least this probability; 1 keeps all.
        top_k: most likely tokens to keep; None keeps all.
        seed: of this request's generator; None draws one.
        stop_token_ids: tokens that end the request, besides the model's end-of-sequence tokens.
        ignore_eos: do not stop at the model's end-of-sequence tokens.
        num_logprobs: most likely tokens to report at each step; None and 0 report none but the chosen one's.

    Raises:
        SamplingError: a value out of range.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None

    def __post_init__(self) -> None:
        _check("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1")
        # written so that NaN fails too
        _check("temperature", self.temperature, 0.0 <= self.temperature < float("inf"), "0 (greedy) or more")
        _check("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "above 0 and at most 1")
        _check("top_k", self.top_k, self.top_k is None or self.top_k >= 1, "at least 1, or none")
        _check("seed", self.seed, self.seed is None or -(1 << 63) <= self.seed < 1 << 63, "a 64-bit integer")
        wanted = self.num_logprobs
        _check("num_logprobs", wanted, wanted is None or 0 <= wanted <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}, or none")


@dataclass(frozen=True)
class Choice:
    """A chosen token with log-probabilities of the model."""

    token_id: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]


class Sampler:
    """Chooses the tokens of one request."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def choose(self, logits_V: Tensor) -> Choice:
        """The next token."""
        logits_V = logits_V.float()
        logprobs_V = torch.log_softmax(logits_V, dim=-1)
        if self._params.temperature < GREEDY_BELOW:
            token_id = int(logits_V.argmax())
        else:
            probs_V = probabilities(logits_V, self._params)
            token_id = int(torch.multinomial(probs_V, 1, generator=self._generator))
        top = logprobs_V.topk(min(self._params.num_logprobs or 0, logprobs_V.numel()))
        pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        return Choice(token_id, float(logprobs_V[token_id]), pairs)


def probabilities(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """The distribution that a token is drawn from (temperature of at least `GREEDY_BELOW`), float32 `[V]`."""
    scaled_V = logits_V.float() / params.temperature
    if params.top_k is not None and params.top_k < scaled_V.numel():
        kth = scaled_V.topk(params.top_k).values[-1]
        scaled_V = scaled_V.masked_fill(scaled_V < kth, float("-inf"))
    probs_V = torch.softmax(scaled_V, dim=-1)
    return probs_V if params.top_p >= 1.0 else _nucleus(probs_V, params.top_p)


def _nucleus(probs_V: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of most likely tokens whose probability is at least `top_p`, renormalised."""
    sorted_V, order_V = probs_V.sort(descending=True, stable=True)
    before_V = sorted_V.cumsum(0) - sorted_V
    kept_V = torch.where(before_V < top_p, sorted_V, 0.0)
    return torch.zeros_like(probs_V).scatter_(0, order_V, kept_V / kept_V.sum())


def _check(name: str, value: object, is_good: bool, allowed: str) -> None:
    if not is_good:
        raise SamplingError(f"{name} is {value}; it must be {allowed}")

"""Token eviction by the scores of the `kvpress` package, applied to the producer's prefill.

Owns: everything that knows the package. A press scores the keys of each head from what its layer saw, after the layer has
run; so scoring a finished prefill gives the tokens that it would have kept while prefilling. Survivors keep their
positions: their keys get the consumer's rotary where they stood, and no query sees the others (`models.PartialLayers`).

    snapkv         attention of the last tokens                          Li et al. 2024, arXiv 2404.14469
    pyramidkv      the same, more tokens for early layers                Cai et al. 2024, arXiv 2406.02069
    streaming_llm  first and last tokens                                 Xiao et al. 2023, arXiv 2309.17453
    expected       attention expected from future queries                Devoto et al. 2025, arXiv 2510.00636
    h2o            attention observed over the whole prefill             Zhang et al. 2023, arXiv 2306.14048

Bytes: keys and values of each survivor in the pool's dtype, and a 16-bit position for each head that keeps it (none for
streaming_llm, whose choice needs no telling).

Settings are the package's but for two that cannot work at high ratios. SnapKV's window of 64 tokens alone exceeds what may be
kept of a prompt of 500 tokens at 10x: it is a quarter of what is kept, at most 64. PyramidKV's default steepness of 20 would
leave later layers fewer tokens than that window, where the package falls back to SnapKV: it is 4.

The package's own entry, hooks on the model, is not used: it expects arguments of an older `transformers`, and importing the
package as a whole patches every attention function and pulls in data-set libraries. Only the modules of the presses are
imported, below a package object whose own code does not run.

Shapes: S prefix tokens, H kv heads, Q query heads, D head size. Attention observed over the whole prefill takes
4 Q S^2 bytes, one layer at a time. Errors: `EvictionError` where the package is absent.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scd_trt.config import ScdError
from scd_trt.evaluate.caches import Control, GivenCache, KvLayer, Prefix, consumer_layers
from scd_trt.models import LoadedModel, attention_module, decoder_layers
from scd_trt.rope import Rope

_PACKAGE = "kvpress"
HOW_TO_INSTALL = (
    f"the package {_PACKAGE!r} is not installed; run: pip install --no-deps {_PACKAGE} "
    "(with its dependencies it would replace the transformers that this project runs on)"
)
_MAX_WINDOW = 64
_POSITION_BYTES = 2
_MIN_TOKENS = 8
"""Prefixes up to this length are kept whole: presses protect four sinks and a window."""


class EvictionError(ScdError):
    """The package of the presses is not installed."""


@dataclass(frozen=True)
class Method:
    """Where a press lives, and what it is made with for a window of so many tokens."""

    module: str
    class_name: str
    options: Callable[[int], dict[str, Any]]
    sends_positions: bool = True
    needs_attention: bool = False


METHODS = {
    "snapkv": Method("snapkv_press", "SnapKVPress", lambda window: {"window_size": window}),
    "pyramidkv": Method("pyramidkv_press", "PyramidKVPress", lambda window: {"window_size": window, "beta": 4}),
    "streaming_llm": Method("streaming_llm_press", "StreamingLLMPress", lambda _: {}, sends_positions=False),
    "expected": Method("expected_attention_press", "ExpectedAttentionPress", lambda _: {}),
    "h2o": Method("observed_attention_press", "ObservedAttentionPress", lambda _: {}, needs_attention=True),
}


def is_installed() -> bool:
    """Whether the presses can be had."""
    return importlib.util.find_spec(_PACKAGE) is not None


def eviction_control(
    name: str, method: Method, consumer: LoadedModel, *, bytes_per_token: float, itemsize: int
) -> Control:
    """A control that keeps as many tokens as take at least `bytes_per_token` of the whole prefix."""
    spec = consumer.spec
    position_bytes = _POSITION_BYTES if method.sends_positions else 0
    token_bytes = 2 * spec.head_dim * itemsize + position_bytes
    share = bytes_per_token / (spec.num_layers * spec.num_kv_heads * token_bytes)

    def cache(prefix: Prefix, _: Prefix) -> list[KvLayer]:
        keep = survivors(method, prefix, num_kept=min(prefix.num_tokens, math.ceil(share * prefix.num_tokens)))
        layers = consumer_layers(consumer, prefix.k_TF, prefix.v_TF)
        num_bytes = token_bytes * sum(int(keep_SH.sum()) for keep_SH in keep)
        return GivenCache(
            [_without(layer, keep_SH) for layer, keep_SH in zip(layers, keep, strict=True)],
            keep=keep,
            bytes_per_token=num_bytes / prefix.num_tokens,
        )

    return Control(name, bytes_per_token, cache)


@torch.no_grad()
def survivors(method: Method, prefix: Prefix, *, num_kept: int) -> list[Tensor]:
    """The `num_kept` tokens (on average over layers) that a press keeps: per layer `[S, H]`, bool.

    Raises:
        EvictionError: the package is not installed.
    """
    num_tokens = prefix.num_tokens
    if num_kept >= num_tokens or num_tokens <= _MIN_TOKENS:
        return [torch.ones(given.k_THD.shape[:2], dtype=torch.bool) for given in prefix.inputs]
    # a trace more than is kept: presses cut the product down to a whole number
    ratio = 1 - (num_kept + 1e-6) / num_tokens
    press = _press(method, compression_ratio=ratio, **method.options(max(1, min(_MAX_WINDOW, num_kept // 4))))
    return [_kept(press, method, prefix, layer, num_kept) for layer in range(len(prefix.inputs))]


def _kept(press: Any, method: Method, prefix: Prefix, layer: int, num_kept: int) -> Tensor:
    given, producer = prefix.inputs[layer], prefix.producer
    if given.x_TM is None:
        raise ValueError(f"layer {layer}: a press needs the attention input, and the prefix was traced without it")
    attention = attention_module(decoder_layers(producer.model)[layer])
    rotary = _Rotary(producer.ropes[layer], prefix.num_tokens)
    hidden_1TM, keys_1HSD, values_1HSD = (
        given.x_TM.unsqueeze(0),
        given.k_THD.transpose(0, 1).unsqueeze(0),
        given.v_THD.transpose(0, 1).unsqueeze(0),
    )
    cos_sin = rotary(hidden_1TM, torch.arange(prefix.num_tokens).unsqueeze(0))
    weights = _attention(attention, hidden_1TM, keys_1HSD, rotary) if method.needs_attention else None
    with _rotary_attribute(attention, rotary):
        scores_1HS = press.score(
            attention, hidden_1TM, keys_1HSD, values_1HSD, weights, {"position_embeddings": cos_sin}
        )
    budget = press.get_layer_budget(attention, prefix.num_tokens) if hasattr(press, "get_layer_budget") else num_kept
    chosen_HK: Tensor = scores_1HS[0].topk(budget, dim=1).indices
    keep_HS: Tensor = torch.zeros(scores_1HS.shape[1:], dtype=torch.bool)
    return keep_HS.scatter_(1, chosen_HK, True).T.contiguous()


def _without(layer: KvLayer, keep_SH: Tensor) -> KvLayer:
    """Zeros in the holes: nothing of a dropped token is left."""
    keep_SH1 = keep_SH.unsqueeze(-1)
    return layer[0] * keep_SH1, layer[1] * keep_SH1


def _attention(attention: Any, hidden_1TM: Tensor, keys_1HSD: Tensor, rotary: _Rotary) -> Tensor:
    """Attention weights `[1, Q, S, S]` of a layer's prefill, float32."""
    queries = _import("utils").get_prerope_query_states(attention, hidden_1TM)[0].transpose(0, 1)
    q_QSD = rotary.rope.apply(queries, torch.arange(len(queries)), seq_len=len(queries)).transpose(0, 1).float()
    k_QSD = keys_1HSD[0].float().repeat_interleave(len(q_QSD) // keys_1HSD.shape[1], dim=0)
    scores_QSS = q_QSD @ k_QSD.transpose(1, 2) * attention.scaling
    weights_1QSS: Tensor = scores_QSS.masked_fill_(_future(scores_QSS.shape[1]), -math.inf).softmax(-1).unsqueeze(0)
    return weights_1QSS


def _future(num_tokens: int) -> Tensor:
    return torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)


class _Rotary:
    """A layer's rotary embedding as the library's models have it: `[1, T, D]`, each frequency twice."""

    def __init__(self, rope: Rope, seq_len: int) -> None:
        self.rope = rope
        self._seq_len = seq_len

    def __call__(self, like: Tensor, position_ids_1T: Tensor) -> tuple[Tensor, Tensor]:
        tables = self.rope.tables(position_ids_1T[0], seq_len=self._seq_len)
        cos, sin = (torch.cat([half, half], dim=-1).unsqueeze(0).to(like) for half in (tables.cos, tables.sin))
        return cos, sin


@contextmanager
def _rotary_attribute(attention: Any, rotary: _Rotary) -> Iterator[None]:
    """Presses look for the rotary embedding on the attention itself."""
    attention.rotary_emb = rotary
    try:
        yield
    finally:
        del attention.rotary_emb


def _press(method: Method, **options: Any) -> Any:
    return getattr(_import(f"presses.{method.module}"), method.class_name)(**options)


def _import(module: str) -> Any:
    """A module of the package, without running the package's own code; see the module docstring."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None:
        raise EvictionError(HOW_TO_INSTALL)
    already = sys.modules.get(_PACKAGE)
    sys.modules[_PACKAGE] = already or importlib.util.module_from_spec(spec)
    try:
        return importlib.import_module(f"{_PACKAGE}.{module}")
    finally:
        if already is None:
            del sys.modules[_PACKAGE]

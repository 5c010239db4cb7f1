"""DroidSpeak-style reuse (Liu et al. 2024, arXiv 2411.02820): raw KV for most layers, some recomputed by the consumer.

The consumer recomputes one contiguous window of layers over the whole prefix. It needs what enters the first of them, which
travels as bfloat16 from the producer ("E cache"); a window that begins at layer 0 needs nothing but the tokens. All other
layers are the producer's keys, with the consumer's rotary, and values. Bytes of a token: keys and values of the other
layers, and two per element of the hidden state. Which window of a given size: the one with the least KL on held-out
text, out of at most a dozen evenly spaced; the paper profiles its windows the same way, by task score.

Shapes: S prefix tokens, M hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from scd_trt.evaluate.caches import Control, KvLayer, Prefix, consumer_layers, prefix_of, stacked
from scd_trt.evaluate.metrics import kl
from scd_trt.models import LoadedModel, cache_layers, forward_with_cache, trace_from

Window = tuple[int, int]
"""Half-open range of layers."""

_MAX_WINDOWS = 12
_HIDDEN_BYTES = 2


def recompute_control(name: str, consumer: LoadedModel, window: Window, *, itemsize: int) -> Control:
    """Raw reuse but for a window of layers."""

    def cache(prefix: Prefix, _: Prefix) -> list[KvLayer]:
        return recomputed(prefix, consumer, window)

    return Control(name, bytes_per_token(consumer, window, itemsize=itemsize), cache)


def bytes_per_token(consumer: LoadedModel, window: Window, *, itemsize: int) -> float:
    """Bytes of one token that travel."""
    start, stop = window
    reused = consumer.spec.num_layers - (stop - start)
    hidden = _HIDDEN_BYTES * consumer.spec.hidden_size if 0 < start < stop else 0
    return float(reused * 2 * consumer.spec.kv_dim * itemsize + hidden)


def recomputed(prefix: Prefix, consumer: LoadedModel, window: Window) -> list[KvLayer]:
    """The producer's cache under the consumer's rotary, with a window of layers computed by the consumer."""
    start, stop = window
    layers = consumer_layers(consumer, prefix.k_TF, prefix.v_TF)
    if start == 0:
        # from the tokens on, the consumer computes what it would have computed anyway
        own: Sequence[KvLayer] = prefix.oracle
    else:
        hidden_TM = prefix.hidden_TM[start].to(torch.bfloat16)
        own = cache_layers(consumer, trace_from(consumer, prefix.token_ids, hidden_TM, layer=start))
    return [*layers[:start], *own[start:stop], *layers[stop:]]


def choose_window(
    producer: LoadedModel,
    consumer: LoadedModel,
    sequences: Sequence[Sequence[int]],
    *,
    size: int,
    prefix_tokens: int,
) -> Window:
    """The window of `size` layers with the least KL to the consumer's own cache, over some sequences."""
    candidates = windows(consumer.spec.num_layers, size)
    losses = torch.zeros(len(candidates), dtype=torch.float64)
    for ids in sequences:
        losses += _losses(producer, consumer, torch.tensor(ids), candidates, prefix_tokens)
    return candidates[int(losses.argmin())]


def windows(num_layers: int, size: int) -> list[Window]:
    """Evenly spaced windows, the first and the last possible one among them."""
    last = num_layers - size
    num_starts = min(last + 1, _MAX_WINDOWS)
    starts = [round(index * last / max(1, num_starts - 1)) for index in range(num_starts)]
    return [(start, start + size) for start in starts]


@torch.no_grad()
def _losses(
    producer: LoadedModel, consumer: LoadedModel, ids: torch.Tensor, candidates: Sequence[Window], prefix_tokens: int
) -> torch.Tensor:
    prefix = prefix_of(producer, consumer, ids[:prefix_tokens])
    caches: dict[str, list[KvLayer]] = {"oracle": list(prefix.oracle)}
    caches |= {str(window): recomputed(prefix, consumer, window) for window in candidates}
    layers = stacked(caches, consumer.dtype)
    oracle, *found = forward_with_cache(consumer, ids[prefix_tokens:-1], layers, start_position=prefix_tokens)
    return torch.stack([kl(oracle.float(), logits.float()).mean() for logits in found])

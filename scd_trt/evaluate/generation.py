"""Greedy answers of one model over several caches of the same prefix at once.

Shapes: N caches, S prefix tokens, T new tokens, H kv heads, D head size. Rows differ only in their cache, so one pass
serves all controls and the model's weights are read once per token. Row i equals what the model says over cache i alone
up to float rounding; offline measurement only, the servers have their own engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scd_trt.models import CacheLayers, LoadedModel, run_with_cache


class GrowingCache:
    """A `KvCache` in memory set aside at once: `[N, S + room, H, D]` per layer."""

    def __init__(self, layers: CacheLayers, *, room: int) -> None:
        self._layers = [tuple(_with_room(tensor, room) for tensor in pair) for pair in layers]
        self._lengths = [pair[0].shape[1] for pair in layers]

    def extend(self, layer: int, k_THD: Tensor, v_THD: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the new tokens and return the whole sequence; see `models.KvCache`."""
        start, stop = self._lengths[layer], self._lengths[layer] + k_THD.shape[1]
        keys, values = self._layers[layer]
        keys[:, start:stop], values[:, start:stop] = k_THD, v_THD
        self._lengths[layer] = stop
        return keys[:, :stop], values[:, :stop]


@torch.no_grad()
def greedy(
    loaded: LoadedModel, layers: CacheLayers, tail_ids: Sequence[int], *, first_position: int, max_tokens: int
) -> list[list[int]]:
    """Most likely continuations of `tail_ids` over each of N caches `[N, S, H, D]`, without the end token.

    Args:
        first_position: rotary position of the first tail token; more than S where the cache leaves the prefix out.
    """
    num_past, num_rows = layers[0][0].shape[1], layers[0][0].shape[0]
    cache = GrowingCache(layers, room=len(tail_ids) + max_tokens)
    ids_NT = torch.tensor([list(tail_ids)] * num_rows)
    found: list[list[int]] = [[] for _ in range(num_rows)]
    running = set(range(num_rows))
    for _ in range(max_tokens):
        where = torch.arange(first_position, first_position + ids_NT.shape[1])
        result = run_with_cache(loaded, ids_NT, cache, start_position=num_past, num_logits=1, positions=where)
        num_past, first_position = num_past + ids_NT.shape[1], first_position + ids_NT.shape[1]
        if result.logits_TV is None:
            raise ValueError("logits were asked for and not computed")
        ids_NT = result.logits_TV[:, -1].argmax(-1, keepdim=True)
        running -= {row for row in running if int(ids_NT[row]) in loaded.eos_token_ids}
        for row in running:
            found[row].append(int(ids_NT[row]))
        if not running:
            break
    return found


def empty_cache(loaded: LoadedModel) -> CacheLayers:
    """A cache of no tokens, one row."""
    spec = loaded.spec
    nothing = torch.zeros(1, 0, spec.num_kv_heads, spec.head_dim, dtype=loaded.dtype)
    return [(nothing, nothing)] * spec.num_layers


def _with_room(tensor_NSHD: Tensor, room: int) -> Tensor:
    num_rows, length, *heads = tensor_NSHD.shape
    buffer = tensor_NSHD.new_zeros(num_rows, length + room, *heads)
    buffer[:, :length] = tensor_NSHD
    return buffer

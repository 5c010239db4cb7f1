"""One sequence's cache during one forward pass: new rows go into the blocks of the paged pool, the whole sequence comes back.

Shapes: N blocks, L layers, H kv heads, B tokens per block, D head size, T new tokens, S tokens of the whole sequence; the
pool view is `[N, L, 2, H, B, D]` (`kv_cache`). Implements `models.KvCache`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class PagedCache:
    """The cache of one sequence during one forward pass.

    Args:
        view: the pool, `[N, L, 2, H, B, D]`.
        block_ids: the sequence's blocks, in order; enough for past and new tokens.
        num_past: tokens whose KV is in the pool.
        num_new: tokens of this pass.
    """

    def __init__(self, view: Tensor, block_ids: Sequence[int], *, num_past: int, num_new: int) -> None:
        tokens_per_block = view.shape[4]
        self._view = view
        self._num_tokens = num_past + num_new
        position = torch.arange(num_past, self._num_tokens)
        self._blocks = torch.as_tensor(block_ids[: -(-self._num_tokens // tokens_per_block)])
        self._new_block = self._blocks[position // tokens_per_block]
        self._new_row = position % tokens_per_block

    def extend(self, layer: int, k_THD: Tensor, v_THD: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens' keys (after RoPE) and values; return those of the whole sequence, `[S, H, D]` each."""
        return self._append(layer, 0, k_THD), self._append(layer, 1, v_THD)

    def _append(self, layer: int, index: int, new_THD: Tensor) -> Tensor:
        pool_NHBD = self._view[:, layer, index]
        pool_NHBD[self._new_block, :, self._new_row] = new_THD.to(pool_NHBD.dtype)
        # select along the first dimension: along any other, torch copies the whole pool first
        all_HSD = pool_NHBD.index_select(0, self._blocks).transpose(0, 1).flatten(1, 2)
        return all_HSD[:, : self._num_tokens].transpose(0, 1)

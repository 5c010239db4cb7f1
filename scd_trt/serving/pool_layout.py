"""The engine's KV pool, however it is handed over, as `[N, L, 2, h, B, D]`; and the pools that are refused.

Shapes: N blocks, L layers, h kv heads of this rank, B tokens per block, D head size; a pool is `[N, L, 2, h*B*D]`.

TensorRT-LLM hands over one tensor (`register_kv_caches`), or, with its second cache manager, a description of byte regions
(`register_kv_cache_layout`): per layer group, regions whose page i lies at `base + stride * i`, each made of (layer, role)
buffers in memory order. One group with one region, whose buffers are key and value of each layer in turn, is the same pool.
Anything else (several attention windows, block scales, MLA, recurrent state) is refused here, before the first request.

Nothing of TensorRT-LLM is imported: a layout is whatever has the attributes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scd_trt.config import ScdError
from scd_trt.kv_cache import KvLayout

PLAIN_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class PoolError(ScdError, ValueError):
    """The engine's pool does not hold plain keys and values."""


def view_pool(pool: Tensor, layout: KvLayout) -> Tensor:
    """The pool as `[N, L, 2, h, B, D]`, sharing memory.

    Raises:
        PoolError: quantised, not made of keys and values, or of another shape than the model and the pair ask for.
    """
    if pool.dtype not in PLAIN_DTYPES:
        raise PoolError(
            f"the pool holds {pool.dtype}: a quantised cache is read with scales that the connector does not know; "
            "set kv_cache_config.dtype to bfloat16 or float16 (a checkpoint may ask for fp8 by itself)"
        )
    if pool.dim() != 4 or pool.shape[2] != 2:
        raise PoolError(
            f"the pool is {tuple(pool.shape)}; expected [blocks, layers, 2, heads * tokens * head size] of keys and values. "
            "Models with latent attention (MLA) or recurrent state have no such pool and are not supported"
        )
    try:
        return layout.view(pool)
    except ValueError as error:
        raise PoolError(f"{error}; are model and tokens_per_block those of the pair?") from error


def pool_of_layout(layout: Any, *, num_layers: int, tokens_per_block: int, dtype: torch.dtype) -> Tensor:
    """The pool `[N, L, 2, h*B*D]` that a layout of one group and one region describes, sharing memory.

    Args:
        dtype: of keys and values; a layout of bytes does not say.
    Raises:
        PoolError: no one tensor describes it.
    """
    if layout.tokens_per_block != tokens_per_block:
        raise PoolError(f"the engine has {layout.tokens_per_block} tokens per block, the pair {tokens_per_block}")
    if len(layout.groups) != 1:
        raise PoolError(f"{len(layout.groups)} layer groups (attention windows); one for all layers is supported")
    (group,) = layout.groups
    regions = (*group.regions, *getattr(group, "replicated_regions", ()))
    if len(regions) != 1:
        raise PoolError(f"{len(regions)} regions in a block; only keys and values, side by side, are supported")
    _check_buffers(regions[0], num_layers)
    rows_NE = regions[0].as_tensor(getattr(layout, "dtype", torch.uint8))
    # a layout of bytes, or of an element type of its own: either way the bytes are those of the pool
    pool: Tensor = rows_NE.view(dtype).unflatten(1, (num_layers, 2, -1))
    return pool


def _check_buffers(region: Any, num_layers: int) -> None:
    buffers = [(buffer.layer_id, buffer.role, getattr(buffer, "expansion", 1)) for buffer in region.buffers]
    expected = [(layer, role, 1) for layer in range(num_layers) for role in ("key", "value")]
    if buffers != expected:
        raise PoolError(f"a block holds {buffers}; expected key and value of {num_layers} layers in turn")

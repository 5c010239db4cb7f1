"""The paged KV pool in TensorRT-LLM's layout, and the keys that name a prefix by its content.

Shapes: N blocks in the pool, L layers, H kv heads, B tokens per block, D head size, T tokens.
A pool is `[N, L, 2, H*B*D]`; inside a block the order is `[H, B, D]`; index 0 holds keys **after RoPE**, 1 values
(TRTLLM, "Connector contract"). Token t of a sequence lives in block `block_ids[t // B]`, row `t % B`.

A block key is a chained 16-byte blake2b: `key_i = H(key_{i-1} | tokens of block i)`, `key_{-1} = H(scope)`, where the
scope holds whatever must separate two caches of the same text (cache salt, translator fingerprint).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

KEY_BYTES = 16


@dataclass(frozen=True)
class KvLayout:
    """Shape of one server's pool."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    tokens_per_block: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def allocate(self, num_blocks: int) -> Tensor:
        """A zeroed pool `[N, L, 2, H*B*D]`."""
        elements = self.num_kv_heads * self.tokens_per_block * self.head_dim
        return torch.zeros(num_blocks, self.num_layers, 2, elements, dtype=self.dtype)

    def view(self, pool: Tensor) -> Tensor:
        """The pool as `[N, L, 2, H, B, D]`, sharing memory.

        Raises:
            ValueError: the pool has another shape or dtype.
        """
        elements = self.num_kv_heads * self.tokens_per_block * self.head_dim
        expected = (self.num_layers, 2, elements)
        if tuple(pool.shape[1:]) != expected or pool.dtype != self.dtype:
            raise ValueError(f"pool is {tuple(pool.shape)} {pool.dtype}; expected [blocks, {expected}] {self.dtype}")
        return pool.view(-1, self.num_layers, 2, self.num_kv_heads, self.tokens_per_block, self.head_dim)


def gather_tokens(view: Tensor, layer: int, block_ids: Sequence[int], start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Copy keys and values of tokens `[start, stop)` of a sequence out of a pool view `[N, L, 2, H, B, D]`.

    Returns:
        keys after RoPE and values, each `[stop - start, H, D]`.
    """
    tokens_per_block = view.shape[4]
    first, last = start // tokens_per_block, -(-stop // tokens_per_block)
    blocks_n2HBD = view[list(block_ids[first:last]), layer]
    kv_2THD = blocks_n2HBD.permute(1, 0, 3, 2, 4).reshape(2, -1, view.shape[3], view.shape[5])
    offset = start - first * tokens_per_block
    return kv_2THD[0, offset : offset + stop - start], kv_2THD[1, offset : offset + stop - start]


def scatter_tokens(
    view: Tensor, layer: int, block_ids: Sequence[int], start: int, *, k_THD: Tensor, v_THD: Tensor
) -> None:
    """Write keys (after RoPE) and values of tokens from `start` on into a pool view; other rows stay untouched."""
    tokens_per_block = view.shape[4]
    token = torch.arange(start, start + k_THD.shape[0])
    block = torch.as_tensor(block_ids)[token // tokens_per_block]
    row = token % tokens_per_block
    view[block, layer, 0, :, row] = k_THD.to(view.dtype)
    view[block, layer, 1, :, row] = v_THD.to(view.dtype)


def block_keys(token_ids: Sequence[int], *, tokens_per_block: int, scope: bytes) -> list[bytes]:
    """Chained content keys of the *full* blocks of a token sequence, 16 bytes each."""
    num_blocks = len(token_ids) // tokens_per_block
    # a third of what numpy takes to read a list; an engine waits for this with its radix tree locked
    tokens = array("I", token_ids[: num_blocks * tokens_per_block])
    if sys.byteorder == "big":
        tokens.byteswap()
    packed = tokens.tobytes()
    size = tokens_per_block * 4
    key = blake2b(scope, digest_size=KEY_BYTES).digest()
    keys = []
    for start in range(0, num_blocks * size, size):
        key = blake2b(key + packed[start : start + size], digest_size=KEY_BYTES).digest()
        keys.append(key)
    return keys


def num_sent_blocks(prompt_tokens: int, tokens_per_block: int) -> int:
    """Full blocks that end before the last prompt token: the consumer computes at least that token itself."""
    return max(prompt_tokens - 1, 0) // tokens_per_block


def scope(*, fingerprint: str, salt: str) -> bytes:
    """Scope of block keys: codes of one translator and one cache salt never serve another."""
    return f"scd\0{fingerprint}\0{salt}".encode()

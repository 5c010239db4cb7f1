"""Who owns which blocks of the KV pool: free list, reference counts, and reuse of finished blocks by content.

A block is in exactly one state:

    free      on the free list, content meaningless
    held      `num_holders` >= 1 requests use it; a full block may carry a key, so that others can join
    cached    nobody uses it, but its key is known: least recently used leaves first when blocks are needed

Keys are chained (`kv_cache.block_keys`), so a block is only of use together with all blocks before it; `release` therefore
lets the last block of a sequence leave first. Not thread-safe: the engine's one thread owns it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence


class BlockPool:
    """Bookkeeping over block ids `0 .. num_blocks`.

    Args:
        enable_reuse: keep finished blocks that have a key; otherwise nothing is shared.
    """

    def __init__(self, num_blocks: int, *, enable_reuse: bool) -> None:
        self.num_blocks = num_blocks
        self._enable_reuse = enable_reuse
        self._free: deque[int] = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._num_holders = [0] * num_blocks
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks kept only for reuse."""
        return len(self._cached)

    def acquire_prefix(self, keys: Sequence[bytes]) -> list[int]:
        """Hold the longest contiguous prefix of `keys` that the pool has; returns its blocks."""
        blocks: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            self._cached.pop(block, None)
            self._num_holders[block] += 1
            blocks.append(block)
        return blocks

    def allocate(self, num_blocks: int) -> list[int]:
        """Hold fresh blocks, evicting cached ones where the free list is too short.

        Raises:
            ValueError: fewer than `num_blocks` are available; ask `num_available` first.
        """
        if num_blocks > self.num_available:
            raise ValueError(f"{num_blocks} blocks wanted, {self.num_available} available of {self.num_blocks}")
        blocks = [self._free.popleft() if self._free else self._evict() for _ in range(num_blocks)]
        for block in blocks:
            self._num_holders[block] = 1
        return blocks

    def name(self, block: int, key: bytes) -> None:
        """A held block is full and computed; from now on others with the same prefix may join it."""
        if self._enable_reuse and key not in self._block_of and block not in self._key_of:
            self._key_of[block] = key
            self._block_of[key] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one hold on each block of a sequence, in order of the sequence.

        Raises:
            ValueError: a block is not held.
        """
        for block in reversed(blocks):
            if not self._num_holders[block]:
                raise ValueError(f"block {block} is not held")
            self._num_holders[block] -= 1
            if self._num_holders[block]:
                continue
            if block in self._key_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        return block

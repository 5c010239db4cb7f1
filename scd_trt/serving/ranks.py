"""The ranks of one tensor-parallel server: which kv heads each holds, and how their rows are put together.

Shapes: T tokens, H kv heads of the model, h kv heads of one rank, D head size.

Codes of a token are made from all its heads, so they cannot be made or read head by head. Rank 0 therefore plans, encodes and
holds the session; every rank reads and writes the heads in its own pool. On the prefill server the ranks' rows are gathered
layer by layer (`RankGroup.all_gather`, a collective: every rank calls it alike, as the broadcast metadata say). On the decode
server no collective is needed: the codes, which are small, travel inside the metadata that the engine broadcasts anyway.

Heads are split in order. With more ranks than heads, consecutive ranks hold the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from scd_trt.config import ScdError


class RanksError(ScdError):
    """Heads and ranks do not fit each other."""


class RankGroup(Protocol):
    """The ranks of this server, and a collective over them."""

    @property
    def rank(self) -> int:
        """This process's."""

    @property
    def size(self) -> int:
        """How many there are."""

    def all_gather(self, rows: Tensor, /) -> list[Tensor]:
        """Every rank's `rows`, in order of the ranks, in host memory. The shapes must be equal; all ranks must call it."""


@dataclass(frozen=True)
class SingleRank:
    """A server of one rank."""

    rank: int = 0
    size: int = 1

    def all_gather(self, rows: Tensor, /) -> list[Tensor]:
        """Its own rows."""
        return [rows.cpu()]


def heads_of_rank(num_kv_heads: int, *, rank: int, size: int) -> range:
    """The kv heads that a rank's pool holds.

    Raises:
        RanksError: neither number divides the other.
    """
    if num_kv_heads % size == 0:
        num_local = num_kv_heads // size
        return range(rank * num_local, (rank + 1) * num_local)
    if size % num_kv_heads == 0:
        head = rank * num_kv_heads // size
        return range(head, head + 1)
    raise RanksError(
        f"tensor_parallel_size {size} does not fit {num_kv_heads} kv heads; one must be a multiple of the other"
    )


def join_heads(parts: Sequence[Tensor], num_kv_heads: int) -> Tensor:
    """All heads `[..., H, D]` from the ranks' `[..., h, D]`; of heads that several ranks hold the first copy is taken."""
    num_copies = max(1, len(parts) // num_kv_heads)
    return torch.cat(list(parts[::num_copies]), dim=-2)

"""What one model says over several caches of the same prefix at once.

Shapes: N caches (rows), S tokens that each holds, T new tokens, A answer tokens, H kv heads, D head size, V vocabulary.
Rows differ only in their cache, so one pass serves all of them and the model's weights are read once per token. Row i
equals what the model says over cache i alone up to float rounding; offline measurement only, the servers have their own
engine.

Most caches under test lead to the answer of the consumer's own cache. So that answer is tried on all of them in one pass
(`forced`); its logits say how far each cache is from the consumer's own on the way, and which rows say the same. Only the
others are continued token by token (`finish`), from where the first of them departs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scd_trt.models import CacheLayers, LoadedModel, run_with_cache


class GrowingCache:
    """A `KvCache` of N rows in memory set aside at once; in each row every layer holds the same number of tokens.

    Attributes:
        keep: per layer `[N, S, H]`, bool, where rows have holes (`models.PartialLayers`).
    """

    def __init__(self, layers: list[tuple[Tensor, Tensor]], num_held: int, *, keep: list[Tensor] | None = None) -> None:
        self._layers = layers
        self._lengths = [num_held] * len(layers)
        self.keep = keep

    @classmethod
    def reserve(
        cls, loaded: LoadedModel, *, num_rows: int, num_tokens: int, room: int, with_holes: bool = False
    ) -> GrowingCache:
        """Rows of `num_tokens` tokens that are to be written with `put`, and room for so many more."""
        spec = loaded.spec
        shape = (num_rows, num_tokens + room, spec.num_kv_heads, spec.head_dim)
        layers = [
            (torch.zeros(shape, dtype=loaded.dtype), torch.zeros(shape, dtype=loaded.dtype))
            for _ in range(spec.num_layers)
        ]
        whole = [torch.ones(num_rows, num_tokens, spec.num_kv_heads, dtype=torch.bool) for _ in layers]
        return cls(layers, num_tokens, keep=whole if with_holes else None)

    @property
    def num_tokens(self) -> int:
        """Tokens that every row holds."""
        return self._lengths[0]

    @property
    def num_rows(self) -> int:
        """N."""
        return self._layers[0][0].shape[0]

    def put(self, row: int, layers: CacheLayers, *, keep: Sequence[Tensor] | None = None) -> None:
        """Write a cache `[S, H, D]` per layer into a row, rounded to the model's dtype.

        Args:
            keep: per layer `[S, H]`, bool: the tokens that each head still has; None for all.
        Raises:
            ValueError: it does not hold the tokens that were reserved, or has holes for which nothing was.
        """
        for (keys, values), (k_SHD, v_SHD) in zip(self._layers, layers, strict=True):
            if {len(k_SHD), len(v_SHD)} != {self.num_tokens}:
                raise ValueError(f"a row holds {self.num_tokens} tokens, got {len(k_SHD)} keys and {len(v_SHD)} values")
            keys[row, : len(k_SHD)], values[row, : len(v_SHD)] = k_SHD, v_SHD
        if keep is None:
            return
        if self.keep is None:
            raise ValueError("a cache with holes needs rows that were reserved with_holes")
        for held, keep_SH in zip(self.keep, keep, strict=True):
            held[row] = keep_SH

    def extend(self, layer: int, k_THD: Tensor, v_THD: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the new tokens and return the whole sequence; see `models.KvCache`."""
        start, stop = self._lengths[layer], self._lengths[layer] + k_THD.shape[1]
        keys, values = self._layers[layer]
        keys[:, start:stop], values[:, start:stop] = k_THD, v_THD
        self._lengths[layer] = stop
        return keys[:, :stop], values[:, :stop]

    def truncate(self, num_tokens: int) -> None:
        """Forget the tokens after the first `num_tokens`."""
        self._lengths = [num_tokens] * len(self._lengths)

    def select(self, rows: Sequence[int]) -> GrowingCache:
        """A copy of some rows."""
        index = torch.tensor(list(rows))
        keep = None if self.keep is None else [held[index] for held in self.keep]
        return GrowingCache([(keys[index], values[index]) for keys, values in self._layers], self.num_tokens, keep=keep)


@dataclass(frozen=True)
class Answer:
    """Most likely tokens, one after the other.

    Attributes:
        token_ids: without the end token.
        end_id: the end token that followed, None where the limit came first.
    """

    token_ids: tuple[int, ...]
    end_id: int | None = None

    @property
    def all_ids(self) -> tuple[int, ...]:
        """With the end token, where there is one."""
        return self.token_ids if self.end_id is None else (*self.token_ids, self.end_id)


def greedy(
    loaded: LoadedModel, layers: CacheLayers, tail_ids: Sequence[int], *, first_position: int, max_tokens: int
) -> list[list[int]]:
    """Most likely continuations of `tail_ids` over each of N caches `[N, S, H, D]`, without the end token.

    Args:
        first_position: rotary position of the first tail token; more than S where the cache leaves tokens out.
    """
    num_rows, num_tokens = layers[0][0].shape[:2]
    cache = GrowingCache.reserve(loaded, num_rows=num_rows, num_tokens=num_tokens, room=len(tail_ids) + max_tokens)
    for row in range(num_rows):
        cache.put(row, [(keys[row], values[row]) for keys, values in layers])
    answers = answer_each(loaded, cache, tail_ids, first_position=first_position, max_tokens=max_tokens)
    return [list(answer.token_ids) for answer in answers]


@torch.no_grad()
def answer_each(
    loaded: LoadedModel, cache: GrowingCache, tail_ids: Sequence[int], *, first_position: int, max_tokens: int
) -> list[Answer]:
    """Most likely continuations of `tail_ids` over each row, token by token; the rows then hold the tail and more."""
    logits_NV = _forward(loaded, cache, [list(tail_ids)] * cache.num_rows, first_position, num_logits=1)[:, -1]
    position = first_position + len(tail_ids)
    return _continue(loaded, cache, logits_NV.argmax(-1).tolist(), position=position, max_tokens=max_tokens)


@torch.no_grad()
def forced(
    loaded: LoadedModel, cache: GrowingCache, token_ids: Sequence[int], *, first_position: int, num_logits: int
) -> Tensor:
    """The last `num_logits` rows of logits `[N, num_logits, V]` of the same tokens over each row, which then holds them."""
    return _forward(loaded, cache, [list(token_ids)] * cache.num_rows, first_position, num_logits=num_logits)


@torch.no_grad()
def finish(
    loaded: LoadedModel, cache: GrowingCache, logits_NAV: Tensor, tried: Answer, *, position: int, max_tokens: int
) -> list[Answer]:
    """What each row says, given its logits while `tried` was forced on it.

    Args:
        cache: holds everything before the answer and then `tried.token_ids`; left as it is.
        logits_NAV: row a is what predicts token a of `tried.all_ids`.
        position: rotary position of the answer's first token.
    """
    chosen_NA = logits_NAV.argmax(-1)
    agrees_NA = chosen_NA == torch.tensor(tried.all_ids)
    departing = [row for row, agrees in enumerate(agrees_NA.all(1).tolist()) if not agrees]
    answers = [tried] * cache.num_rows
    if not departing:
        return answers
    # up to the first departure of any row, all of them have said the same
    num_common = int(agrees_NA[departing].long().cumprod(1).sum(1).min())
    common = tried.token_ids[:num_common]
    rest = cache.select(departing)
    rest.truncate(cache.num_tokens - len(tried.token_ids) + num_common)
    first = chosen_NA[departing, num_common].tolist()
    found = _continue(loaded, rest, first, position=position + num_common, max_tokens=max_tokens - num_common)
    for row, answer in zip(departing, found, strict=True):
        answers[row] = Answer((*common, *answer.token_ids), answer.end_id)
    return answers


def _continue(
    loaded: LoadedModel, cache: GrowingCache, first: list[int], *, position: int, max_tokens: int
) -> list[Answer]:
    """Go on from each row's next token; rows that have ended leave the batch once half of it has."""
    said: list[list[int]] = [[] for _ in first]
    ends: dict[int, int] = {}
    rows, following = list(range(len(first))), first
    for step in range(max_tokens):
        for row, token in zip(rows, following, strict=True):
            if row not in ends and token in loaded.eos_token_ids:
                ends[row] = token
            elif row not in ends:
                said[row].append(token)
        running = [place for place, row in enumerate(rows) if row not in ends]
        if not running or step == max_tokens - 1:
            break
        if len(running) <= len(rows) // 2:
            cache, rows = cache.select(running), [rows[place] for place in running]
            following = [following[place] for place in running]
        logits = _forward(loaded, cache, [[token] for token in following], position + step, num_logits=1)
        following = logits[:, -1].argmax(-1).tolist()
    return [Answer(tuple(tokens), ends.get(row)) for row, tokens in enumerate(said)]


def _forward(
    loaded: LoadedModel, cache: GrowingCache, ids_NT: list[list[int]], first_position: int, *, num_logits: int
) -> Tensor:
    ids = torch.tensor(ids_NT)
    result = run_with_cache(
        loaded,
        ids,
        cache,
        start_position=cache.num_tokens,
        num_logits=num_logits,
        positions=torch.arange(first_position, first_position + ids.shape[1]),
        keep=cache.keep,
    )
    if result.logits_TV is None:
        raise ValueError("logits were asked for and not computed")
    return result.logits_TV

"""What every control works with: a prefix as both models computed it, a cache for the consumer, and who makes it.

Owns: `Prefix`, `Control` and its result, and the two ways in which nearly all controls make a cache: through a translator
(`coded`), or through a coder of the producer's own rows (`row_control`), whose keys then get the consumer's rotary.

Shapes: S prefix tokens, H kv heads, D head size, F = H * D, M hidden size. A cache is, per layer, keys after the consumer's
RoPE and values `[S, H, D]`; rows are `[S, F]`.

A control states its bytes per token once; where they depend on the prefix (entropy coding, windows, evicted tokens) the
cache that it returns carries what was measured, and `Control.measured_bytes` is the one to ask. A cache may have holes: then
it carries which heads keep which tokens, and `stacked` hands that on in a type that `models` and `generation` obey.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from scd_trt.codec import Decoder, Encoder, LayerInput
from scd_trt.models import CacheLayers, LoadedModel, PartialLayers, cache_layers, holes, trace
from scd_trt.rope import Rope, RopeTables, shared_tables
from scd_trt.translator import Translator

KvLayer = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Prefix:
    """One prefix as both models computed it.

    Attributes:
        token_ids: `[S]`.
        producer: the model that made the rows.
        oracle: the consumer's own cache.
        inputs: the producer's keys after its RoPE, values and attention input, per layer.
        k_TF: the producer's keys before RoPE, per layer.
        hidden_TM: what enters each of the producer's layers.
    """

    token_ids: Tensor
    producer: LoadedModel
    oracle: tuple[KvLayer, ...]
    inputs: tuple[LayerInput, ...]
    k_TF: tuple[Tensor, ...]
    hidden_TM: tuple[Tensor, ...]

    @property
    def num_tokens(self) -> int:
        """S."""
        return self.inputs[0].k_THD.shape[0]

    @property
    def v_TF(self) -> tuple[Tensor, ...]:
        """The producer's values, per layer."""
        return tuple(given.v_THD.flatten(1) for given in self.inputs)


class GivenCache(PartialLayers):
    """The layers of a cache, and what a control has to say of this one.

    Attributes:
        bytes_per_token: as packed for this prefix; None where the control states it for all.
    """

    def __init__(
        self,
        layers: Iterable[KvLayer],
        *,
        keep: Sequence[Tensor] | None = None,
        bytes_per_token: float | None = None,
    ) -> None:
        super().__init__(layers, keep)
        self.bytes_per_token = bytes_per_token


@dataclass(frozen=True)
class Control:
    """One way to give the consumer a cache.

    Attributes:
        bytes_per_token: as packed; 0 where nothing crosses the wire. Where it depends on the prefix: that of a prefix of the
            held-out length.
        cache: the cache of a prefix; the second prefix is another prompt's, which only `mismatched` reads.
    """

    name: str
    bytes_per_token: float
    cache: Callable[[Prefix, Prefix], list[KvLayer]]

    def measured_bytes(self, cache: list[KvLayer]) -> float:
        """Bytes per token of a cache that this control returned."""
        measured = cache.bytes_per_token if isinstance(cache, GivenCache) else None
        return self.bytes_per_token if measured is None else measured


@dataclass(frozen=True)
class CodedRows:
    """Rows of all layers as they come back from a coder, and the bytes of their codes."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    num_bytes: float


class RowCoder(Protocol):
    """A compressor that knows nothing of a second model: rows of all layers in, the same rows with its losses out."""

    @property
    def after_rope(self) -> bool:
        """Whether it takes keys as they lie in the producer's pool; else before RoPE."""

    def __call__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> CodedRows:
        """Code keys and values, `[S, F]` float32 per layer, first token first."""


@torch.no_grad()
def prefix_of(producer: LoadedModel, consumer: LoadedModel, token_ids: Tensor) -> Prefix:
    """Run both models over a prefix."""
    traced = trace(producer, token_ids, capture={"kv", "x", "hidden"})
    raw = cache_layers(producer, traced)
    return Prefix(
        token_ids=token_ids,
        producer=producer,
        oracle=tuple(cache_layers(consumer, trace(consumer, token_ids, capture={"kv"}))),
        inputs=tuple(LayerInput(k, v, x) for (k, v), x in zip(raw, traced.x_TM, strict=True)),
        k_TF=traced.k_TF,
        hidden_TM=traced.hidden_TM,
    )


def coded(translator: Translator, *, of_another: bool = False) -> Callable[[Prefix, Prefix], list[KvLayer]]:
    """Caches that a translator's codes give, of the prefix or of the other prompt's."""
    encoder, decoder = Encoder(translator), Decoder(translator)

    def cache(prefix: Prefix, other: Prefix) -> list[KvLayer]:
        source = other if of_another else prefix
        positions = torch.arange(source.num_tokens)
        own_positions = torch.arange(prefix.num_tokens)
        layers: list[KvLayer] = []
        for group in range(len(translator.manifest.groups)):
            inputs = [source.inputs[layer] for layer in translator.manifest.source_layers(group)]
            codes = encoder.encode(group, inputs, positions, seq_len=source.num_tokens)
            # another prompt may be shorter: its rows repeat
            codes = codes[own_positions % source.num_tokens]
            layers += decoder.decode(group, codes, own_positions, seq_len=prefix.num_tokens)
        return layers

    return cache


def row_control(name: str, coder: RowCoder, consumer: LoadedModel, *, bytes_per_token: float) -> Control:
    """A control that reuses the producer's rows after a coder's losses."""

    def cache(prefix: Prefix, _: Prefix) -> list[KvLayer]:
        given = [layer.k_THD.flatten(1) for layer in prefix.inputs] if coder.after_rope else prefix.k_TF
        rows = coder([k_TF.float() for k_TF in given], [v_TF.float() for v_TF in prefix.v_TF])
        keys = stripped(prefix.producer, rows.keys) if coder.after_rope else rows.keys
        layers = consumer_layers(consumer, keys, rows.values)
        return GivenCache(layers, bytes_per_token=rows.num_bytes / prefix.num_tokens)

    return Control(name, bytes_per_token, cache)


def consumer_layers(consumer: LoadedModel, keys: Sequence[Tensor], values: Sequence[Tensor]) -> list[KvLayer]:
    """A cache of rows: the consumer's rotary on keys that have none."""
    tables = rope_tables(consumer.ropes, keys[0].shape[0])
    head_dim = consumer.spec.head_dim
    return [
        (table.apply(_heads(k_TF.float(), head_dim)), _heads(v_TF.float(), head_dim))
        for table, k_TF, v_TF in zip(tables, keys, values, strict=True)
    ]


def stripped(model: LoadedModel, keys: Sequence[Tensor]) -> list[Tensor]:
    """Keys `[S, F]` of a sequence from its start, as they were before the model's rotary."""
    tables = rope_tables(model.ropes, keys[0].shape[0])
    head_dim = model.spec.head_dim
    return [table.strip(_heads(k_TF, head_dim)).flatten(1) for table, k_TF in zip(tables, keys, strict=True)]


def rope_tables(ropes: Sequence[Rope], num_tokens: int) -> list[RopeTables]:
    """Cosines and sines of a sequence from its start, per layer."""
    return shared_tables(ropes, torch.arange(num_tokens), seq_len=num_tokens)


def stacked(caches: Mapping[str, list[KvLayer]], dtype: torch.dtype) -> CacheLayers:
    """Several caches of one prefix as one with a leading dimension, rounded to the pool's dtype."""
    layers = [
        (torch.stack([k.to(dtype) for k, _ in several]), torch.stack([v.to(dtype) for _, v in several]))
        for several in zip(*caches.values(), strict=True)
    ]
    kept = [holes(cache) for cache in caches.values()]
    if all(keep is None for keep in kept):
        return layers
    whole = torch.ones(layers[0][0].shape[1:-1], dtype=torch.bool)
    return PartialLayers(
        layers,
        [torch.stack([whole if keep is None else keep[layer] for keep in kept]) for layer in range(len(layers))],
    )


def _heads(x_TF: Tensor, head_dim: int) -> Tensor:
    return x_TF.reshape(x_TF.shape[0], -1, head_dim)

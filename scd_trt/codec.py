"""Encode a producer's KV into codes and decode codes into a consumer's KV: the arithmetic of a translator.

Shapes: T tokens, H kv heads, D head size, F = H * D, M hidden size, R rank, C code bytes per token of a group.
`Encoder` takes rows as they lie in the producer's pool (keys after RoPE), `Decoder` returns rows as they go into the
consumer's pool (keys after the consumer's RoPE). In between: METHOD, section 1; code layout: `translator`.

Arithmetic is float32 and is rounded once to the code dtype; codes outside its range are clamped to the largest finite
value, never infinite. Offline measurement, the servers and the tests all call these two classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from scd_trt.rope import Rope
from scd_trt.translator import PatchLayer, RawLayer, ReuseLayer, Translator, TranslatorError


@dataclass(frozen=True)
class LayerInput:
    """What one layer of the producer gives: keys after RoPE and values `[T, H, D]`; attention input `[T, M]` for Patch."""

    k_THD: Tensor
    v_THD: Tensor
    x_TM: Tensor | None = None


class _Side:
    """What encoder and decoder share: the translator, code dtypes and per-layer rotary embeddings."""

    def __init__(self, translator: Translator) -> None:
        self.translator = translator
        manifest = translator.manifest
        self.groups = manifest.groups
        self.bytes_per_token = manifest.bytes_per_token
        self.code_dtype: torch.dtype = getattr(torch, manifest.code_dtype)
        self.raw_dtype: torch.dtype = getattr(torch, manifest.raw_dtype)
        self.same_rope = [a == b for a, b in zip(manifest.producer.rope, manifest.consumer.rope, strict=True)]

    @cached_property
    def producer_rope(self) -> list[Rope]:
        return [Rope(params) for params in self.translator.manifest.producer.rope]

    @cached_property
    def consumer_rope(self) -> list[Rope]:
        return [Rope(params) for params in self.translator.manifest.consumer.rope]


class Encoder(_Side):
    """The producer's half."""

    def encode(
        self, group: int, inputs: Sequence[LayerInput], positions_T: Tensor, *, seq_len: int | None = None
    ) -> Tensor:
        """Codes of one group of layers.

        Args:
            group: index into `groups`.
            inputs: one for each layer of the group, in order.
            positions_T: position of each token, for stripping RoPE.
            seq_len: length at which the keys were computed; only rope type `dynamic` needs it.
        Returns:
            uint8 `[T, C]`, C = `bytes_per_token[group]`.
        """
        layers = range(*self.groups[group])
        if len(inputs) != len(layers):
            raise ValueError(f"group {group} has {len(layers)} layers, got {len(inputs)} inputs")
        parts = []
        for layer, given in zip(layers, inputs, strict=True):
            strip = partial(self.producer_rope[layer].strip, positions_T=positions_T, seq_len=seq_len)
            parts.append(self._layer(layer, given, strip).view(torch.uint8))
        return torch.cat(parts, dim=1)

    def _layer(self, layer: int, given: LayerInput, strip: Callable[[Tensor], Tensor]) -> Tensor:
        maps = self.translator.layers[layer]
        if isinstance(maps, PatchLayer):
            if given.x_TM is None:
                raise TranslatorError(f"layer {layer} is a Patch layer, but the engine gave no attention input")
            return _to_codes(maps.encode_h(given.x_TM.float()), self.code_dtype)
        if isinstance(maps, ReuseLayer):
            k_TF = strip(given.k_THD.float()).flatten(1)
            codes = torch.cat([maps.encode_k(k_TF), maps.encode_v(given.v_THD.float().flatten(1))], dim=1)
            return _to_codes(codes, self.code_dtype)
        k_THD = given.k_THD if self.same_rope[layer] else strip(given.k_THD)
        return _to_codes(torch.cat([k_THD.flatten(1), given.v_THD.flatten(1)], dim=1), self.raw_dtype)


class Decoder(_Side):
    """The consumer's half."""

    def decode(
        self, group: int, codes_TC: Tensor, positions_T: Tensor, *, seq_len: int | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """Keys after the consumer's RoPE and values of every layer of a group.

        Args:
            codes_TC: uint8 `[T, C]`, C = `bytes_per_token[group]`.
            positions_T: position of each token, for applying RoPE.
            seq_len: length that the keys are to be rotated for; only rope type `dynamic` needs it.
        Returns:
            for each layer: keys and values `[T, H, D]`, float32 (raw layers: `raw_dtype`).
        Raises:
            ValueError: the codes have another width or dtype.
        """
        if codes_TC.dtype != torch.uint8 or codes_TC.shape[1:] != (self.bytes_per_token[group],):
            found = f"{codes_TC.dtype} {tuple(codes_TC.shape)}"
            raise ValueError(f"group {group}: codes are {found}; expected uint8 [T, {self.bytes_per_token[group]}]")
        layers = range(*self.groups[group])
        widths = [self.translator.manifest.layer_bytes(layer) for layer in layers]
        parts = torch.split(codes_TC, widths, dim=1)
        decoded = []
        for layer, part in zip(layers, parts, strict=True):
            rotate = partial(self.consumer_rope[layer].apply, positions_T=positions_T, seq_len=seq_len)
            decoded.append(self._layer(layer, part, rotate))
        return decoded

    def _layer(self, layer: int, codes_TC: Tensor, rotate: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        maps = self.translator.layers[layer]
        if isinstance(maps, RawLayer):
            k_TF, v_TF = _from_bytes(codes_TC, self.raw_dtype).chunk(2, dim=1)
            if self.same_rope[layer]:
                return self._heads(k_TF), self._heads(v_TF)
        else:
            codes_TR = _from_bytes(codes_TC, self.code_dtype).float()
            k_TF, v_TF = _reuse(maps, codes_TR) if isinstance(maps, ReuseLayer) else self._patch(maps, codes_TR)
        return rotate(self._heads(k_TF)), self._heads(v_TF)

    def _patch(self, maps: PatchLayer, codes_TR: Tensor) -> tuple[Tensor, Tensor]:
        if maps.hidden is not None:
            codes_TR = torch.nn.functional.silu(maps.hidden(codes_TR))
        k_TF, v_TF = maps.project(codes_TR).chunk(2, dim=1)
        if maps.k_norm_D is not None:
            k_THD = self._heads(k_TF)
            scale = torch.rsqrt(k_THD.square().mean(-1, keepdim=True) + maps.k_norm_eps)
            k_TF = (k_THD * scale * maps.k_norm_D).flatten(1)
        return k_TF, v_TF

    def _heads(self, x_TF: Tensor) -> Tensor:
        spec = self.translator.manifest.consumer
        return x_TF.view(-1, spec.num_kv_heads, spec.head_dim)


def _reuse(maps: ReuseLayer, codes_TR: Tensor) -> tuple[Tensor, Tensor]:
    rank = maps.encode_k.weight.shape[1]
    return maps.decode_k(codes_TR[:, :rank]), maps.decode_v(codes_TR[:, rank:])


def _to_codes(codes_TR: Tensor, dtype: torch.dtype) -> Tensor:
    if codes_TR.dtype == dtype:
        return codes_TR
    limit = torch.finfo(dtype).max
    return codes_TR.clamp(-limit, limit).to(dtype)


def _from_bytes(codes_TC: Tensor, dtype: torch.dtype) -> Tensor:
    # a copy, because a part of a row need not begin where its dtype may be read
    return codes_TC.clone(memory_format=torch.contiguous_format).view(dtype)

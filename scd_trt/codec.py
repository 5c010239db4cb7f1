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

from scd_trt.bit_packing import pack, unpack
from scd_trt.model_spec import ModelSpec
from scd_trt.rope import Rope
from scd_trt.translator import (
    GroupTransform,
    PatchLayer,
    ReuseLayer,
    RowTransform,
    Translator,
    TranslatorError,
)


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
        return _ropes(self.translator.manifest.producer)

    @cached_property
    def consumer_rope(self) -> list[Rope]:
        return _ropes(self.translator.manifest.consumer)


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
        transform = self.translator.transform(group)
        if transform is not None:
            return self._transform(transform, layers, inputs, positions_T, seq_len=seq_len)
        parts = []
        for layer, given in zip(layers, inputs, strict=True):
            strip = partial(self.producer_rope[layer].strip, positions_T=positions_T, seq_len=seq_len)
            parts.append(self._layer(layer, given, strip).view(torch.uint8))
        return torch.cat(parts, dim=1)

    def _transform(
        self,
        transform: GroupTransform,
        layers: range,
        inputs: Sequence[LayerInput],
        positions_T: Tensor,
        *,
        seq_len: int | None,
    ) -> Tensor:
        ropes = [self.producer_rope[layer] for layer in layers]
        tables = {rope: rope.tables(positions_T, seq_len=seq_len) for rope in set(ropes)}
        keys = [tables[rope].strip(given.k_THD.float()).flatten(1) for rope, given in zip(ropes, inputs, strict=True)]
        values = [given.v_THD.float().flatten(1) for given in inputs]
        packed = [
            pack(_levels(rows, torch.cat(found, dim=1), positions_T), rows.layout, check_range=False)
            for rows, found in zip(_kinds(transform), (keys, values), strict=True)
        ]
        return torch.cat(packed, dim=1)

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
        transform = self.translator.transform(group)
        if transform is not None:
            return self._transform(transform, layers, codes_TC, positions_T, seq_len=seq_len)
        widths = [self.translator.manifest.layer_bytes(layer) for layer in layers]
        parts = torch.split(codes_TC, widths, dim=1)
        decoded = []
        for layer, part in zip(layers, parts, strict=True):
            rotate = partial(self.consumer_rope[layer].apply, positions_T=positions_T, seq_len=seq_len)
            decoded.append(self._layer(layer, part, rotate))
        return decoded

    def _transform(
        self, transform: GroupTransform, layers: range, codes_TC: Tensor, positions_T: Tensor, *, seq_len: int | None
    ) -> list[tuple[Tensor, Tensor]]:
        sizes = [rows.layout.bytes_per_token for rows in _kinds(transform)]
        keys_TO, values_TO = (
            _rows(rows, unpack(part.contiguous(), rows.layout), positions_T)
            for rows, part in zip(_kinds(transform), torch.split(codes_TC, sizes, dim=1), strict=True)
        )
        ropes = [self.consumer_rope[layer] for layer in layers]
        tables = {rope: rope.tables(positions_T, seq_len=seq_len) for rope in set(ropes)}
        return [
            (tables[rope].apply(self._heads(k_TF)), self._heads(v_TF))
            for rope, k_TF, v_TF in zip(
                ropes, keys_TO.chunk(len(layers), dim=1), values_TO.chunk(len(layers), dim=1), strict=True
            )
        ]

    def _layer(self, layer: int, codes_TC: Tensor, rotate: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        maps = self.translator.layers[layer]
        if isinstance(maps, ReuseLayer):
            k_TF, v_TF = _reuse(maps, _from_bytes(codes_TC, self.code_dtype).float())
        elif isinstance(maps, PatchLayer):
            k_TF, v_TF = self._patch(maps, _from_bytes(codes_TC, self.code_dtype).float())
        else:
            k_TF, v_TF = _from_bytes(codes_TC, self.raw_dtype).chunk(2, dim=1)
            if self.same_rope[layer]:
                return self._heads(k_TF), self._heads(v_TF)
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


def _ropes(spec: ModelSpec) -> list[Rope]:
    """Rotary embedding per layer; layers with equal parameters share one, so that a group makes its tables once."""
    unique = {parameters: Rope(parameters) for parameters in spec.rope}
    return [unique[parameters] for parameters in spec.rope]


def _kinds(transform: GroupTransform) -> tuple[RowTransform, RowTransform]:
    return transform.keys, transform.values


def _levels(rows: RowTransform, features_TI: Tensor, positions_T: Tensor) -> Tensor:
    """Quantised components, uint8 `[T, S]`."""
    centred_TI = features_TI - rows.mean_I
    if rows.sink_in_PI is not None:
        centred_TI = _shifted(centred_TI, -rows.sink_in_PI, positions_T)
    scaled_TS = centred_TI @ rows.encode_IS
    return scaled_TS.floor_().add_(rows.half_S).clamp_(torch.zeros(()), 2 * rows.half_S - 1).to(torch.uint8)


def _rows(rows: RowTransform, levels_TS: Tensor, positions_T: Tensor) -> Tensor:
    """The consumer's rows `[T, O]` of quantised components."""
    y_TO = torch.addmm(rows.bias_O, levels_TS.float(), rows.decode_SO)
    return y_TO if rows.sink_out_PO is None else _shifted(y_TO, rows.sink_out_PO, positions_T)


def _shifted(x_TN: Tensor, shift_PN: Tensor, positions_T: Tensor) -> Tensor:
    """Add its shift to each row whose position is below P; in place."""
    early_E = (positions_T < len(shift_PN)).nonzero()[:, 0]
    return x_TN.index_add_(0, early_E, shift_PN[positions_T[early_E]])


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

"""Encode a producer's KV into codes and decode codes into a consumer's KV: the arithmetic of a translator.

Shapes: T tokens, H kv heads, D head size, F = H * D, M hidden size, R rank, C code bytes per token of a group.
`Encoder` takes rows as they lie in the producer's pool (keys after RoPE), `Decoder` returns rows as they go into the
consumer's pool (keys after the consumer's RoPE). In between: METHOD, section 1; code layout: `translator`.

Layers coded one by one: arithmetic is float32 and is rounded once to the code dtype; codes outside its range are clamped to
the largest finite value, never infinite.

Transformed groups: matrices are bfloat16, and products run in `product_dtype()`: bfloat16 where the CPU multiplies that in
hardware (its terms are added in float32, each sum is rounded to bfloat16), else float32 on the same matrices. Rows are
centred in float32 before any rounding, sums of components of 8 bits are corrected by what rounding dropped, cells are
integers that are exact in either dtype, and means are added in float32 after. How a matrix product adds up depends on its
number of rows, so `Encoder` multiplies tiles of always `TILE_ROWS` rows, the last one filled up with zeros: **codes of a
token are the same bytes however tokens are cut into calls**, on one machine with one number of threads. Elsewhere a value at
the edge of a cell may fall on its other side; a decoder takes any codes.

Offline measurement, the servers and the tests all call these two classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby

import torch
from torch import Tensor

from scd_trt.bit_packing import pack, unpack
from scd_trt.rope import Rope, shared_ropes
from scd_trt.translator import (
    MATRIX_DTYPE,
    GroupTransform,
    PatchLayer,
    ReuseLayer,
    RowGuard,
    RowTransform,
    Translator,
    TranslatorError,
)

TILE_ROWS = 128
"""Rows of each product of an encoder. What costs time is mostly that a product rearranges the matrix: 128 rows take a fifth
longer than 64, and less than twice as long as the 32 of a single block."""


MAX_ROUNDED_WIDTH = 6
"""Bits up to which components may come out of a product in bfloat16. It has a grid of half a step near the ends of 8 bits,
which adds a tenth to the error of such a component (of 6 bits: a hundredth); wider ones get the rounded part in addition."""


def product_dtype() -> torch.dtype:
    """Dtype in which this machine multiplies: the matrices' own where it has instructions for that, else float32."""
    return MATRIX_DTYPE if torch.cpu._is_avx512_bf16_supported() else torch.float32


@dataclass(frozen=True)
class LayerInput:
    """What one layer of the producer gives: keys after RoPE and values `[T, H, D]`; attention input `[T, M]` for Patch."""

    k_THD: Tensor
    v_THD: Tensor
    x_TM: Tensor | None = None


@dataclass(frozen=True)
class Encoded:
    """Codes of one group, and how far what they were made from lies from the calibration text.

    Attributes:
        codes_TC: uint8 `[T, C]`, C = `bytes_per_token[group]`.
        novelty_T: float32, relative to the limit: a block whose mean exceeds 1 is beyond calibration. The larger one of keys
            and values; sinks, which have means of their own, count as typical. Zero where a group has no guard, because
            its layers are sent as they are, say.
    """

    codes_TC: Tensor
    novelty_T: Tensor


class _Side:
    """What encoder and decoder share: the translator, code dtypes and per-layer rotary embeddings.

    `dtype` is that of the products of transformed groups; other than `product_dtype()` it is for comparing the two.
    """

    def __init__(self, translator: Translator, *, dtype: torch.dtype | None = None) -> None:
        self.translator = translator
        self.product_dtype = dtype or product_dtype()
        manifest = translator.manifest
        self.groups = manifest.groups
        self.bytes_per_token = manifest.bytes_per_token
        self.code_dtype: torch.dtype = getattr(torch, manifest.code_dtype)
        self.raw_dtype: torch.dtype = getattr(torch, manifest.raw_dtype)

    @cached_property
    def same_rope(self) -> list[bool]:
        """Of layers that are sent as they are; their models have the same shape."""
        manifest = self.translator.manifest
        return [a == b for a, b in zip(manifest.producer.rope, manifest.consumer.rope, strict=True)]

    @cached_property
    def producer_rope(self) -> tuple[Rope, ...]:
        return shared_ropes(self.translator.manifest.producer.rope)

    @cached_property
    def consumer_rope(self) -> tuple[Rope, ...]:
        return shared_ropes(self.translator.manifest.consumer.rope)


class Encoder(_Side):
    """The producer's half."""

    def encode(
        self, group: int, inputs: Sequence[LayerInput], positions_T: Tensor, *, seq_len: int | None = None
    ) -> Tensor:
        """Codes of one group of layers.

        Args:
            group: index into `groups`.
            inputs: one for each source layer of the group (`Manifest.source_layers`), in order.
            positions_T: position of each token, for stripping RoPE.
            seq_len: length at which the keys were computed; only rope type `dynamic` needs it.
        Returns:
            uint8 `[T, C]`, C = `bytes_per_token[group]`.
        """
        return self._encode(group, inputs, positions_T, seq_len=seq_len, is_measured=False).codes_TC

    def encode_guarded(
        self, group: int, inputs: Sequence[LayerInput], positions_T: Tensor, *, seq_len: int | None = None
    ) -> Encoded:
        """The same codes as `encode`, and the novelty of what they were made from; arguments as there."""
        return self._encode(group, inputs, positions_T, seq_len=seq_len, is_measured=True)

    def _encode(
        self,
        group: int,
        inputs: Sequence[LayerInput],
        positions_T: Tensor,
        *,
        seq_len: int | None,
        is_measured: bool,
    ) -> Encoded:
        layers = self.translator.manifest.source_layers(group)
        if len(inputs) != len(layers):
            raise ValueError(f"group {group} is computed from {len(layers)} layers, got {len(inputs)} inputs")
        transform = self.translator.transform(group)
        if transform is not None:
            k_TI, v_TI = self._features(layers, inputs, positions_T, seq_len=seq_len)
            return self._transform(transform, (k_TI, v_TI), positions_T, is_measured=is_measured)
        parts = []
        for layer, given in zip(layers, inputs, strict=True):
            strip = partial(self.producer_rope[layer].strip, positions_T=positions_T, seq_len=seq_len)
            parts.append(self._layer(layer, given, strip).view(torch.uint8))
        codes_TC = torch.cat(parts, dim=1)
        return Encoded(codes_TC, torch.zeros(len(codes_TC), device=codes_TC.device))

    def _features(
        self, layers: Sequence[int], inputs: Sequence[LayerInput], positions_T: Tensor, *, seq_len: int | None
    ) -> tuple[Tensor, Tensor]:
        """Keys before RoPE and values of all source layers side by side, float32 `[T, I]`, the caller's to overwrite."""
        k_TGD = torch.cat([given.k_THD for given in inputs], dim=1).float()
        v_TGD = torch.cat([given.v_THD for given in inputs], dim=1).float()
        turned = [
            rope.tables(positions_T, seq_len=seq_len).strip(part_TGD)
            for rope, part_TGD in _by_rope(self.producer_rope, layers, k_TGD)
        ]
        return torch.cat(turned, dim=1).flatten(1), v_TGD.flatten(1)

    def _transform(
        self, transform: GroupTransform, features: tuple[Tensor, Tensor], positions_T: Tensor, *, is_measured: bool
    ) -> Encoded:
        num_tokens, device, dtype = len(positions_T), positions_T.device, self.product_dtype
        packed_TC = torch.empty(num_tokens, transform.layout.bytes_per_token, dtype=torch.uint8, device=device)
        novelty_T = torch.zeros(num_tokens, device=device)
        sizes = [rows.layout.bytes_per_token for rows in _kinds(transform)]
        for rows, x_TI, out in zip(_kinds(transform), features, torch.split(packed_TC, sizes, dim=1), strict=True):
            centred_TI = _centred(rows, x_TI, positions_T)
            pack(_levels(rows, centred_TI, dtype), rows.layout, out=out, check_range=False)
            if is_measured and rows.guard is not None:
                novelty_T = torch.maximum(novelty_T, _novelty(rows, rows.guard, centred_TI, positions_T, dtype=dtype))
        return Encoded(packed_TC, novelty_T)

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
            _rows(rows, unpack(part, rows.layout), positions_T, self.product_dtype)
            for rows, part in zip(_kinds(transform), torch.split(codes_TC, sizes, dim=1), strict=True)
        )
        num_heads = self.translator.manifest.consumer.num_kv_heads
        k_THD = [
            one_THD
            for rope, part_TGD in _by_rope(self.consumer_rope, layers, self._heads(keys_TO))
            for one_THD in torch.split(rope.tables(positions_T, seq_len=seq_len).apply(part_TGD), num_heads, dim=1)
        ]
        return list(zip(k_THD, torch.split(self._heads(values_TO), num_heads, dim=1), strict=True))

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
        head_dim = self.translator.manifest.consumer.head_dim
        return x_TF.view(len(x_TF), x_TF.shape[1] // head_dim, head_dim)


def _by_rope(ropes: Sequence[Rope], layers: Sequence[int], x_TGD: Tensor) -> Iterator[tuple[Rope, Tensor]]:
    """Heads of several layers, `[T, num_layers * H, D]`, as runs of layers that rotate alike: mostly all of them."""
    num_heads, start = x_TGD.shape[1] // len(layers), 0
    for rope, run in groupby(ropes[layer] for layer in layers):
        stop = start + num_heads * len(list(run))
        yield rope, x_TGD[:, start:stop]
        start = stop


def _kinds(transform: GroupTransform) -> tuple[RowTransform, RowTransform]:
    return transform.keys, transform.values


def through_codes(
    encoder: Encoder, decoder: Decoder, group: int, inputs: Sequence[LayerInput]
) -> list[tuple[Tensor, Tensor]]:
    """What a consumer gets of one group for a prompt from its start: keys and values of the group's layers.

    Args:
        inputs: of all the producer's layers.
    """
    num_tokens = inputs[0].k_THD.shape[0]
    positions_T = torch.arange(num_tokens)
    given = [inputs[layer] for layer in encoder.translator.manifest.source_layers(group)]
    codes_TC = encoder.encode(group, given, positions_T, seq_len=num_tokens)
    return decoder.decode(group, codes_TC, positions_T, seq_len=num_tokens)


def num_blocks_within(novelty_T: Tensor, tokens_per_block: int) -> int:
    """Blocks before the first whose mean novelty exceeds 1, or is not a number."""
    is_within_N = novelty_T.reshape(-1, tokens_per_block).mean(1) <= 1
    return int(is_within_N.long().cumprod(0).sum())


def _centred(rows: RowTransform, features_TI: Tensor, positions_T: Tensor) -> Tensor:
    """Features less what is expected of them; overwrites them."""
    centred_TI = features_TI.sub_(rows.mean_I)
    return centred_TI if rows.sink_in_PI is None else _shifted(centred_TI, rows.sink_in_PI, positions_T, sign=-1)


def _novelty(
    rows: RowTransform, guard: RowGuard, centred_TI: Tensor, positions_T: Tensor, *, dtype: torch.dtype
) -> Tensor:
    """Relative to the limit, float32 `[T]`."""
    novelty_T = _tiled_product(centred_TI, guard.directions_IQ.to(dtype)).float().square().sum(1)
    return novelty_T.masked_fill(positions_T < rows.num_sink_tokens, 1.0) / guard.limit


def _levels(rows: RowTransform, centred_TI: Tensor, dtype: torch.dtype) -> Tensor:
    """Quantised components, uint8 `[T, S]`."""
    scaled_TS = _scaled(rows, centred_TI, dtype)
    return scaled_TS.floor_().clamp_(-rows.half_S, rows.half_S - 1).add_(rows.half_S).to(torch.uint8)


def _scaled(rows: RowTransform, centred_TI: Tensor, dtype: torch.dtype) -> Tensor:
    """Components in units of their steps, float32 `[T, S]`."""
    num_fine = sum(count for width, count in rows.layout.runs if width > MAX_ROUNDED_WIDTH)
    return _tiled_product(centred_TI, rows.encode_IS.to(dtype), num_fine=num_fine)


def _tiled_product(x_TI: Tensor, matrix_IS: Tensor, *, num_fine: int = 0) -> Tensor:
    """Product in the matrix's dtype, float32 `[T, S]`; rows do not depend on what other rows there are.

    The first `num_fine` columns get what rounding their sums to the matrix's dtype has dropped.
    """
    x_TI = x_TI.to(matrix_IS.dtype)
    fine_IS = matrix_IS[:, :num_fine]
    product_TS = torch.empty(len(x_TI), matrix_IS.shape[1], device=x_TI.device)
    for rows_RI, out_RS in zip(torch.split(x_TI, TILE_ROWS), torch.split(product_TS, TILE_ROWS), strict=True):
        tile_RI = rows_RI if len(rows_RI) == TILE_ROWS else _padded(rows_RI)
        rounded_RS = tile_RI @ matrix_IS
        out_RS.copy_(rounded_RS[: len(out_RS)])
        if num_fine and matrix_IS.dtype != torch.float32:
            # what is added to a product is added before the sum is rounded
            dropped_RS = torch.addmm(rounded_RS[:, :num_fine], tile_RI, fine_IS, beta=-1)
            out_RS[:, :num_fine] += dropped_RS[: len(out_RS)]
    return product_TS


def _padded(rows_RI: Tensor) -> Tensor:
    """A whole tile: those rows, then zeros."""
    tile_RI = rows_RI.new_zeros(TILE_ROWS, rows_RI.shape[1])
    tile_RI[: len(rows_RI)] = rows_RI
    return tile_RI


def _rows(rows: RowTransform, levels_TS: Tensor, positions_T: Tensor, dtype: torch.dtype) -> Tensor:
    """The consumer's rows `[T, O]` of quantised components, float32."""
    # uint8 with bfloat16 gives bfloat16, in one pass, and cells are exact in it
    cells_TS = levels_TS - rows.half_S.to(dtype)
    y_TO = (cells_TS @ rows.decode_SO.to(dtype)).float().add_(rows.bias_O)
    return y_TO if rows.sink_out_PO is None else _shifted(y_TO, rows.sink_out_PO, positions_T)


def _shifted(x_TN: Tensor, shift_PN: Tensor, positions_T: Tensor, *, sign: int = 1) -> Tensor:
    """Add its shift, or subtract it, to each row whose position is below P; in place."""
    early_E = (positions_T < len(shift_PN)).nonzero()[:, 0]
    return x_TN.index_add_(0, early_E, shift_PN[positions_T[early_E]], alpha=sign)


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

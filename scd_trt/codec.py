"""Encode a producer's KV into codes and decode codes into a consumer's KV: the arithmetic of a translator.

Shapes: T tokens, H kv heads, D head size, F = H * D, M hidden size, R rank, C code bytes per token of a group.
`Encoder` takes rows as they lie in the producer's pool (keys after RoPE), `Decoder` returns rows as they go into the
consumer's pool (keys after the consumer's RoPE). In between: METHOD, section 1; code layout: `translator`.

Layers coded one by one: arithmetic is float32 and is rounded once to the code dtype; codes outside its range are clamped to
the largest finite value, never infinite.

Transformed groups: matrices are bfloat16, and products run in `product_dtype()`: bfloat16 where the CPU multiplies that in
hardware (its terms are added in float32, each sum is rounded to bfloat16), else float32 on the same matrices. Rows are
centred in float32 before any rounding, sums of components of 8 bits are corrected by what rounding dropped, cells are
integers that are exact in either dtype, and means are added in float32 after; what is decoded is rounded once more, to the
pool's dtype. As products have a fixed number of rows (see `products`), **codes of a token are the same bytes however tokens
are cut into calls**, on one machine with one number of threads. Elsewhere a value at the edge of a cell may fall on its other
side; a decoder takes any codes.

Tokens are worked on a tile at a time, in memory that is used again for each: an `Encoder` or `Decoder` serves one thread.

Offline measurement, the servers and the tests all call these two classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

from scd_trt.bit_packing import pack, unpack
from scd_trt.products import TILE_ROWS, Product, Scratch, product_dtype
from scd_trt.rope import Rope, RopeTables, shared_ropes
from scd_trt.translator import (
    PatchLayer,
    ReuseLayer,
    RowTransform,
    Translator,
    TranslatorError,
)

_Kind = TypeVar("_Kind")
_Turn = Callable[..., Tensor]
MAX_ROUNDED_WIDTH = 6
"""Bits up to which components may come out of a product in bfloat16. It has a grid of half a step near the ends of 8 bits,
which adds a tenth to the error of such a component (of 6 bits: a hundredth); wider ones get the rounded part in addition."""


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
            and values; sinks, whose rows are stored, count as typical. Zero where a group has no guard, because
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
        self._scratch = Scratch()
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
    """The producer's half; holds the matrices of transformed groups once more, in the order that products take."""

    def __init__(self, translator: Translator, *, dtype: torch.dtype | None = None) -> None:
        super().__init__(translator, dtype=dtype)
        self._kinds = _each_kind(translator, partial(_RowEncoder, dtype=self.product_dtype, scratch=self._scratch))

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
        kinds = self._kinds[group]
        if kinds is not None:
            ropes = [self.producer_rope[layer] for layer in layers]
            return _encode_kinds(
                kinds, inputs, _tiles(positions_T, seq_len, ropes, self._scratch), is_measured=is_measured
            )
        parts = []
        for layer, given in zip(layers, inputs, strict=True):
            strip = partial(self.producer_rope[layer].strip, positions_T=positions_T, seq_len=seq_len)
            parts.append(self._layer(layer, given, strip).view(torch.uint8))
        codes_TC = torch.cat(parts, dim=1)
        return Encoded(codes_TC, torch.zeros(len(codes_TC), device=codes_TC.device))

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
    """The consumer's half; holds the matrices of transformed groups once more, in the order that products take."""

    def __init__(self, translator: Translator, *, dtype: torch.dtype | None = None) -> None:
        super().__init__(translator, dtype=dtype)
        self._kinds = _each_kind(translator, partial(_RowDecoder, dtype=self.product_dtype, scratch=self._scratch))

    def decode(
        self, group: int, codes_TC: Tensor, positions_T: Tensor, *, seq_len: int | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """Keys after the consumer's RoPE and values of every layer of a group.

        Args:
            codes_TC: uint8 `[T, C]`, C = `bytes_per_token[group]`.
            positions_T: position of each token, for applying RoPE.
            seq_len: length that the keys are to be rotated for; only rope type `dynamic` needs it.
        Returns:
            for each layer: keys and values `[T, H, D]`, in `raw_dtype` (paper's layers: float32).
        Raises:
            ValueError: the codes have another width or dtype.
        """
        if codes_TC.dtype != torch.uint8 or codes_TC.shape[1:] != (self.bytes_per_token[group],):
            found = f"{codes_TC.dtype} {tuple(codes_TC.shape)}"
            raise ValueError(f"group {group}: codes are {found}; expected uint8 [T, {self.bytes_per_token[group]}]")
        layers = range(*self.groups[group])
        kinds = self._kinds[group]
        if kinds is not None:
            ropes = [self.consumer_rope[layer] for layer in layers]
            return self._transform(kinds, codes_TC, _tiles(positions_T, seq_len, ropes, self._scratch))
        widths = [self.translator.manifest.layer_bytes(layer) for layer in layers]
        parts = torch.split(codes_TC, widths, dim=1)
        decoded = []
        for layer, part in zip(layers, parts, strict=True):
            rotate = partial(self.consumer_rope[layer].apply, positions_T=positions_T, seq_len=seq_len)
            decoded.append(self._layer(layer, part, rotate))
        return decoded

    @torch.no_grad()
    def _transform(
        self, kinds: tuple[_RowDecoder, _RowDecoder], codes_TC: Tensor, tiles: list[_Tile]
    ) -> list[tuple[Tensor, Tensor]]:
        sizes = [kind.rows.layout.bytes_per_token for kind in kinds]
        parts = torch.split(codes_TC, sizes, dim=1)
        cells = [kind.cells(part_TC) for kind, part_TC in zip(kinds, parts, strict=True)]
        k_TGD, v_TGD = (
            self._heads(torch.empty(len(codes_TC), kind.num_outputs, dtype=self.raw_dtype)) for kind in kinds
        )
        for tile in tiles:
            # keys and values may share memory until they are copied
            rows = (kind.decode(cells[at][tile.rows], parts[at], tile) for at, kind in enumerate(kinds))
            k_TGD[tile.rows] = tile.turned(RopeTables.apply, self._heads(next(rows)))
            v_TGD[tile.rows] = self._heads(next(rows))
        num_heads = self.translator.manifest.consumer.num_kv_heads
        return list(zip(*(torch.split(x_TGD, num_heads, dim=1) for x_TGD in (k_TGD, v_TGD)), strict=True))

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


@dataclass(frozen=True)
class _Tile:
    """Tokens that are worked on together.

    Attributes:
        rows: which of a call's they are, at most `TILE_ROWS`.
        positions_R: their positions.
        seq_len: see `Encoder.encode`.
        ropes: of each layer of the keys.
        scratch: where its rows are put.
    """

    rows: slice
    positions_R: Tensor
    seq_len: int | None
    ropes: Sequence[Rope]
    scratch: Scratch

    @cached_property
    def sinks(self) -> Tensor:
        """Which of the call's tokens stand at position 0."""
        starts_R: Tensor = self.positions_R == 0
        return starts_R.nonzero()[:, 0] + int(self.rows.start)

    def gathered(self, parts: Sequence[Tensor]) -> Tensor:
        """These rows of several layers side by side, float32 `[R, G, D]`, G = num_layers * H, to be overwritten."""
        num_layers, (_, num_heads, head_dim) = len(parts), parts[0].shape
        width = num_layers * num_heads * head_dim
        joined = self._own("joined", width, parts[0].dtype)
        torch.cat([part_THD[self.rows].flatten(1) for part_THD in parts], dim=1, out=joined)
        return self._own("gathered", width, torch.float32).copy_(joined).view(-1, num_layers * num_heads, head_dim)

    def turned(self, turn: _Turn, x_RGD: Tensor) -> Tensor:
        """Heads of several layers, float32 `[R, G, D]`, each turned by the rotary embedding of its layer."""
        turned_RGD = self._own("turned", x_RGD.shape[1] * x_RGD.shape[2], torch.float32).view_as(x_RGD)
        num_heads, start = x_RGD.shape[1] // len(self.ropes), 0
        # runs of layers that rotate alike: mostly all of them
        for rope, run in groupby(self.ropes):
            own = slice(start, start + num_heads * len(list(run)))
            turn(rope.tables(self.positions_R, seq_len=self.seq_len), x_RGD[:, own], out=turned_RGD[:, own])
            start = own.stop
        return turned_RGD

    def _own(self, name: str, num_columns: int, dtype: torch.dtype) -> Tensor:
        return self.scratch.rows(name, num_columns, dtype)[: len(self.positions_R)]


def _tiles(positions_T: Tensor, seq_len: int | None, ropes: Sequence[Rope], scratch: Scratch) -> list[_Tile]:
    starts = range(0, len(positions_T), TILE_ROWS)
    rows = [slice(start, min(start + TILE_ROWS, len(positions_T))) for start in starts]
    return [_Tile(own, positions_T[own], seq_len, ropes, scratch) for own in rows]


def _each_kind(translator: Translator, prepare: Callable[[RowTransform], _Kind]) -> list[tuple[_Kind, _Kind] | None]:
    """Keys and values of each group; None where its layers are coded one by one."""
    transforms = [translator.transform(group) for group in range(len(translator.manifest.groups))]
    return [None if found is None else (prepare(found.keys), prepare(found.values)) for found in transforms]


@torch.no_grad()
def _encode_kinds(
    kinds: tuple[_RowEncoder, _RowEncoder], inputs: Sequence[LayerInput], tiles: list[_Tile], *, is_measured: bool
) -> Encoded:
    num_tokens = len(inputs[0].k_THD)
    levels = [torch.empty(num_tokens, kind.rows.layout.num_components, dtype=torch.uint8) for kind in kinds]
    numbers = [torch.zeros(num_tokens, dtype=torch.uint8) for _ in kinds]
    novelty_T = torch.zeros(num_tokens)
    for tile in tiles:
        for kind, x_RI, levels_TS, numbers_T in zip(kinds, _features(inputs, tile), levels, numbers, strict=True):
            operand = kind.operand(x_RI)
            levels_TS[tile.rows] = kind.levels(operand)[: len(x_RI)]
            numbers_T[tile.sinks] = kind.sink_numbers(x_RI, tile)
            if is_measured:
                torch.maximum(novelty_T[tile.rows], kind.novelty(operand, tile), out=novelty_T[tile.rows])
    sizes = [kind.rows.layout.bytes_per_token for kind in kinds]
    packed_TC = torch.empty(num_tokens, sum(sizes), dtype=torch.uint8)
    sinks_E = torch.cat([tile.sinks for tile in tiles]) if tiles else torch.empty(0, dtype=torch.long)
    for kind, levels_TS, numbers_T, out in zip(
        kinds, levels, numbers, torch.split(packed_TC, sizes, dim=1), strict=True
    ):
        pack(levels_TS, kind.rows.layout, out=out, check_range=False)
        if kind.rows.num_sink_rows:
            out[sinks_E] = 0
            out[sinks_E, :1] = numbers_T[sinks_E, None]
    return Encoded(packed_TC, novelty_T)


def _features(inputs: Sequence[LayerInput], tile: _Tile) -> Iterator[Tensor]:
    """Keys before RoPE, then values of all source layers side by side, float32 `[R, I]`, to be overwritten."""
    yield tile.turned(RopeTables.strip, tile.gathered([given.k_THD for given in inputs])).flatten(1)
    yield tile.gathered([given.v_THD for given in inputs]).flatten(1)


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


class _RowEncoder:
    """One kind of rows of a group, on their way to levels."""

    def __init__(self, rows: RowTransform, *, dtype: torch.dtype, scratch: Scratch) -> None:
        num_fine = sum(count for width, count in rows.layout.runs if width > MAX_ROUNDED_WIDTH)
        product = partial(Product, dtype=dtype, scratch=scratch)
        self.rows = rows
        self._low_S, self._high_S = -rows.half_S, rows.half_S - 1
        self._components = product(rows.encode_IS, num_fine=num_fine)
        self._directions = None if rows.guard is None else product(rows.guard.directions_IQ)

    def operand(self, features_RI: Tensor) -> Tensor:
        """Features less their means, as products take them; overwrites them."""
        return self._components.operand(features_RI.sub_(self.rows.mean_I))

    def sink_numbers(self, centred_RI: Tensor, tile: _Tile) -> Tensor:
        """For each sink the number of the stored row that is nearest, uint8."""
        stored_KI = self.rows.sink_in_KI
        if stored_KI is None or not len(tile.sinks):
            return torch.zeros(len(tile.sinks), dtype=torch.uint8)
        sinks_E1I = centred_RI[tile.sinks - tile.rows.start, None]
        return (sinks_E1I - stored_KI).square().sum(2).argmin(1).to(torch.uint8)

    def levels(self, operand: Tensor) -> Tensor:
        """Quantised components, whole numbers in float32 `[TILE_ROWS, S]`."""
        return self._components(operand).floor_().clamp_(self._low_S, self._high_S).sub_(self._low_S)

    def novelty(self, operand: Tensor, tile: _Tile) -> Tensor:
        """Relative to the limit, float32 `[R]`; zero without a guard."""
        num_rows, guard = len(tile.positions_R), self.rows.guard
        if self._directions is None or guard is None:
            return torch.zeros(num_rows)
        novelty_R = self._directions(operand)[:num_rows].square().sum(1)
        return novelty_R.masked_fill((tile.positions_R == 0) & (self.rows.num_sink_rows > 0), 1.0) / guard.limit


class _RowDecoder:
    """One kind of rows of a group, on their way from packed levels."""

    def __init__(self, rows: RowTransform, *, dtype: torch.dtype, scratch: Scratch) -> None:
        self.rows = rows
        self.num_outputs = len(rows.bias_O)
        self._product = Product(rows.decode_SO, dtype=dtype, scratch=scratch)
        self._half_S = rows.half_S.to(torch.uint8)

    def cells(self, codes_TC: Tensor) -> Tensor:
        """Levels less half their number, int8 `[T, S]`: exact in every dtype of products."""
        # a difference of bytes wraps around; read with a sign, it is right
        return unpack(codes_TC, self.rows.layout).sub_(self._half_S).view(torch.int8)

    def decode(self, cells_RS: Tensor, codes_TC: Tensor, tile: _Tile) -> Tensor:
        """The consumer's rows, float32 `[R, O]`, to be overwritten.

        Args:
            codes_TC: of all tokens of the call, for the numbers of sinks.
        """
        y_RO = self._product(self._product.operand(cells_RS))[: len(cells_RS)].add_(self.rows.bias_O)
        stored_KO = self.rows.sink_out_KO
        if stored_KO is not None and len(tile.sinks):
            y_RO[tile.sinks - tile.rows.start] = stored_KO[_numbers(codes_TC[tile.sinks], len(stored_KO))]
        return y_RO


def _numbers(codes_EC: Tensor, num_rows: int) -> Tensor:
    """Numbers of the stored rows; of one that there is not the last row's, for codes may come from anywhere."""
    if not codes_EC.shape[1]:
        return torch.zeros(len(codes_EC), dtype=torch.long)
    return codes_EC[:, 0].long().clamp_max(num_rows - 1)


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

"""Fixed-rate packing of quantised components into bytes: the byte contract of one token's codes.

Owns: which widths exist, their packing units, the layout of one token (`BitLayout`), and `pack` / `unpack`.

Shapes: T tokens, C components, P packed bytes of one token, U units of one run. Levels are unsigned whole numbers, one
uint8 each, below `2**width` of their component.

**Bytes of one token.** Components are ordered in *runs* of equal width, widest first; the bytes of the runs follow each
other. A run of width w consists of U *units* of c components in n bytes, so that c * w = 8 * n:

    width                    8   6   4   3   2
    components of a unit     1   4   2   8   4
    bytes of a unit          1   3   1   3   1

A unit is the little-endian number `sum(level[j] << (j * w) for j in range(c))`: the first component sits in the lowest
bits, its lowest bits in the first byte. Units are stored in *planes*: of a run's C = c * U components, component
`j * U + u` is number j of unit u; of its n * U bytes, byte `i * U + u` is byte i of unit u. Thus every step of packing
reads and writes contiguous memory, three times as fast here as units side by side, and a kernel loads it coalesced.

    width  levels             bytes, hexadecimal
    8      165                a5
    6      1 2 3 4            81 30 10              1 + (2 << 6) + (3 << 12) + (4 << 18)
    4      1 2 3 4 5 6        41 52 63              U = 3, units (1, 4) (2, 5) (3, 6)
    3      0 1 2 3 4 5 6 7    88 c6 fa
    2      0 1 2 3            e4

Nothing is padded: a run that is not whole units is refused, and whoever chooses widths chooses whole units (as
`distill.rate_distortion` does, at no measurable loss). Hence bytes per token are `sum(width * count) / 8`, exactly.

Errors: `ValueError` with the value, its place and what is allowed. Deliberately not here: what a level means (quantiser
steps and midpoints are folded into the maps of the translator), and any choice of widths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, PositiveInt, model_validator
from torch import Tensor

Width = Literal[8, 6, 4, 3, 2]


class Unit(NamedTuple):
    """The smallest number of components of one width that fill whole bytes."""

    num_components: int
    num_bytes: int


UNITS: dict[int, Unit] = {8: Unit(1, 1), 6: Unit(4, 3), 4: Unit(2, 1), 3: Unit(8, 3), 2: Unit(4, 1)}
"""Packing unit of each width, widest first."""


class BitLayout(BaseModel):
    """Widths of one token's components: runs `(width, number of components)`, widest first, each of whole units.

    As JSON it is `{"runs": [[8, 5], [4, 12]]}`; equal widths have equal layouts. No runs: nothing is sent.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    runs: tuple[tuple[Width, PositiveInt], ...]

    @classmethod
    def from_bits(cls, widths: Sequence[int]) -> BitLayout:
        """Layout of components with these widths, in their order."""
        return cls.model_validate({"runs": [(width, len(list(run))) for width, run in groupby(widths)]})

    @model_validator(mode="after")
    def _runs_are_whole(self) -> BitLayout:
        for (width, count), (next_width, _) in pairwise(self.runs):
            if width <= next_width:
                raise ValueError(
                    f"a run of {next_width} bits follows {count} components of {width} bits; "
                    "each width may come once, widest first: sort the components"
                )
        for width, count in self.runs:
            unit = UNITS[width].num_components
            if count % unit:
                raise ValueError(
                    f"{count} components of {width} bits do not fill whole bytes; give a multiple of {unit}"
                )
        return self

    @property
    def num_components(self) -> int:
        return sum(count for _, count in self.runs)

    @property
    def bytes_per_token(self) -> int:
        return sum(width * count for width, count in self.runs) // 8


def pack(levels_TC: Tensor, layout: BitLayout, *, out: Tensor | None = None, check_range: bool = True) -> Tensor:
    """Pack the levels of T tokens.

    Args:
        levels_TC: uint8 `[T, num_components]`, any strides.
        out: uint8 `[T, bytes_per_token]` to write into, any strides, sharing no memory with `levels_TC`.
        check_range: read all levels once more and refuse one that is too large for its width; costs a fraction of
            packing on a CPU but a synchronisation on a GPU. Without it a level that is too large spoils its neighbours:
            only for callers that have clamped.
    Returns:
        uint8 `[T, bytes_per_token]`; `out` where it was given.
    Raises:
        ValueError: wrong shape, dtype or device, or a level out of range.
    """
    _check_rows("levels", levels_TC, layout.num_components)
    if check_range:
        check_levels(levels_TC, layout)
    packed_TP = _rows("out", out, levels_TC, layout.bytes_per_token)
    for width, run_TC, run_TP in _runs(layout, levels_TC, packed_TP):
        num_components, num_bytes = UNITS[width]
        members = run_TC.chunk(num_components, dim=1)
        for byte_TU, (first, *rest) in zip(run_TP.chunk(num_bytes, dim=1), _FIELDS[width], strict=True):
            _pack_byte(byte_TU, members, first, rest)
    return packed_TP


def unpack(packed_TP: Tensor, layout: BitLayout, *, out: Tensor | None = None) -> Tensor:
    """Levels of T packed tokens; every byte string of the right length is valid.

    Args:
        packed_TP: uint8 `[T, bytes_per_token]`, any strides.
        out: uint8 `[T, num_components]` to write into, any strides, sharing no memory with `packed_TP`.
    Returns:
        uint8 `[T, num_components]`; `out` where it was given.
    Raises:
        ValueError: wrong shape, dtype or device.
    """
    _check_rows("packed bytes", packed_TP, layout.bytes_per_token)
    levels_TC = _rows("out", out, packed_TP, layout.num_components)
    for width, run_TC, run_TP in _runs(layout, levels_TC, packed_TP):
        num_components, num_bytes = UNITS[width]
        planes = run_TP.chunk(num_bytes, dim=1)
        for index, member_TU in enumerate(run_TC.chunk(num_components, dim=1)):
            _unpack_member(member_TU, planes, index, width)
    return levels_TC


def check_levels(levels_TC: Tensor, layout: BitLayout) -> None:
    """Raise `ValueError` where a level is too large for the width of its component; names the first one."""
    if not len(levels_TC):
        return
    stop = 0
    for width, count in layout.runs:
        start, stop = stop, stop + count
        run_TC = levels_TC[:, start:stop]
        if int(run_TC.amax()) >> width:
            token, component = (run_TC >> width).nonzero()[0].tolist()
            raise ValueError(
                f"level {int(run_TC[token, component])} of token {token}, component {start + component} "
                f"does not fit its {width} bits; levels are 0..{(1 << width) - 1}: clamp before packing"
            )


class _Field(NamedTuple):
    """Part of a byte: component `member` of its unit, shifted up by `shift` bits (down where negative)."""

    member: int
    shift: int


def _fields(width: int) -> tuple[tuple[_Field, ...], ...]:
    """For each byte of a unit its fields, lowest bits first; only the first can be shifted down."""
    num_components, num_bytes = UNITS[width]
    return tuple(
        tuple(
            _Field(member, member * width - 8 * byte)
            for member in range(num_components)
            if -width < member * width - 8 * byte < 8
        )
        for byte in range(num_bytes)
    )


_FIELDS = {width: _fields(width) for width in UNITS}


def _pack_byte(byte_TU: Tensor, members: Sequence[Tensor], first: _Field, rest: Sequence[_Field]) -> None:
    # uint8 arithmetic wraps, so that `x * 2**shift` drops the bits that belong to the next byte, and as fields do not
    # overlap a sum is an or: one pass over memory for each field
    if first.shift < 0:
        torch.bitwise_right_shift(members[first.member], -first.shift, out=byte_TU)
    elif rest:
        second, *rest = rest
        torch.add(members[first.member], members[second.member], alpha=1 << second.shift, out=byte_TU)
    else:
        byte_TU.copy_(members[first.member])
    for member, shift in rest:
        byte_TU.add_(members[member], alpha=1 << shift)


def _unpack_member(member_TU: Tensor, planes: Sequence[Tensor], index: int, width: int) -> None:
    byte, shift = divmod(index * width, 8)
    mask = (1 << width) - 1
    if shift == 0:
        torch.bitwise_and(planes[byte], mask, out=member_TU)
        return
    torch.bitwise_right_shift(planes[byte], shift, out=member_TU)
    if shift + width > 8:
        member_TU.add_(planes[byte + 1], alpha=1 << (8 - shift))
    if shift + width != 8:
        member_TU.bitwise_and_(mask)


def _runs(layout: BitLayout, levels_TC: Tensor, packed_TP: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    component, byte = 0, 0
    for width, count in layout.runs:
        num_bytes = width * count // 8
        yield width, levels_TC[:, component : component + count], packed_TP[:, byte : byte + num_bytes]
        component, byte = component + count, byte + num_bytes


def _rows(name: str, out: Tensor | None, like: Tensor, width: int) -> Tensor:
    if out is None:
        return torch.empty(len(like), width, dtype=torch.uint8, device=like.device)
    _check_rows(name, out, width)
    if len(out) != len(like) or out.device != like.device:
        raise ValueError(f"{name} has {len(out)} rows on {out.device}; expected {len(like)} on {like.device}")
    return out


def _check_rows(name: str, rows: Tensor, width: int) -> None:
    if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] != width:
        raise ValueError(f"{name}: {rows.dtype} {tuple(rows.shape)}; this layout needs torch.uint8 [T, {width}]")

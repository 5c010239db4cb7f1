"""Packing is exact, keeps to its byte contract, and never lets one component touch another."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from scd_trt.bit_packing import UNITS, BitLayout, check_levels, pack, unpack

# Written by hand from the table of the module docstring, one run of two units each: (levels, bytes). Units lie in planes:
# component j * 2 + u is number j of unit u, byte i * 2 + u is byte i of unit u.
GOLDEN = {
    8: ([0xA5, 0x0F], [0xA5, 0x0F]),
    # unit 0 is 1, 2, 3, 4 = 000100 000011 000010 000001, unit 1 is 63, 0, 63, 0 = 000000 111111 000000 111111
    6: ([1, 63, 2, 0, 3, 63, 4, 0], [0x81, 0x3F, 0x30, 0xF0, 0x10, 0x03]),
    # unit 0 is 1, 2, unit 1 is 15, 4
    4: ([1, 15, 2, 4], [0x21, 0x4F]),
    # unit 0 is 0..7 = 111 110 101 100 011 010 001 000, unit 1 is 7, 0, 0, 0, 0, 0, 0, 1
    3: ([0, 7, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0, 7, 1], [0x88, 0x07, 0xC6, 0x00, 0xFA, 0x20]),
    # unit 0 is 0, 1, 2, 3 = 11 10 01 00, unit 1 is 3, 0, 0, 1
    2: ([0, 3, 1, 0, 2, 0, 3, 1], [0xE4, 0x43]),
}


@st.composite
def layouts(draw):
    widths = draw(st.sets(st.sampled_from(list(UNITS))))
    return BitLayout(
        runs=tuple((w, UNITS[w].num_components * draw(st.integers(1, 5))) for w in sorted(widths, reverse=True))
    )


def _limits(layout):
    """Number of levels of each component."""
    return torch.tensor([1 << width for width, count in layout.runs for _ in range(count)])


def _levels(layout, num_tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    raw_TC = torch.randint(0, 256, (num_tokens, layout.num_components), generator=generator)
    return (raw_TC % _limits(layout)).to(torch.uint8)


def _bits_packed_slowly(levels, layout):
    """The contract once more, bit by bit: one token's bytes."""
    packed, start = bytearray(), 0
    for width, count in layout.runs:
        num_units = count // UNITS[width].num_components
        units = [
            sum(levels[start + member * num_units + unit] << (member * width) for member in range(count // num_units))
            for unit in range(num_units)
        ]
        rows = [unit.to_bytes(UNITS[width].num_bytes, "little") for unit in units]
        packed += bytes(row[byte] for byte in range(UNITS[width].num_bytes) for row in rows)
        start += count
    return bytes(packed)


def test_units_fill_whole_bytes():
    assert {width: tuple(unit) for width, unit in UNITS.items()} == {
        8: (1, 1),
        6: (4, 3),
        4: (2, 1),
        3: (8, 3),
        2: (4, 1),
    }
    assert all(width * unit.num_components == 8 * unit.num_bytes for width, unit in UNITS.items())


@pytest.mark.parametrize("width", GOLDEN)
def test_golden_bytes(width):
    levels, expected = GOLDEN[width]
    layout = BitLayout.from_bits([width] * len(levels))
    packed_TP = pack(torch.tensor([levels], dtype=torch.uint8), layout)
    assert packed_TP.tolist() == [expected]
    assert unpack(torch.tensor([expected], dtype=torch.uint8), layout).tolist() == [levels]


@pytest.mark.parametrize(
    ("width", "levels", "expected"),
    [
        (8, [165], "a5"),
        (6, [1, 2, 3, 4], "813010"),
        (4, [1, 2, 3, 4, 5, 6], "415263"),
        (3, list(range(8)), "88c6fa"),
        (2, list(range(4)), "e4"),
    ],
)
def test_golden_bytes_of_the_docstring(width, levels, expected):
    packed_TP = pack(torch.tensor([levels], dtype=torch.uint8), BitLayout.from_bits([width] * len(levels)))
    assert bytes(packed_TP[0].tolist()).hex() == expected


def test_runs_follow_each_other():
    layout = BitLayout(runs=((8, 2), (4, 2), (2, 4)))
    levels_TC = torch.tensor([[200, 7, 1, 2, 3, 2, 1, 0]], dtype=torch.uint8)
    assert pack(levels_TC, layout).tolist() == [[200, 7, 0x21, 0b00_01_10_11]]


@given(layout=layouts(), num_tokens=st.integers(0, 7), seed=st.integers(0, 2**31))
def test_unpack_inverts_pack(layout, num_tokens, seed):
    levels_TC = _levels(layout, num_tokens, seed)
    packed_TP = pack(levels_TC, layout)
    assert packed_TP.shape == (num_tokens, layout.bytes_per_token)
    assert torch.equal(unpack(packed_TP, layout), levels_TC)
    assert [bytes(row) for row in packed_TP.tolist()] == [
        _bits_packed_slowly(row, layout) for row in levels_TC.tolist()
    ]


@given(layout=layouts(), seed=st.integers(0, 2**31))
def test_pack_inverts_unpack(layout, seed):
    # every byte string is valid and none is padding: a bit that unpack ignored would not come back
    generator = torch.Generator().manual_seed(seed)
    packed_TP = torch.randint(0, 256, (3, layout.bytes_per_token), generator=generator, dtype=torch.uint8)
    assert torch.equal(pack(unpack(packed_TP, layout), layout), packed_TP)


@given(layout=layouts().filter(lambda layout: layout.runs), data=st.data())
def test_a_component_touches_only_its_own_bits(layout, data):
    poisoned = data.draw(st.integers(0, layout.num_components - 1))
    low_TC = torch.zeros(1, layout.num_components, dtype=torch.uint8)
    high_TC = low_TC.clone()
    high_TC[0, poisoned] = _limits(layout)[poisoned] - 1
    changed = pack(low_TC, layout) ^ pack(high_TC, layout)
    width = int(_limits(layout)[poisoned]).bit_length() - 1
    assert sum(byte.bit_count() for byte in changed[0].tolist()) == width
    assert torch.equal(unpack(changed, layout), high_TC)


def test_out_is_written_in_place_and_its_neighbours_are_not():
    layout = BitLayout(runs=((6, 4), (3, 8), (2, 4)))
    levels_TC = _levels(layout, 5, seed=1)
    arena = torch.full((7, layout.bytes_per_token + 4), 0xEE, dtype=torch.uint8)
    inside = arena[1:6, 2:-2]
    assert pack(levels_TC, layout, out=inside) is inside
    assert torch.equal(inside, pack(levels_TC, layout))
    arena_levels = torch.full((5, layout.num_components + 2), 0xEE, dtype=torch.uint8)
    unpack(inside, layout, out=arena_levels[:, 1:-1])
    assert torch.equal(arena_levels[:, 1:-1], levels_TC)
    for border in (arena[0], arena[6], arena[:, :2], arena[:, -2:], arena_levels[:, 0], arena_levels[:, -1]):
        assert bool((border == 0xEE).all())


def test_strided_levels_pack_alike():
    layout = BitLayout(runs=((4, 6), (3, 8)))
    levels_TC = _levels(layout, 9, seed=2)
    strided_TC = levels_TC.T.contiguous().T
    assert strided_TC.stride() != levels_TC.stride()
    assert torch.equal(pack(strided_TC, layout), pack(levels_TC, layout))


def test_no_components_need_no_bytes():
    layout = BitLayout.from_bits([])
    assert (layout.num_components, layout.bytes_per_token) == (0, 0)
    assert pack(torch.empty(3, 0, dtype=torch.uint8), layout).shape == (3, 0)


@pytest.mark.parametrize("width", [6, 4, 3, 2])
def test_a_level_too_large_is_named(width):
    layout = BitLayout(runs=((8, 3), (width, 8)))
    levels_TC = torch.zeros(4, 11, dtype=torch.uint8)
    levels_TC[:, :3] = 255
    levels_TC[2, 5] = 1 << width
    expected = rf"level {1 << width} of token 2, component 5 does not fit its {width} bits; levels are 0\.\."
    with pytest.raises(ValueError, match=expected):
        pack(levels_TC, layout)
    with pytest.raises(ValueError, match=expected):
        check_levels(levels_TC, layout)
    assert pack(levels_TC, layout, check_range=False).shape == (4, 3 + width)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (torch.zeros(2, 5, dtype=torch.uint8), r"levels: torch.uint8 \(2, 5\); this layout needs torch.uint8 \[T, 4\]"),
        (torch.zeros(4, dtype=torch.uint8), r"levels: torch.uint8 \(4,\)"),
        (torch.zeros(2, 4, dtype=torch.int8), r"levels: torch.int8 \(2, 4\)"),
        (torch.zeros(2, 4), r"levels: torch.float32 \(2, 4\)"),
    ],
)
def test_wrong_levels_are_refused(rows, expected):
    with pytest.raises(ValueError, match=expected):
        pack(rows, BitLayout.from_bits([4] * 4))


def test_wrong_bytes_and_outputs_are_refused():
    layout = BitLayout.from_bits([4] * 4)
    levels_TC = torch.zeros(2, 4, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"packed bytes: torch.uint8 \(2, 4\); this layout needs torch.uint8 \[T, 2\]"):
        unpack(levels_TC, layout)
    with pytest.raises(ValueError, match=r"out: torch.int32 \(2, 2\)"):
        pack(levels_TC, layout, out=torch.zeros(2, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match="out has 3 rows on cpu; expected 2 on cpu"):
        pack(levels_TC, layout, out=torch.zeros(3, 2, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("widths", "expected"),
    [
        ([6] * 5, "5 components of 6 bits do not fill whole bytes; give a multiple of 4"),
        ([4], "1 components of 4 bits do not fill whole bytes; give a multiple of 2"),
        ([3] * 4, "4 components of 3 bits do not fill whole bytes; give a multiple of 8"),
        ([2] * 6, "6 components of 2 bits do not fill whole bytes; give a multiple of 4"),
        ([4, 4, 8], "a run of 8 bits follows 2 components of 4 bits; each width may come once, widest first"),
        ([8, 4, 4, 8, 4, 4], "a run of 8 bits follows 2 components of 4 bits"),
        ([8, 5], "8, 6, 4, 3 or 2"),
        ([8, 0], "8, 6, 4, 3 or 2"),
    ],
)
def test_wrong_layouts_are_refused(widths, expected):
    with pytest.raises(ValueError, match=expected):
        BitLayout.from_bits(widths)


def test_layout_survives_json():
    layout = BitLayout.from_bits([8] * 5 + [4] * 12)
    assert layout.model_dump_json() == '{"runs":[[8,5],[4,12]]}'
    assert BitLayout.model_validate_json(layout.model_dump_json()) == layout
    assert (layout.num_components, layout.bytes_per_token) == (17, 11)
    with pytest.raises(ValidationError):
        BitLayout.model_validate({"runs": [[8, 0]]})
    with pytest.raises(ValidationError, match="a run of 4 bits follows 2 components of 4 bits"):
        BitLayout.model_validate({"runs": [[4, 2], [4, 2]]})
    with pytest.raises(ValidationError):
        BitLayout.model_validate({"runs": [], "padding": 1})

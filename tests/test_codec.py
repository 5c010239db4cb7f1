"""The codec against plain float64 formulas, and its promises at the edges: exactness, clamping, byte layout."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_translators import (
    HEAD_DIM,
    HIDDEN,
    KEY_RUNS,
    NUM_KV_HEADS,
    VALUE_RUNS,
    WIDTH,
    group_translator,
    random_group,
    random_patch,
    random_reuse,
    random_translator,
    tiny_spec,
)

from scd_trt.bit_packing import UNITS, BitLayout, pack, unpack
from scd_trt.codec import Decoder, Encoder, LayerInput
from scd_trt.products import TILE_ROWS, Product, Scratch, _has_packed_products
from scd_trt.rope import RopeParameters
from scd_trt.translator import MATRIX_DTYPE, AffineMap, GroupTransform, RawLayer, RowTransform, TranslatorError

NUM_TOKENS = 11
POSITIONS = torch.arange(37, 37 + NUM_TOKENS)
DTYPES = (torch.bfloat16, torch.float32)
# float32 codes: sums of 24 products of size 1, twice, and a rotation
CLOSE = {"rtol": 0, "atol": 2e-5}


def _input(seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> LayerInput:
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(NUM_TOKENS, NUM_KV_HEADS, HEAD_DIM, generator=generator) * scale for _ in range(2))
    return LayerInput(k.to(dtype), v.to(dtype), torch.randn(NUM_TOKENS, HIDDEN, generator=generator).to(dtype) * scale)


def _plain_rotation(x: np.ndarray, theta: float, sign: int) -> np.ndarray:
    """Pair (f, f + D/2) as a complex number, turned by position * theta^(-2f/D)."""
    half = HEAD_DIM // 2
    frequency = theta ** (-np.arange(half) * 2 / HEAD_DIM)
    turn = np.exp(1j * sign * POSITIONS.numpy()[:, None] * frequency)[:, None, :]
    turned = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _plain_map(affine: AffineMap, x: np.ndarray) -> np.ndarray:
    return x @ affine.weight.double().numpy() + affine.bias.double().numpy()


def _heads(x: np.ndarray) -> np.ndarray:
    return x.reshape(NUM_TOKENS, NUM_KV_HEADS, HEAD_DIM)


def _through(translator, given: LayerInput):
    codes = Encoder(translator).encode(0, [given], POSITIONS)
    return Decoder(translator).decode(0, codes, POSITIONS)[0]


def test_reuse_equals_the_plain_formula_with_different_rotations():
    layer = random_reuse()
    translator = random_translator(
        layer, code_dtype="float32", producer=tiny_spec(1), consumer=tiny_spec(1, theta=123.0)
    )
    given = _input()
    k, v = _through(translator, given)
    stripped = _plain_rotation(given.k_THD.double().numpy(), 10_000.0, -1).reshape(NUM_TOKENS, -1)
    k_before = _heads(_plain_map(layer.decode_k, _plain_map(layer.encode_k, stripped)))
    values = given.v_THD.double().numpy().reshape(NUM_TOKENS, -1)
    np.testing.assert_allclose(k.numpy(), _plain_rotation(k_before, 123.0, 1), **CLOSE)
    np.testing.assert_allclose(
        v.numpy(), _heads(_plain_map(layer.decode_v, _plain_map(layer.encode_v, values))), **CLOSE
    )


@pytest.mark.parametrize("mlp_hidden", [None, 9])
@pytest.mark.parametrize("k_norm", [False, True])
def test_patch_equals_the_plain_formula(mlp_hidden, k_norm):
    layer = random_patch(mlp_hidden=mlp_hidden, k_norm=k_norm)
    given = _input()
    k, v = _through(random_translator(layer, code_dtype="float32"), given)
    x = _plain_map(layer.encode_h, given.x_TM.double().numpy())
    if layer.hidden is not None:
        x = _plain_map(layer.hidden, x)
        x = x / (1 + np.exp(-x))
    keys, values = np.split(_plain_map(layer.project, x), 2, axis=1)
    keys = _heads(keys)
    if k_norm:
        keys = keys / np.sqrt((keys**2).mean(-1, keepdims=True) + layer.k_norm_eps) * layer.k_norm_D.double().numpy()
    np.testing.assert_allclose(k.numpy(), _plain_rotation(keys, 10_000.0, 1), **CLOSE)
    np.testing.assert_allclose(v.numpy(), _heads(values), **CLOSE)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_raw_is_bit_exact_where_both_models_rotate_alike(dtype):
    given = _input(dtype=getattr(torch, dtype))
    k, v = _through(random_translator(RawLayer(), raw_dtype=dtype), given)
    assert k.dtype == given.k_THD.dtype
    assert torch.equal(k, given.k_THD)
    assert torch.equal(v, given.v_THD)


def test_raw_takes_the_consumers_rotation_where_they_differ():
    given = _input()
    translator = random_translator(RawLayer(), raw_dtype="float32", consumer=tiny_spec(1, theta=123.0))
    k, v = _through(translator, given)
    expected = _plain_rotation(_plain_rotation(given.k_THD.double().numpy(), 10_000.0, -1), 123.0, 1)
    np.testing.assert_allclose(k.numpy(), expected, **CLOSE)
    assert torch.equal(v, given.v_THD)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_codes_are_rounded_once(dtype):
    layer = random_patch()
    codes = Encoder(random_translator(layer, code_dtype=dtype)).encode(0, [_input()], POSITIONS)
    expected = layer.encode_h(_input().x_TM).to(getattr(torch, dtype))
    assert torch.equal(codes.view(getattr(torch, dtype)), expected)


def test_codes_beyond_the_range_are_clamped():
    layer = random_reuse()
    codes = Encoder(random_translator(layer)).encode(0, [_input(scale=1e6)], POSITIONS).view(torch.float16)
    assert bool(codes.isfinite().all())
    assert codes.abs().max() == torch.finfo(torch.float16).max
    raw = Encoder(random_translator(RawLayer(), raw_dtype="float16")).encode(0, [_input(scale=1e6)], POSITIONS)
    assert bool(raw.view(torch.float16).isfinite().all())


def test_byte_layout_is_codes_in_order_little_endian():
    one_k = AffineMap(torch.zeros(16, 1), torch.tensor([1.0]))
    two_v = AffineMap(torch.zeros(16, 2), torch.tensor([2.0, -0.5]))
    layer = random_reuse(r_k=1, r_v=2)
    layer = type(layer)(encode_k=one_k, decode_k=layer.decode_k, encode_v=two_v, decode_v=layer.decode_v)
    translator = random_translator(layer, copy.deepcopy(layer), groups=((0, 2),))
    codes = Encoder(translator).encode(0, [_input(), _input()], POSITIONS)
    # float16: 1.0 = 3c00, 2.0 = 4000, -0.5 = b800
    assert bytes(codes[0].tolist()).hex() == "003c004000b8" * 2


@given(
    kinds=st.lists(st.sampled_from(["reuse", "patch", "raw"]), min_size=1, max_size=4),
    code_dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    raw_dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    cuts=st.tuples(st.integers(0, NUM_TOKENS), st.integers(0, NUM_TOKENS)),
)
@settings(max_examples=40, deadline=None)
def test_groups_and_parts_of_a_sequence_are_coded_independently(kinds, code_dtype, raw_dtype, cuts):
    makers = {"reuse": random_reuse, "patch": random_patch, "raw": RawLayer}
    layers = [makers[kind]() for kind in kinds]
    dtypes = {"code_dtype": code_dtype, "raw_dtype": raw_dtype}
    apart = random_translator(*layers, **dtypes)
    together = random_translator(*layers, groups=((0, len(layers)),), **dtypes)
    inputs = [_input(seed, getattr(torch, raw_dtype)) for seed in range(len(layers))]
    whole = Encoder(together).encode(0, inputs, POSITIONS)
    assert whole.dtype == torch.uint8
    assert whole.shape == (NUM_TOKENS, together.manifest.bytes_per_token[0])
    parts = [Encoder(apart).encode(group, [given], POSITIONS) for group, given in enumerate(inputs)]
    assert torch.equal(torch.cat(parts, dim=1), whole)
    start, stop = sorted(cuts)
    decoded = Decoder(together).decode(0, whole, POSITIONS)
    partial = Decoder(together).decode(0, whole[start:stop], POSITIONS[start:stop])
    for (k, v), (k_part, v_part) in zip(decoded, partial, strict=True):
        # another number of rows may take another path through the matrix product: one rounding of sums of size 4
        torch.testing.assert_close(k_part, k[start:stop], rtol=0, atol=4e-6)
        torch.testing.assert_close(v_part, v[start:stop], rtol=0, atol=4e-6)


def test_a_layer_may_begin_where_its_dtype_is_not_aligned():
    # five float16 codes are ten bytes: the float32 rows behind them begin at no multiple of four
    translator = random_translator(random_patch(r_h=5), RawLayer(), raw_dtype="float32", groups=((0, 2),))
    codes = Encoder(translator).encode(0, [_input(), _input(1)], POSITIONS)
    _, (k, v) = Decoder(translator).decode(0, codes[:1], POSITIONS[:1])
    assert torch.equal(k, _input(1).k_THD[:1])
    assert torch.equal(v, _input(1).v_THD[:1])


def test_codes_of_another_width_or_dtype_are_refused():
    decoder = Decoder(random_translator())
    with pytest.raises(ValueError, match=r"group 0: codes are torch.uint8 \(2, 23\); expected uint8 \[T, 24\]"):
        decoder.decode(0, torch.zeros(2, 23, dtype=torch.uint8), POSITIONS[:2])
    with pytest.raises(ValueError, match=r"torch\.float16"):
        decoder.decode(0, torch.zeros(2, 24, dtype=torch.float16), POSITIONS[:2])


def test_wrong_inputs_are_refused():
    encoder = Encoder(random_translator())
    with pytest.raises(ValueError, match="group 0 is computed from 1 layers, got 2"):
        encoder.encode(0, [_input(), _input()], POSITIONS)
    blind = LayerInput(_input().k_THD, _input().v_THD)
    with pytest.raises(TranslatorError, match="layer 1 is a Patch layer"):
        encoder.encode(1, [blind], POSITIONS)


def test_rotation_that_depends_on_the_length_is_told_the_length():
    stretched = RopeParameters(rope_type="dynamic", factor=4.0, max_position=16, head_dim=HEAD_DIM, rotary_dim=HEAD_DIM)
    specs = {"producer": tiny_spec(1, rope=(stretched,)), "consumer": tiny_spec(1)}
    translator = random_translator(RawLayer(), raw_dtype="float32", **specs)
    short, long = (
        Encoder(translator).encode(0, [_input()], POSITIONS, seq_len=seq_len).view(torch.float32)
        for seq_len in (48, 96)
    )
    assert not torch.equal(short, long)
    assert torch.equal(short[:, 16:], long[:, 16:])


# ---- groups that are transformed ------------------------------------------------------------------------------------


def _plain_levels(rows: RowTransform, x_TI: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Levels, component by component, and how far each value lies from the nearest edge of a cell."""
    scaled = (x_TI - rows.mean_I.double().numpy()) @ rows.encode_IS.double().numpy()
    widths = [width for width, count in rows.layout.runs for _ in range(count)]
    levels = np.empty(scaled.shape, dtype=np.uint8)
    for component, width in enumerate(widths):
        shifted = np.floor(scaled[:, component]) + 2 ** (width - 1)
        levels[:, component] = np.clip(shifted, 0, 2**width - 1)
    return levels, np.abs(scaled - np.round(scaled))


def _side_by_side(inputs: list[LayerInput], theta: float) -> tuple[np.ndarray, np.ndarray]:
    keys = [_plain_rotation(given.k_THD.double().numpy(), theta, -1).reshape(NUM_TOKENS, -1) for given in inputs]
    values = [given.v_THD.double().numpy().reshape(NUM_TOKENS, -1) for given in inputs]
    return np.concatenate(keys, axis=1), np.concatenate(values, axis=1)


@pytest.mark.parametrize(
    ("dtype", "margin", "least_sure"),
    [
        # a value near an edge of a cell may fall on its other side: float32, of sums up to 300, of 32 terms
        (torch.float32, 1e-3, 0.99),
        # 32 features rounded to 8 significant bits each, in components that reach 128; five deviations
        (torch.bfloat16, 0.35, 0.15),
    ],
    ids=str,
)
def test_group_codes_are_the_packed_levels_of_keys_then_of_values(dtype, margin, least_sure):
    transform = random_group(2)
    translator = group_translator(transform, producer=tiny_spec(2, theta=123.0))
    inputs = [_input(seed) for seed in range(2)]
    codes = Encoder(translator, dtype=dtype).encode(0, inputs, POSITIONS)
    assert codes.shape == (NUM_TOKENS, 11 + 5)
    packed_keys, packed_values = codes[:, :11], codes[:, 11:]
    for packed, rows, x in zip(
        (packed_keys, packed_values), (transform.keys, transform.values), _side_by_side(inputs, 123.0), strict=True
    ):
        found = unpack(packed, rows.layout).numpy()
        expected, from_edge = _plain_levels(rows, x)
        sure = from_edge > margin
        assert sure.mean() > least_sure
        assert (found == expected)[sure].all()
        assert (np.abs(found.astype(int) - expected) <= 1).all()
        # the components use their range, and leave it at both ends
        widths = np.array([width for width, count in rows.layout.runs for _ in range(count)])
        assert (found == 0).any()
        assert (found == 2**widths - 1).any()


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 2e-6), (torch.bfloat16, 2**-8)], ids=str)
def test_decoded_groups_are_the_plain_formula_in_the_consumers_rotation(dtype, relative):
    transform = random_group(2)
    translator = group_translator(transform, consumer=tiny_spec(2, theta=123.0), raw_dtype="float32")
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 256, (NUM_TOKENS, 16), dtype=torch.uint8, generator=generator)
    decoded = Decoder(translator, dtype=dtype).decode(0, codes, POSITIONS)
    expected, sizes = [], []
    for rows, packed in ((transform.keys, codes[:, :11]), (transform.values, codes[:, 11:])):
        widths = torch.tensor([width for width, count in rows.layout.runs for _ in range(count)])
        cells = unpack(packed, rows.layout).double() - torch.exp2(widths.double() - 1)
        product = (cells @ rows.decode_SO.double()).numpy()
        expected.append(product + rows.bias_O.double().numpy())
        sizes.append(np.abs(product).max())
    for layer, (k, v) in enumerate(decoded):
        own = slice(layer * WIDTH, (layer + 1) * WIDTH)
        # the product is rounded, to half a unit in its last place of 8; a rotation mixes two of them
        plain = _plain_rotation(_heads(expected[0][:, own]), 123.0, 1)
        np.testing.assert_allclose(k.numpy(), plain, rtol=0, atol=relative * sizes[0])
        np.testing.assert_allclose(v.numpy(), _heads(expected[1][:, own]), rtol=0, atol=relative * sizes[1])


def test_layers_of_a_group_may_rotate_differently():
    """As in models that mix local and global attention; and each model has its own."""
    thetas = {"producer": (50.0, 900.0), "consumer": (7000.0, 33.0)}
    specs = {
        role: tiny_spec(2, rope=tuple(RopeParameters(theta=t, head_dim=HEAD_DIM, rotary_dim=HEAD_DIM) for t in values))
        for role, values in thetas.items()
    }
    # one component per element, at a step of 1/16: codes that nearly carry the rows
    identity = RowTransform(
        layout=BitLayout(runs=((8, 2 * WIDTH),)),
        mean_I=torch.zeros(2 * WIDTH),
        encode_IS=(torch.eye(2 * WIDTH) * 16).to(MATRIX_DTYPE),
        decode_SO=(torch.eye(2 * WIDTH) / 16).to(MATRIX_DTYPE),
        bias_O=torch.full((2 * WIDTH,), 0.5 / 16),
    )
    translator = group_translator(
        GroupTransform(keys=identity, values=copy.deepcopy(identity)), raw_dtype="float32", **specs
    )
    inputs = [_input(seed) for seed in range(2)]
    codes = Encoder(translator, dtype=torch.float32).encode(0, inputs, POSITIONS)
    for layer, (k, v) in enumerate(Decoder(translator, dtype=torch.float32).decode(0, codes, POSITIONS)):
        before = _plain_rotation(inputs[layer].k_THD.double().numpy(), thetas["producer"][layer], -1)
        expected = _plain_rotation(before, thetas["consumer"][layer], 1)
        # half a step on each of the two elements that a rotation mixes
        assert np.abs(k.numpy() - expected).max() <= 2**0.5 / 32 + 1e-5
        assert np.abs(v.numpy() - inputs[layer].v_THD.numpy()).max() <= 1 / 32 + 1e-5


def test_levels_are_clamped_at_both_ends():
    rows = RowTransform(
        layout=BitLayout(runs=((8, 1), (2, 4))),
        mean_I=torch.zeros(WIDTH),
        encode_IS=(torch.ones(WIDTH, 5) / WIDTH).to(MATRIX_DTYPE),
        decode_SO=torch.zeros(5, WIDTH, dtype=MATRIX_DTYPE),
        bias_O=torch.zeros(WIDTH),
    )
    translator = group_translator(GroupTransform(keys=rows, values=copy.deepcopy(rows)))
    values = torch.tensor([-1e30, -129.0, -128.0, -3.0, -2.0, -1.0, 0.0, 1.0, 1.5, 2.0, 127.0])
    given = LayerInput(
        torch.zeros(11, NUM_KV_HEADS, HEAD_DIM), values[:, None, None].expand(-1, NUM_KV_HEADS, HEAD_DIM)
    )
    codes = Encoder(translator).encode(0, [given], POSITIONS)
    levels = unpack(codes[:, 2:], rows.layout)
    assert levels[:, 0].tolist() == [0, 0, 0, 125, 126, 127, 128, 129, 129, 130, 255]
    assert levels[:, 1].tolist() == [0, 0, 0, 0, 0, 1, 2, 3, 3, 3, 3]
    upwards = LayerInput(given.k_THD, torch.full_like(given.v_THD, 1e30))
    assert unpack(Encoder(translator).encode(0, [upwards], POSITIONS)[:, 2:], rows.layout)[0].tolist() == [
        255,
        3,
        3,
        3,
        3,
    ]


@st.composite
def _layouts(draw) -> tuple[tuple[int, int], ...]:
    """Widths in falling order, each of whole units; nothing at all is a layout too."""
    numbers = {width: draw(st.integers(0, 3)) for width in UNITS}
    return tuple((width, num * UNITS[width].num_components) for width, num in numbers.items() if num)


@given(keys=_layouts(), values=_layouts(), num_layers=st.integers(1, 3), num_tokens=st.integers(1, NUM_TOKENS))
@settings(max_examples=60, deadline=None)
def test_any_layout_is_coded_as_its_components_are(keys, values, num_layers, num_tokens):
    transform = random_group(num_layers, key_runs=keys, value_runs=values)
    translator = group_translator(transform)
    inputs = [_input(seed) for seed in range(num_layers)]
    given = [LayerInput(one.k_THD[:num_tokens], one.v_THD[:num_tokens]) for one in inputs]
    codes = Encoder(translator).encode(0, given, POSITIONS[:num_tokens])
    assert codes.shape == (num_tokens, sum(width * count for width, count in (*keys, *values)) // 8)
    assert translator.manifest.bytes_per_token == (codes.shape[1],)
    split = transform.keys.layout.bytes_per_token
    for rows, packed in ((transform.keys, codes[:, :split]), (transform.values, codes[:, split:])):
        # levels survive: what was packed is what the layout's own packing gives
        assert torch.equal(pack(unpack(packed, rows.layout), rows.layout), packed)
    decoded = Decoder(translator).decode(0, codes, POSITIONS[:num_tokens])
    assert [tuple(x.shape) for pair in decoded for x in pair] == [(num_tokens, NUM_KV_HEADS, HEAD_DIM)] * 2 * num_layers
    assert all(bool(x.isfinite().all()) for pair in decoded for x in pair)
    if not values:
        # nothing is sent of the values: they are the bias
        assert torch.equal(decoded[0][1][0].flatten(), transform.values.bias_O[:WIDTH].bfloat16())


WIDE, WIDE_RUNS = 960, ((8, 60), (6, 100), (4, 102), (3, 96), (2, 124))
"""Rows as wide as those of a real group, with numbers of components that fill no vector register."""
LONG = 3 * TILE_ROWS + 10
NUM_SINKS = 3


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def wide(request) -> tuple[Encoder, list[LayerInput], torch.Tensor]:
    """An encoder, rows of more than three tiles, and their codes from one call."""
    translator = group_translator(
        random_group(3, key_runs=WIDE_RUNS, value_runs=WIDE_RUNS, width=WIDE // 3),
        width=WIDE // 3,
        **{side: tiny_spec(3, num_kv_heads=WIDE // 3 // HEAD_DIM) for side in ("producer", "consumer")},
    )
    encoder = Encoder(translator, dtype=request.param)
    kv = torch.randn(3, 2, LONG, WIDE // 3 // HEAD_DIM, HEAD_DIM, generator=torch.Generator().manual_seed(1)).bfloat16()
    inputs = [LayerInput(k, v) for k, v in kv]
    return encoder, inputs, encoder.encode(0, inputs, torch.arange(LONG))


def _encode_part(encoder: Encoder, inputs: list[LayerInput], start: int, stop: int) -> torch.Tensor:
    part = [LayerInput(one.k_THD[start:stop], one.v_THD[start:stop]) for one in inputs]
    return encoder.encode(0, part, torch.arange(start, stop))


@given(cuts=st.lists(st.integers(0, LONG), max_size=5))
@settings(max_examples=40, deadline=None)
def test_codes_do_not_depend_on_how_tokens_are_cut_into_calls(wide, cuts):
    """Byte by byte, tiles or not, single tokens and none."""
    encoder, inputs, whole = wide
    edges = [0, *sorted(cuts), LONG]
    parts = [_encode_part(encoder, inputs, start, stop) for start, stop in pairwise(edges)]
    assert torch.equal(torch.cat(parts), whole)


def _multiplied(product: Product, rows: torch.Tensor) -> torch.Tensor:
    """In a single tile."""
    return product(product.operand(rows))[: len(rows)].clone()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_fine", [0, 60])
def test_rows_of_a_product_are_the_same_bits_for_any_number_of_rows(dtype, num_fine):
    """At a width where the library's own product adds up in another order for few rows."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TILE_ROWS, WIDE, generator=generator)
    matrix = torch.randn(WIDE, 482, generator=generator)
    product = Product(matrix, dtype=dtype, scratch=Scratch(), num_fine=num_fine)
    whole = _multiplied(product, x)
    for start, stop in ((0, 1), (0, 2), (5, 37), (64, 128), (127, 128), (0, 0)):
        assert torch.equal(_multiplied(product, x[start:stop]), whole[start:stop])
    if dtype == torch.float32:
        longer = torch.cat([x, x, x, x[:10]])
        plain = longer @ matrix
        # were this to fail, the library would have become deterministic, and whole tiles be needless
        assert not torch.equal(x[:2] @ matrix, plain[:2])


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(WIDE, 482), (33, 5), (1, 1), (7, 0), (0, 7)])
def test_products_are_the_plain_formula(monkeypatch, num_inputs, num_outputs, is_packed):
    """With operators that keep the matrix in their own order, and where there are none."""
    if is_packed and not _has_packed_products():
        pytest.skip("no packed products on this machine")
    monkeypatch.setattr("scd_trt.products._has_packed_products", lambda: is_packed)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, num_inputs, generator=generator).bfloat16()
    matrix = torch.randn(num_inputs, num_outputs, generator=generator).bfloat16()
    product = Product(matrix, dtype=torch.bfloat16, scratch=Scratch(), num_fine=num_outputs // 2)
    found, expected = _multiplied(product, x).double(), x.double() @ matrix.double()
    # each sum is rounded to 8 significant bits; without such operators it is float32
    torch.testing.assert_close(found, expected, rtol=2**-8 if is_packed else 0, atol=1e-4)
    # memory is used again: nothing of larger rows is left
    again = _multiplied(product, x[:3])
    assert torch.equal(again.double(), found[:3])


def test_fine_columns_have_what_rounding_dropped():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, WIDE, generator=generator).bfloat16()
    matrix = torch.randn(WIDE, 12, generator=generator).bfloat16()
    product = Product(matrix, dtype=torch.bfloat16, scratch=Scratch(), num_fine=5)
    errors = (_multiplied(product, x).double() - x.double() @ matrix.double()).abs().amax(0)
    # sums of size 100: a grid of 1/2 in bfloat16, of which the dropped part in turn has 8 significant bits
    assert float(errors[:5].max()) < 2e-3
    if _has_packed_products():
        assert float(errors[5:].min()) > 0.05


def test_memory_made_in_inference_mode_serves_outside_of_it():
    product = Product(torch.eye(8), dtype=torch.bfloat16, scratch=Scratch())
    with torch.inference_mode():
        _multiplied(product, torch.ones(3, 8))
    assert torch.equal(_multiplied(product, torch.ones(3, 8)), torch.ones(3, 8))


def test_codes_of_a_token_do_not_depend_on_its_neighbours(wide):
    encoder, inputs, whole = wide
    others = [LayerInput(one.k_THD.clone(), one.v_THD.clone()) for one in inputs]
    for one in others:
        one.k_THD[1:] = 1e30
        one.v_THD[1:] = float("nan")
    assert torch.equal(_encode_part(encoder, others, 0, LONG)[0], whole[0])


def test_products_in_either_dtype_give_nearly_the_same_codes(wide):
    encoder, inputs, whole = wide
    for dtype in DTYPES:
        other = Encoder(encoder.translator, dtype=dtype).encode(0, inputs, torch.arange(LONG))
        differing = [
            (unpack(one, rows.layout).int() - unpack(two, rows.layout).int()).abs()[NUM_SINKS:]
            for rows, one, two in zip(
                vars(encoder.translator.transform(0)).values(),
                whole.chunk(2, dim=1),
                other.chunk(2, dim=1),
                strict=True,
            )
        ]
        # features, and components of up to 6 bits, rounded to 8 significant bits; rows of sinks are larger
        assert max(int(found.max()) for found in differing) <= 1
        assert all(float(found.double().mean()) < 0.05 for found in differing)


def test_groups_have_their_own_sizes_and_add_up():
    manifest = group_translator(random_group(2), random_group(1, key_runs=VALUE_RUNS)).manifest
    assert manifest.bytes_per_token == (16, 10)
    assert manifest.patch_layers == ()
    sizes = [sum(width * count for width, count in runs) / 8 for runs in (KEY_RUNS, VALUE_RUNS)]
    assert sizes == [11, 5]


def test_group_codes_of_another_width_or_number_of_layers_are_refused():
    translator = group_translator()
    with pytest.raises(ValueError, match=r"group 0: codes are torch.uint8 \(2, 15\); expected uint8 \[T, 16\]"):
        Decoder(translator).decode(0, torch.zeros(2, 15, dtype=torch.uint8), POSITIONS[:2])
    with pytest.raises(ValueError, match="group 0 is computed from 2 layers, got 1"):
        Encoder(translator).encode(0, [_input()], POSITIONS)


def test_layers_that_rotate_alike_share_their_tables():
    decoder = Decoder(group_translator(random_group(3)))
    assert len(set(decoder.consumer_rope)) == len(set(decoder.producer_rope)) == 1

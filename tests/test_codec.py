"""The codec against plain float64 formulas, and its promises at the edges: exactness, clamping, byte layout."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_translators import HEAD_DIM, HIDDEN, NUM_KV_HEADS, random_patch, random_reuse, random_translator, tiny_spec

from scd_trt.codec import Decoder, Encoder, LayerInput
from scd_trt.rope import RopeParameters
from scd_trt.translator import AffineMap, RawLayer, TranslatorError

NUM_TOKENS = 11
POSITIONS = torch.arange(37, 37 + NUM_TOKENS)
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
    with pytest.raises(ValueError, match="group 0 has 1 layers, got 2"):
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

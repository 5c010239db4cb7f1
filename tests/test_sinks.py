"""The attention sink at position 0 travels as the number of a stored row (scd_trt.codec, RowTransform)."""

from dataclasses import replace

import pytest
import torch
from tiny_translators import HEAD_DIM, NUM_KV_HEADS, WIDTH, group_translator, random_group

from scd_trt.codec import Decoder, Encoder, LayerInput


def _inputs(num_tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, NUM_KV_HEADS, HEAD_DIM)
    return [LayerInput(*(torch.randn(shape, generator=generator) for _ in range(2))) for _ in range(2)]


def _opened_by(inputs, transform, number, noise=0.0):
    """The inputs with a stored row at position 0, where RoPE turns by nothing."""
    given = []
    for layer, one in enumerate(inputs):
        own = slice(layer * WIDTH, (layer + 1) * WIDTH)
        tensors = []
        for rows, x_THD in ((transform.keys, one.k_THD), (transform.values, one.v_THD)):
            row_F = (rows.sink_in_KI[number] + rows.mean_I)[own]
            changed = x_THD.clone()
            changed[0] = (row_F + noise * torch.randn(WIDTH)).view(NUM_KV_HEADS, HEAD_DIM)
            tensors.append(changed)
        given.append(LayerInput(*tensors))
    return given


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_position_0_is_sent_as_the_number_of_the_nearest_row(number, noise):
    torch.manual_seed(number)
    transform = random_group(2)
    translator = group_translator(transform)
    inputs, positions = _opened_by(_inputs(6), transform, number, noise), torch.arange(6)
    codes = Encoder(translator).encode(0, inputs, positions)
    num_keys = transform.keys.layout.bytes_per_token
    assert codes[0, 0] == codes[0, num_keys] == number
    assert int(codes[0].long().sum()) == 2 * number
    decoded = Decoder(translator).decode(0, codes, positions)
    for layer, pair in enumerate(decoded):
        own = slice(layer * WIDTH, (layer + 1) * WIDTH)
        for x_THD, rows in zip(pair, (transform.keys, transform.values), strict=True):
            # the pool's dtype at most lies between
            torch.testing.assert_close(x_THD[0].flatten().float(), rows.sink_out_KO[number, own], rtol=2**-8, atol=1e-6)


def test_all_other_positions_are_coded_as_without_stored_rows():
    transform = random_group(2)
    plain = replace(
        transform,
        keys=replace(transform.keys, sink_in_KI=None, sink_out_KO=None),
        values=replace(transform.values, sink_in_KI=None, sink_out_KO=None),
    )
    inputs, positions = _opened_by(_inputs(6), transform, 1), torch.arange(6)
    with_rows, without = group_translator(transform), group_translator(plain)
    codes, expected = (Encoder(side).encode(0, inputs, positions) for side in (with_rows, without))
    assert torch.equal(codes[1:], expected[1:])
    assert not torch.equal(codes[0], expected[0])
    later = [Encoder(side).encode(0, inputs, positions + 1) for side in (with_rows, without)]
    assert torch.equal(*later)
    for (k, v), (k_plain, v_plain) in zip(
        *(Decoder(side).decode(0, codes, positions) for side in (with_rows, without)), strict=True
    ):
        assert torch.equal(k[1:], k_plain[1:])
        assert torch.equal(v[1:], v_plain[1:])
        assert not torch.equal(v[0], v_plain[0])


def test_numbers_that_no_row_has_are_decoded_as_the_last_row():
    """A code may come from anywhere; it must not read past the rows."""
    transform = random_group(2)
    translator = group_translator(transform)
    codes = torch.full((1, translator.manifest.bytes_per_token[0]), 255, dtype=torch.uint8)
    (k, _), _ = Decoder(translator).decode(0, codes, torch.zeros(1, dtype=torch.long))
    expected = transform.keys.sink_out_KO[-1, :WIDTH]
    torch.testing.assert_close(k[0].flatten().float(), expected, rtol=2**-8, atol=1e-6)  # bfloat16 pool


def test_a_kind_without_codes_has_its_first_row():
    transform = random_group(2, value_runs=())
    translator = group_translator(transform)
    positions = torch.arange(2)
    codes = Encoder(translator).encode(0, _opened_by(_inputs(2), transform, 2), positions)
    (_, v), _ = Decoder(translator).decode(0, codes, positions)
    expected = transform.values.sink_out_KO[0, :WIDTH]
    torch.testing.assert_close(v[0].flatten().float(), expected, rtol=2**-8, atol=1e-6)  # bfloat16 pool

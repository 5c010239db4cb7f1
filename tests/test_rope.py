"""Rope against the library whose checkpoints we read, and against itself."""

import pytest
import torch
from transformers.models.llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from scd_trt.rope import Rope, RopeError, RopeParameters, merge_rope_config

HEAD_DIM = 16
MAX_POSITION = 64

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 500_000.0, "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn-all": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,  # long enough for both bounds to fall inside the head
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.8,
        "mscale_all_dim": 0.4,
        "truncate": False,
    },
    "yarn-attention": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 1.5,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,  # the second wavelength, 32.4, lies between the bounds 16 and 64
    },
}


def _config(rope: dict) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        max_position_embeddings=MAX_POSITION,
        rope_parameters=dict(rope),
    )


def _parameters(rope: dict) -> RopeParameters:
    return RopeParameters.from_config(rope, head_dim=HEAD_DIM, max_position_embeddings=MAX_POSITION)


def _heads(num_tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_tokens, 2, HEAD_DIM, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_and_rotation_equal_the_reference(name):
    theirs = LlamaRotaryEmbedding(_config(ROPES[name]))
    ours = Rope(_parameters(ROPES[name]))
    num_tokens = 200  # past MAX_POSITION, where dynamic changes
    positions = torch.arange(num_tokens)
    x = _heads(num_tokens)
    cos, sin = theirs(x, positions.unsqueeze(0))
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1).unsqueeze(0), x.transpose(0, 1).unsqueeze(0), cos, sin)
    got = ours.apply(x, positions, seq_len=num_tokens if ours.depends_on_length else None)
    assert ours.attention_scaling == theirs.attention_scaling
    # one float32 rounding of a frequency is worth 200 * 6e-8 radians at the last position
    torch.testing.assert_close(got, expected[0].transpose(0, 1), atol=2e-5, rtol=0)
    if name != "dynamic":
        assert torch.equal(ours.inv_freq, theirs.inv_freq)


def test_dynamic_equals_default_within_the_pretraining_context():
    dynamic, default = Rope(_parameters(ROPES["dynamic"])), Rope(_parameters(ROPES["default"]))
    x, positions = _heads(8), torch.arange(8)
    assert torch.equal(dynamic.apply(x, positions, seq_len=MAX_POSITION), default.apply(x, positions))
    assert not torch.allclose(dynamic.apply(x, positions, seq_len=4 * MAX_POSITION), default.apply(x, positions))


def test_dynamic_refuses_an_unknown_length():
    rope = Rope(_parameters(ROPES["dynamic"]))
    assert rope.depends_on_length
    with pytest.raises(RopeError, match="seq_len"):
        rope.apply(_heads(1), torch.tensor([0]))


@pytest.mark.parametrize("name", ROPES)
def test_strip_undoes_apply(name):
    rope = Rope(_parameters(ROPES[name]))
    x, positions = _heads(50), torch.arange(1000, 1050)
    rotated = rope.apply(x, positions, seq_len=1050)
    assert not torch.allclose(rotated, x, atol=0.1)
    # two rotations, each a product sum of two float32 terms of size up to 4
    torch.testing.assert_close(rope.strip(rotated, positions, seq_len=1050), x, atol=2e-6, rtol=0)


def test_stripping_one_rope_and_applying_another_equals_the_other_directly():
    source, target = Rope(_parameters(ROPES["yarn-all"])), Rope(_parameters(ROPES["llama3"]))
    x, positions = _heads(40), torch.arange(40)
    moved = target.apply(source.strip(source.apply(x, positions), positions), positions)
    torch.testing.assert_close(moved, target.apply(x, positions), atol=4e-6, rtol=0)  # three float32 rotations


def test_tables_serve_several_calls_and_leading_dimensions():
    rope = Rope(_parameters(ROPES["llama3"]))
    x, positions = torch.stack([_heads(9, seed=1), _heads(9, seed=2)]), torch.arange(9)
    tables = rope.tables(positions)
    assert tables.cos.shape == (9, HEAD_DIM // 2)
    assert torch.equal(tables.apply(x)[1], rope.apply(x[1], positions))
    assert torch.equal(tables.strip(x)[0], rope.strip(x[0], positions))


def test_partial_rotation_leaves_the_tail_alone():
    rope = Rope(_parameters(ROPES["default"] | {"partial_rotary_factor": 0.5}))
    x, positions = _heads(6), torch.arange(1, 7)
    rotated = rope.apply(x, positions)
    assert rope.parameters.rotary_dim == HEAD_DIM // 2
    assert torch.equal(rotated[..., HEAD_DIM // 2 :], x[..., HEAD_DIM // 2 :])
    small = Rope(
        RopeParameters.from_config(ROPES["default"], head_dim=HEAD_DIM // 2, max_position_embeddings=MAX_POSITION)
    )
    assert torch.equal(rotated[..., : HEAD_DIM // 2], small.apply(x[..., : HEAD_DIM // 2], positions))


def test_half_precision_is_computed_in_float32():
    rope = Rope(_parameters(ROPES["default"]))
    x, positions = _heads(300).bfloat16(), torch.arange(700, 1000)
    rotated = rope.apply(x, positions)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, rope.apply(x.float(), positions).bfloat16())


def test_old_config_spelling_means_the_same():
    old = {"rope_scaling": {"type": "linear", "factor": 8.0}, "rope_theta": 500_000}
    new = {"rope_parameters": ROPES["linear"]}
    assert _parameters(merge_rope_config(old)) == _parameters(merge_rope_config(new))
    assert _parameters(merge_rope_config({})) == _parameters(ROPES["default"])


def test_top_level_pretraining_context_wins():
    config = {"original_max_position_embeddings": 16, "rope_parameters": ROPES["yarn"]}
    assert _parameters(merge_rope_config(config)).original_max_position == 16


def test_yarn_without_factor_takes_the_ratio_of_contexts():
    rope = {"rope_type": "yarn", "original_max_position_embeddings": 16, "factor": None}
    assert _parameters(rope).factor == MAX_POSITION / 16


def test_fields_of_other_types_do_not_separate_equal_ropes():
    assert _parameters(ROPES["default"] | {"factor": 8.0}) == _parameters(ROPES["default"])


@pytest.mark.parametrize("name", ROPES)
def test_parameters_survive_json(name):
    parameters = _parameters(ROPES[name])
    assert RopeParameters.model_validate_json(parameters.model_dump_json()) == parameters


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "longrope", "short_factor": [1.0]}, "'longrope' is not supported; supported: default, linear"),
        ({"type": "mrope", "mrope_section": [16]}, "'mrope' is not supported"),
        ({"rope_type": "default", "mrope_section": [16]}, "mrope_section"),
        ({"rope_type": "linear"}, "needs factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "needs high_freq_factor"),
        (ROPES["llama3"] | {"high_freq_factor": 1.0}, "must be above low_freq_factor"),
        ({"rope_type": "linear", "factor": -1.0}, "factor Input should be greater than 0"),
        ({"rope_type": "default", "partial_rotary_factor": 0.2}, "rotary_dim 3 must be even"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(rope, message):
    with pytest.raises(RopeError, match=message):
        _parameters(rope)

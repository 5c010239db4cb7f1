"""Reading a specification from files, refusing what is not handled, and comparing pairs."""

import json
import shutil
from pathlib import Path

import pytest
from tiny_models import FAMILIES, save_perturbed_copy, save_tiny_model, save_tiny_tokenizer
from transformers import AutoConfig

from scd_trt.model_spec import (
    ModelFilesError,
    ModelSpec,
    PairMismatchError,
    UnsupportedModelError,
    check_pair,
    same_shape,
)
from scd_trt.rope import RopeError


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("spec")
    return {family: save_tiny_model(root / family, family) for family in FAMILIES}


@pytest.fixture
def llama(checkpoints, tmp_path):
    """A copy that a test may break."""
    return Path(shutil.copytree(checkpoints["llama"], tmp_path / "llama"))


def _edit_config(path: Path, **changes) -> Path:
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_equal_the_library_configuration(checkpoints, family):
    spec = ModelSpec.from_directory(checkpoints[family])
    config = AutoConfig.from_pretrained(checkpoints[family])
    assert (spec.family, spec.name) == (family, family)
    assert spec.num_layers == config.num_hidden_layers == len(spec.rope) == len(spec.sliding_windows)
    assert (spec.num_heads, spec.num_kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
    assert (spec.head_dim, spec.hidden_size, spec.kv_dim) == (16, 64, 32)
    assert (spec.max_position, spec.vocab_size) == (config.max_position_embeddings, config.vocab_size)
    assert spec.norm_eps == config.rms_norm_eps
    assert spec.dtype == "float32"
    assert spec.has_qk_norm == (family in ("qwen3", "gemma3"))
    assert spec.has_attention_bias == (family in ("llama", "qwen2"))


def test_windows_and_ropes_are_per_layer(checkpoints):
    gemma, mistral = (ModelSpec.from_directory(checkpoints[name]) for name in ("gemma3", "mistral"))
    assert gemma.sliding_windows == (24, None, 24)
    assert [rope.theta for rope in gemma.rope] == [1e4, 1e6, 1e4]
    assert [rope.rope_type for rope in gemma.rope] == ["default", "linear", "default"]
    assert mistral.sliding_windows == (24, 24, 24)
    assert ModelSpec.from_directory(checkpoints["qwen2"]).sliding_windows == (None, None, None)


def test_specification_survives_json(checkpoints):
    spec = ModelSpec.from_directory(checkpoints["gemma3"])
    assert ModelSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_parameters": "absent", "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("llama", {"num_key_value_heads": "absent"}),
        ("mistral", {"sliding_window": "absent"}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"layer_types": "absent", "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 9}),
        ("qwen3", {"layer_types": "absent", "use_sliding_window": False, "max_window_layers": 1, "sliding_window": 9}),
        ("qwen2", {"head_dim": "absent"}),
        ("gemma3", {"layer_types": "absent", "sliding_window_pattern": 2, "_sliding_window_pattern": "absent"}),
        (
            "gemma3",
            {
                "rope_parameters": "absent",
                "rope_theta": 2e6,
                "rope_local_base_freq": 3e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        ),
        ("gemma3", {"rope_parameters": "absent"}),
    ],
)
def test_old_and_sparse_configurations_mean_what_the_library_makes_of_them(checkpoints, tmp_path, family, changes):
    path = _edit_config(Path(shutil.copytree(checkpoints[family], tmp_path / family)), **changes)
    spec, config = ModelSpec.from_directory(path), AutoConfig.from_pretrained(path)
    kinds = (
        getattr(config, "layer_types", None)
        or ["full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"] * 3
    )
    windows = tuple(config.sliding_window if kind == "sliding_attention" else None for kind in kinds)
    ropes = [config.rope_parameters.get(kind, config.rope_parameters) for kind in kinds]
    assert spec.sliding_windows == windows
    assert [(rope.theta, rope.rope_type) for rope in spec.rope] == [(r["rope_theta"], r["rope_type"]) for r in ropes]
    assert [rope.factor for rope in spec.rope] == [rope.get("factor") for rope in ropes]
    assert spec.num_kv_heads == config.num_key_value_heads


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": 512}, "kv_lora_rank 512"),
        ({"model_type": "jamba", "attn_layer_period": 8}, "recurrent or hybrid layers .attn_layer_period"),
        ({"layer_types": ["linear_attention", "full_attention", "full_attention"]}, "linear_attention"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}, "save its text model alone"),
        ({"model_type": "qwen2_vl", "vision_config": {}}, "wraps a language model for images"),
        ({"model_type": "gptj"}, "'gptj' is not supported; supported: llama, mistral"),
        ({"model_type": "absent"}, "model_type None is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method awq"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "rotates 8 of 16"),
    ],
)
def test_unsupported_models_are_refused_by_name(llama, changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        ModelSpec.from_directory(_edit_config(llama, **changes))


def test_unsupported_rope_is_refused(llama):
    with pytest.raises(RopeError, match="longrope"):
        ModelSpec.from_directory(_edit_config(llama, rope_parameters={"rope_type": "longrope"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": "absent"}, "num_hidden_layers"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"vocab_size": -1}, "vocab_size: Input should be greater than 0"),
    ],
)
def test_malformed_configurations_name_the_key(llama, changes, message):
    with pytest.raises(ModelFilesError, match=message):
        ModelSpec.from_directory(_edit_config(llama, **changes))


def test_layer_types_must_cover_the_layers(checkpoints, tmp_path):
    path = Path(shutil.copytree(checkpoints["qwen3"], tmp_path / "qwen3"))
    with pytest.raises(ModelFilesError, match="2 entries for 3 layers"):
        ModelSpec.from_directory(_edit_config(path, layer_types=["full_attention"] * 2))
    with pytest.raises(ModelFilesError, match="no sliding_window is in force"):
        ModelSpec.from_directory(_edit_config(path, layer_types=["sliding_attention"] * 3))


def test_wrong_places_say_what_is_expected(llama, tmp_path):
    with pytest.raises(ModelFilesError, match=r"nowhere: no such directory; expected .* config.json, tokenizer.json"):
        ModelSpec.from_directory(tmp_path / "nowhere")
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with pytest.raises(ModelFilesError, match=r"no \*.safetensors; pytorch_model.bin is a pickle"):
        ModelSpec.from_directory(llama)
    (llama / "tokenizer.json").write_text("[]")
    with pytest.raises(ModelFilesError, match=r"tokenizer.json: expected a JSON object, found list"):
        ModelSpec.from_directory(llama)
    (llama / "tokenizer.json").unlink()
    with pytest.raises(ModelFilesError, match=r"tokenizer.json is missing"):
        ModelSpec.from_directory(llama)
    (llama / "config.json").write_text("{")
    with pytest.raises(ModelFilesError, match=r"config.json: not valid JSON"):
        ModelSpec.from_directory(llama)


def test_vocab_digest_is_of_the_token_map(llama, tmp_path):
    spec = ModelSpec.from_directory(llama)
    file = llama / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    content["model"]["vocab"] = dict(reversed(vocab.items()))
    content["added_tokens"].reverse()
    file.write_text(json.dumps(content, indent=1))
    assert ModelSpec.from_directory(llama).vocab_digest == spec.vocab_digest

    content["added_tokens"][0]["content"] = "<|other|>"
    file.write_text(json.dumps(content))
    assert ModelSpec.from_directory(llama).vocab_digest != spec.vocab_digest

    content["model"]["vocab"] = [[token, 0.0] for token in vocab]  # Unigram spells the same map as a list
    content["added_tokens"] = []
    file.write_text(json.dumps(content))
    assert ModelSpec.from_directory(llama).vocab_digest == spec.vocab_digest

    file.write_text("{}")
    with pytest.raises(ModelFilesError, match="no token table"):
        ModelSpec.from_directory(llama)


def test_weights_digest_sees_one_bit(llama):
    before = ModelSpec.from_directory(llama)
    weights = bytearray((llama / "model.safetensors").read_bytes())
    weights[len(weights) // 2] ^= 1
    (llama / "model.safetensors").write_bytes(weights)
    after = ModelSpec.from_directory(llama)
    assert after.weights_digest != before.weights_digest
    assert after.model_copy(update={"weights_digest": before.weights_digest}) == before


def test_a_fine_tuned_variant_pairs_even_with_another_rope(checkpoints, tmp_path):
    rope = {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}
    variant = save_perturbed_copy(checkpoints["llama"], tmp_path / "variant", rope_parameters=rope)
    producer, consumer = ModelSpec.from_directory(checkpoints["llama"]), ModelSpec.from_directory(variant)
    assert producer.rope != consumer.rope
    assert producer.weights_digest != consumer.weights_digest
    check_pair(producer, consumer)


def test_mismatches_are_named_together_with_both_values(checkpoints, tmp_path):
    other = save_tiny_model(tmp_path / "other", "llama", num_hidden_layers=2, num_key_value_heads=1)
    save_tiny_tokenizer(other, extra_tokens=("extra",))
    producer, consumer = ModelSpec.from_directory(checkpoints["llama"]), ModelSpec.from_directory(other)
    with pytest.raises(PairMismatchError) as caught:
        check_pair(producer, consumer)
    message = str(caught.value)
    assert "llama cannot feed other" in message
    assert "num_layers: producer 3, consumer 2" in message
    assert "num_kv_heads: producer 2, consumer 1" in message
    assert f"vocab_digest: producer {producer.vocab_digest}, consumer {consumer.vocab_digest}" in message
    assert "family" not in message
    assert "head_dim" not in message


def test_another_size_is_a_pair_where_that_is_allowed(checkpoints, tmp_path):
    other = save_tiny_model(tmp_path / "other", "llama", num_hidden_layers=2, num_key_value_heads=1, head_dim=32)
    producer, consumer = ModelSpec.from_directory(checkpoints["llama"]), ModelSpec.from_directory(other)
    check_pair(producer, consumer, allow_other_shape=True)
    assert not same_shape(producer, consumer)
    assert same_shape(producer, producer)
    with pytest.raises(PairMismatchError, match=r"head_dim: producer 16, consumer 32 .*only method.policy rd can"):
        check_pair(producer, consumer)


def test_another_vocabulary_is_no_pair_at_any_size(checkpoints, tmp_path):
    other = save_tiny_model(tmp_path / "other", "llama", num_hidden_layers=2)
    save_tiny_tokenizer(other, extra_tokens=("extra",))
    producer, consumer = ModelSpec.from_directory(checkpoints["llama"]), ModelSpec.from_directory(other)
    with pytest.raises(PairMismatchError) as caught:
        check_pair(producer, consumer, allow_other_shape=True)
    assert "vocab_digest" in str(caught.value)
    assert "num_layers" not in str(caught.value)
    assert "policy rd" not in str(caught.value)


def test_another_family_is_no_pair(checkpoints):
    with pytest.raises(PairMismatchError, match="family: producer llama, consumer mistral"):
        check_pair(*(ModelSpec.from_directory(checkpoints[name]) for name in ("llama", "mistral")))

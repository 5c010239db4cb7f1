"""The recipes of the example pairs (mechanics, on tiny models) and what they left in the repository."""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_models import save_tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from scd_trt.models import load_model

PAIRS = Path(__file__).parents[1] / "examples" / "pairs"
DEMO = PAIRS / "smollm2_qa"
peft = pytest.importorskip("peft")

# peft looks up an attribute that transformers has renamed; neither side is ours
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pairs_recipe", PAIRS / "recipe.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up by name
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def tiny_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def random_tree(recipe: ModuleType, seed: int, num_branches: int, context_tokens: int) -> Any:
    generator = random.Random(seed)

    def ids(num: int) -> list[int]:
        return [generator.randrange(97) for _ in range(num)]

    branches = [recipe.Branch(ids(3 + index), ids(1 + index)) for index in range(num_branches)]
    return recipe.Tree(ids(context_tokens), branches)


@torch.no_grad()
def test_packed_loss_equals_every_question_asked_alone(recipe: ModuleType) -> None:
    model = tiny_model()
    trees = [random_tree(recipe, 1, 3, 11), random_tree(recipe, 2, 1, 0), random_tree(recipe, 3, 2, 5)]
    losses = []
    for tree in trees:
        for branch in tree.branches:
            before = tree.context_ids + branch.prompt_ids
            logits = model(input_ids=torch.tensor([before + branch.answer_ids])).logits[0]
            log_p = logits.log_softmax(-1)[len(before) - 1 : -1]
            losses += [-log_p[index, token].item() for index, token in enumerate(branch.answer_ids)]
    packed = recipe.answer_loss(model, recipe.build_pack(trees)).item()
    # fp32, sums in another order over a few dozen terms
    assert packed == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_block_mask_by_hand(recipe: ModuleType) -> None:
    # tree 0: context, one token each of two questions; tree 1: context, a question
    owner = torch.tensor([[0, 0], [0, 1], [0, 2], [1, 0], [1, 1]])
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]
    assert recipe.block_mask(owner).int().tolist() == expected


def test_packs_hold_every_tree_once_and_keep_the_limit(recipe: ModuleType) -> None:
    trees = [random_tree(recipe, seed, 2, 3 + seed) for seed in range(20)]
    packs = recipe.pack_trees(trees, 50, random.Random(0))
    assert sorted(tree.num_tokens for pack in packs for tree in pack) == sorted(tree.num_tokens for tree in trees)
    assert all(len(pack) == 1 or sum(tree.num_tokens for tree in pack) <= 50 for pack in packs)
    assert max(map(len, packs)) > 1


def test_learning_rate_rises_then_falls(recipe: ModuleType) -> None:
    factors = [recipe.learning_rate_factor(40)(step) for step in range(40)]
    assert factors[:2] == [0.5, 39 / 40]
    assert factors[-1] == 1 / 40
    assert factors[1:] == sorted(factors[1:], reverse=True)


def test_saved_adapter_is_what_was_trained(recipe: ModuleType, tmp_path: Path) -> None:
    lora = peft.LoraConfig(r=8, target_modules=recipe.LINEAR_LAYERS, task_type="CAUSAL_LM", init_lora_weights=False)
    trained = peft.get_peft_model(tiny_model(), lora)
    for parameter in trained.parameters():
        parameter.data = parameter.data.bfloat16().float()
    recipe.save_adapter(trained, tmp_path, "some/base")
    base = tiny_model()
    for parameter in base.parameters():
        parameter.data = parameter.data.bfloat16().float()
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    ids = torch.arange(10)[None]
    assert torch.equal(loaded(input_ids=ids).logits, trained(input_ids=ids).logits)


def test_greedy_of_padded_prompts_equals_each_alone(recipe: ModuleType) -> None:
    model = tiny_model()
    prompts = [[*range(20), 21, 22], [30], list(range(50, 60))]
    expected = []
    for ids in prompts:
        batch = torch.tensor([ids])
        found = model.generate(
            batch, attention_mask=torch.ones_like(batch), max_new_tokens=recipe.MAX_ANSWER_TOKENS, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        expected.append(found[0, len(ids) :].tolist())
    assert recipe.greedy(model, prompts, eos_id=96) == [ids[: ids.index(96)] if 96 in ids else ids for ids in expected]
    # every row may end at another step, and all of them early
    marker = expected[0][3]
    ended = [ids[: ids.index(marker)] if marker in ids else ids for ids in expected]
    assert recipe.greedy(model, prompts, eos_id=marker) == ended
    assert recipe.greedy(model, prompts[:1], eos_id=marker) == ended[:1]


def test_gain_is_of_the_same_questions(recipe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [recipe.Question(f"context {n}", "?", ("yes",), str(n)) for n in range(6)]
    said = {"base": ["no", "yes"] * 3, "tuned": ["yes"] * 6}
    monkeypatch.setattr(recipe, "answer", lambda model, _, __: said[model])
    models = {name: argparse.Namespace(model=name, tokenizer=None) for name in said}
    result = recipe.measure(models, found)
    means = {name: result[name]["f1"]["mean"] for name in result}
    assert means == {"base": 0.5, "tuned": 1.0, "gain": 0.5}
    assert 0 <= result["gain"]["f1"]["low"] < 0.5 < result["gain"]["f1"]["high"] <= 1


def test_shipped_adapter_is_small_neutral_and_complete(recipe: ModuleType) -> None:
    config = json.loads((DEMO / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == recipe.RECIPES["smollm2_qa"].base_name
    assert not re.search(r'"/|\\\\|~', json.dumps(config))
    path = DEMO / "adapter" / "adapter_model.safetensors"
    assert path.stat().st_size < 6 * 2**20
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    state = load_file(path)
    assert len(state) == 30 * len(recipe.LINEAR_LAYERS) * 2
    assert all(tensor.dtype == torch.bfloat16 and tensor.isfinite().all() for tensor in state.values())
    assert all(tensor.any() for tensor in state.values())


@pytest.fixture
def base_path(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "base", "llama")


def test_a_consumer_on_another_rope_base_starts_with_the_same_weights(recipe: ModuleType, base_path: Path) -> None:
    target = base_path.with_name("target")
    recipe.start_from(base_path, target, 3e5)
    base, started = load_model(base_path).spec, load_model(target).spec
    assert started.weights_digest == base.weights_digest
    assert [rope.theta for rope in started.rope] == [3e5] * base.num_layers
    assert started.rope[0].model_copy(update={"theta": base.rope[0].theta}) == base.rope[0]


def test_starting_again_leaves_nothing_of_the_last_run(recipe: ModuleType, base_path: Path) -> None:
    target = base_path.with_name("target")
    recipe.start_from(base_path, target)
    (target / "left.safetensors").write_bytes(b"of an earlier run")
    recipe.start_from(base_path, target)
    assert sorted(file.name for file in target.iterdir()) == sorted(file.name for file in base_path.iterdir())


def test_saved_weights_are_the_trained_ones_in_bf16(recipe: ModuleType, base_path: Path) -> None:
    target = base_path.with_name("target")
    recipe.start_from(base_path, target)
    trained = load_model(base_path).model
    before = load_file(base_path / "model.safetensors")
    for parameter in trained.parameters():
        parameter.data += 0.5
    recipe.save_weights(trained, target / "model.safetensors")
    after = load_file(target / "model.safetensors")
    assert set(after) == set(before)
    for name, tensor in after.items():
        assert torch.equal(tensor, (before[name].float() + 0.5).bfloat16()), name
    ids = torch.arange(10)[None]
    expected = trained.to(torch.bfloat16)(input_ids=ids).logits
    assert torch.equal(load_model(target, dtype="bfloat16").model(input_ids=ids).logits, expected)


def test_weights_of_another_model_are_not_written(recipe: ModuleType, base_path: Path) -> None:
    other = save_tiny_model(base_path.with_name("other"), "qwen3")
    path = other / "model.safetensors"
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"_norm\.weight, which the trained model does not have"):
        recipe.save_weights(load_model(base_path).model, path)
    assert path.read_bytes() == before


def fake_training(model: Any, tokenizer: Any, options: argparse.Namespace) -> dict[str, Any]:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.25
    return {"num_steps": 1}


@pytest.mark.parametrize("rank", [0, 2])
def test_a_made_consumer_is_whole_and_differs_from_its_base(
    recipe: ModuleType, base_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = base_path.with_name("out")
    monkeypatch.setenv("SCD_TRT_CACHE", str(base_path.with_name("cache")))
    monkeypatch.setattr(recipe, "train", fake_training)
    chosen = recipe.Recipe(str(base_path), "some/base", rank=rank, learning_rate=1.0, max_steps=1)
    options = argparse.Namespace(out=out, seed=0)
    # an earlier consumer is replaced, not mixed with
    shutil.copytree(base_path, out / "model")
    (out / "model" / "left").touch()
    recipe.make(chosen, base_path, options)
    assert recipe.consumer(chosen, out) == out / "model"
    assert not (out / "model" / "left").exists()
    assert not (out / "model.partial").exists()
    base, made = load_model(base_path), load_model(out / "model")
    assert made.spec.weights_digest != base.spec.weights_digest
    assert json.loads((out / "training.json").read_text())["rank"] == rank


def test_an_adapter_alone_is_merged(recipe: ModuleType, base_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCD_TRT_CACHE", str(base_path.with_name("cache")))
    lora = peft.LoraConfig(r=2, target_modules=recipe.LINEAR_LAYERS, task_type="CAUSAL_LM", init_lora_weights=False)
    out = base_path.with_name("out")
    recipe.save_adapter(peft.get_peft_model(load_model(base_path).model, lora), out / "adapter", "some/base")
    chosen = recipe.Recipe(str(base_path), "some/base", rank=2, learning_rate=1.0, max_steps=1)
    merged = load_model(recipe.consumer(chosen, out))
    assert merged.spec.weights_digest != load_model(base_path).spec.weights_digest


def test_drift_does_not_count_another_rotation(
    recipe: ModuleType, base_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        recipe,
        "questions",
        lambda *_, **__: [recipe.Question(f"a text, number {n}", "?", ("!",), "") for n in range(3)],
    )
    target = base_path.with_name("target")
    recipe.start_from(base_path, target, 3e5)
    base, rotated = load_model(base_path), load_model(target)
    assert recipe.drift(base, base) == {"keys": 0.0, "values": 0.0}
    # what the first layer gives is the same; further layers feel the other attention
    assert torch.equal(*(recipe.kv_rows(loaded, [5, 6, 7])[..., : base.spec.kv_dim] for loaded in (base, rotated)))
    for parameter in rotated.model.parameters():
        parameter.data.copy_(parameter.data * 0)
    assert recipe.drift(base, rotated) == {"keys": 1.0, "values": 1.0}


MEASURED = sorted(path.parent for path in PAIRS.glob("*/metrics.json"))


def test_every_recipe_has_its_figures(recipe: ModuleType) -> None:
    assert [directory.name for directory in MEASURED] == sorted(recipe.RECIPES)
    assert all((directory / "training.json").is_file() for directory in MEASURED)


@pytest.mark.parametrize("directory", MEASURED, ids=lambda path: path.name)
def test_shipped_figures_show_a_gain_on_test_documents(directory: Path) -> None:
    metrics = json.loads((directory / "metrics.json").read_text())
    for task in ("narrativeqa", "disflqa"):
        assert metrics[task]["tuned"]["f1"]["low"] > metrics[task]["base"]["f1"]["high"]
    assert all(0.01 < value < 1 for value in metrics["drift"].values())

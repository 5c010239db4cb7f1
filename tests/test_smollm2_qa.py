"""The recipe of the demo's consumer (mechanics, on a tiny model) and the adapter that it left in the repository."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

DIRECTORY = Path(__file__).parents[1] / "examples" / "pairs" / "smollm2_qa"
peft = pytest.importorskip("peft")

# peft looks up an attribute that transformers has renamed; neither side is ours
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("smollm2_qa_recipe", DIRECTORY / "recipe.py")
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
    recipe.save_adapter(trained, tmp_path)
    base = tiny_model()
    for parameter in base.parameters():
        parameter.data = parameter.data.bfloat16().float()
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    ids = torch.arange(10)[None]
    assert torch.equal(loaded(input_ids=ids).logits, trained(input_ids=ids).logits)


def test_greedy_after_a_shared_context_equals_generate(recipe: ModuleType) -> None:
    model = tiny_model()
    context, endings = list(range(20)), [[21, 22], [30, 31, 32]]
    cache = recipe.DynamicCache()
    with torch.inference_mode():
        recipe.next_logits(model, context, cache)
        for ending in endings:
            if cache.get_seq_length() > len(context):
                cache.crop(len(context) - cache.get_seq_length())
            chosen = recipe.greedy(model, cache, ending, eos_id=-1)
            ids = torch.tensor([context + ending])
            expected = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=recipe.MAX_ANSWER_TOKENS, do_sample=False,
                pad_token_id=0,
            )  # fmt: skip
            assert chosen == expected[0, ids.shape[1] :].tolist()


def test_shipped_adapter_is_small_neutral_and_complete(recipe: ModuleType) -> None:
    config = json.loads((DIRECTORY / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == recipe.NEUTRAL_BASE_NAME
    assert not re.search(r'"/|\\\\|~', json.dumps(config))
    path = DIRECTORY / "adapter" / "adapter_model.safetensors"
    assert path.stat().st_size < 6 * 2**20
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    state = load_file(path)
    assert len(state) == 30 * len(recipe.LINEAR_LAYERS) * 2
    assert all(tensor.dtype == torch.bfloat16 and tensor.isfinite().all() for tensor in state.values())
    assert all(tensor.any() for tensor in state.values())


def test_shipped_figures_show_a_gain_on_test_documents() -> None:
    metrics = json.loads((DIRECTORY / "metrics.json").read_text())
    for task in ("narrativeqa", "disflqa"):
        assert metrics["tuned"][task]["f1"]["low"] > metrics["base"][task]["f1"]["high"]
    assert all(0.01 < value < 1 for value in metrics["drift"].values())

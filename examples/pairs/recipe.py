"""Make the consumers of the example pairs: packaged base models that learn to answer questions about a text briefly.

The producer of a pair is the untouched base model. What is trained on and what is measured never share a document
(`scd_trt.corpus`): consumers learn from the `train` split, figures come from the `test` split.

smollm2_qa    SmolLM2-135M-Instruct + LoRA: the light fine-tune of the demo, its adapter is in the repository
smollm2_rope  SmolLM2-135M-Instruct, all weights trained, rope base 1e5 -> 3e5: the heavy one, on another rope base
qwen_qa       Qwen2.5-Coder-0.5B-Instruct + LoRA: a second architecture (biases on q, k, v)

Packing. A tree is one context with all its questions. Trees are packed into sequences; a token attends to the earlier
tokens of its own tree that belong to the context or to its own question, and positions continue after the context. So one
forward pass over a context serves some thirty questions, and each sees exactly what it would see alone. The loss is on
answer tokens only.

The same seed, one thread and the same library versions give the same consumer. It goes to `model/` under `--out`, by default
where `recipe:<pair>` in a pair file looks for it, and gets that name only when it is whole.
"""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import DynamicCache, LlamaForCausalLM

from scd_trt.evaluate.metrics import bootstrap_interval
from scd_trt.evaluate.tasks import TASKS, Question, exact_match, f1, num_shared_tokens, prompt, questions
from scd_trt.model_references import recipe_directory
from scd_trt.models import LoadedModel, load_model, materialize, trace

LINEAR_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MAX_ANSWER_TOKENS = 32
ANSWER_BATCH = 10
# transformers renamed the argument; the old name now warns.
CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
TRAINING_OPTIONS = ("pair", "seed", "epochs", "max_steps", "learning_rate", "pack_tokens")

log = logging.getLogger("recipe")


@dataclass(frozen=True)
class Recipe:
    """How one pair's consumer is made.

    Attributes:
        base: model reference of the producer.
        base_name: the base's public name, for the adapter's own configuration.
        rank, alpha: of the LoRA adapter; rank 0 trains all weights.
        learning_rate: of AdamW, at its peak.
        max_steps: packs to train on, at most.
        rope_theta: the consumer's rope base, None for the producer's.
    """

    base: str
    base_name: str
    rank: int
    learning_rate: float
    max_steps: int
    alpha: int = 32
    rope_theta: float | None = None


SMOLLM2 = "package:smollm2-135m-instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"
QWEN = "package:qwen2.5-coder-0.5b-instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct"
RECIPES = {
    "smollm2_qa": Recipe(*SMOLLM2, rank=8, learning_rate=1e-3, max_steps=110),
    "smollm2_rope": Recipe(*SMOLLM2, rank=0, learning_rate=2e-4, max_steps=90, rope_theta=3e5),
    "qwen_qa": Recipe(*QWEN, rank=8, learning_rate=5e-4, max_steps=24),
}


@dataclass(frozen=True)
class Branch:
    """One question after its context: `prompt_ids` up to where the assistant speaks, `answer_ids` with the end marker."""

    prompt_ids: list[int]
    answer_ids: list[int]


@dataclass(frozen=True)
class Tree:
    """One context and its questions, as token ids."""

    context_ids: list[int]
    branches: list[Branch]

    @property
    def num_tokens(self) -> int:
        return len(self.context_ids) + sum(len(b.prompt_ids) + len(b.answer_ids) for b in self.branches)


@dataclass(frozen=True)
class Pack:
    """One training sequence of T tokens.

    Attributes:
        ids_1T, positions_1T: tokens and their positions.
        mask_11TT: true where the row's token may attend to the column's.
        predicting_A, answers_A: indices of the tokens that predict an answer token, and that token.
    """

    ids_1T: torch.Tensor
    positions_1T: torch.Tensor
    mask_11TT: torch.Tensor
    predicting_A: torch.Tensor
    answers_A: torch.Tensor


def build_pack(trees: Sequence[Tree]) -> Pack:
    """Lay trees out in one sequence under the block mask."""
    ids: list[int] = []
    positions: list[int] = []
    owner: list[tuple[int, int]] = []  # (tree, branch), branch 0 being the context
    predicting: list[int] = []
    answers: list[int] = []
    for tree_index, tree in enumerate(trees):
        ids += tree.context_ids
        positions += range(len(tree.context_ids))
        owner += [(tree_index, 0)] * len(tree.context_ids)
        for branch_index, branch in enumerate(tree.branches, start=1):
            first_answer = len(ids) + len(branch.prompt_ids)
            predicting += range(first_answer - 1, first_answer - 1 + len(branch.answer_ids))
            answers += branch.answer_ids
            tokens = branch.prompt_ids + branch.answer_ids
            ids += tokens
            positions += range(len(tree.context_ids), len(tree.context_ids) + len(tokens))
            owner += [(tree_index, branch_index)] * len(tokens)
    return Pack(
        torch.tensor([ids]),
        torch.tensor([positions]),
        block_mask(torch.tensor(owner))[None, None],
        torch.tensor(predicting),
        torch.tensor(answers),
    )


def block_mask(owner_T2: torch.Tensor) -> torch.Tensor:
    """[T, T], true where the row's token sees the column's: earlier, same tree, and context or same branch."""
    tree_T, branch_T = owner_T2.unbind(1)
    same_tree = tree_T[:, None] == tree_T
    visible_branch = (branch_T == 0) | (branch_T[:, None] == branch_T)
    return (same_tree & visible_branch).tril()


def answer_loss(model: Any, pack: Pack) -> torch.Tensor:
    """Mean cross-entropy of the answer tokens; the vocabulary projection is computed for those rows only."""
    hidden = model.model(
        input_ids=pack.ids_1T, position_ids=pack.positions_1T, attention_mask=pack.mask_11TT, use_cache=False
    ).last_hidden_state[0]
    logits = model.lm_head(hidden[pack.predicting_A]).float()
    return torch.nn.functional.cross_entropy(logits, pack.answers_A)


def prompt_ids(tokenizer: Any, question: Question) -> list[int]:
    rendered = tokenizer.apply_chat_template(
        list(prompt(question).messages), tokenize=False, add_generation_prompt=True
    )
    ids: list[int] = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    return ids


def build_trees(tokenizer: Any, found: Sequence[Question], generator: random.Random) -> list[Tree]:
    """One tree per context; of several accepted answers one is drawn."""
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    trees = []
    for _, group in groupby(found, key=lambda question: question.digest):
        asked = list(group)
        prompts = [prompt_ids(tokenizer, question) for question in asked]
        shared = num_shared_tokens(prompts) if len(prompts) > 1 else 0
        answers = [tokenizer(generator.choice(q.answers), add_special_tokens=False)["input_ids"] for q in asked]
        branches = [Branch(ids[shared:], [*answer, end]) for ids, answer in zip(prompts, answers, strict=True)]
        trees.append(Tree(prompts[0][:shared], branches))
    return trees


def pack_trees(trees: list[Tree], max_tokens: int, generator: random.Random) -> list[list[Tree]]:
    """Shuffled trees gathered into packs of at most `max_tokens` (a longer tree makes a pack of its own)."""
    packs: list[list[Tree]] = []
    room = 0
    for tree in generator.sample(trees, len(trees)):
        if tree.num_tokens > room:
            packs.append([])
            room = max_tokens
        packs[-1].append(tree)
        room -= tree.num_tokens
    return generator.sample(packs, len(packs))


def learning_rate_factor(num_steps: int) -> Callable[[int], float]:
    """Linear warm-up over 5 % of the steps, then linear decay to zero."""
    warmup = max(1, num_steps // 20)
    return lambda step: min((step + 1) / warmup, (num_steps - step) / num_steps)


def train(model: Any, tokenizer: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Train what takes a gradient, in place; returns what it took."""
    generator = random.Random(options.seed)
    found = [question for task in TASKS for question in questions(task, split="train", seed=options.seed)]
    packs = []
    for _ in range(options.epochs):
        packs += pack_trees(build_trees(tokenizer, found, generator), options.pack_tokens, generator)
    packs = packs[: options.max_steps]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=options.learning_rate, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor(len(packs)))
    plain = model.get_base_model() if isinstance(model, PeftModel) else model
    started = time.perf_counter()
    for step, pack in enumerate(packs, start=1):
        # autocast changes nothing where the weights are bf16 already; full training keeps them in fp32
        with torch.autocast("cpu", torch.bfloat16):
            loss = answer_loss(plain, build_pack(pack))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        log_step(step, len(packs), loss.item(), time.perf_counter() - started)
    num_tokens = sum(tree.num_tokens for pack in packs for tree in pack)
    return {"num_steps": len(packs), "num_tokens": num_tokens, "seconds": round(time.perf_counter() - started)}


def log_step(step: int, num_steps: int, loss: float, elapsed_s: float) -> None:
    left_s = elapsed_s / step * (num_steps - step)
    log.info("step %d/%d  loss %.3f  %.0f s, %.0f s left", step, num_steps, loss, elapsed_s, left_s)


@torch.inference_mode()
def greedy(model: Any, prompts: Sequence[list[int]], eos_id: int) -> list[list[int]]:
    """Continue every prompt, up to the end marker or MAX_ANSWER_TOKENS; shorter prompts are padded on the left."""
    width = max(map(len, prompts))
    step_NT = torch.tensor([[eos_id] * (width - len(ids)) + ids for ids in prompts])
    mask_NS = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    cache = DynamicCache()
    chosen: list[torch.Tensor] = []
    while len(chosen) < MAX_ANSWER_TOKENS and not has_ended(chosen, eos_id):
        positions_NT = (mask_NS.cumsum(1) - 1).clamp_min(0)[:, -step_NT.shape[1] :]
        options = {CACHE_ARGUMENT: cache, "logits_to_keep": 1}
        logits_NTV = model(input_ids=step_NT, attention_mask=mask_NS, position_ids=positions_NT, **options).logits
        step_NT = logits_NTV[:, -1:].argmax(-1)
        mask_NS = torch.cat([mask_NS, torch.ones_like(step_NT)], dim=1)
        chosen.append(step_NT[:, 0])
    rows = torch.stack(chosen, dim=1).tolist()
    return [row[: row.index(eos_id)] if eos_id in row else row for row in rows]


def has_ended(chosen: Sequence[torch.Tensor], eos_id: int) -> bool:
    """Whether every row has its end marker."""
    return bool(chosen) and bool((torch.stack([*chosen]) == eos_id).any(0).all())


def answer(model: Any, tokenizer: Any, found: Sequence[Question]) -> list[str]:
    """Greedy answers."""
    answers: list[str] = []
    for start in range(0, len(found), ANSWER_BATCH):
        prompts = [prompt_ids(tokenizer, question) for question in found[start : start + ANSWER_BATCH]]
        answers += map(tokenizer.decode, greedy(model, prompts, tokenizer.eos_token_id))
        log.info("answered %d/%d questions", len(answers), len(found))
    return answers


def measure(loaded: dict[str, LoadedModel], found: Sequence[Question]) -> dict[str, Any]:
    """F1 and exact match of each model, and what the tuned one gains."""
    said = {name: answer(model.model, model.tokenizer, found) for name, model in loaded.items()}
    clusters = [question.digest for question in found]
    result: dict[str, Any] = {name: {} for name in (*loaded, "gain")}
    for metric, score in (("f1", f1), ("exact_match", exact_match)):
        scores = {
            name: [score(text, q.answers) for text, q in zip(answers, found, strict=True)]
            for name, answers in said.items()
        }
        # of the same questions, so that how hard they are does not widen the interval
        scores["gain"] = [after - before for before, after in zip(scores["base"], scores["tuned"], strict=True)]
        for name, values in scores.items():
            result[name][metric] = interval(values, clusters)
    return result


def interval(values: Sequence[float], clusters: Sequence[str]) -> dict[str, float]:
    """Mean with a 95 % interval, resampled by document."""
    found = bootstrap_interval(values, seed=0, clusters=clusters)
    return {"mean": round(found.mean, 4), "low": round(found.low, 4), "high": round(found.high, 4)}


def drift(base: LoadedModel, tuned: LoadedModel, num_contexts: int = 8) -> dict[str, float]:
    """|KV_tuned - KV_base| / |KV_base| over test contexts; keys before RoPE, for the two need not rotate alike."""
    found = questions("narrativeqa", split="test")
    contexts = list(dict.fromkeys(question.context for question in found))[:num_contexts]
    encoded = [base.tokenizer(context, add_special_tokens=False)["input_ids"] for context in contexts]
    errors, totals = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for ids in encoded:
        rows_base, rows_tuned = (kv_rows(loaded, ids) for loaded in (base, tuned))
        errors += (rows_tuned - rows_base).square().sum((1, 2))
        totals += rows_base.square().sum((1, 2))
    keys, values = (errors / totals).sqrt().tolist()
    return {"keys": round(keys, 4), "values": round(values, 4)}


def kv_rows(loaded: LoadedModel, ids: list[int]) -> torch.Tensor:
    """[2, T, L * F] float64: keys before RoPE and values of all layers side by side."""
    traced = trace(loaded, ids, capture={"kv"})
    return torch.stack([torch.cat(rows, dim=1).double() for rows in (traced.k_TF, traced.v_TF)])


def save_adapter(model: Any, directory: Path, base_name: str) -> None:
    """PEFT's directory format, weights in bf16 and no path of this machine in it."""
    directory.mkdir(parents=True, exist_ok=True)
    state = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in get_peft_model_state_dict(model, save_embedding_layers=False).items()
    }
    save_file(state, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = model.peft_config["default"].to_dict()
    config |= {"base_model_name_or_path": base_name, "inference_mode": True}
    for name, value in config.items():
        config[name] = sorted(value) if isinstance(value, set) else value
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True, default=str) + "\n")


def start_from(base: Path, directory: Path, rope_theta: float | None = None) -> None:
    """Copy the base's checkpoint, with another rope base if one is given."""
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(base, directory)
    if rope_theta is not None:
        config = json.loads((directory / "config.json").read_text())
        config["rope_parameters"]["rope_theta"] = rope_theta
        write_json(directory / "config.json", config)


def save_weights(model: Any, path: Path) -> None:
    """Overwrite a checkpoint's tensors, name by name, with the model's in bf16; tied ones stay tied.

    Raises:
        ValueError: the model has no tensor of one of the names, so the file is not of this model.
    """
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
    state = model.state_dict()
    unknown = sorted(set(names) - set(state))
    if unknown:
        raise ValueError(f"{path}: holds {unknown[0]}, which the trained model does not have")
    save_file({name: state[name].to(torch.bfloat16).contiguous() for name in names}, path, metadata={"format": "pt"})


def publish(partial: Path) -> None:
    """Give a finished model its name, in place of an earlier one."""
    target = partial.with_name("model")
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def make_adapter(recipe: Recipe, base: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train a LoRA adapter; write it and the merged model."""
    lora = LoraConfig(r=recipe.rank, lora_alpha=recipe.alpha, target_modules=LINEAR_LAYERS, task_type="CAUSAL_LM")
    loaded = load_model(base, dtype="bfloat16")
    model = get_peft_model(loaded.model, lora)
    summary = train(model, loaded.tokenizer, options)
    save_adapter(model, options.out / "adapter", recipe.base_name)
    partial = options.out / "model.partial"
    start_from(materialize(recipe.base, adapter=options.out / "adapter", progress=log.info), partial)
    publish(partial)
    return summary


def make_full_model(recipe: Recipe, base: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train every weight in fp32 master copies; write the model in bf16."""
    partial = options.out / "model.partial"
    start_from(base, partial, recipe.rope_theta)
    loaded = load_model(partial, dtype="float32")
    loaded.model.requires_grad_(True)
    summary = train(loaded.model, loaded.tokenizer, options)
    save_weights(loaded.model, partial / "model.safetensors")
    publish(partial)
    return summary


def make(recipe: Recipe, base: Path, options: argparse.Namespace) -> None:
    """Train the consumer and write `training.json`."""
    torch.manual_seed(options.seed)
    summary = (make_adapter if recipe.rank else make_full_model)(recipe, base, options)
    settings = {name: value for name, value in vars(options).items() if name in TRAINING_OPTIONS}
    settings |= {"rank": recipe.rank, "alpha": recipe.alpha, "rope_theta": recipe.rope_theta}
    write_json(options.out / "training.json", settings | summary)


def measure_consumer(base: Path, tuned: Path, options: argparse.Namespace) -> None:
    """Compare the consumer, as it was written, with the base model; write `metrics.json`."""
    models = {name: load_model(path, dtype="bfloat16") for name, path in (("base", base), ("tuned", tuned))}
    result: dict[str, Any] = {"num_questions_per_task": options.num_questions, "drift": drift(**models)}
    for task in TASKS:
        log.info("measuring %s", task)
        found = questions(task, split="test", limit=options.num_questions, seed=options.seed)
        result[task] = measure(models, found)
    write_json(options.out / "metrics.json", result)
    log.info("%s", json.dumps(result, indent=2))


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", choices=RECIPES)
    parser.add_argument("--out", type=Path, help="directory for model/, adapter/, training.json and metrics.json")
    parser.add_argument("--stage", choices=("all", "train", "measure"), default="all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--max-steps", type=int, help="stop after this many packs (default: the recipe's)")
    parser.add_argument("--learning-rate", type=float, help="default: the recipe's")
    parser.add_argument("--pack-tokens", type=int, default=2048, help="longest sequence to pack several contexts into")
    parser.add_argument("--num-questions", type=int, default=60, help="test questions per task")
    options = parser.parse_args()
    recipe = RECIPES[options.pair]
    options.out = options.out or recipe_directory(options.pair)
    options.max_steps = options.max_steps or recipe.max_steps
    options.learning_rate = options.learning_rate or recipe.learning_rate
    return options


def consumer(recipe: Recipe, out: Path) -> Path:
    """The made model; an adapter alone, as the repository carries it, is merged first."""
    if (out / "model").is_dir():
        return out / "model"
    return materialize(recipe.base, adapter=out / "adapter", progress=log.info)


def main() -> None:
    options = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    recipe = RECIPES[options.pair]
    base = materialize(recipe.base, progress=log.info)
    if options.stage != "measure":
        make(recipe, base, options)
    if options.stage != "train":
        measure_consumer(base, consumer(recipe, options.out), options)


if __name__ == "__main__":
    main()

"""Make the demo's consumer: SmolLM2-135M-Instruct with a LoRA adapter that answers questions about a text briefly.

The producer of the pair is the untouched base model. What is trained on and what is measured never share a document
(`scd_trt.corpus`): adapters learn from the `train` split, figures come from the `test` split.

Packing. A tree is one context with all its questions. Trees are packed into sequences; a token attends to the earlier
tokens of its own tree that belong to the context or to its own question, and positions continue after the context. So one
forward pass over a context serves some thirty questions, and each sees exactly what it would see alone. The loss is on
answer tokens only.

The same seed, one thread and the same library versions give the same adapter.
"""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import DynamicCache, LlamaForCausalLM

from scd_trt.evaluate.metrics import bootstrap_interval
from scd_trt.evaluate.tasks import TASKS, Question, exact_match, f1, num_shared_tokens, prompt, questions
from scd_trt.models import load_model, load_tokenizer, materialize

BASE = "package:smollm2-135m-instruct"
NEUTRAL_BASE_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
LINEAR_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MAX_ANSWER_TOKENS = 32
# transformers renamed the argument; the old name now warns.
CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
TRAINING_OPTIONS = ("seed", "epochs", "max_steps", "rank", "alpha", "learning_rate", "pack_tokens")

log = logging.getLogger("smollm2_qa")


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
    """Train the adapter in place; returns what it took."""
    generator = random.Random(options.seed)
    found = [question for task in TASKS for question in questions(task, split="train", seed=options.seed)]
    packs = []
    for _ in range(options.epochs):
        packs += pack_trees(build_trees(tokenizer, found, generator), options.pack_tokens, generator)
    packs = packs[: options.max_steps]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=options.learning_rate, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor(len(packs)))
    llama = model.get_base_model()
    started = time.perf_counter()
    for step, pack in enumerate(packs, start=1):
        loss = answer_loss(llama, build_pack(pack))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        elapsed = time.perf_counter() - started
        log.info(
            "step %d/%d  loss %.3f  %.0f s, %.0f s left",
            step,
            len(packs),
            loss.item(),
            elapsed,
            elapsed / step * (len(packs) - step),
        )
    num_tokens = sum(tree.num_tokens for pack in packs for tree in pack)
    return {"num_steps": len(packs), "num_tokens": num_tokens, "seconds": round(time.perf_counter() - started)}


@torch.inference_mode()
def answer(model: Any, tokenizer: Any, asked: Sequence[Question]) -> list[str]:
    """Greedy answers to questions about one context, whose KV is computed once."""
    prompts = [prompt_ids(tokenizer, question) for question in asked]
    shared = min(num_shared_tokens(prompts), min(map(len, prompts)) - 1)
    cache = DynamicCache()
    next_logits(model, prompts[0][:shared], cache)
    answers = []
    for ids in prompts:
        if cache.get_seq_length() > shared:
            cache.crop(shared - cache.get_seq_length())
        answers.append(tokenizer.decode(greedy(model, cache, ids[shared:], tokenizer.eos_token_id)))
    return answers


def next_logits(model: Any, ids: list[int], cache: DynamicCache) -> torch.Tensor:
    """Append `ids` to the cache; logits [V] of what follows."""
    logits: torch.Tensor = model(input_ids=torch.tensor([ids]), logits_to_keep=1, **{CACHE_ARGUMENT: cache}).logits
    return logits[0, -1]


def greedy(model: Any, cache: Any, ids: list[int], eos_id: int) -> list[int]:
    """Continue `ids` after what `cache` holds, up to the end marker or MAX_ANSWER_TOKENS."""
    chosen: list[int] = []
    step = ids
    while len(chosen) < MAX_ANSWER_TOKENS:
        token = int(next_logits(model, step, cache).argmax())
        if token == eos_id:
            break
        chosen.append(token)
        step = [token]
    return chosen


def measure(model: Any, tokenizer: Any, found: Sequence[Question]) -> dict[str, Any]:
    """F1 and exact match with 95 % intervals, resampled by document."""
    groups = [list(group) for _, group in groupby(found, key=lambda question: question.digest)]
    predictions = []
    for number, group in enumerate(groups, start=1):
        predictions += answer(model, tokenizer, group)
        log.info("answered %d/%d contexts", number, len(groups))
    clusters = [question.digest for question in found]
    result: dict[str, Any] = {}
    for name, score in (("f1", f1), ("exact_match", exact_match)):
        scores = [score(text, q.answers) for text, q in zip(predictions, found, strict=True)]
        interval = bootstrap_interval(scores, seed=0, clusters=clusters)
        result[name] = {"mean": round(interval.mean, 4), "low": round(interval.low, 4), "high": round(interval.high, 4)}
    return result


def measure_tasks(model: Any, tokenizer: Any, options: argparse.Namespace) -> dict[str, Any]:
    return {
        task: measure(model, tokenizer, questions(task, split="test", limit=options.num_questions, seed=options.seed))
        for task in TASKS
    }


@torch.inference_mode()
def drift(base: Any, tuned: Any, tokenizer: Any, num_contexts: int = 8) -> dict[str, float]:
    """|KV_tuned - KV_base| / |KV_base| over test contexts; both rotate alike, so rotation does not change the figure."""
    found = questions("narrativeqa", split="test")
    contexts = list(dict.fromkeys(question.context for question in found))[:num_contexts]
    squares = {"keys": [0.0, 0.0], "values": [0.0, 0.0]}
    for context in contexts:
        ids = tokenizer(context, add_special_tokens=False)["input_ids"]
        caches = DynamicCache(), DynamicCache()
        for model, cache in zip((base, tuned), caches, strict=True):
            next_logits(model, ids, cache)
        for base_layer, tuned_layer in zip(caches[0].layers, caches[1].layers, strict=True):
            for name in squares:
                reference = getattr(base_layer, name).float()
                squares[name][0] += (getattr(tuned_layer, name).float() - reference).square().sum().item()
                squares[name][1] += reference.square().sum().item()
    return {name: round((error / total) ** 0.5, 4) for name, (error, total) in squares.items()}


def save_adapter(model: Any, directory: Path) -> None:
    """PEFT's directory format, weights in bf16 and no path of this machine in it."""
    directory.mkdir(parents=True, exist_ok=True)
    state = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in get_peft_model_state_dict(model, save_embedding_layers=False).items()
    }
    save_file(state, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = model.peft_config["default"].to_dict()
    config |= {"base_model_name_or_path": NEUTRAL_BASE_NAME, "inference_mode": True}
    for name, value in config.items():
        config[name] = sorted(value) if isinstance(value, set) else value
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True, default=str) + "\n")


def load(adapter: Path | None = None) -> Any:
    """The base, or what serves with this adapter: merged and rounded to bf16."""
    return load_model(materialize(BASE, adapter=adapter, progress=log.info), dtype="bfloat16").model


def make_adapter(tokenizer: Any, options: argparse.Namespace) -> None:
    """Train and write `adapter/` and `training.json`."""
    torch.manual_seed(options.seed)
    lora = LoraConfig(r=options.rank, lora_alpha=options.alpha, target_modules=LINEAR_LAYERS, task_type="CAUSAL_LM")
    model = get_peft_model(load(), lora)
    summary = train(model, tokenizer, options)
    save_adapter(model, options.out / "adapter")
    settings = {name: value for name, value in vars(options).items() if name in TRAINING_OPTIONS}
    write_json(options.out / "training.json", settings | summary)


def measure_adapter(tokenizer: Any, options: argparse.Namespace) -> None:
    """Compare the adapter in `--out`, as it was written, with the base model; write `metrics.json`."""
    base, tuned = load(), load(options.out / "adapter")
    result: dict[str, Any] = {"num_questions_per_task": options.num_questions, "drift": drift(base, tuned, tokenizer)}
    for name, model in (("base", base), ("tuned", tuned)):
        log.info("measuring the %s model", name)
        result[name] = measure_tasks(model, tokenizer, options)
    write_json(options.out / "metrics.json", result)
    log.info("%s", json.dumps(result, indent=2))


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, help="directory for adapter/, training.json and metrics.json"
    )
    parser.add_argument("--stage", choices=("all", "train", "measure"), default="all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--max-steps", type=int, default=110, help="stop after this many packs")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--pack-tokens", type=int, default=2048, help="longest sequence to pack several contexts into")
    parser.add_argument("--num-questions", type=int, default=60, help="test questions per task")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(materialize(BASE, progress=log.info))
    if options.stage != "measure":
        make_adapter(tokenizer, options)
    if options.stage != "train":
        measure_adapter(tokenizer, options)


if __name__ == "__main__":
    main()

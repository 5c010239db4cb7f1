"""What coding a prompt costs beside computing it: time, floating point operations, bytes of the artifact.

    python benchmarks/codec_cost.py [PAIR.yaml] [--json]     default: engine_configs/smollm2-qa/pair.yaml, distilled already

Time: encode and decode of one prompt, of the producer's own keys and values, against the consumer's prefill of that prompt;
CPU time of one thread, all in turn in one run, the least of several turns; products in bfloat16 and in float32. Operations
and bytes follow from shapes, for this pair and for a model of 8B parameters (Llama 3.1) with groups of as many layers and as
large a share of components sent; bytes are relative to the weights of one model in bfloat16. Exits 1 where a limit is missed,
that of time by the product dtype that this machine takes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from scd_trt import translator as translators
from scd_trt.codec import Decoder, Encoder, LayerInput
from scd_trt.config import load_pair
from scd_trt.corpus import token_sequences
from scd_trt.distill.plan import prepare
from scd_trt.models import LoadedModel, cache_layers, load_model, trace
from scd_trt.products import product_dtype
from scd_trt.translator import Translator

DEFAULT = Path(__file__).parents[1] / "engine_configs" / "smollm2-qa" / "pair.yaml"
NUM_TOKENS, NUM_ROUNDS, CALLS_PER_ROUND = 1024, 5, 4
TIME_LIMIT, OPERATIONS_LIMIT, BYTES_LIMIT, LARGE_BYTES_LIMIT = 0.10, 0.05, 0.15, 0.07
LARGE_NUM_LAYERS, LARGE_KV_DIM = 32, 8 * 128
LARGE_NUM_PARAMETERS, LARGE_NUM_PARAMETERS_COMPUTED = 8.03e9, 6.98e9


@dataclass(frozen=True)
class Figure:
    """A share of something larger; `limit` is None where none is set."""

    name: str
    share: float
    limit: float | None
    detail: str

    @property
    def is_within(self) -> bool:
        return self.limit is None or self.share <= self.limit

    @property
    def verdict(self) -> str:
        if self.limit is None:
            return ""
        return f"limit {self.limit:.0%}: " + ("within" if self.is_within else f"{self.share / self.limit:.2f} times it")


def main() -> int:
    """Measure, count, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", nargs="?", type=Path, default=DEFAULT)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = load_pair(arguments.pair)
    job = prepare(config)
    producer = load_model(job.producer_path, dtype=config.producer.dtype)
    consumer = load_model(job.consumer_path, dtype=config.consumer.dtype)
    translator = translators.load(config.translator_path())
    prompt = read_prompt(config.heldout.source, consumer)
    artifact_bytes = (config.translator_path() / translators.TENSORS_FILE).stat().st_size
    figures = [*times(translator, producer, consumer, prompt), *shapes(translator, consumer, artifact_bytes)]
    if arguments.json:
        print(json.dumps([asdict(figure) for figure in figures], indent=1))
    else:
        for figure in figures:
            print(f"{figure.name:52s} {figure.share:7.2%}  {figure.verdict:25s} {figure.detail}")
    return 0 if all(figure.is_within for figure in figures) else 1


def read_prompt(source: str | tuple[str, ...], model: LoadedModel) -> list[int]:
    """The first tokens of held-out text."""
    texts = token_sequences(
        source,
        lambda text: model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],
        num_tokens=NUM_TOKENS,
        sequence_tokens=NUM_TOKENS,
        split="heldout",
        seed=0,
    )
    return list(next(iter(texts)))


def times(translator: Translator, producer: LoadedModel, consumer: LoadedModel, prompt: list[int]) -> Iterator[Figure]:
    """Encode and decode relative to prefill, for both dtypes of products."""
    kv = cache_layers(producer, trace(producer, prompt, capture={"kv"}))
    groups, positions = range(len(translator.manifest.groups)), torch.arange(len(prompt))
    inputs = [[LayerInput(*kv[layer]) for layer in translator.manifest.source_layers(group)] for group in groups]
    calls: dict[str, Callable[[], object]] = {"prefill": lambda: trace(consumer, prompt, capture={"kv"})}
    for dtype in (torch.bfloat16, torch.float32):
        encoder, decoder = Encoder(translator, dtype=dtype), Decoder(translator, dtype=dtype)
        codes = [encoder.encode(group, inputs[group], positions) for group in groups]
        calls[f"encode {dtype}"] = partial(_each, encoder.encode, inputs, positions)
        calls[f"decode {dtype}"] = partial(_each, decoder.decode, codes, positions)
    least_s = least_seconds(calls)
    for dtype in (torch.bfloat16, torch.float32):
        parts_s = [least_s[f"{verb} {dtype}"] for verb in ("encode", "decode")]
        detail = " + ".join(f"{part_s / len(prompt) * 1e6:.0f}" for part_s in parts_s)
        yield Figure(
            f"time of coding / prefill, {dtype} products",
            sum(parts_s) / least_s["prefill"],
            TIME_LIMIT if dtype == product_dtype() else None,
            f"encode + decode {detail} us/token, prefill {least_s['prefill'] / len(prompt) * 1e6:.0f}",
        )


def _each(call: Callable[..., object], groups: Sequence[object], positions: torch.Tensor) -> None:
    for group, given in enumerate(groups):
        call(group, given, positions)


def least_seconds(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """CPU time of each, in turn: what else the machine does then meets all of them alike."""
    found = dict.fromkeys(calls, float("inf"))
    with torch.inference_mode():
        for _ in range(NUM_ROUNDS):
            for name, call in calls.items():
                for _ in range(1 if name == "prefill" else CALLS_PER_ROUND):
                    began_s = time.process_time()
                    call()
                    found[name] = min(found[name], time.process_time() - began_s)
    return found


def shapes(translator: Translator, model: LoadedModel, artifact_bytes: int) -> Iterator[Figure]:
    """Operations and bytes of this pair, and of one of 8B parameters."""
    spec, groups = translator.manifest.consumer, translator.manifest.groups
    kinds = [rows for transform in translator.transforms if transform for rows in vars(transform).values()]
    num_sent = sum(rows.layout.num_components for rows in kinds)
    num_factors = sum(rows.encode_IS.numel() + rows.decode_SO.numel() for rows in kinds)
    parameters = {id(value): value.numel() for value in model.model.parameters()}
    num_computed = sum(parameters.values()) - model.model.get_input_embeddings().weight.numel()
    model_bytes = 2 * sum(parameters.values())
    detail = f"{2 * num_factors / 1e6:.1f} M/token of {2 * num_computed / 1e6:.0f} M"
    yield Figure("operations of coding / prefill, this pair", num_factors / num_computed, None, detail)
    detail = f"{artifact_bytes / 1e6:.1f} MB of {model_bytes / 1e6:.0f} MB"
    yield Figure("artifact / model, this pair", artifact_bytes / model_bytes, BYTES_LIMIT, detail)
    share, layers = num_sent / (2 * spec.num_layers * spec.kv_dim), max(stop - start for start, stop in groups)
    large = sum(4 * share * (size * LARGE_KV_DIM) ** 2 for size in _group_sizes(layers))
    detail = f"groups of {layers} layers, {share:.3f} of components sent"
    yield Figure("operations of coding / prefill, 8B", large / LARGE_NUM_PARAMETERS_COMPUTED, OPERATIONS_LIMIT, detail)
    yield Figure("artifact / model, 8B", large / LARGE_NUM_PARAMETERS, LARGE_BYTES_LIMIT, f"{2 * large / 1e6:.0f} MB")


def _group_sizes(layers: int) -> list[int]:
    """Layers of each group of the large model."""
    return [min(layers, LARGE_NUM_LAYERS - start) for start in range(0, LARGE_NUM_LAYERS, layers)]


if __name__ == "__main__":
    sys.exit(main())

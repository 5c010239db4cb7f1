"""What do codes lose on prompts that do not open as the calibration text did? KL to the oracle on held-out text.

    python benchmarks/other_openings.py [PAIR.yaml]     default: engine_configs/smollm2-qa/pair.yaml, distilled already

The first token's row travels as the number of a stored one, and three quarters of the calibration text open like a chat with
the default system message (docs/method.md, "Openings"). Compared: that opening, another system message, and plain text. Raw
reuse is the baseline.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from scd_trt import translator as translators
from scd_trt.config import load_pair
from scd_trt.corpus import token_sequences
from scd_trt.distill.plan import prepare
from scd_trt.distill.sensitivity import RAW, Heldout
from scd_trt.models import load_model

DEFAULT = Path(__file__).parents[1] / "engine_configs" / "smollm2-qa" / "pair.yaml"
OTHER_SYSTEM = "You answer briefly and in French. Be kind, and never mention the weather."
NUM_SEQUENCES, PREFIX_TOKENS, SCORED_TOKENS = 4, 512, 64


def main() -> None:
    """Measure three openings and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", nargs="?", type=Path, default=DEFAULT)
    config = load_pair(parser.parse_args().pair)
    job = prepare(config)
    producer = load_model(job.producer_path, dtype=config.producer.dtype)
    consumer = load_model(job.consumer_path, dtype=config.consumer.dtype)
    translator = translators.load(config.translator_path())
    openings = {
        "default system message": opening(consumer.tokenizer, []),
        "another system message": opening(consumer.tokenizer, [{"role": "system", "content": OTHER_SYSTEM}]),
        "plain text": [],
    }
    print(f"{'opening':24s} {'raw reuse':>10s} {'codes':>10s} {'ratio':>7s}")
    for name, ids in openings.items():
        heldout = Heldout(consumer)
        length = PREFIX_TOKENS + SCORED_TOKENS + 1 - len(ids)
        texts = token_sequences(
            config.heldout.source,
            lambda text: consumer.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],
            num_tokens=NUM_SEQUENCES * length,
            sequence_tokens=length,
            split="heldout",
            seed=0,
        )
        for text in texts:
            heldout.add_sequence(producer, [*ids, *text], prefix_tokens=PREFIX_TOKENS)
        heldout.add_source("codes", translator, range(job.num_layers))
        raw, codes = heldout.kl([heldout.mixture(RAW), heldout.mixture("codes")])
        print(f"{name:24s} {raw:10.4f} {codes:10.4f} {codes / raw:7.2f}", flush=True)


def opening(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Tokens before the user's first word."""
    rendered: str = tokenizer.apply_chat_template([*messages, {"role": "user", "content": "text"}], tokenize=False)
    ids: list[int] = tokenizer(rendered[: rendered.rindex("text")], add_special_tokens=False)["input_ids"]
    return ids


if __name__ == "__main__":
    main()

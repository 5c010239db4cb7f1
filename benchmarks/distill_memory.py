"""Does distillation's peak memory grow with the calibration text? It must not: 10k against 40k tokens, within 10 %.

    python benchmarks/distill_memory.py                    a random pair (6 layers, hidden 256), each policy: two minutes
    python benchmarks/distill_memory.py PAIR.yaml          a real pair, with its own models and text

Each size is distilled in a process of its own; peak resident memory is what the kernel reports for it (ru_maxrss). The
third process only loads both models and runs one sequence: what is above it is what distillation itself holds. If traces
were kept, the random pair alone would need 0.5 GB more at 40k tokens. Prints JSON; exits 1 where memory grows more.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from scd_trt.config import CorpusConfig, HeldoutConfig, MethodConfig, ModelConfig, PairConfig, load_pair

SIZES = (10_000, 40_000)
LIMIT = 1.10
SEQUENCE_TOKENS = 512


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", nargs="?", type=Path, help="pair file; default: a random pair")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        if arguments.pair:
            return judge(load_pair(arguments.pair), scratch)
        config = random_pair(scratch)
        methods = (config.method, config.method.model_copy(update={"policy": "rd"}))
        return max([judge(config.model_copy(update={"method": method}), scratch) for method in methods])


def judge(config: PairConfig, scratch: Path) -> int:
    """Measure one pair and policy; 1 where memory grows."""
    peaks = {size: peak_bytes(_sized(config, size, scratch), scratch, distil=True) for size in SIZES}
    idle = peak_bytes(_sized(config, SIZES[0], scratch), scratch, distil=False)
    ratio = peaks[SIZES[1]] / peaks[SIZES[0]]
    figures = {f"peak_mb_{size}_tokens": round(peak / 1e6, 1) for size, peak in peaks.items()}
    figures |= {"models_alone_mb": round(idle / 1e6, 1), "ratio": round(ratio, 4), "limit": LIMIT}
    print(json.dumps({"policy": config.method.policy} | figures), flush=True)
    return 0 if ratio <= LIMIT else 1


def random_pair(scratch: Path) -> PairConfig:
    """A pair of random models and a text of random words, large enough that kept traces would show."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from tiny_models import save_perturbed_copy, save_tiny_model

    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "head_dim": 64}
    producer = save_tiny_model(scratch / "a", **shape)
    consumer = save_perturbed_copy(producer, scratch / "b")
    text = scratch / "text.jsonl"
    generator = random.Random(0)
    words = ["".join(generator.choices("etaoinshrdlu", k=generator.randint(2, 9))) for _ in range(500)]
    with text.open("w", encoding="utf-8") as file:
        for _ in range(600):
            file.write(json.dumps({"text": " ".join(generator.choices(words, k=100))}) + "\n")
    return PairConfig(
        name="memory",
        producer=ModelConfig(model=str(producer)),
        consumer=ModelConfig(model=str(consumer)),
        method=MethodConfig(policy="paper", r_k=64, r_v=64, r_h=128, patch_layers=(1, 4)),
        calibration=CorpusConfig(source=str(text)),
        heldout=HeldoutConfig(source=str(text), num_sequences=2, prefix_tokens=128, scored_tokens=16),
    )


def peak_bytes(config: PairConfig, scratch: Path, *, distil: bool) -> int:
    """Peak resident memory of a process that distils the pair, or only runs one sequence through its models."""
    file = scratch / "config.json"
    file.write_text(config.model_dump_json())
    code = "import sys; sys.path.insert(0, sys.argv[1]); import distill_memory; distill_memory.child(*sys.argv[2:])"
    command = [sys.executable, "-c", code, str(Path(__file__).parent), str(file), "distil" if distil else "idle"]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(result.stdout.splitlines()[-1])


def child(file: str, work: str) -> None:
    """Body of the measured process; prints its own peak in bytes."""
    from scd_trt.distill.calibration import paired_traces
    from scd_trt.distill.pipeline import distill
    from scd_trt.distill.plan import prepare

    config = PairConfig.model_validate_json(Path(file).read_text())
    if work == "distil":
        distill(config, resume=False)
    else:
        for _ in paired_traces(prepare(config), (tuple(range(4, 4 + SEQUENCE_TOKENS // 4)) * 4,), {"kv", "x"}):
            pass
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def _sized(config: PairConfig, num_tokens: int, scratch: Path) -> PairConfig:
    corpus = config.calibration.model_copy(update={"num_tokens": num_tokens, "sequence_tokens": SEQUENCE_TOKENS})
    return config.model_copy(update={"calibration": corpus, "translator": scratch / "artifact"})


if __name__ == "__main__":
    sys.exit(main())

"""Tiny pairs as files on disk, served by real processes: the setting of the end-to-end tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from live_servers import free_port
from tiny_models import save_perturbed_copy, save_tiny_model

from scd_trt.config import PairConfig, load_pair
from scd_trt.distill.pipeline import distill
from scd_trt.serving.launcher import Child, serving_group


def loopback_config(tokens_per_block: int, **sections: Any) -> PairConfig:
    """A pair for engines in one process, whose models the test opens itself; `sections` change single keys.

    The guard is off: such tests serve random prompts, which are beyond any calibration text.
    """
    data: dict[str, Any] = {
        "name": "tiny",
        "producer": {"model": "a"},
        "consumer": {"model": "b"},
        "calibration": {"source": "none"},
        "heldout": {"source": "none"},
        "method": {"guard": "off"},
        "engine": {"tokens_per_block": tokens_per_block, "num_blocks": 64, "max_num_tokens": 1024},
        "transport": {"backend": "loopback", "arena_bytes": 4 << 20, "send_buffer_bytes": 4 << 20},
    }
    for name, section in sections.items():
        data[name] = data.get(name, {}) | section
    return PairConfig.model_validate(data)


WORDS = [
    "the",
    "cache",
    "of",
    "a",
    "prompt",
    "crosses",
    "a",
    "network",
    "before",
    "the",
    "first",
    "token",
    "appears",
    "and",
    "it",
    "does",
    "not",
    "fit",
    "other",
    "models",
]


Shape = Mapping[str, Any]
"""Entries of a model's configuration."""


@dataclass(frozen=True)
class TinyPair:
    """A pair file, what it says, and the directories of its models."""

    file: Path
    config: PairConfig
    producer: Path
    consumer: Path


def write_pair(
    root: Path, *, policy: str, same_model: bool = False, shapes: tuple[Shape, Shape] | None = None, **sections: Any
) -> TinyPair:
    """A tiny producer, its perturbed copy (or itself) as consumer, texts, and a pair file with free ports.

    Args:
        shapes: of the producer and of the consumer, which then is a model of its own.
    """
    if shapes is not None:
        producer, consumer = (
            save_tiny_model(root / name, seed=seed, **shape)
            for seed, (name, shape) in enumerate(zip(("producer", "consumer"), shapes, strict=True))
        )
    else:
        producer = save_tiny_model(root / "producer")
        consumer = producer if same_model else save_perturbed_copy(producer, root / "consumer")
    texts = root / "texts"
    texts.mkdir()
    for index in range(60):
        (texts / f"{index}.txt").write_text(" ".join([*WORDS[index % 2 :], *[str(index)] * 40]))
    ports = iter([free_port() for _ in range(5)])
    data: dict[str, Any] = {
        "name": f"tiny-{policy}",
        "producer": {"model": str(producer), "dtype": "float32"},
        "consumer": {"model": str(consumer), "dtype": "float32"},
        "translator": str(root / "translator"),
        "method": {"policy": policy, "r_k": 24, "r_v": 24, "r_h": 40, "max_patch_layers": 1},
        "calibration": {"source": str(texts), "num_tokens": 512, "sequence_tokens": 128},
        "heldout": {"source": str(texts), "num_sequences": 2, "prefix_tokens": 64, "scored_tokens": 16},
        "engine": {"tokens_per_block": 8, "num_blocks": 512},
        "transport": {"arena_bytes": 32 << 20, "send_buffer_bytes": 32 << 20},
        "servers": {
            "router": {"port": next(ports)},
            "prefill": {"port": next(ports), "control_port": next(ports)},
            "decode": {"port": next(ports), "control_port": next(ports)},
        },
    }
    for name, section in sections.items():
        data[name] = {**data.get(name, {}), **section}
    file = root / "pair.yaml"
    file.write_text(yaml.safe_dump(data))
    return TinyPair(file, load_pair(file), producer, consumer)


@contextlib.contextmanager
def served(pair: TinyPair) -> Iterator[dict[str, Child]]:
    """Distil the pair and run its three processes."""
    distill(pair.config)
    with serving_group(pair.file, pair.config, log_directory=pair.file.parent / "logs") as children:
        yield children


@contextlib.contextmanager
def served_slowly(root: Path) -> Iterator[tuple[TinyPair, dict[str, Child]]]:
    """An exact pair and its processes; prompts are computed in chunks of 8 tokens, and the pool holds a long answer."""
    engine = {"max_num_tokens": 8, "num_blocks": 1024}
    pair = write_pair(root, policy="exact", same_model=True, engine=engine)
    with served(pair) as children:
        yield pair, children


def complete(url: str, prompt: str | list[int], **extra: Any) -> dict[str, Any]:
    """One greedy completion; the whole answer."""
    body = {"model": extra.pop("model"), "prompt": prompt, "max_tokens": 16, "temperature": 0, **extra}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer

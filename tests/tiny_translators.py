"""Tiny random translators, for tests of files and arithmetic (never of quality)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from scd_trt import translator as translators
from scd_trt.bit_packing import BitLayout
from scd_trt.model_spec import ModelSpec
from scd_trt.rope import RopeParameters
from scd_trt.translator import (
    MATRIX_DTYPE,
    AffineMap,
    GroupTransform,
    LayerMaps,
    PatchLayer,
    RawLayer,
    ReuseLayer,
    RowTransform,
    TransformLayer,
    Translator,
)

NUM_KV_HEADS, HEAD_DIM, HIDDEN = 2, 8, 24
WIDTH = NUM_KV_HEADS * HEAD_DIM


def tiny_spec(num_layers: int, *, theta: float = 10_000.0, **overrides: Any) -> ModelSpec:
    """A specification of a model that need not exist."""
    fields: dict[str, Any] = {
        "name": "tiny",
        "family": "llama",
        "num_layers": num_layers,
        "num_heads": 4,
        "num_kv_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_size": HIDDEN,
        "max_position": 1024,
        "rope": (RopeParameters(theta=theta, head_dim=HEAD_DIM, rotary_dim=HEAD_DIM),) * num_layers,
        "sliding_windows": (None,) * num_layers,
        "has_qk_norm": False,
        "has_attention_bias": False,
        "norm_eps": 1e-5,
        "dtype": "float32",
        "vocab_size": 288,
        "vocab_digest": "aa",
        "weights_digest": "bb",
    }
    return ModelSpec(**fields | overrides)


def random_affine(size_in: int, size_out: int, seed: int) -> AffineMap:
    """A dense map with a bias."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(size_in, size_out, generator=generator) / size_in**0.5
    return AffineMap(weight, torch.randn(size_out, generator=generator))


def random_reuse(*, r_k: int = 5, r_v: int = 7, seed: int = 0) -> ReuseLayer:
    """A Reuse layer of ranks that differ."""
    return ReuseLayer(
        encode_k=random_affine(WIDTH, r_k, seed),
        decode_k=random_affine(r_k, WIDTH, seed + 1),
        encode_v=random_affine(WIDTH, r_v, seed + 2),
        decode_v=random_affine(r_v, WIDTH, seed + 3),
    )


def random_patch(*, r_h: int = 6, mlp_hidden: int | None = None, k_norm: bool = False, seed: int = 10) -> PatchLayer:
    """A Patch layer, optionally with a trained aligner or a key norm."""
    return PatchLayer(
        encode_h=random_affine(HIDDEN, r_h, seed),
        hidden=random_affine(r_h, mlp_hidden, seed + 1) if mlp_hidden else None,
        project=random_affine(mlp_hidden or r_h, 2 * WIDTH, seed + 2),
        k_norm_D=torch.linspace(0.5, 1.5, HEAD_DIM) if k_norm else None,
        k_norm_eps=1e-6 if k_norm else 0.0,
    )


def random_translator(*layers: LayerMaps, **fields: Any) -> Translator:
    """A translator of the given layers (default: one of each kind), one layer per group unless `groups` says otherwise."""
    maps = layers or (random_reuse(), random_patch(), RawLayer(), random_patch(mlp_hidden=9, k_norm=True, seed=20))
    given: dict[str, Any] = {
        "name": "tiny",
        "policy": "paper",
        "code_dtype": "float16",
        "raw_dtype": "bfloat16",
        "producer": tiny_spec(len(maps)),
        "consumer": tiny_spec(len(maps)),
        "groups": tuple((layer, layer + 1) for layer in range(len(maps))),
    }
    return translators.build(given | fields, tuple(maps))


KEY_RUNS: tuple[tuple[int, int], ...] = ((8, 3), (6, 4), (4, 2), (3, 8), (2, 4))
VALUE_RUNS: tuple[tuple[int, int], ...] = ((6, 4), (2, 8))
"""Every width, and layouts that differ between keys and values: 11 and 5 bytes per token."""


def random_rows(width: int, runs: tuple[tuple[int, int], ...], seed: int, *, num_sinks: int = 0) -> RowTransform:
    """Components of rows of unit spread that fill most levels of their widths and leave their range now and then."""
    layout = BitLayout(runs=runs)
    generator = torch.Generator().manual_seed(seed)
    levels_S = torch.tensor([2.0**bits for bits, count in runs for _ in range(count)])
    directions_IS = torch.randn(width, layout.num_components, generator=generator) / width**0.5
    return RowTransform(
        layout=layout,
        mean_I=torch.randn(width, generator=generator) * 0.3,
        encode_IS=(directions_IS * levels_S / 4).to(MATRIX_DTYPE),
        decode_SO=(torch.randn(layout.num_components, width, generator=generator) / levels_S[:, None]).to(MATRIX_DTYPE),
        bias_O=torch.randn(width, generator=generator),
        sink_in_KI=torch.randn(num_sinks, width, generator=generator) * 5 if num_sinks else None,
        sink_out_KO=torch.randn(num_sinks, width, generator=generator) * 5 if num_sinks else None,
    )


def random_group(
    num_layers: int,
    *,
    key_runs: tuple[tuple[int, int], ...] = KEY_RUNS,
    value_runs: tuple[tuple[int, int], ...] = VALUE_RUNS,
    width: int = WIDTH,
    seed: int = 30,
    num_sinks: int = 3,
) -> GroupTransform:
    """A transform of the rows of so many layers of `width`."""
    return GroupTransform(
        keys=random_rows(num_layers * width, key_runs, seed, num_sinks=num_sinks),
        values=random_rows(num_layers * width, value_runs, seed + 1, num_sinks=num_sinks),
    )


def group_translator(*transforms: GroupTransform, width: int = WIDTH, **fields: Any) -> Translator:
    """A translator of transformed groups (default: one of two layers and one of a single layer)."""
    coded = transforms or (random_group(2), random_group(1, seed=40))
    sizes = [len(transform.keys.mean_I) // width for transform in coded]
    edges = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    given: dict[str, Any] = {
        "name": "tiny",
        "policy": "rd",
        "code_dtype": "float16",
        "raw_dtype": "bfloat16",
        "producer": tiny_spec(edges[-1]),
        "consumer": tiny_spec(edges[-1]),
        "groups": tuple(pairwise(edges)),
    }
    return translators.build(given | fields, tuple(TransformLayer() for _ in range(edges[-1])), coded)

"""What same-model compressors are fitted on: the producer's own rows of calibration text.

Owns: `ProducerSample`, the rows of a few whole sequences, bounded in tokens and bytes; and `joint_moments`, mean and
covariance of the keys of all layers side by side and of the values, streamed and resumable like the pair's own moments.

Shapes: R sequences, T tokens of each, L layers, F = num_kv_heads * head_dim; n width of a joint row of several layers.
Errors: `StatisticsError` for a damaged file of partial statistics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from scd_trt.distill.calibration import Ids, Progress, Texts, fold_resumably
from scd_trt.distill.statistics import Kind, PairStatistics
from scd_trt.models import LoadedModel, trace

MAX_SAMPLE_TOKENS = 4096
MAX_SAMPLE_BYTES = 256 << 20

MAX_JOINT_WIDTH = 8192
"""Widest joint row: its covariance takes 512 MiB. More layers than fit are split into the fewest groups of equal size."""

NUM_SINK_TOKENS = 4
"""First tokens of a sequence that joint moments leave out; coders that use them send these uncoded."""

_KINDS: tuple[Kind, ...] = ("group_k", "group_v")


@dataclass(frozen=True)
class ProducerSample:
    """Rows of whole sequences, each from its start, float32: keys before RoPE and values `[L, R, T, F]`."""

    keys: Tensor
    values: Tensor


@torch.no_grad()
def producer_sample(producer: LoadedModel, sequences: Sequence[Sequence[int]]) -> ProducerSample:
    """Rows of the first sequences, as many as the bounds allow and at least one, all cut to the length of the shortest."""
    spec = producer.spec
    num_tokens = min(MAX_SAMPLE_TOKENS, MAX_SAMPLE_BYTES // (8 * spec.num_layers * spec.kv_dim))
    num_sequences = max(1, num_tokens // len(sequences[0]))
    chosen = sequences[:num_sequences]
    length = min(map(len, chosen))
    traces = [trace(producer, ids[:length], capture={"kv"}) for ids in chosen]
    keys, values = (
        torch.stack([torch.stack(rows) for rows in found], dim=1).float()
        for found in ([traced.k_TF for traced in traces], [traced.v_TF for traced in traces])
    )
    return ProducerSample(keys, values)


def joint_groups(num_layers: int, width: int) -> tuple[tuple[int, int], ...]:
    """Half-open ranges of layers whose rows are taken side by side: all layers, where their width allows it."""
    most = max(1, MAX_JOINT_WIDTH // width)
    num_groups = -(-num_layers // most)
    edges = [index * num_layers // num_groups for index in range(num_groups + 1)]
    return tuple(pairwise(edges))


def joint_moments(producer: LoadedModel, texts: Texts, work: Path, progress: Progress) -> PairStatistics:
    """Moments of the producer's rows by joint group, going on from `work` where an earlier run was interrupted."""
    groups = joint_groups(producer.spec.num_layers, producer.spec.kv_dim)
    widths = [((stop - start) * producer.spec.kv_dim, 0) for start, stop in groups]
    statistics = PairStatistics({(group, kind): width for group, width in enumerate(widths) for kind in _KINDS})

    def fold(remaining: Ids) -> Iterator[None]:
        for ids in remaining:
            _fold(statistics, groups, producer, ids)
            yield

    path = work / f"{texts.key}.joint.safetensors"
    return fold_resumably(statistics, texts, path, progress, stage="joint statistics of the producer", fold=fold)


@torch.no_grad()
def _fold(
    statistics: PairStatistics, groups: Sequence[tuple[int, int]], producer: LoadedModel, ids: Sequence[int]
) -> None:
    traced = trace(producer, ids, capture={"kv"})
    for (group, kind), moments in statistics.moments.items():
        rows = (traced.k_TF if kind == "group_k" else traced.v_TF)[slice(*groups[group])]
        joint_Tn = torch.cat(rows, dim=1)[NUM_SINK_TOKENS:]
        moments.update(joint_Tn, joint_Tn[:, :0])
    statistics.num_sequences += 1

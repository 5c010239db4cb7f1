"""What a policy hands back, and how it becomes a translator.

Owns: `Fitted`, the common result of all policies; `assemble`, which puts fitted maps and a job's manifest fields together;
and the consumer's projections as the fit of Patch layers reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from scd_trt import translator as translators
from scd_trt.distill.fit import Projections
from scd_trt.distill.plan import Job
from scd_trt.models import LoadedModel, projection_weights
from scd_trt.translator import GroupTransform, LayerMaps, Translator

Layers = tuple[LayerMaps, ...]
Transforms = tuple[GroupTransform | None, ...]


@dataclass(frozen=True)
class Fitted:
    """Maps as they go into the artifact.

    Attributes:
        figures: what was measured of them, the manifest's `quality`.
        frontier: the finely traced frontier, if it was asked for (`report`).
    """

    layers: Layers
    transforms: Transforms
    figures: dict[str, Any]
    frontier: tuple[dict[str, Any], ...] = ()


def assemble(
    job: Job, layers: Layers, transforms: Transforms = (), *, quality: Mapping[str, Any] | None = None
) -> Translator:
    """A translator of these maps for the job's pair."""
    config = job.config
    fields = {
        "name": config.name,
        "policy": config.method.policy,
        "code_dtype": config.method.code_dtype,
        "raw_dtype": config.consumer.dtype,
        "producer": job.producer,
        "consumer": job.consumer,
        "groups": job.groups,
        "sources": job.sources,
        "config_digest": config.method_digest(),
        "quality": dict(quality or {}),
    }
    return translators.build(fields, layers, transforms)


def projections(consumer: LoadedModel, layer: int) -> Projections:
    """The consumer's map from its attention input to keys and values of one layer."""
    weights = projection_weights(consumer, layer)
    width = weights.k_weight_FM.shape[0]
    biases = [torch.zeros(width) if bias is None else bias.float() for bias in (weights.k_bias_F, weights.v_bias_F)]
    scale_D = weights.k_norm_weight_D
    return Projections(
        weight_MO=torch.cat([weights.k_weight_FM.float(), weights.v_weight_FM.float()]).T,
        bias_O=torch.cat(biases),
        k_norm_D=None if scale_D is None else scale_D.float() + weights.k_norm_unit_offset,
        k_norm_eps=weights.k_norm_eps if scale_D is not None else 0.0,
    )

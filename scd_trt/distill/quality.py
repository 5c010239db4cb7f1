"""The held-out figures that an artifact carries: controls, error of the query path, quality by rank (METHOD, section 3).

Everything is measured over the mixtures of `sensitivity.Heldout`, on text that no map was fitted on. The layers to patch were
chosen on the same held-out text, so the artifact's own row is slightly optimistic; `evaluate` measures on the test split.

The result is plain JSON data and goes into the manifest as `quality`:
    controls      row -> {kl, kl_worst_decile, top1, nll, nll_worst_decile, bytes_per_token}
    query_error   row -> relative error of B's queries on the scored tokens, per layer
    rank_sweep    list of {rank, row -> {kl, bytes_per_token}}
Rows: `oracle` B's own cache; `raw` A's as it is; `raw_rerotated` A's keys under B's rotary; `reuse` all layers Reuse;
`reuse_equal_bytes` the bytes of the Patch layers spent on Reuse rank in the same layers; `scd` the artifact;
`mismatched` the artifact's caches of another prompt, which must be bad or the text does not need its prefix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from scd_trt.distill.sensitivity import Heldout, Mixture
from scd_trt.evaluate.metrics import LogitComparison, worst_decile

Sizes = Mapping[str, int | None]
"""Bytes per token of each row; None where nothing is sent."""


def controls(heldout: Heldout, mixtures: Mapping[str, Mixture], sizes: Sizes) -> dict[str, dict[str, float | None]]:
    """One row per mixture."""
    return {
        name: _row(heldout.compare(mixture)) | {"bytes_per_token": sizes[name]} for name, mixture in mixtures.items()
    }


def query_errors(heldout: Heldout, mixtures: Mapping[str, Mixture]) -> dict[str, list[float]]:
    """Relative error of the query path per layer, of each mixture."""
    return dict(zip(mixtures, heldout.query_errors(list(mixtures.values())), strict=True))


def sample_sizes(heldout: Heldout, *, calibration_tokens: int) -> dict[str, int]:
    """How much text stands behind the figures."""
    first = heldout.sequences[0]
    return {
        "calibration_tokens": calibration_tokens,
        "heldout_sequences": len(heldout.sequences),
        "heldout_prefix_tokens": first.inputs[0].k_THD.shape[0],
        "heldout_scored_tokens": len(first.scored_T),
    }


def _row(compared: Sequence[LogitComparison]) -> dict[str, float | None]:
    kl, nll = [item.kl for item in compared], [item.nll for item in compared]
    return {
        "kl": float(np.mean(kl)),
        "kl_worst_decile": worst_decile(kl, higher_is_worse=True),
        "top1": float(np.mean([item.top1_agreement for item in compared])),
        "nll": float(np.mean(nll)),
        "nll_worst_decile": worst_decile(nll, higher_is_worse=True),
    }

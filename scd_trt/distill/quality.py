"""The held-out figures that an artifact carries: controls, error of the query path, quality by rank (METHOD, section 3).

Everything is measured over the mixtures of `sensitivity.Heldout`, on text that no map was fitted on. The layers to patch were
chosen on the same held-out text, so the artifact's own row is slightly optimistic; `evaluate` measures on the test split.

The result is plain JSON data and goes into the manifest as `quality`:
    controls      row -> {kl, kl_worst_decile, top1, nll, nll_worst_decile, bytes_per_token}
    query_error   row -> relative error of B's queries on the scored tokens, per layer
    rank_sweep    list of {rank, row -> {kl, bytes_per_token}}
    exact_layers  list of {num_layers, kl, gain}: the artifact with the consumer's own cache in its first layers
Policy `rd` has more (`rd`). Rows: `oracle` B's own cache; `raw` A's as it is; `raw_rerotated` A's keys under B's rotary;
`reuse` all layers Reuse;
`reuse_equal_bytes` the bytes of the Patch layers spent on Reuse rank in the same layers; `scd` the artifact;
`mismatched` the artifact's caches of another prompt, which must be bad or the text does not need its prefix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from scd_trt.distill.calibration import PairModels, Progress, Texts
from scd_trt.distill.plan import Job
from scd_trt.distill.sensitivity import ORACLE, Heldout, Mixture
from scd_trt.evaluate.metrics import LogitComparison, worst_decile

MISMATCHED = "mismatched"

Sizes = Mapping[str, int | None]
"""Bytes per token of each row; None where nothing is sent."""


def open_heldout(job: Job, texts: Texts, tell: Progress, models: PairModels) -> Heldout:
    """Held-out caches of both models, in the dtypes in which they serve."""
    tell.stage("held-out caches", len(texts.heldout))
    producer, consumer = models.serving()
    heldout = Heldout(consumer, on_scored=tell.advance)
    for ids in texts.heldout:
        heldout.add_sequence(producer, ids, prefix_tokens=job.config.heldout.prefix_tokens)
        tell.advance()
    return heldout


def add_mismatched(heldout: Heldout, mixtures: dict[str, Mixture], sizes: dict[str, int | None], *, of: str) -> None:
    """A row more: the caches that row `of` makes of another prompt, where there is another."""
    if len(heldout.sequences) > 1:
        heldout.add_mismatched(MISMATCHED, mixtures[of])
        mixtures[MISMATCHED], sizes[MISMATCHED] = heldout.mixture(MISMATCHED), sizes[of]


def exact_layers(heldout: Heldout, source: str, numbers: Sequence[int]) -> list[dict[str, float]]:
    """What the first layers of a source would gain by being exact, for several numbers of them."""
    mixtures = [heldout.mixture(source, range(number), ORACLE) for number in numbers]
    own, *exact = heldout.kl([heldout.mixture(source), *mixtures])
    return [{"num_layers": number, "kl": kl, "gain": own - kl} for number, kl in zip(numbers, exact, strict=True)]


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

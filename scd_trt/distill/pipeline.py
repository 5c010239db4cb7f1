"""`distill`: from a pair file to a translator on disk (METHOD, section 1).

Stages, in order:
    open        materialise both models; check the pair, ranks, layers and lengths (`plan`)
    calibrate   A and B over the same text in float32, folded into streamed moments (`calibration`)
    choose      held-out caches in the serving dtypes; restore-one profile; greedy selection; budget
    align       with `aligner: mlp` a second pass over the text trains aligners; kept only if held-out KL falls
    measure     the controls, the error of the query path, quality by rank (`quality`)
    write       tensors, then the manifest, which makes it an artifact, then the report, which is drawn from the manifest

Policy `exact` sends the pool's rows: nothing is calibrated, and quality is measured only where the models differ.

Unfinished work lies in `.<artifact>.partial` beside the artifact, under a key of settings, weights and token ids; the next
run with this key goes on from there. A finished artifact with this key is returned as it is. Nothing in the artifact depends
on time, host or interruptions: same input, same bytes.

Memory: two models, O(width^2) moments per layer, held-out caches; none of it grows with the calibration text.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from scd_trt import translator as translators
from scd_trt.config import PairConfig
from scd_trt.distill import quality, report
from scd_trt.distill.aligner import train
from scd_trt.distill.calibration import (
    Progress,
    SilentProgress,
    Texts,
    calibrate,
    group_statistics,
    layer_statistics,
    read_texts,
    sample_rows,
    sink_rows,
)
from scd_trt.distill.fit import LayerFits, Projections
from scd_trt.distill.layer_selection import LayerSet, Selection, best_layers, configured, select
from scd_trt.distill.plan import Job, Plan, plan, prepare
from scd_trt.distill.rate_control import (
    FINEST,
    FRONTIER,
    NUM_BISECTIONS,
    Transforms,
    choose,
    fisher_weights,
    frontier,
    group_spectra,
)
from scd_trt.distill.sensitivity import ORACLE, RAW, REROTATED, Heldout, Mixture, restore_one_profile
from scd_trt.models import LoadedModel, load_model, projection_weights
from scd_trt.translator import LayerMaps, PatchLayer, RawLayer, TransformLayer, Translator, TranslatorError

__all__ = ["Plan", "Progress", "SilentProgress", "distill", "plan"]

logger = logging.getLogger(__name__)

MLP_SAMPLE_ROWS = 8192
"""Rows of each Patch layer that a trained aligner sees."""

SWEEP_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Reuse ranks of the sweep, as shares of the width of keys."""

REUSE, PATCH, PATCH_MLP, EQUAL_BYTES = "reuse", "patch", "patch_mlp", "reuse_equal_bytes"
SCD, EXACT, MISMATCHED = "scd", "exact", "mismatched"
RD, TRANSLATION = "rd", "translation"

Fitted = tuple[tuple[LayerMaps, ...], Transforms, dict[str, Any]]
"""Layers and group transforms as they go into the artifact, and the figures measured of them."""


@dataclass(frozen=True)
class Choice:
    """Layers as they go into the artifact and how they were chosen.

    Attributes:
        mixture: the held-out sources that these layers produce.
        profile: restore-one gain per layer; empty where the layers were configured.
        aligner_kl: held-out KL by aligner, where both were fitted.
    """

    layers: tuple[LayerMaps, ...]
    mixture: Mixture
    selection: Selection
    profile: Mapping[int, float]
    aligner_kl: Mapping[str, float]


def distill(config: PairConfig, *, progress: Progress | None = None, resume: bool = True) -> Translator:
    """Fit, measure and write the translator of a pair; a finished one of the same inputs is returned as it is.

    Args:
        progress: is told what is being done.
        resume: go on from an earlier run; False forgets it.
    Raises:
        ScdError: what in the pair file, the models or the texts the user can cure.
    """
    tell = progress or SilentProgress()
    tell.stage("open the pair", 1)
    job = prepare(config, tell=lambda text: tell.stage(text, 1))
    tell.advance()
    tell.stage("read the texts", 1)
    texts = read_texts(job)
    tell.advance()
    directory = config.translator_path()
    work = directory.parent / f".{directory.name}.partial"
    if not resume:
        shutil.rmtree(work, ignore_errors=True)
    elif (finished := _finished(directory, job, texts)) is not None:
        return finished
    layers, transforms, figures = _policy(job)(job, texts, work, tell)
    translator = _assemble(job, layers, transforms, quality={"inputs": texts.key} | figures)
    tell.stage("write the translator", 1)
    report.remove(directory)
    translators.save(translator, directory)
    report.write(translator.manifest, directory)
    shutil.rmtree(work, ignore_errors=True)
    tell.advance()
    return translator


def _finished(directory: Path, job: Job, texts: Texts) -> Translator | None:
    if not (directory / translators.MANIFEST_FILE).exists():
        return None
    try:
        found = translators.load(directory)
    except TranslatorError as error:
        logger.warning("%s; fitting it again", error)
        return None
    if found.manifest.quality.get("inputs") != texts.key or found.manifest.name != job.config.name:
        return None
    if not report.exists(directory):
        report.write(found.manifest, directory)
    return found


def _policy(job: Job) -> Callable[[Job, Texts, Path, Progress], Fitted]:
    return {"rd": _rd, "paper": _paper, "exact": _exact}[job.config.method.policy]


def _exact(job: Job, texts: Texts, _: Path, tell: Progress) -> Fitted:
    layers = tuple(RawLayer() for _ in range(job.num_layers))
    if not job.needs_heldout:
        return layers, (), {}
    heldout = _open_heldout(job, texts, tell)
    translator = _assemble(job, layers)
    heldout.add_source(EXACT, translator, range(job.num_layers))
    mixtures = {name: heldout.mixture(name) for name in (ORACLE, RAW, REROTATED, EXACT)}
    size = translator.manifest.dense_bytes_per_token
    tell.stage("measure on held-out text", len(mixtures) * len(heldout.sequences))
    rows = quality.controls(heldout, mixtures, {ORACLE: None, RAW: size, REROTATED: size, EXACT: size})
    return layers, (), quality.sample_sizes(heldout, calibration_tokens=0) | {"controls": rows}


def _rd(job: Job, texts: Texts, work: Path, tell: Progress) -> Fitted:
    statistics = calibrate(job, texts, work, tell, into=group_statistics(job))
    weights_L2F = fisher_weights(job, texts, tell)
    spectra = group_spectra(job, statistics, weights_L2F, tell, sinks=sink_rows(job, texts))
    heldout = _open_heldout(job, texts, tell)
    layers = tuple(TransformLayer() for _ in range(job.num_layers))

    def measured(transforms: Transforms) -> dict[str, Any]:
        translator = _assemble(job, layers, transforms)
        heldout.add_source(RD, translator, range(job.num_layers))
        row = quality.controls(heldout, {RD: heldout.mixture(RD)}, {RD: sum(translator.manifest.bytes_per_token)})
        return row[RD]

    method = job.config.method
    tell.stage("measure rates on held-out text", (len(FRONTIER) + 1) * len(heldout.sequences))
    traced = frontier(spectra, measured)
    translation = measured(spectra.at_ratio(FINEST))
    if method.max_kl is not None:
        tell.stage("search the rate that keeps to max_kl", (1 + NUM_BISECTIONS) * len(heldout.sequences))
    transforms = choose(
        spectra, lambda t: float(measured(t)["kl"]), bytes_per_token=method.bytes_per_token, max_kl=method.max_kl
    )
    rows = _rd_controls(job, layers, transforms, heldout, tell)
    rows[TRANSLATION] = translation
    figures = {"controls": rows, "frontier": traced}
    return layers, transforms, quality.sample_sizes(heldout, calibration_tokens=statistics.num_tokens) | figures


def _rd_controls(
    job: Job, layers: tuple[LayerMaps, ...], transforms: Transforms, heldout: Heldout, tell: Progress
) -> dict[str, dict[str, Any]]:
    own = _assemble(job, layers, transforms)
    heldout.add_source(RD, own, range(job.num_layers))
    mixtures = {name: heldout.mixture(name) for name in (ORACLE, RAW, REROTATED, RD)}
    dense, size = own.manifest.dense_bytes_per_token, sum(own.manifest.bytes_per_token)
    sizes: dict[str, int | None] = {ORACLE: None, RAW: dense, REROTATED: dense, RD: size}
    _add_mismatched(heldout, mixtures, sizes, of=RD)
    tell.stage("measure on held-out text", len(mixtures) * len(heldout.sequences))
    return quality.controls(heldout, mixtures, sizes)


def _paper(job: Job, texts: Texts, work: Path, tell: Progress) -> Fitted:
    statistics = calibrate(job, texts, work, tell, into=layer_statistics(job))
    fits = LayerFits(statistics, job.config.method.ridge)
    heldout = _open_heldout(job, texts, tell)
    choice = _choose(job, fits, heldout, tell)
    if job.config.method.aligner == "mlp" and choice.selection.layers:
        choice = _align(job, choice, heldout, texts, tell)
    sizes = quality.sample_sizes(heldout, calibration_tokens=statistics.num_tokens)
    return choice.layers, (), sizes | _figures(job, fits, choice, heldout, tell)


def _open_heldout(job: Job, texts: Texts, tell: Progress) -> Heldout:
    tell.stage("held-out caches", len(texts.heldout))
    producer = load_model(job.producer_path, dtype=job.config.producer.dtype)
    consumer = load_model(job.consumer_path, dtype=job.config.consumer.dtype)
    heldout = Heldout(consumer, on_scored=tell.advance)
    for ids in texts.heldout:
        heldout.add_sequence(producer, ids, prefix_tokens=job.config.heldout.prefix_tokens)
        tell.advance()
    return heldout


def _choose(job: Job, fits: LayerFits, heldout: Heldout, tell: Progress) -> Choice:
    """Fit Reuse everywhere, then decide which layers to patch instead."""
    reuse = tuple(fits.reuse(layer, r_k=job.r_k[layer], r_v=job.r_v[layer]) for layer in range(job.num_layers))
    heldout.add_source(REUSE, _assemble(job, reuse), range(job.num_layers))
    profile: Mapping[int, float] = {}
    candidates = job.patch_candidates
    if job.config.method.patch_layers == "auto" and candidates:
        tell.stage("restore-one profile", (1 + job.num_layers) * len(heldout.sequences))
        profile = restore_one_profile(heldout, REUSE)
        candidates = best_layers(profile, job.config.method.num_candidates)
    patches = {
        layer: fits.patch(layer, _projections(heldout.consumer, layer), r_h=job.r_h[layer]) for layer in candidates
    }
    heldout.add_source(PATCH, _assemble(job, _substituted(reuse, patches)), candidates)
    selection = _select(job, heldout, candidates, tell)
    chosen = {layer: patches[layer] for layer in selection.layers}
    mixture = heldout.mixture(REUSE, selection.layers, PATCH)
    return Choice(_substituted(reuse, chosen), mixture, selection, profile, {})


def _select(job: Job, heldout: Heldout, candidates: LayerSet, tell: Progress) -> Selection:
    """Greedy path and budget; configured layers are taken as they are, with the path of their own order."""
    method = job.config.method
    if not candidates:
        return Selection((), ())
    costs = {layer: float(job.patch_bytes(layer)) for layer in candidates}
    steps = range(min(method.max_patch_layers, len(candidates)))
    automatic = method.patch_layers == "auto"
    num_sets = sum(len(candidates) - step for step in steps) if automatic else len(candidates)
    tell.stage("select layers to patch", (1 + num_sets) * len(heldout.sequences))
    base_kl = heldout.kl([heldout.mixture(REUSE)])[0]

    def score(sets: Sequence[LayerSet]) -> list[float]:
        return [base_kl - kl for kl in heldout.kl([heldout.mixture(REUSE, layers, PATCH) for layers in sets])]

    if automatic:
        return select(candidates, score, costs=costs, max_layers=method.max_patch_layers)
    return configured(candidates, score, costs=costs)


def _align(job: Job, choice: Choice, heldout: Heldout, texts: Texts, tell: Progress) -> Choice:
    """Train the aligners of the chosen layers, and keep them only if held-out KL is lower with them."""
    method, chosen = job.config.method, choice.selection.layers
    samples = sample_rows(job, texts, chosen, capacity=MLP_SAMPLE_ROWS, progress=tell)
    tell.stage("train aligners", len(chosen))
    trained: dict[int, LayerMaps] = {}
    for layer in chosen:
        affine = choice.layers[layer]
        if not isinstance(affine, PatchLayer):
            raise TypeError(f"layer {layer} was chosen to be patched but is {type(affine).__name__}")
        trained[layer] = train(
            affine,
            samples[layer],
            _projections(heldout.consumer, layer),
            width=method.mlp_hidden,
            num_steps=method.mlp_steps,
            seed=method.seed,
        )
        tell.advance()
    layers = _substituted(choice.layers, trained)
    heldout.add_source(PATCH_MLP, _assemble(job, layers), chosen)
    mixture = heldout.mixture(REUSE, chosen, PATCH_MLP)
    affine_kl, mlp_kl = heldout.kl([choice.mixture, mixture])
    measured = replace(choice, aligner_kl={"affine": affine_kl, "mlp": mlp_kl})
    return measured if affine_kl <= mlp_kl else replace(measured, layers=layers, mixture=mixture)


def _figures(job: Job, fits: LayerFits, choice: Choice, heldout: Heldout, tell: Progress) -> dict[str, Any]:
    mixtures, sizes = _control_mixtures(job, fits, choice, heldout)
    tell.stage("measure on held-out text", (len(mixtures) + 2 + 2 * len(SWEEP_SHARES)) * len(heldout.sequences))
    return {
        "controls": quality.controls(heldout, mixtures, sizes),
        "query_error": quality.query_errors(heldout, {REUSE: mixtures[REUSE], SCD: mixtures[SCD]}),
        "rank_sweep": [_sweep(job, fits, choice, heldout, share) for share in SWEEP_SHARES],
        "restore_one": [choice.profile[layer] for layer in sorted(choice.profile)],
        "selection": [
            {"layers": list(step.layers), "gain": step.gain, "cost": step.cost, "efficiency": step.efficiency}
            for step in choice.selection.path
        ],
        "aligner_kl": dict(choice.aligner_kl),
    }


def _control_mixtures(
    job: Job, fits: LayerFits, choice: Choice, heldout: Heldout
) -> tuple[dict[str, Mixture], dict[str, int | None]]:
    own = _assemble(job, choice.layers).manifest
    dense, size = own.dense_bytes_per_token, sum(own.bytes_per_token)
    reuse_size = (sum(job.r_k) + sum(job.r_v)) * job.code_bytes
    mixtures = {name: heldout.mixture(name) for name in (ORACLE, RAW, REROTATED, REUSE)}
    sizes: dict[str, int | None] = {ORACLE: None, RAW: dense, REROTATED: dense, REUSE: reuse_size}
    if choice.selection.layers:
        richer = _equal_bytes(job, fits, choice)
        heldout.add_source(EQUAL_BYTES, richer, choice.selection.layers)
        mixtures[EQUAL_BYTES] = heldout.mixture(REUSE, choice.selection.layers, EQUAL_BYTES)
        sizes[EQUAL_BYTES] = sum(richer.manifest.bytes_per_token)
    mixtures[SCD], sizes[SCD] = choice.mixture, size
    _add_mismatched(heldout, mixtures, sizes, of=SCD)
    return mixtures, sizes


def _add_mismatched(heldout: Heldout, mixtures: dict[str, Mixture], sizes: dict[str, int | None], *, of: str) -> None:
    """A row more: the caches that row `of` makes of another prompt, where there is another."""
    if len(heldout.sequences) > 1:
        heldout.add_mismatched(MISMATCHED, mixtures[of])
        mixtures[MISMATCHED], sizes[MISMATCHED] = heldout.mixture(MISMATCHED), sizes[of]


def _equal_bytes(job: Job, fits: LayerFits, choice: Choice) -> Translator:
    """Reuse in the layers that are patched, at the ranks that the Patch codes' bytes buy (at most full rank)."""
    width = job.consumer.kv_dim
    richer: dict[int, LayerMaps] = {}
    for layer in choice.selection.layers:
        r_k = min(width, max(1, job.r_h[layer] // 2))
        richer[layer] = fits.reuse(layer, r_k=r_k, r_v=min(width, max(1, job.r_h[layer] - r_k)))
    return _assemble(job, _substituted(choice.layers, richer))


def _sweep(job: Job, fits: LayerFits, choice: Choice, heldout: Heldout, share: float) -> dict[str, Any]:
    """Reuse at another rank in all layers, without and with the chosen Patch layers."""
    rank = max(1, round(share * job.consumer.kv_dim))
    reuse = tuple(fits.reuse(layer, r_k=rank, r_v=rank) for layer in range(job.num_layers))
    patched = _substituted(reuse, {layer: choice.layers[layer] for layer in choice.selection.layers})
    name = f"rank {rank}"
    heldout.add_source(name, _assemble(job, reuse), range(job.num_layers))
    both = [heldout.mixture(name), tuple(name if source == REUSE else source for source in choice.mixture)]
    reuse_kl, scd_kl = heldout.kl(both)
    heldout.drop_source(name)
    sizes = [sum(_assemble(job, layers).manifest.bytes_per_token) for layers in (reuse, patched)]
    return {
        "rank": rank,
        REUSE: {"kl": reuse_kl, "bytes_per_token": sizes[0]},
        SCD: {"kl": scd_kl, "bytes_per_token": sizes[1]},
    }


def _substituted(layers: Sequence[LayerMaps], changed: Mapping[int, LayerMaps]) -> tuple[LayerMaps, ...]:
    return tuple(changed.get(layer, maps) for layer, maps in enumerate(layers))


def _projections(consumer: LoadedModel, layer: int) -> Projections:
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


def _assemble(
    job: Job,
    layers: tuple[LayerMaps, ...],
    transforms: Transforms = (),
    *,
    quality: Mapping[str, Any] | None = None,
) -> Translator:
    config = job.config
    fields = {
        "name": config.name,
        "policy": config.method.policy,
        "code_dtype": config.method.code_dtype,
        "raw_dtype": config.consumer.dtype,
        "producer": job.producer,
        "consumer": job.consumer,
        "groups": job.groups,
        "config_digest": config.method_digest(),
        "quality": dict(quality or {}),
    }
    return translators.build(fields, layers, transforms)

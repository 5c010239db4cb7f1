"""`distill`: from a pair file to a translator on disk (METHOD, section 1).

Stages, in order:
    open        materialise both models; check the pair, ranks, layers and lengths (`plan`)
    calibrate   A and B over the same text in float32, folded into streamed moments (`calibration`)
    choose      held-out caches in the serving dtypes; restore-one profile; greedy selection; budget
    align       with `aligner: mlp` a second pass over the text trains aligners; kept only if held-out KL falls
    measure     the controls, the error of the query path, quality by rank (`quality`)
    write       tensors, then the manifest, which makes it an artifact, then the report, which is drawn from the manifest

These are policy `paper`'s; `rd` has its own between open and write (`rd`). Policy `exact` sends the pool's rows: nothing is
calibrated, and quality is measured only where the models differ.

Unfinished work lies in `.<artifact>.partial` beside the artifact, under a key of weights, token ids and the settings that
the moments depend on; the next run with this key goes on from there. In a directory of the user's it is kept, so that the
pair can be fitted at another rate without reading the text again. A finished artifact of the same settings is returned as
it is. Nothing in the artifact depends on time, host or interruptions: same input, same bytes. With `trace_frontier` the
finely traced frontier lies beside the manifest (`report.FRONTIER_FILE`), whichever run traced it; asked of a finished
artifact, it is traced from the moments again.

Memory: two models, O(width^2) moments per layer, held-out caches; none of it grows with the calibration text.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scd_trt import translator as translators
from scd_trt.config import PairConfig
from scd_trt.distill import quality, rd, report
from scd_trt.distill.aligner import train
from scd_trt.distill.assembly import Fitted, assemble, projections
from scd_trt.distill.calibration import (
    PairModels,
    Progress,
    SilentProgress,
    Texts,
    calibrate,
    choose_sources,
    layer_statistics,
    read_texts,
    sample_rows,
)
from scd_trt.distill.fit import LayerFits
from scd_trt.distill.layer_selection import LayerSet, Selection, best_layers, configured, select
from scd_trt.distill.plan import Job, Plan, PlanError, plan, prepare
from scd_trt.distill.sensitivity import ORACLE, RAW, REROTATED, Heldout, Mixture, restore_one_profile
from scd_trt.translator import LayerMaps, PatchLayer, RawLayer, Translator, TranslatorError

__all__ = ["Plan", "Progress", "SilentProgress", "distill", "plan"]

logger = logging.getLogger(__name__)

MLP_SAMPLE_ROWS = 8192
"""Rows of each Patch layer that a trained aligner sees."""

SWEEP_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Reuse ranks of the sweep, as shares of the width of keys."""

REUSE, PATCH, PATCH_MLP, EQUAL_BYTES = "reuse", "patch", "patch_mlp", "reuse_equal_bytes"
SCD, EXACT = "scd", "exact"


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


def distill(
    config: PairConfig,
    *,
    progress: Progress | None = None,
    resume: bool = True,
    trace_frontier: bool = False,
    work: Path | None = None,
) -> Translator:
    """Fit, measure and write the translator of a pair; a finished one of the same inputs is returned as it is.

    Args:
        progress: is told what is being done.
        resume: go on from an earlier run; False forgets it.
        trace_frontier: measure at many rates, and write that beside the artifact.
        work: directory of unfinished work, which is then kept: another rate of the pair starts from the same moments.
    Raises:
        ScdError: what in the pair file, the models or the texts the user can cure.
    """
    if trace_frontier and config.method.policy != "rd":
        raise PlanError(f"method.policy {config.method.policy} has no frontier of rates; it belongs to policy rd")
    tell = progress or SilentProgress()
    tell.stage("open the pair", 1)
    job = prepare(config, tell=lambda text: tell.stage(text, 1))
    tell.advance()
    tell.stage("read the texts", 1)
    texts = read_texts(job)
    tell.advance()
    directory = config.translator_path()
    is_kept, work = work is not None, work or directory.parent / f".{directory.name}.partial"
    models = PairModels(job)
    finished = None
    if resume:
        finished = _finished(directory, job, texts)
    else:
        for path in work.glob(f"{texts.moments_key}.*"):
            path.unlink()
    if finished is None:
        finished = _distilled(job, texts, work, tell, models, full_frontier=trace_frontier)
    elif trace_frontier and not report.read_frontier(directory, finished.manifest):
        logger.info("the moments of a finished artifact are not kept; the calibration text is read again")
        points = rd.trace(job, texts, work, tell, models)
        report.write(finished.manifest, directory, frontier=points)
    if not is_kept:
        shutil.rmtree(work, ignore_errors=True)
    return finished


def _distilled(
    job: Job, texts: Texts, work: Path, tell: Progress, models: PairModels, *, full_frontier: bool
) -> Translator:
    directory = job.config.translator_path()
    job = choose_sources(job, texts, work, tell, models=models)
    if job.config.method.policy == "rd":
        fitted = rd.fit(job, texts, work, tell, models, full_frontier=full_frontier)
    elif job.config.method.policy == "paper":
        fitted = _paper(job, texts, work, tell, models)
    else:
        fitted = _exact(job, texts, tell, models)
    translator = assemble(job, fitted.layers, fitted.transforms, quality={"inputs": texts.key} | fitted.figures)
    tell.stage("write the translator", 1)
    report.remove(directory)
    translators.save(translator, directory)
    report.write(translator.manifest, directory, frontier=fitted.frontier)
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


def _exact(job: Job, texts: Texts, tell: Progress, models: PairModels) -> Fitted:
    layers = tuple(RawLayer() for _ in range(job.num_layers))
    if not job.needs_heldout:
        return Fitted(layers, (), {})
    heldout = quality.open_heldout(job, texts, tell, models)
    translator = assemble(job, layers)
    heldout.add_source(EXACT, translator, range(job.num_layers))
    mixtures = {name: heldout.mixture(name) for name in (ORACLE, RAW, REROTATED, EXACT)}
    size = translator.manifest.dense_bytes_per_token
    tell.stage("measure on held-out text", len(mixtures) * len(heldout.sequences))
    rows = quality.controls(heldout, mixtures, {ORACLE: None, RAW: size, REROTATED: size, EXACT: size})
    return Fitted(layers, (), quality.sample_sizes(heldout, calibration_tokens=0) | {"controls": rows})


def _paper(job: Job, texts: Texts, work: Path, tell: Progress, models: PairModels) -> Fitted:
    statistics = calibrate(job, texts, work, tell, into=layer_statistics(job), models=models)
    fits = LayerFits(statistics, job.config.method.ridge)
    heldout = quality.open_heldout(job, texts, tell, models)
    choice = _choose(job, fits, heldout, tell)
    if job.config.method.aligner == "mlp" and choice.selection.layers:
        choice = _align(job, choice, heldout, texts, tell)
    sizes = quality.sample_sizes(heldout, calibration_tokens=statistics.num_tokens)
    return Fitted(choice.layers, (), sizes | _figures(job, fits, choice, heldout, tell))


def _choose(job: Job, fits: LayerFits, heldout: Heldout, tell: Progress) -> Choice:
    """Fit Reuse everywhere, then decide which layers to patch instead."""
    reuse = tuple(fits.reuse(layer, r_k=job.r_k[layer], r_v=job.r_v[layer]) for layer in range(job.num_layers))
    heldout.add_source(REUSE, assemble(job, reuse), range(job.num_layers))
    profile: Mapping[int, float] = {}
    candidates = job.patch_candidates
    if job.config.method.patch_layers == "auto" and candidates:
        tell.stage("restore-one profile", (1 + job.num_layers) * len(heldout.sequences))
        profile = restore_one_profile(heldout, REUSE)
        candidates = best_layers(profile, job.config.method.num_candidates)
    patches = {
        layer: fits.patch(layer, projections(heldout.consumer, layer), r_h=job.r_h[layer]) for layer in candidates
    }
    heldout.add_source(PATCH, assemble(job, _substituted(reuse, patches)), candidates)
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
            projections(heldout.consumer, layer),
            width=method.mlp_hidden,
            num_steps=method.mlp_steps,
            seed=method.seed,
        )
        tell.advance()
    layers = _substituted(choice.layers, trained)
    heldout.add_source(PATCH_MLP, assemble(job, layers), chosen)
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
    own = assemble(job, choice.layers).manifest
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
    quality.add_mismatched(heldout, mixtures, sizes, of=SCD)
    return mixtures, sizes


def _equal_bytes(job: Job, fits: LayerFits, choice: Choice) -> Translator:
    """Reuse in the layers that are patched, at the ranks that the Patch codes' bytes buy (at most full rank)."""
    width = job.consumer.kv_dim
    richer: dict[int, LayerMaps] = {}
    for layer in choice.selection.layers:
        r_k = min(width, max(1, job.r_h[layer] // 2))
        richer[layer] = fits.reuse(layer, r_k=r_k, r_v=min(width, max(1, job.r_h[layer] - r_k)))
    return assemble(job, _substituted(choice.layers, richer))


def _sweep(job: Job, fits: LayerFits, choice: Choice, heldout: Heldout, share: float) -> dict[str, Any]:
    """Reuse at another rank in all layers, without and with the chosen Patch layers."""
    rank = max(1, round(share * job.consumer.kv_dim))
    reuse = tuple(fits.reuse(layer, r_k=rank, r_v=rank) for layer in range(job.num_layers))
    patched = _substituted(reuse, {layer: choice.layers[layer] for layer in choice.selection.layers})
    name = f"rank {rank}"
    heldout.add_source(name, assemble(job, reuse), range(job.num_layers))
    both = [heldout.mixture(name), tuple(name if source == REUSE else source for source in choice.mixture)]
    reuse_kl, scd_kl = heldout.kl(both)
    heldout.drop_source(name)
    sizes = [sum(assemble(job, layers).manifest.bytes_per_token) for layers in (reuse, patched)]
    return {
        "rank": rank,
        REUSE: {"kl": reuse_kl, "bytes_per_token": sizes[0]},
        SCD: {"kl": scd_kl, "bytes_per_token": sizes[1]},
    }


def _substituted(layers: Sequence[LayerMaps], changed: Mapping[int, LayerMaps]) -> tuple[LayerMaps, ...]:
    return tuple(changed.get(layer, maps) for layer, maps in enumerate(layers))

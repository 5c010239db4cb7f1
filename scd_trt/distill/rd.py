"""Policy `rd`: groups of layers at the least rate-distortion cost, kept to a limit by measurement (METHOD, section 2).

Stages: calibrate and weigh (`rate_control`); held-out caches; price the modes of every group (`modes`); trace the frontier
and choose (`rate_control`), where a table of several modes is taken only if held-out text finds it no worse than
transforms everywhere at the same bytes; controls.

Figures, beside those that all policies have (`quality`):
    frontier       row of measures per ratio
    limit          name, allowed and measured value, bytes per token, and what the measurement says of itself
    modes          lambda (nats per byte) and prefix length; per group its layers, mode, and what every mode was predicted to
                   cost; `measured`: KL with and without modes other than transform, where such a table was tried
    exact_layers   what computing the first layers exactly would gain
    omitted        controls that this pair cannot have, and why

What is kept: nothing but the figures. Moments take many times the artifact's bytes and are deleted with the finished run;
a frontier that is asked for later is traced from the calibration text again (`trace`), which leaves the artifact as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scd_trt.distill import guard, quality
from scd_trt.distill.answers import QuestionBench
from scd_trt.distill.assembly import Fitted, assemble
from scd_trt.distill.calibration import (
    PairModels,
    Progress,
    Texts,
    calibrate,
    choose_sources,
    group_statistics,
)
from scd_trt.distill.modes import Coder, Coding, Modes, ModeTable, fixed_codes, predictions
from scd_trt.distill.plan import EXACT_LAYERS, FRONTIER, FULL_FRONTIER, Job
from scd_trt.distill.rate_control import FINEST, Chosen, Limit, Loss, choose, error_weights, group_spectra
from scd_trt.distill.sensitivity import ORACLE, RAW, REROTATED, Heldout
from scd_trt.model_spec import OTHER_SHAPE

RD, TRANSLATION = "rd", "translation"


@dataclass(frozen=True)
class _Measured:
    """A coding, what held-out text says of it, and of other modes at the same bytes.

    Attributes:
        rivals: KL of every table of modes that was measured, where there was more than one.
    """

    coding: Coding
    row: dict[str, Any]
    rivals: tuple[tuple[Modes, float], ...]

    @property
    def num_bytes(self) -> int:
        return self.coding.num_bytes

    @property
    def num_silent_groups(self) -> int:
        return self.coding.num_silent_groups


@dataclass(frozen=True)
class _Bench:
    """All that rates and modes are chosen with.

    Attributes:
        rows: measures by table of modes and limit on bytes: each is measured once.
        tables: what was decided, by limit on bytes.
    """

    job: Job
    texts: Texts
    models: PairModels
    tell: Progress
    coder: Coder
    heldout: Heldout
    num_calibration_tokens: int
    guards: guard.Guards
    rows: dict[tuple[Modes, int], dict[str, Any]] = field(default_factory=dict)
    tables: dict[int, ModeTable] = field(default_factory=dict)

    @property
    def dense_bytes(self) -> int:
        return self.job.dense_bytes_per_token

    def stage(self, name: str, sizes: Sequence[int]) -> None:
        """Announce that `best` will be asked for these sizes."""
        mixed = sum(_is_mixed(self._decided(size)) for size in sizes)
        self.tell.stage(name, (len(sizes) + mixed) * len(self.heldout.sequences))

    def best(self, num_bytes: int) -> _Measured:
        """The coding of at most so many bytes with the least measured KL; a table of several modes if it is no worse."""
        plain, table = self.coder.plain(num_bytes), self._decided(num_bytes)
        plain_row = self._row(plain)
        if not _is_mixed(table):
            return _Measured(plain, plain_row, ())
        mixed = self.coder.coding(table)
        mixed_row = self._row(mixed)
        rivals = ((plain.modes, float(plain_row["kl"])), (mixed.modes, float(mixed_row["kl"])))
        if mixed_row["kl"] <= plain_row["kl"]:
            return _Measured(mixed, mixed_row, rivals)
        return _Measured(plain, plain_row, rivals)

    def unlimited(self) -> _Bench:
        """The same without a limit on matrices: what the translation loses, not what leaving components out does."""
        spectra = replace(self.coder.spectra, max_matrix_elements=None)
        return replace(self, coder=replace(self.coder, spectra=spectra), rows={}, tables={})

    def searched(self, num_bytes: int) -> _Measured:
        """`best`, as a stage of its own."""
        self.stage(f"search: measure {num_bytes} bytes per token", [num_bytes])
        return self.best(num_bytes)

    def use(self, coding: Coding) -> None:
        """Make a coding's caches the held-out source that is called `rd`."""
        translator = assemble(self.job, coding.layers, coding.transforms)
        self.heldout.add_source(RD, translator, range(self.job.num_layers))

    def _decided(self, num_bytes: int) -> ModeTable:
        if num_bytes not in self.tables:
            self.tables[num_bytes] = self.coder.decide(num_bytes)
        return self.tables[num_bytes]

    def _row(self, coding: Coding) -> dict[str, Any]:
        key = (coding.modes, coding.table.num_bytes)
        if key in self.rows:
            self.tell.advance(len(self.heldout.sequences))
        else:
            self.use(coding)
            found = quality.controls(self.heldout, {RD: self.heldout.mixture(RD)}, {RD: coding.num_bytes})
            self.rows[key] = found[RD]
        return self.rows[key]


def fit(job: Job, texts: Texts, work: Path, tell: Progress, models: PairModels, *, full_frontier: bool) -> Fitted:
    """Fit, choose and measure.

    Args:
        job: with the source layers of its groups, where they are not simply their own (`calibration.choose_sources`).
        full_frontier: trace all rates of `FULL_FRONTIER`, for `Fitted.frontier`.
    """
    bench = _open(job, texts, work, tell, models, is_guarded=True)
    points = _points(bench, FULL_FRONTIER if full_frontier else FRONTIER)
    chosen = _chosen(bench)
    coding = chosen.codes.coding
    figures: dict[str, Any] = quality.sample_sizes(bench.heldout, calibration_tokens=bench.num_calibration_tokens) | {
        "controls": _controls(bench, coding),
        "frontier": [point for point in points if point["ratio"] in FRONTIER],
        "limit": chosen.as_json(),
        "modes": _modes(bench, chosen.codes),
        "exact_layers": _exact_layers(bench),
    }
    if not job.same_shape:
        figures["omitted"] = dict.fromkeys((RAW, REROTATED), OTHER_SHAPE)
    transforms = guard.attach(coding.transforms, bench.guards)
    return Fitted(coding.layers, transforms, figures, tuple(points) if full_frontier else ())


def trace(job: Job, texts: Texts, work: Path, tell: Progress, models: PairModels) -> tuple[dict[str, Any], ...]:
    """The whole frontier and nothing else, for an artifact that is finished."""
    job = choose_sources(job, texts, work, tell, models=models)
    return tuple(_points(_open(job, texts, work, tell, models), FULL_FRONTIER))


def _open(
    job: Job, texts: Texts, work: Path, tell: Progress, models: PairModels, *, is_guarded: bool = False
) -> _Bench:
    empty = group_statistics(job, num_openers=texts.num_openers)
    statistics = calibrate(job, texts, work, tell, into=empty, models=models)
    weights = error_weights(job, texts, tell, models=models, work=work)
    sinks = None if statistics.first_rows is None else statistics.first_rows.means()
    spectra = group_spectra(job, statistics, weights, tell, sinks=sinks)
    guards = guard.fit(job, texts, statistics, tell, models=models) if is_guarded else {}
    heldout = quality.open_heldout(job, texts, tell, models)
    coder = Coder(spectra, job.groups, fixed_codes(job, statistics, weights, heldout.consumer))
    return _Bench(job, texts, models, tell, coder, heldout, statistics.num_tokens, guards)


def _points(bench: _Bench, ratios: Sequence[float]) -> list[dict[str, Any]]:
    """What held-out text says of the best codes at each ratio."""
    sizes = [int(bench.dense_bytes / ratio) for ratio in ratios]
    bench.stage("measure rates on held-out text", sizes)
    points = []
    for ratio, size in zip(ratios, sizes, strict=True):
        found = bench.best(size)
        counts = {mode: found.coding.modes.count(mode) for mode in dict.fromkeys(found.coding.modes)}
        points.append({"ratio": ratio} | found.row | {"modes": counts, "num_silent_groups": found.num_silent_groups})
    return points


def _chosen(bench: _Bench) -> Chosen[_Measured]:
    limit = Limit.of(bench.job.config.method, bench.dense_bytes)
    measure = _f1_measure(bench) if limit.name == "max_relative_f1_loss" else _kl_loss
    return choose(limit, bench.searched, measure, dense_bytes=bench.dense_bytes)


def _kl_loss(found: _Measured) -> Loss:
    kl = float(found.row["kl"])
    return Loss(kl, f"costs {kl:.4g} nats per token on held-out text")


def _f1_measure(bench: _Bench) -> Callable[[_Measured], Loss]:
    """Relative F1 loss on the held-out questions; what `f1_loss_rule` says is compared with the limit."""
    job, asked, rule = bench.job, bench.texts.questions, bench.job.config.method.f1_loss_rule
    bench.tell.stage("the consumer's own answers", len(asked))
    questions = QuestionBench(
        *bench.models.serving(),
        asked,
        seed=job.config.method.seed,
        with_inputs=bool(job.patch_candidates),
        on_answered=bench.tell.advance,
    )

    def measure(tried: _Measured) -> Loss:
        bench.tell.stage(f"search: answer questions over {tried.num_bytes} bytes per token", len(asked))
        found = questions.loss(assemble(job, tried.coding.layers, tried.coding.transforms))
        value, judged = (found.high, "the upper end") if rule == "upper" else (found.mean, "the mean")
        text = (
            f"loses {found.mean:.2%} of F1 on {found.num_questions} held-out questions about {found.num_documents} texts "
            f"(95 % interval {found.low:.2%} to {found.high:.2%}, judged by {judged})"
        )
        return Loss(value, text, {"rule": rule} | found.as_json())

    return measure


def _controls(bench: _Bench, coding: Coding) -> dict[str, dict[str, Any]]:
    heldout, dense = bench.heldout, bench.dense_bytes
    finest = int(dense / FINEST)
    unlimited = bench.unlimited()
    unlimited.stage("measure the translation on held-out text", [finest])
    translation = unlimited.best(finest).row
    bench.use(coding)
    reused = (RAW, REROTATED) if bench.job.same_shape else ()
    mixtures = {name: heldout.mixture(name) for name in (ORACLE, *reused, RD)}
    sizes: dict[str, int | None] = {ORACLE: None, RAW: dense, REROTATED: dense, RD: coding.num_bytes}
    quality.add_mismatched(heldout, mixtures, sizes, of=RD)
    bench.tell.stage("measure on held-out text", len(mixtures) * len(heldout.sequences))
    return quality.controls(heldout, mixtures, sizes) | {TRANSLATION: translation}


def _modes(bench: _Bench, chosen: _Measured) -> dict[str, Any]:
    """The chosen table, what was predicted of all modes, and what was measured where several tables were tried."""
    prefix_tokens, table = bench.job.config.heldout.prefix_tokens, chosen.coding.table
    return {
        "prefix_tokens": prefix_tokens,
        "nats_per_byte": 0.5 * prefix_tokens * 8 * table.slope,
        "groups": predictions(bench.coder, table, prefix_tokens=prefix_tokens),
        "measured": [{"modes": list(modes), "kl": kl} for modes, kl in chosen.rivals],
    }


def _exact_layers(bench: _Bench) -> list[dict[str, Any]]:
    """What the chosen codes would gain if the consumer computed its first layers itself; nothing sends such codes."""
    numbers = [number for number in EXACT_LAYERS if number < bench.job.num_layers]
    bench.tell.stage("measure exact first layers", (1 + len(numbers)) * len(bench.heldout.sequences))
    return quality.exact_layers(bench.heldout, RD, numbers)


def _is_mixed(table: ModeTable) -> bool:
    return any(mode != "transform" for mode in table.modes)

"""The whole distillation on a tiny random pair: artifact, choices, determinism, resuming, refusals; never quality."""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from tiny_models import save_perturbed_copy, save_tiny_model

from scd_trt import translator as translators
from scd_trt.codec import Decoder, Encoder, LayerInput
from scd_trt.config import CorpusConfig, HeldoutConfig, MethodConfig, ModelConfig, PairConfig
from scd_trt.corpus import CorpusError
from scd_trt.distill import calibration, pipeline
from scd_trt.distill.calibration import read_texts
from scd_trt.distill.fit import FitError
from scd_trt.distill.layer_selection import LayerSelectionError
from scd_trt.distill.plan import PlanError, prepare
from scd_trt.distill.sensitivity import ORACLE, RAW, Heldout
from scd_trt.distill.statistics import StatisticsError
from scd_trt.model_spec import PairMismatchError
from scd_trt.models import cache_layers, load_model, project_kv, trace
from scd_trt.translator import PatchLayer, ReuseLayer

WORDS = ["the", "river", "carries", "old", "stories", "past", "quiet", "houses", "where", "nobody", "remembers", "them"]
METHOD = MethodConfig(r_k=24, r_v=24, r_h=48, num_candidates=3, max_patch_layers=2)


@dataclass
class Recorder:
    """A progress that remembers, and may interrupt."""

    stages: list[str] = field(default_factory=list)
    totals: dict[str, int] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    advances: list[int] = field(default_factory=list)
    interrupt_at: tuple[str, int] | None = None

    def stage(self, name: str, total: int) -> None:
        self.stages.append(name)
        self.totals[name] = total
        self.steps[name] = 0

    def advance(self, num_steps: int = 1) -> None:
        self.advances.append(num_steps)
        self.steps[self.stages[-1]] += num_steps
        if self.interrupt_at == (self.stages[-1], self.steps[self.stages[-1]]):
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    producer = save_tiny_model(root / "a")
    return producer, save_perturbed_copy(producer, root / "b", scale=0.05)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """120 documents of about 400 characters: one character is one token."""
    path = tmp_path_factory.mktemp("text") / "stories.jsonl"
    generator = torch.Generator().manual_seed(0)
    with path.open("w") as file:
        for _ in range(120):
            picks = torch.randint(len(WORDS), (70,), generator=generator).tolist()
            file.write(json.dumps({"text": " ".join(WORDS[pick] for pick in picks)}) + "\n")
    return path


@pytest.fixture
def config(models, text, tmp_path) -> PairConfig:
    return _config(models, text, tmp_path / "artifact")


def _config(models, text: Path, target: Path, **method) -> PairConfig:
    return PairConfig(
        name="tiny",
        producer=ModelConfig(model=str(models[0]), dtype="float32"),
        consumer=ModelConfig(model=str(models[1]), dtype="float32"),
        translator=target,
        method=METHOD.model_copy(update=method),
        calibration=CorpusConfig(source=str(text), num_tokens=1500, sequence_tokens=300),
        heldout=HeldoutConfig(source=str(text), num_sequences=3, prefix_tokens=60, scored_tokens=10),
    )


@pytest.fixture(scope="module")
def distilled(models, text, tmp_path_factory):
    """One artifact for all tests that only look."""
    progress = Recorder()
    config = _config(models, text, tmp_path_factory.mktemp("distilled") / "artifact")
    return config, pipeline.distill(config, progress=progress), progress


def _files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_artifact_is_complete_and_loads(distilled):
    config, translator, _ = distilled
    loaded = translators.load(config.translator_path())
    assert loaded.manifest == translator.manifest
    assert loaded.manifest.config_digest == config.method_digest()
    names = {"efficiency.png", "restore_one.png", "query_error.png", "rank_sweep.png"}
    assert set(_files(config.translator_path())) == names | {"report.md", "translator.json", "translator.safetensors"}
    assert [path.name for path in config.translator_path().parent.iterdir()] == ["artifact"]


def test_progress_ends_where_it_said(distilled):
    _, _, progress = distilled
    assert progress.steps == progress.totals


def test_controls_are_measured_and_in_order(distilled):
    _, translator, _ = distilled
    rows = translator.manifest.quality["controls"]
    assert list(rows)[:4] == ["oracle", "raw", "raw_rerotated", "reuse"]
    # float32 logits of two batch sizes differ in the last digits
    assert rows["oracle"]["kl"] < 1e-6
    assert rows["oracle"]["top1"] == 1.0
    assert rows["raw"]["kl"] == pytest.approx(rows["raw_rerotated"]["kl"], rel=1e-3)  # same rope: rounding only
    assert rows["mismatched"]["kl"] > 2 * rows["scd"]["kl"]
    assert rows["raw"]["bytes_per_token"] == translator.manifest.dense_bytes_per_token
    assert rows["scd"]["bytes_per_token"] == sum(translator.manifest.bytes_per_token)


def test_more_rank_is_better(distilled):
    _, translator, _ = distilled
    sweep = translator.manifest.quality["rank_sweep"]
    assert [point["rank"] for point in sweep] == [8, 16, 24, 32]
    assert sweep[0]["reuse"]["kl"] > sweep[-1]["reuse"]["kl"]


def test_selection_keeps_the_most_efficient_set(distilled):
    _, translator, _ = distilled
    path = translator.manifest.quality["selection"]
    assert [len(step["layers"]) for step in path] == [1, 2]
    best = max(path, key=lambda step: step["efficiency"])
    expected = tuple(sorted(best["layers"])) if best["gain"] > 0 else ()
    assert translator.manifest.patch_layers == expected


def test_report_shows_the_table_and_every_figure(distilled):
    config, translator, _ = distilled
    report = (config.translator_path() / "report.md").read_text()
    assert translator.manifest.fingerprint in report
    for row in translator.manifest.quality["controls"]:
        assert f"| {row} |" in report
    for file in config.translator_path().glob("*.png"):
        assert f"({file.name})" in report


def test_two_runs_give_the_same_bytes(distilled, config):
    pipeline.distill(config)
    assert _files(config.translator_path()) == _files(distilled[0].translator_path())


def test_finished_run_is_returned_as_it_is(distilled):
    config, translator, _ = distilled
    before = {path: path.stat().st_mtime_ns for path in config.translator_path().iterdir()}
    progress = Recorder()
    again = pipeline.distill(config, progress=progress)
    assert again.manifest == translator.manifest
    assert progress.stages == ["open the pair", "read the texts"]
    assert {path: path.stat().st_mtime_ns for path in config.translator_path().iterdir()} == before


def test_missing_report_is_drawn_again_from_the_manifest(distilled, config):
    pipeline.distill(config)
    (config.translator_path() / "report.md").unlink()
    (config.translator_path() / "efficiency.png").unlink()
    pipeline.distill(config)
    assert _files(config.translator_path()) == _files(distilled[0].translator_path())


def test_interrupted_run_continues_and_gives_the_same_bytes(distilled, config, monkeypatch):
    monkeypatch.setattr(calibration, "SAVE_EVERY_SEQUENCES", 2)
    with pytest.raises(KeyboardInterrupt):
        pipeline.distill(config, progress=Recorder(interrupt_at=("calibrate", 3)))
    work = config.translator_path().parent / ".artifact.partial"
    assert len(list(work.iterdir())) == 1
    assert not config.translator_path().exists()
    progress = Recorder()
    pipeline.distill(config, progress=progress)
    opened, read, saved, *rest = progress.advances
    assert (opened, read, saved) == (1, 1, 2)
    assert rest[:3] == [1, 1, 1]
    assert _files(config.translator_path()) == _files(distilled[0].translator_path())
    assert not work.exists()


def test_fresh_run_forgets_partial_work(config, monkeypatch):
    monkeypatch.setattr(calibration, "SAVE_EVERY_SEQUENCES", 1)
    with pytest.raises(KeyboardInterrupt):
        pipeline.distill(config, progress=Recorder(interrupt_at=("calibrate", 2)))
    (partial,) = (config.translator_path().parent / ".artifact.partial").iterdir()
    partial.write_bytes(b"damaged")
    with pytest.raises(StatisticsError, match="delete it"):
        pipeline.distill(config)
    progress = Recorder(interrupt_at=("calibrate", 1))
    with pytest.raises(KeyboardInterrupt):
        pipeline.distill(config, progress=progress, resume=False)


def test_damaged_artifact_is_made_again(distilled, config):
    pipeline.distill(config)
    path = config.translator_path() / translators.TENSORS_FILE
    path.write_bytes(path.read_bytes()[:-1])
    pipeline.distill(config)
    assert _files(config.translator_path()) == _files(distilled[0].translator_path())


def test_configured_layers_are_taken_as_they_are(models, text, tmp_path):
    translator = pipeline.distill(_config(models, text, tmp_path / "t", patch_layers=(2, 0), r_k=(4, 5, 6)))
    assert translator.manifest.patch_layers == (0, 2)
    assert translator.manifest.quality["restore_one"] == []
    assert [step["layers"] for step in translator.manifest.quality["selection"]] == [[0], [0, 2]]
    middle = translator.layers[1]
    assert isinstance(middle, ReuseLayer)
    assert middle.encode_k.weight.shape[1] == 5
    assert not (tmp_path / "t" / "restore_one.png").exists()


def test_no_patch_layers(models, text, tmp_path):
    translator = pipeline.distill(_config(models, text, tmp_path / "t", max_patch_layers=0))
    assert translator.manifest.patch_layers == ()
    assert translator.manifest.quality["controls"]["scd"] == translator.manifest.quality["controls"]["reuse"]


def test_trained_aligner_is_kept_only_if_it_is_better(models, text, tmp_path):
    config = _config(models, text, tmp_path / "t", aligner="mlp", patch_layers=(1,), mlp_hidden=32, mlp_steps=5)
    translator = pipeline.distill(config)
    by_aligner = translator.manifest.quality["aligner_kl"]
    assert by_aligner["affine"] < by_aligner["mlp"]  # five steps teach nothing
    layer = translator.layers[1]
    assert isinstance(layer, PatchLayer)
    assert layer.hidden is None
    assert "aligner: affine is kept" in (tmp_path / "t" / "report.md").read_text()


def test_exact_needs_no_calibration_and_measures_what_differs(models, text, tmp_path):
    config = _config(models, text, tmp_path / "t", policy="exact")
    config = config.model_copy(update={"calibration": CorpusConfig(source="/nowhere")})
    translator = pipeline.distill(config)
    rows = translator.manifest.quality["controls"]
    assert list(rows) == ["oracle", "raw", "raw_rerotated", "exact"]
    assert rows["exact"]["kl"] == rows["raw"]["kl"] > 0
    assert sum(translator.manifest.bytes_per_token) == translator.manifest.dense_bytes_per_token


def test_exact_between_equal_models_reads_no_text(models, tmp_path):
    config = _config((models[0], models[0]), Path("/nowhere"), tmp_path / "t", policy="exact")
    translator = pipeline.distill(config)
    assert "controls" not in translator.manifest.quality
    assert "nothing was measured" in (tmp_path / "t" / "report.md").read_text()


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen2"])
def test_patch_at_full_rank_of_equal_models_is_the_models_own_cache(family, text, tmp_path):
    model = save_tiny_model(tmp_path / "m", family)
    config = _config((model, model), text, tmp_path / "t", patch_layers=(0, 1, 2), r_h=64, ridge=1e-9)
    config = config.model_copy(update={"method": config.method.model_copy(update={"code_dtype": "float32"})})
    translator = pipeline.distill(config)
    loaded = load_model(model)
    positions = torch.arange(40)
    # characters that the calibration text lacks lie outside what was fitted
    traced = trace(loaded, read_texts(prepare(config)).heldout[0][:40])
    own = cache_layers(loaded, traced)
    for layer, (k, v) in enumerate(own):
        codes = Encoder(translator).encode(layer, [LayerInput(k, v, traced.x_TM[layer])], positions)
        ((k_got, v_got),) = Decoder(translator).decode(layer, codes, positions)
        # float32 through three maps, one of them the inverse of a covariance of condition 1e6
        torch.testing.assert_close(k_got, k, rtol=0, atol=2e-2)
        torch.testing.assert_close(v_got, v, rtol=0, atol=2e-2)
        assert project_kv(loaded, layer, traced.x_TM[layer])[1].shape == (40, 32)


def test_mixtures_take_each_layer_from_its_source(models):
    producer, consumer = load_model(models[0]), load_model(models[1])
    scored = []
    heldout = Heldout(consumer, on_scored=scored.append)
    heldout.add_sequence(producer, list(range(10, 60)), prefix_tokens=40)
    partly = heldout.mixture(RAW, [0, 2], ORACLE)
    assert partly == (ORACLE, RAW, ORACLE)
    together = heldout.kl([heldout.mixture(ORACLE), heldout.mixture(RAW), partly])
    alone = [heldout.kl([mixture])[0] for mixture in (heldout.mixture(ORACLE), heldout.mixture(RAW), partly)]
    # float32 logits of different batch sizes
    assert together == pytest.approx(alone, rel=1e-3, abs=1e-6)
    assert together[0] < 1e-6 < together[2] < together[1]
    assert sum(scored) == 6
    reported = heldout.compare(heldout.mixture(RAW))
    assert reported[0].kl == pytest.approx(together[1], rel=1e-3)
    of_raw, of_partly = heldout.query_errors([heldout.mixture(RAW), partly])
    # layer 0's queries read no cache; layer 1's read layer 0's, which is the oracle's in the second mixture
    assert of_raw[0] == of_partly[0] == of_partly[1] == 0.0
    assert of_raw[1] > 0
    assert of_raw[2] > of_partly[2] > 0


def test_plan_says_what_would_be_done(config):
    found = pipeline.plan(config)
    assert found.calibration_tokens == 1500
    assert found.forward_tokens == 1500 + 3 * 70
    assert found.reuse_bytes_per_token == 3 * 48 * 2
    assert found.dense_bytes_per_token == 3 * 2 * 32 * 4
    # 3 layers of keys and values of width 64, and of inputs of width 128, in float64
    assert found.statistics_bytes == 8 * 3 * (2 * 64**2 + 128**2)
    assert found.as_json()["translator"] == str(config.translator_path())
    assert not config.translator_path().exists()


@pytest.mark.parametrize(
    ("method", "error", "message"),
    [
        ({"r_k": 33}, FitError, r"method\.r_k: layer 0 has rank 33; at most 32"),
        ({"r_h": (8, 8, 65)}, FitError, r"method\.r_h: layer 2 has rank 65; at most 64"),
        ({"r_v": (8, 8)}, FitError, r"method\.r_v has 2 values for 3 layers"),
        ({"patch_layers": (3,)}, LayerSelectionError, r"layer 3 of a model with layers 0\.\.2"),
    ],
)
def test_settings_that_do_not_suit_the_model_are_refused(models, text, tmp_path, method, error, message):
    with pytest.raises(error, match=message):
        pipeline.distill(_config(models, text, tmp_path / "t", **method))


def test_texts_that_are_too_small_or_too_long_are_refused(config):
    long = config.model_copy(update={"heldout": config.heldout.model_copy(update={"prefix_tokens": 1020})})
    with pytest.raises(PlanError, match=r"heldout\.prefix_tokens .* is 1030, but the pair's context holds 1024"):
        pipeline.distill(long)
    greedy = config.model_copy(update={"calibration": config.calibration.model_copy(update={"num_tokens": 10**6})})
    with pytest.raises(CorpusError, match="ask for fewer tokens"):
        pipeline.distill(greedy)


def test_models_that_are_no_pair_are_refused(models, text, tmp_path):
    other = save_tiny_model(tmp_path / "other", num_hidden_layers=2)
    with pytest.raises(PairMismatchError, match="num_layers"):
        pipeline.distill(_config((models[0], other), text, tmp_path / "t"))


@pytest.mark.slow
def test_peak_memory_does_not_grow_with_the_text():
    script = Path(__file__).parents[1] / "benchmarks" / "distill_memory.py"
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr

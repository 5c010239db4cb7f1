"""Pairs of different size: two layers of two kv heads feed three layers of one wide head, from the fit to the served text."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_pairs import TinyPair, complete, served, write_pair

from scd_trt import translator as translators
from scd_trt.codec import Decoder, Encoder, LayerInput
from scd_trt.config import ControlConfig, MethodConfig, TransportConfig
from scd_trt.distill import pipeline
from scd_trt.distill.plan import Job, prepare
from scd_trt.distill.sources import MAX_PROBED_TOKENS
from scd_trt.evaluate import report as evaluation_report
from scd_trt.evaluate.plan import EvaluationPlan, Row
from scd_trt.evaluate.runner import evaluate
from scd_trt.kv_cache import num_sent_blocks
from scd_trt.model_spec import PairMismatchError
from scd_trt.models import LoadedModel, cache_layers, forward_with_cache, load_model, trace
from scd_trt.serving.connector import ScdConnectorScheduler, ScdConnectorWorker
from scd_trt.serving.connector_runtime import ConnectorRuntime, Role
from scd_trt.serving.cpu_engine import CpuEngine, SamplingParams
from scd_trt.serving.prefill_role import groups_ready_at
from scd_trt.transfer.control import ControlClient
from scd_trt.transfer.wire import new_transfer_id
from scd_trt.translator import Translator, TranslatorError

PRODUCER = {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16}
CONSUMER = {"num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 32, "hidden_size": 96}
BYTES_PER_TOKEN = 96
"""An eighth of the consumer's cache of 3 * 2 * 32 floats."""

NUM_ANSWER_TOKENS = 16

pytestmark = pytest.mark.timeout(240)


def make_pair(root: Path, **method: Any) -> TinyPair:
    # prompts of random letters are nothing like the calibration text
    given = {"group_layers": 2, "bytes_per_token": BYTES_PER_TOKEN, "fisher_tokens": 64, "guard": "off"} | method
    return write_pair(root, policy="rd", shapes=(PRODUCER, CONSUMER), method=given)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def translator(pair: TinyPair) -> Translator:
    return pipeline.distill(pair.config)


@pytest.fixture(scope="module")
def models(pair: TinyPair) -> tuple[LoadedModel, LoadedModel]:
    return load_model(pair.producer), load_model(pair.consumer)


def test_groups_name_their_sources_and_have_both_models_widths(translator: Translator) -> None:
    manifest = translator.manifest
    assert (manifest.producer.num_layers, manifest.consumer.num_layers) == (2, 3)
    assert manifest.groups == ((0, 2), (2, 3))
    # as many sources as are as wide as the group: two layers of 32 for two of 32, one for one
    assert [len(sources) for sources in manifest.sources] == [2, 1]
    assert manifest.source_layers(0) == (0, 1)
    for transform, width_in, width_out in zip(translator.transforms, (64, 32), (64, 32), strict=True):
        assert transform is not None
        for rows in (transform.keys, transform.values):
            assert (len(rows.mean_I), len(rows.bias_O)) == (width_in, width_out)
    assert sum(manifest.bytes_per_token) <= BYTES_PER_TOKEN


def test_the_artifact_loads_as_it_was_written(pair: TinyPair, translator: Translator) -> None:
    loaded = translators.load(pair.config.translator_path())
    assert loaded.manifest == translator.manifest
    assert pipeline.distill(pair.config).manifest.fingerprint == translator.manifest.fingerprint


def test_controls_that_cannot_be_are_left_out_with_the_reason(pair: TinyPair, translator: Translator) -> None:
    quality = translator.manifest.quality
    assert set(quality["controls"]) == {"oracle", "rd", "mismatched", "translation"}
    assert set(quality["omitted"]) == {"raw", "raw_rerotated"}
    assert {group["mode"] for group in quality["modes"]["groups"]} == {"transform"}
    report = (pair.config.translator_path() / "report.md").read_text()
    assert "raw is left out: the models' caches have different shapes" in report
    assert "layers are computed from the producer's: 0..1 from 0, 1; 2..2 from" in report


def test_evaluate_measures_what_can_be_and_says_what_cannot(
    pair: TinyPair, translator: Translator, tmp_path: Path
) -> None:
    results = evaluate(pair.config, EvaluationPlan((Row("text", 3, 64),)), tmp_path, progress=pipeline.SilentProgress())
    (table,) = results.tables.values()
    assert list(table) == ["oracle", "rd", "mismatched", "no_cache"]
    assert table["oracle"]["kl"]["mean"] == 0 < table["rd"]["kl"]["mean"]
    assert "different shapes" in results.omitted
    assert not (tmp_path / "calibration").exists()
    page = evaluation_report.write(results, tmp_path, name="tiny").read_text()
    assert "Controls that reuse the producer's cache are left out: the models' caches have different shapes" in page


def test_an_interrupted_choice_of_sources_is_not_made_again(tmp_path: Path) -> None:
    class Interrupting(pipeline.SilentProgress):
        stages: list[str]

        def __init__(self) -> None:
            self.stages = []

        def stage(self, name: str, total: int) -> None:
            self.stages.append(name)
            if name == "calibrate" and self.stages.count("choose source layers"):
                raise KeyboardInterrupt

    pair, progress = make_pair(tmp_path), Interrupting()
    with pytest.raises(KeyboardInterrupt):
        pipeline.distill(pair.config, progress=progress)
    again = Interrupting()
    pipeline.distill(pair.config, progress=again)
    assert "calibrate" in again.stages
    assert "choose source layers" not in again.stages


@pytest.mark.parametrize("policy", ["paper", "exact"])
def test_other_policies_cannot_translate_between_sizes(pair: TinyPair, policy: Any) -> None:
    config = pair.config.model_copy(update={"method": MethodConfig(policy=policy)})
    with pytest.raises(PairMismatchError, match=r"num_layers: producer 2, consumer 3.*only method.policy rd can"):
        pipeline.distill(config)


def inputs_of(producer: LoadedModel, ids: list[int], num_tokens: int) -> list[LayerInput]:
    """What the producer's pool holds of the first tokens of a prompt."""
    layers = cache_layers(producer, trace(producer, ids, capture={"kv"}))
    return [LayerInput(k[:num_tokens], v[:num_tokens]) for k, v in layers]


def decoded(translator: Translator, inputs: list[LayerInput]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    encoder, decoder = Encoder(translator), Decoder(translator)
    positions = torch.arange(len(inputs[0].k_THD))
    layers = []
    for group in range(len(translator.manifest.groups)):
        given = [inputs[layer] for layer in translator.manifest.source_layers(group)]
        layers += decoder.decode(group, encoder.encode(group, given, positions), positions)
    return layers


def test_decoded_caches_have_the_consumers_shape(
    translator: Translator, models: tuple[LoadedModel, LoadedModel]
) -> None:
    layers = decoded(translator, inputs_of(models[0], list(range(4, 30)), 26))
    assert [(tuple(k.shape), tuple(v.shape)) for k, v in layers] == [((26, 1, 32), (26, 1, 32))] * 3


def test_a_missing_source_is_an_error(translator: Translator, models: tuple[LoadedModel, LoadedModel]) -> None:
    inputs = inputs_of(models[0], list(range(4, 12)), 8)
    with pytest.raises(ValueError, match="group 0 is computed from 2 layers, got 1"):
        Encoder(translator).encode(0, inputs[:1], torch.arange(8))


def test_sources_matter_in_their_order(translator: Translator, models: tuple[LoadedModel, LoadedModel]) -> None:
    inputs, positions = inputs_of(models[0], list(range(4, 30)), 26), torch.arange(26)
    encoder = Encoder(translator)
    assert not torch.equal(encoder.encode(0, inputs, positions), encoder.encode(0, inputs[::-1], positions))


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (((0, 1),), "sources of 1 groups for 2"),
        (((0, 1), (2,)), r"group 1 is computed from layers \(2,\); expected ascending ones below 2"),
        (((1, 0), (1,)), r"group 0 is computed from layers \(1, 0\)"),
        (((0, 1), ()), r"group 1 is computed from layers \(\)"),
        ((), r"group 1 is computed from layers \(2,\)"),
    ],
)
def test_wrong_sources_are_refused(translator: Translator, sources: Any, message: str) -> None:
    with pytest.raises(TranslatorError, match=message):
        translators.build(manifest_fields(translator) | {"sources": sources}, translator.layers, translator.transforms)


def test_rows_cannot_be_sent_as_they_are_between_shapes(translator: Translator) -> None:
    fields = manifest_fields(translator) | {"sources": ((0, 1), (1,))}
    layers = (*translator.layers[:2], translators.RawLayer())
    with pytest.raises(TranslatorError, match="group 1 is not computed from its own layers, so it must be transformed"):
        translators.build(fields, layers, (translator.transforms[0], None))


def manifest_fields(translator: Translator) -> dict[str, Any]:
    derived = {"format_version", "layers", "transforms", "tensors_digest"}
    return {name: value for name, value in dict(translator.manifest).items() if name not in derived}


def test_groups_leave_in_order_and_not_before_their_sources(translator: Translator) -> None:
    def ready(*sources: tuple[int, ...]) -> dict[int, list[int]]:
        return groups_ready_at(translator.manifest.model_copy(update={"sources": sources}))

    assert ready((0, 1), (1,)) == {1: [0, 1]}
    assert ready((0,), (0, 1)) == {0: [0], 1: [1]}
    # the second could be encoded first, but the first leaves first
    assert ready((0, 1), (0,)) == {1: [0, 1]}
    assert groups_ready_at(translator.manifest.model_copy(update={"sources": ()})) == {1: [0], 2: [1]}


def test_more_sources_than_the_group_has_layers(tmp_path: Path) -> None:
    """Neighbours as features, for models of one shape."""
    given = {"group_layers": 1, "bytes_per_token": BYTES_PER_TOKEN, "fisher_tokens": 64, "source_layers": 2}
    pair = write_pair(tmp_path, policy="rd", method=given)
    manifest = pipeline.distill(pair.config).manifest
    assert [len(sources) for sources in manifest.sources] == [2, 2, 2]
    # a perturbed copy: a layer's own counterpart is among its sources
    assert all(group in sources for group, sources in enumerate(manifest.sources))
    assert {"raw", "raw_rerotated"} <= set(manifest.quality["controls"])
    assert "omitted" not in manifest.quality
    assert all(set(group["predicted"]) == {"transform"} for group in manifest.quality["modes"]["groups"])


def test_a_dry_run_counts_the_choice_of_sources(pair: TinyPair) -> None:
    config = pair.config
    heldout_tokens = 2 * (64 + 16)
    assert pipeline.plan(config).forward_tokens == 2 * 512 + heldout_tokens
    long = config.calibration.model_copy(update={"num_tokens": 10 * MAX_PROBED_TOKENS})
    expected = 11 * MAX_PROBED_TOKENS + heldout_tokens
    assert pipeline.plan(config.model_copy(update={"calibration": long})).forward_tokens == expected


def test_a_group_never_has_more_sources_than_there_are(pair: TinyPair) -> None:
    def job(**method: Any) -> Job:
        changed = pair.config.method.model_copy(update=method)
        return prepare(pair.config.model_copy(update={"method": changed}))

    assert job(source_layers=9).num_sources(0) == 2
    assert job(source_layers=1).num_sources(0) == 1
    assert job(group_layers=3).num_sources(0) == 2


def offline_text(translator: Translator, models: tuple[LoadedModel, LoadedModel], ids: list[int]) -> str:
    """Greedy continuation over the decoded cache of all blocks that travel."""
    producer, consumer = models
    num_prefix = num_sent_blocks(len(ids), 8) * 8
    layers = decoded(translator, inputs_of(producer, ids, num_prefix))
    said: list[int] = []
    for _ in range(NUM_ANSWER_TOKENS):
        tail = ids[num_prefix:] + said
        logits = forward_with_cache(consumer, tail, layers, start_position=num_prefix, num_logits=1)
        said.append(int(logits[-1].argmax()))
        if said[-1] in consumer.eos_token_ids:
            break
    text: str = consumer.tokenizer.decode(said, skip_special_tokens=True)
    return text


def prompt_of(models: tuple[LoadedModel, LoadedModel], seed: int) -> tuple[str, list[int]]:
    letters = random.Random(seed)
    prompt = "".join(letters.choice("abcdefghijklmnop qrstuvwxyz.") for _ in range(60 + 11 * seed))
    ids: list[int] = models[1].tokenizer(prompt)["input_ids"]
    return prompt, ids


def own_text(consumer: LoadedModel, ids: list[int]) -> str:
    """What the consumer says after its own prefill."""
    batch = torch.tensor([ids])
    said = consumer.model.generate(
        batch, attention_mask=torch.ones_like(batch), max_new_tokens=NUM_ANSWER_TOKENS, do_sample=False, pad_token_id=0
    )
    text: str = consumer.tokenizer.decode(said[0, len(ids) :], skip_special_tokens=True)
    return text


@contextmanager
def engines(pair: TinyPair, translator: Translator, models: tuple[LoadedModel, LoadedModel]) -> Iterator[list[Any]]:
    """Runtime and engine of both roles in this process."""
    config = pair.config.model_copy(update={"transport": TransportConfig(backend="loopback", arena_bytes=4 << 20)})
    roles: tuple[Role, ...] = ("prefill", "decode")
    with ExitStack() as stack:
        found = []
        for role, loaded in zip(roles, models, strict=True):
            runtime = ConnectorRuntime.open_with(translator, config, role, listen="127.0.0.1:0")
            stack.callback(runtime.close)
            connector = ScdConnectorScheduler(runtime), ScdConnectorWorker(runtime)
            engine = CpuEngine(loaded, config.engine, connector=connector)
            stack.callback(engine.close)
            found.append((runtime, engine))
        yield found


async def hand_over(prefill: tuple[ConnectorRuntime, CpuEngine], decode: ConnectorRuntime, ids: list[int]) -> None:
    """What the router does for one prompt, up to the landing."""
    runtime, engine = prefill
    client = ControlClient(decode.require_consumer().address, ControlConfig())
    transfer_id = new_transfer_id()
    keys = decode.sent_block_keys(ids, "")
    await client.expect(transfer_id, keys, producer=runtime.require_producer().address)
    await asyncio.to_thread(lambda: list(engine.submit(ids, SamplingParams(max_tokens=1, temperature=0.0))))
    await client.wait(transfer_id, timeout_s=20.0)
    assert (await client.report(transfer_id)).num_landed == len(keys)
    await client.close()


@torch.no_grad()
def test_served_text_is_that_of_the_decoded_cache(
    pair: TinyPair, translator: Translator, models: tuple[LoadedModel, LoadedModel]
) -> None:
    texts, own_texts = [], []
    with engines(pair, translator, models) as (prefill, (decode, engine)):
        for seed in range(4):
            _, ids = prompt_of(models, seed)
            asyncio.run(hand_over(prefill, decode, ids))
            generation = engine.submit(ids, SamplingParams(max_tokens=NUM_ANSWER_TOKENS, temperature=0.0))
            said = [event.token_id for event in generation]
            assert generation.cached_tokens == num_sent_blocks(len(ids), 8) * 8
            texts.append(models[1].tokenizer.decode(said, skip_special_tokens=True))
            assert texts[-1] == offline_text(translator, models, ids)
            own_texts.append(own_text(models[1], ids))
    # models that share nothing: had the consumer prefilled by itself, it would have said something else
    assert texts != own_texts


@pytest.mark.slow
@torch.no_grad()
def test_three_processes_serve_that_text_too(
    pair: TinyPair, translator: Translator, models: tuple[LoadedModel, LoadedModel]
) -> None:
    with served(pair) as children:
        for seed in range(2):
            prompt, ids = prompt_of(models, seed)
            answer = complete(children["router"].url, prompt, model=pair.config.name, max_tokens=NUM_ANSWER_TOKENS)
            assert answer["choices"][0]["text"] == offline_text(translator, models, ids)
            scd = answer["usage"]["scd"]
            assert (scd["fallback"], scd["matched_tokens"]) == (None, num_sent_blocks(len(ids), 8) * 8)

"""The guard: quiet on text like the calibration text, loud beyond it; what it refuses is never published nor used."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from serving_pairs import TinyPair, complete, served, write_pair
from test_connector import (
    B,
    Server,
    StartServer,
    generate,
    greedy,
    hand_over,
    model_a,  # noqa: F401  (a fixture)
    model_b,  # noqa: F401  (a fixture)
    random_prompt,
    rd_translator,
    run,
    start,  # noqa: F401  (a fixture)
)
from test_session import LAYOUT, codes_of, keys_of, pair, until  # noqa: F401  (pair is a fixture)
from tiny_translators import group_translator, random_group

from scd_trt import translator as translators
from scd_trt.codec import Decoder, Encoder, LayerInput, num_blocks_within
from scd_trt.config import PairConfig
from scd_trt.distill import guard
from scd_trt.distill.calibration import PairModels, SilentProgress, Texts, read_texts
from scd_trt.distill.guard import Producer, joint_limits, predictive_limit, student_quantile, worst_block
from scd_trt.distill.pipeline import distill
from scd_trt.distill.plan import prepare
from scd_trt.distill.statistics import Moments
from scd_trt.models import LoadedModel, cache_layers, forward_with_cache, trace
from scd_trt.transfer.states import Landing, Sending
from scd_trt.translator import MATRIX_DTYPE, RowGuard, Translator, TranslatorError

CUT = {"guard": "cut"}


# ---- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("probability", "degrees", "exact"),
    [(0.99, 6, 3.1427), (0.999, 6, 5.2076), (0.99, 15, 2.6025), (0.999, 15, 3.7328), (0.999, 31, 3.3749)],
)
def test_student_quantiles_are_those_of_the_tables(probability: float, degrees: int, exact: float) -> None:
    assert student_quantile(probability, degrees) == pytest.approx(exact, rel=0.02)  # what the docstring promises


@pytest.mark.parametrize("num_sequences", [6, 16])
def test_new_sequences_exceed_a_limit_at_the_stated_rate(num_sequences: int) -> None:
    generator = torch.Generator().manual_seed(0)

    def worst_blocks(number: int) -> torch.Tensor:
        return (0.3 + 0.2 * torch.randn(number, generator=generator)).exp()

    limits = [predictive_limit(worst_blocks(num_sequences).tolist(), rate=0.02) for _ in range(2000)]
    exceeded = sum(int((worst_blocks(20) > limit).sum()) for limit in limits)
    # 800 of 40,000, and those over one limit come together: known to a tenth; the quantile itself to 2 %
    assert exceeded / 40_000 == pytest.approx(0.02, rel=0.15)


def test_several_groups_and_kinds_share_one_rate() -> None:
    generator = torch.Generator().manual_seed(0)

    def sequence() -> dict[guard.Key, torch.Tensor]:
        return {
            (group, kind): (0.1 * torch.randn(guard.BLOCK_TOKENS, generator=generator)).exp()
            * (0.2 * torch.randn(1, generator=generator)).exp()
            for group in range(6)
            for kind in guard.KINDS
        }

    limits = joint_limits([sequence() for _ in range(60)], rate=0.05)
    new = [sequence() for _ in range(1000)]
    num_beyond = sum(any(worst_block(found[key]) > limits[key] for key in limits) for found in new)
    # the largest of twelve is not quite log-normal; each by itself at 5 % would give 46 %
    assert 0.02 < num_beyond / 1000 < 0.08


def test_the_worst_block_is_a_whole_one() -> None:
    novelty = torch.cat([torch.full((32,), 1.0), torch.full((32,), 3.0), torch.full((20,), 9.0)])
    assert worst_block(novelty) == 3.0
    assert worst_block(novelty[:10]) == 1.0


def test_moments_without_some_rows_are_those_of_the_others() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(90, 7, generator=generator, dtype=torch.float64) * 3 + 40
    whole, rest = Moments(7, 0), Moments(7, 0)
    whole.update(rows, rows[:, :0])
    rest.update(rows[25:], rows[25:, :0])
    found, expected = Producer.of(whole).without(rows[:25]), Producer.of(rest)
    assert found.count == expected.count
    torch.testing.assert_close(found.mean_I, expected.mean_I, rtol=1e-12, atol=0)
    # products of centred rows: what is lost to the mean is 40^2 of 3^2, times the machine's 1e-16
    torch.testing.assert_close(found.cross_II, expected.cross_II, rtol=1e-11, atol=1e-9)


def test_the_sketch_is_the_mahalanobis_distance() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4000, 6, generator=generator, dtype=torch.float64) @ torch.randn(
        6, 6, generator=generator, dtype=torch.float64
    )
    moments = Moments(6, 0)
    moments.update(rows, rows[:, :0])
    producer = Producer.of(moments)
    gaussian_IQ = torch.randn(6, 20_000, generator=generator, dtype=torch.float64)
    sketch = ((rows[:50] - producer.mean_I) @ producer.directions(gaussian_IQ)).square().sum(1)
    covariance = producer.cross_II / producer.count
    shifted = covariance + torch.eye(6) * guard.RIDGE * covariance.diagonal().mean()
    centred = rows[:50] - producer.mean_I
    exact = (centred @ shifted.inverse() * centred).sum(1) / 6
    # a mean of 20,000 squares is known to sqrt(2 / 20,000) = 1 %; fifty of them to 3 %
    torch.testing.assert_close(sketch, exact, rtol=0.04, atol=0)


# ---- a fitted pair ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """Policy `rd`; enough sequences for limits that mean something."""
    return write_pair(
        tmp_path_factory.mktemp("guarded"),
        policy="rd",
        method={"group_layers": 1, "guard_rate": 0.01, "bytes_per_token": 64},
        calibration={"num_tokens": 1536},
        engine={"tokens_per_block": 32, "max_num_tokens": 64},
    )


@pytest.fixture(scope="module")
def translator(tiny: TinyPair) -> Translator:
    return distill(tiny.config)


@pytest.fixture(scope="module")
def producer(tiny: TinyPair) -> LoadedModel:
    return PairModels(prepare(tiny.config)).producer()


def novelty(translator: Translator, producer: LoadedModel, ids: list[int]) -> torch.Tensor:
    """Of every block of 32 tokens, the largest of all groups."""
    layers = cache_layers(producer, trace(producer, torch.tensor(ids), capture={"kv"}))
    encoder, positions = Encoder(translator), torch.arange(len(ids))
    found = []
    for group in range(len(translator.manifest.groups)):
        inputs = [LayerInput(*layers[layer]) for layer in translator.manifest.source_layers(group)]
        novelty_T = encoder.encode_guarded(group, inputs, positions, seq_len=len(ids)).novelty_T
        found.append(novelty_T.reshape(-1, 32).mean(1))
    return torch.stack(found).amax(0)


def shifted_ids(texts: Texts, producer: LoadedModel) -> list[int]:
    """Characters that the calibration text does not use."""
    used = {token for ids in (*texts.calibration, *texts.heldout) for token in ids}
    unused = [token for token in range(4, len(producer.tokenizer)) if token not in used]
    return random.Random(0).choices(unused, k=128)


def test_quiet_on_heldout_text_and_loud_beyond_it(
    tiny: TinyPair, translator: Translator, producer: LoadedModel
) -> None:
    texts = read_texts(prepare(tiny.config))
    heldout = torch.cat([novelty(translator, producer, list(ids[:64])) for ids in texts.heldout])
    assert bool((heldout <= 1).all())
    beyond = novelty(translator, producer, shifted_ids(texts, producer))
    assert bool((beyond > 1).all())


def test_codes_are_the_same_with_and_without_novelty(translator: Translator, producer: LoadedModel) -> None:
    ids = torch.arange(4, 44)
    layers = cache_layers(producer, trace(producer, ids, capture={"kv"}))
    encoder = Encoder(translator)
    for group in range(len(translator.manifest.groups)):
        inputs = [LayerInput(*layers[layer]) for layer in translator.manifest.source_layers(group)]
        positions = torch.arange(len(ids))
        encoded = encoder.encode_guarded(group, inputs, positions, seq_len=len(ids))
        assert torch.equal(encoded.codes_TC, encoder.encode(group, inputs, positions, seq_len=len(ids)))
        assert encoded.novelty_T.shape == (len(ids),)


def test_novelty_is_the_larger_kind_relative_to_its_limit_and_sinks_are_typical() -> None:
    directions = torch.Generator().manual_seed(5)
    transform = random_group(1)
    found = {}
    for kind, limit in (("keys", 2.0), ("values", 0.5)):
        rows = getattr(transform, kind)
        directions_IQ = torch.randn(len(rows.mean_I), 3, generator=directions).to(MATRIX_DTYPE)
        found[kind] = replace(rows, guard=RowGuard(directions_IQ, limit))
    guarded = group_translator(replace(transform, **found))
    rows_T = torch.randn(6, 2, 8, generator=directions)
    given = LayerInput(rows_T, rows_T + 1)
    encoded = Encoder(guarded, dtype=torch.float32).encode_guarded(0, [given], torch.arange(100, 106))
    strip = Encoder(guarded).producer_rope[0].strip
    expected = []
    for kind, x_TI in (("keys", strip(rows_T, torch.arange(100, 106)).flatten(1)), ("values", given.v_THD.flatten(1))):
        limited: RowGuard = found[kind].guard
        product = (x_TI - found[kind].mean_I) @ limited.directions_IQ.float()
        expected.append(product.square().sum(1) / limited.limit)
    torch.testing.assert_close(encoded.novelty_T, torch.stack(expected).amax(0), rtol=1e-5, atol=0)  # float32 products
    first = Encoder(guarded).encode_guarded(0, [given], torch.arange(6)).novelty_T
    assert float(first[0]) == 2.0  # one over the smaller limit
    assert not bool((first[1:] == 2.0).any())


@pytest.mark.parametrize(
    ("novelty_of_blocks", "num_within"), [((0.9, 1.0, 1.1, 0.2), 2), ((1.1, 0.1), 0), ((0.5, 0.5), 2), ((), 0)]
)
def test_blocks_before_the_first_that_is_beyond(novelty_of_blocks: tuple[float, ...], num_within: int) -> None:
    # one token far out does not make a block unusual; its mean does
    per_token = [value for mean in novelty_of_blocks for value in (2 * mean, 0.0, mean, mean)]
    assert num_blocks_within(torch.tensor(per_token), 4) == num_within


def test_not_finite_rows_are_beyond_every_limit() -> None:
    assert num_blocks_within(torch.tensor([0.1, 0.1, float("nan"), 0.1]), 2) == 1


# ---- the artifact ----------------------------------------------------------------------------------------------------


def test_the_guard_comes_back_from_disk(translator: Translator, tmp_path: Path) -> None:
    translators.save(translator, tmp_path)
    loaded = translators.load(tmp_path)
    assert loaded.manifest == translator.manifest
    loaded.check_guard()
    for mine, found in zip(translator.transforms, loaded.transforms, strict=True):
        assert mine is not None
        assert found is not None
        for kind in ("keys", "values"):
            before, after = getattr(mine, kind).guard, getattr(found, kind).guard
            assert torch.equal(before.directions_IQ, after.directions_IQ)
            assert before.limit == after.limit > 0


def test_limits_are_part_of_the_fingerprint(translator: Translator) -> None:
    first = translator.transforms[0]
    assert first is not None
    assert first.keys.guard is not None
    eased = replace(first, keys=replace(first.keys, guard=replace(first.keys.guard, limit=99.0)))
    other = rebuilt(translator, (eased, *translator.transforms[1:]))
    assert other.manifest.fingerprint != translator.manifest.fingerprint


def test_an_artifact_without_limits_is_refused_where_the_guard_is_on(
    start: StartServer,  # noqa: F811
    model_a: LoadedModel,  # noqa: F811
) -> None:
    unguarded = rd_translator(model_a, model_a)
    with pytest.raises(TranslatorError, match="run `scd-trt distill`"):
        start("prefill", model_a, unguarded, method=CUT)
    start("decode", model_a, unguarded, method=CUT)  # its producer decides
    start("prefill", model_a, unguarded, method={"guard": "off"})


def test_off_and_cut_share_an_artifact(tiny: TinyPair) -> None:
    off = tiny.config.model_copy(update={"method": tiny.config.method.model_copy(update={"guard": "off"})})
    stricter = tiny.config.model_copy(update={"method": tiny.config.method.model_copy(update={"guard_rate": 0.1})})
    assert off.method_digest() == tiny.config.method_digest() != stricter.method_digest()


def test_one_sequence_cannot_say_what_is_unusual(tiny: TinyPair) -> None:
    job = prepare(tiny.config)
    texts = Texts(calibration=((1, 2, 3),), heldout=(), key="", moments_key="")
    with pytest.raises(guard.GuardError, match="two calibration sequences, found 1"):
        guard.fit(job, texts, None, SilentProgress(), models=PairModels(job))  # type: ignore[arg-type]


# ---- transfers that are cut ------------------------------------------------------------------------------------------


def test_a_cut_push_still_writes_what_it_has_queued() -> None:
    state = Sending(num_groups=2, num_blocks=3)
    state.queue(0, 0, 3)
    state.queue(1, 0, 1)
    state.cut("guarded")
    assert not state.queue(1, 1, 1)
    assert (state.is_failed, state.is_drained) == (False, False)
    state.written()
    state.written()
    assert (state.is_drained, state.end_reason, state.num_written) == (True, "guarded", 2)


def test_a_cut_that_fails_on_the_way_says_why() -> None:
    state = Sending(num_groups=1, num_blocks=2)
    state.queue(0, 0, 1)
    state.cut("guarded")
    state.dropped()
    state.fail("timeout")
    assert (state.is_drained, state.end_reason) == (True, "timeout")


def test_the_consumer_waits_for_all_that_was_sent_before_the_cut() -> None:
    state = Landing(num_groups=2, num_blocks=3, granted_s=0)
    state.end(num_writes=2, reason="guarded")  # the word may come before the bytes
    assert (state.state, state.is_drained) == ("waiting", False)
    state.land(0, 0, 3, now_s=1)
    assert state.state == "landing"
    state.land(1, 0, 1, now_s=1)
    assert (state.state, state.reason, state.num_landed_blocks) == ("failed", "guarded", 1)
    assert state.is_drained


def test_blocks_before_the_cut_are_published_and_nothing_else(pair: Any) -> None:  # noqa: F811
    decode, prefill = pair
    keys = keys_of("a", 4)
    transfer_id, _ = decode.expect(keys, prefill.address)
    push = prefill.plan(keys)
    push.send(0, 0, codes_of(0, 0, 4))
    for group in range(1, LAYOUT.num_groups):
        push.send(group, 0, codes_of(group, 0, 2))
    push.cut(2, encode_ms=1.0)
    waited = decode.wait(transfer_id)
    assert (waited.state, waited.reason) == ("failed", "guarded")
    with decode.consumer.pin(keys) as blocks:
        assert blocks.num_blocks == 2
        assert all((blocks.codes(group) == codes_of(group, 0, 2)).all() for group in range(LAYOUT.num_groups))
    report = decode.report(transfer_id)
    assert (report.num_granted, report.num_landed, report.encode_ms) == (4, 2, 1.0)
    assert (prefill.statistics()["ended_guarded"], prefill.statistics()["guarded_blocks"]) == (1, 2)
    until(decode.arena_is_whole, "the extent is back")


def test_a_cut_outside_the_push_is_a_mistake(pair: Any) -> None:  # noqa: F811
    decode, prefill = pair
    keys = keys_of("a", 4)
    decode.expect(keys, prefill.address)
    with pytest.raises(ValueError, match="cut at block 4"):
        prefill.plan(keys).cut(4)


# ---- the served path -------------------------------------------------------------------------------------------------


def guarded_at(
    translator: Translator, producer: LoadedModel, prompt: list[int], *, group: int, block: int
) -> Translator:
    """The translator with a guard that, of this prompt, finds one block beyond the limit, in one group, and no other.

    Its one direction tells the block's rows from all others by least squares.
    """
    layers = cache_layers(producer, trace(producer, torch.tensor(prompt), capture={"kv"}))
    inputs = [LayerInput(*layers[layer]) for layer in translator.manifest.source_layers(group)]
    transform = translator.transforms[group]
    assert transform is not None
    v_TI = torch.cat([given.v_THD.flatten(1) for given in inputs], dim=1) - transform.values.mean_I
    wanted_T1 = torch.zeros(len(prompt), 1)
    wanted_T1[block * B : (block + 1) * B] = 1
    free = slice(1, None)
    # far above what sinks count as
    direction_I1 = torch.linalg.lstsq(v_TI[free], wanted_T1[free]).solution * 1e3
    found = with_values_guard(translator, group, RowGuard(direction_I1.to(MATRIX_DTYPE), 1.0))
    encoded = Encoder(found).encode_guarded(group, inputs, torch.arange(len(prompt)), seq_len=len(prompt))
    novelty_N = encoded.novelty_T[: len(prompt) // B * B].reshape(-1, B).mean(1)
    (first, second), (found_block, _) = (part.tolist() for part in novelty_N.topk(2))
    assert found_block == block
    limit = (first * second) ** 0.5
    return with_values_guard(translator, group, RowGuard(direction_I1.to(MATRIX_DTYPE), limit))


def with_values_guard(translator: Translator, group: int, found: RowGuard) -> Translator:
    """A guard on the values of one group; all else is guarded by nothing that could fire."""
    guarded = []
    for index, transform in enumerate(translator.transforms):
        assert transform is not None
        width = len(transform.keys.mean_I)
        kinds = [RowGuard(torch.zeros(width, 1, dtype=MATRIX_DTYPE), 1.0) for _ in range(2)]
        if index == group:
            kinds[1] = found
        keys, values = replace(transform.keys, guard=kinds[0]), replace(transform.values, guard=kinds[1])
        guarded.append(replace(transform, keys=keys, values=values))
    return rebuilt(translator, tuple(guarded))


def rebuilt(translator: Translator, transforms: tuple[Any, ...]) -> Translator:
    """The same translator with other transforms."""
    manifest = translator.manifest
    fields = manifest.model_dump(include={"name", "policy", "code_dtype", "raw_dtype", "groups", "sources"})
    models = {"producer": manifest.producer, "consumer": manifest.consumer}
    return translators.build(fields | models, translator.layers, transforms)


def over_translated_prefix(
    translator: Translator, producer: LoadedModel, consumer: LoadedModel, prompt: list[int], num_tokens: int
) -> list[int]:
    """What the consumer says greedily over the translated cache of the first tokens, computing all others itself."""
    layers = cache_layers(producer, trace(producer, torch.tensor(prompt[:num_tokens]), capture={"kv"}))
    encoder, decoder, positions = Encoder(translator), Decoder(translator), torch.arange(num_tokens)
    cache = []
    for group in range(len(translator.manifest.groups)):
        inputs = [LayerInput(*layers[layer]) for layer in translator.manifest.source_layers(group)]
        codes = encoder.encode(group, inputs, positions, seq_len=num_tokens)
        cache += decoder.decode(group, codes, positions, seq_len=num_tokens)
    said: list[int] = []
    for _ in range(8):
        rest = torch.tensor([*prompt, *said][num_tokens:])
        logits = forward_with_cache(consumer, rest, cache, start_position=num_tokens, num_logits=1)
        said.append(int(logits[-1].argmax()))
    return said


@pytest.mark.parametrize("chunk", [1024, 24], ids=["one step", "chunks"])
@pytest.mark.parametrize(("group", "block"), [(0, 3), (1, 3), (1, 0), (0, 5)])
def test_the_prompt_is_cut_at_the_block_that_a_group_finds_beyond(
    start: StartServer,  # noqa: F811
    model_a: LoadedModel,  # noqa: F811
    model_b: LoadedModel,  # noqa: F811
    group: int,
    block: int,
    chunk: int,
) -> None:
    prompt = random_prompt(3, 50)
    plain = rd_translator(model_a, model_b)
    guarded = guarded_at(plain, model_a, prompt, group=group, block=block)
    prefill = start("prefill", model_a, guarded, method=CUT, engine={"max_num_tokens": chunk})
    cuts: list[tuple[int, int]] = []
    prefill.runtime.on_cut = lambda kept, refused: cuts.append((kept, refused))
    decode = start("decode", model_b, guarded)
    report = hand_over(prefill, decode, prompt)
    assert (report.state, report.reason, report.num_landed) == ("failed", "guarded", block)
    assert cuts == [(block, 6 - block)]
    for server in (prefill, decode):
        assert server.runtime.store.match(server.keys(prompt)) == block
    generation = decode.engine.submit(prompt, greedy(8))
    said = [event.token_id for event in generation]
    assert generation.cached_tokens == block * B
    if block:
        assert said == over_translated_prefix(guarded, model_a, model_b, prompt, block * B)
    else:
        assert said == generate(model_b, prompt, 8)
    assert not prefill.runtime.unfinished_pushes
    # asked again, the blocks before the cut come from the store and the guard finds the same
    assert hand_over(prefill, decode, prompt).reason == "guarded"


def test_without_the_guard_everything_is_sent(
    start: StartServer,  # noqa: F811
    model_a: LoadedModel,  # noqa: F811
) -> None:
    prompt = random_prompt(3, 50)
    guarded = guarded_at(rd_translator(model_a, model_a), model_a, prompt, group=0, block=2)
    prefill = start("prefill", model_a, guarded, method={"guard": "off"})
    decode = start("decode", model_a, guarded)
    assert hand_over(prefill, decode, prompt).state == "landed"


def test_another_prompt_is_not_cut(start: StartServer, model_a: LoadedModel) -> None:  # noqa: F811
    prompt = random_prompt(3, 50)
    guarded = guarded_at(rd_translator(model_a, model_a), model_a, prompt, group=0, block=2)
    prefill: Server = start("prefill", model_a, guarded, method=CUT)
    decode = start("decode", model_a, guarded)
    assert hand_over(prefill, decode, [*prompt[:16], prompt[0]]).state == "landed"
    run(prefill, prompt)  # nobody expects it: nothing is encoded, nothing counted
    assert prefill.runtime.require_producer().statistics().get("guarded_blocks", 0) == 0


@pytest.mark.timeout(240)
def test_three_processes_cut_what_the_calibration_text_does_not_cover(tiny: TinyPair, producer: LoadedModel) -> None:
    texts = read_texts(prepare(tiny.config))
    usual = list(texts.heldout[0][:64])
    strange = shifted_ids(texts, producer)
    with served(tiny) as children:
        url, model = children["router"].url, tiny.config.name
        answers = [complete(url, ids, model=model) for ids in (usual, [*usual, *strange], strange)]
        alone = complete(children["decode"].url, strange, model=model)
        exposed = {role: httpx.get(f"{children[role].url}/metrics").text for role in ("router", "prefill")}
    whole, part, none = (answer["usage"]["scd"] for answer in answers)
    assert (whole["fallback"], whole["guarded_blocks"]) == (None, 0)
    assert (part["fallback"], part["matched_tokens"]) == (None, 64)
    assert part["guarded_blocks"] == (len(usual) + len(strange) - 1) // 32 - 2
    assert (none["fallback"], none["guarded_blocks"]) == ("guarded", (len(strange) - 1) // 32)
    assert answers[2]["choices"][0]["text"] == alone["choices"][0]["text"]
    refused = part["guarded_blocks"] + none["guarded_blocks"]
    for text in exposed.values():
        assert 'scd_guarded_requests_total{extent="part"} 1.0' in text
        assert 'scd_guarded_requests_total{extent="whole"} 1.0' in text
        assert f"scd_guarded_blocks_total {float(refused)}" in text
    assert 'scd_fallback_total{reason="guarded"} 1.0' in exposed["router"]


def test_a_guard_rate_that_is_no_share_is_refused(tiny: TinyPair) -> None:
    data = tiny.config.model_dump()
    data["method"]["guard_rate"] = 0.5
    with pytest.raises(ValueError, match="guard_rate"):
        PairConfig.model_validate(data)

"""One artifact, three modes: a raw group, a patched group and a transformed group, served together.

Maps are random, nonsense for the model: what is served must still be what the encoder and the decoder make offline.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from serving_pairs import loopback_config
from tiny_models import VOCAB_SIZE, save_perturbed_copy, save_tiny_model
from tiny_translators import random_affine, random_group
from torch import Tensor

from scd_trt import translator as translators
from scd_trt.codec import Decoder, Encoder, LayerInput
from scd_trt.config import PairConfig
from scd_trt.evaluate.generation import greedy
from scd_trt.models import LoadedModel, cache_layers, load_model, trace
from scd_trt.serving.connector import ScdConnectorScheduler, ScdConnectorWorker
from scd_trt.serving.connector_runtime import ConnectorRuntime
from scd_trt.serving.cpu_engine import CpuEngine, SamplingParams
from scd_trt.transfer.control import ControlClient
from scd_trt.transfer.wire import new_transfer_id
from scd_trt.translator import PatchLayer, RawLayer, TransformLayer, Translator

BLOCK, NUM_TOKENS, MAX_ANSWER = 8, 61, 12


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, LoadedModel]:
    root: Path = tmp_path_factory.mktemp("models")
    producer = save_tiny_model(root / "a")
    # another rotary base: raw keys travel without RoPE
    changed = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    return load_model(producer), load_model(save_perturbed_copy(producer, root / "b", scale=0.3, **changed))


@pytest.fixture(scope="module")
def translator(pair: tuple[LoadedModel, LoadedModel]) -> Translator:
    producer, consumer = (loaded.spec for loaded in pair)
    width = consumer.kv_dim
    fields = {
        "name": "tiny",
        "policy": "rd",
        "code_dtype": "float16",
        "raw_dtype": "float32",
        "producer": producer,
        "consumer": consumer,
        "groups": ((0, 1), (1, 2), (2, 3)),
    }
    patch = PatchLayer(random_affine(producer.hidden_size, 10, 0), random_affine(10, 2 * width, 1))
    layers = (RawLayer(), patch, TransformLayer())
    return translators.build(fields, layers, (None, None, random_group(1, width=width)))


def _config() -> PairConfig:
    return loopback_config(BLOCK)


@pytest.fixture
def servers(
    pair: tuple[LoadedModel, LoadedModel], translator: Translator
) -> Iterator[dict[str, tuple[ConnectorRuntime, CpuEngine]]]:
    with ExitStack() as stack:
        started = {}
        for role, loaded in zip(("prefill", "decode"), pair, strict=True):
            runtime = ConnectorRuntime.open_with(translator, _config(), role, listen="127.0.0.1:0")
            stack.callback(runtime.close)
            connector = ScdConnectorScheduler(runtime), ScdConnectorWorker(runtime)
            engine = CpuEngine(loaded, _config().engine, connector=connector)
            stack.callback(engine.close)
            started[role] = runtime, engine
        yield started


def _hand_over(servers: dict[str, tuple[ConnectorRuntime, CpuEngine]], prompt: list[int]) -> list[Tensor]:
    """Serve a prompt up to the landing; the codes of every group as the decode server holds them."""
    (prefill, engine), (decode, _) = servers["prefill"], servers["decode"]
    consumer, producer = decode.require_consumer(), prefill.require_producer()

    async def talk() -> list[Tensor]:
        client, transfer_id = ControlClient(consumer.address, _config().control), new_transfer_id()
        keys = decode.sent_block_keys(prompt, "")
        await client.expect(transfer_id, keys, producer=producer.address)
        await asyncio.to_thread(lambda: list(engine.submit(prompt, SamplingParams(max_tokens=1, temperature=0.0))))
        await client.wait(transfer_id, timeout_s=60.0)
        await client.close()
        with consumer.pin(keys) as pinned:
            assert pinned.num_blocks == len(keys)
            return [torch.from_numpy(pinned.codes(group)).clone() for group in range(3)]

    return asyncio.run(talk())


def test_a_mixed_artifact_is_stored_and_read(translator: Translator, tmp_path: Path) -> None:
    translators.save(translator, tmp_path)
    loaded = translators.load(tmp_path)
    assert loaded.manifest == translator.manifest
    assert [layer.mode for layer in loaded.manifest.layers] == ["raw", "patch", "transform"]
    width = translator.manifest.consumer.kv_dim
    assert loaded.manifest.bytes_per_token == (2 * width * 4, 10 * 2, 16)
    assert [loaded.transform(group) is None for group in range(3)] == [True, True, False]


def test_what_is_served_is_what_is_made_offline(
    pair: tuple[LoadedModel, LoadedModel],
    translator: Translator,
    servers: dict[str, tuple[ConnectorRuntime, CpuEngine]],
) -> None:
    producer, consumer = pair
    prompt = random.Random(5).choices(range(4, VOCAB_SIZE), k=NUM_TOKENS)
    landed = _hand_over(servers, prompt)
    num_sent = (NUM_TOKENS - 1) // BLOCK * BLOCK
    traced = trace(producer, prompt)
    inputs = [LayerInput(k, v, x) for (k, v), x in zip(cache_layers(producer, traced), traced.x_TM, strict=True)]
    encoder, decoder, positions = Encoder(translator), Decoder(translator), torch.arange(num_sent)
    caches = []
    for group, codes in enumerate(landed):
        given = inputs[group]
        rows = LayerInput(given.k_THD[:num_sent], given.v_THD[:num_sent], given.x_TM[:num_sent])
        own = encoder.encode(group, [rows], positions)
        assert codes.shape == own.shape
        # the engine's own forward pass may round the last bits otherwise, and then only at the edge of a cell
        assert float((codes != own).float().mean()) < (0.02 if group == 2 else 0.5)
        torch.testing.assert_close(
            decoder.decode(group, codes, positions), decoder.decode(group, own, positions), rtol=0.1, atol=0.2
        )
        caches += decoder.decode(group, codes, positions)
    (expected,) = greedy(
        consumer,
        [(k[None], v[None]) for k, v in caches],
        prompt[num_sent:],
        first_position=num_sent,
        max_tokens=MAX_ANSWER,
    )
    sampling = SamplingParams(max_tokens=MAX_ANSWER, temperature=0.0)
    answered = [event.token_id for event in servers["decode"][1].submit(prompt, sampling)]
    assert [token for token in answered if token not in consumer.eos_token_ids] == expected

"""Served codes against the encoder alone: the bytes that land at the decode server are those of one offline call.

Both are given the same rows: what prefill left in its pool. (Rows of another chunking differ in their last digits, because
attention adds up in another order; how codes follow those is tested with the connector.)
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_pairs import loopback_config
from tiny_models import VOCAB_SIZE, save_tiny_model
from tiny_translators import group_translator, random_group
from torch import Tensor

from scd_trt.codec import Encoder, LayerInput
from scd_trt.config import PairConfig
from scd_trt.kv_cache import gather_tokens
from scd_trt.models import LoadedModel, load_model
from scd_trt.serving.connector import ScdConnectorScheduler, ScdConnectorWorker
from scd_trt.serving.connector_runtime import ConnectorRuntime
from scd_trt.serving.cpu_engine import CpuEngine, SamplingParams
from scd_trt.transfer.control import ControlClient
from scd_trt.transfer.wire import new_transfer_id
from scd_trt.translator import Translator

NUM_LAYERS = 3
KEY_RUNS = ((8, 10), (6, 40), (4, 50), (3, 48), (2, 60))
# multiplied in float32, 960 rows by 482: of that shape a plain product adds up differently for other numbers of rows
VALUE_RUNS = ((8, 482),)


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    shape = {"hidden_size": 64, "num_hidden_layers": NUM_LAYERS, "head_dim": 240}
    path: Path = save_tiny_model(tmp_path_factory.mktemp("model") / "model", **shape)
    return load_model(path, dtype=request.param)


@pytest.fixture(scope="module")
def translator(model: LoadedModel) -> Translator:
    """A group of two layers and one of a single layer, with random maps and sinks."""
    width = model.spec.kv_dim
    coded = [
        random_group(size, key_runs=KEY_RUNS, value_runs=VALUE_RUNS, width=width, seed=seed)
        for size, seed in ((2, 30), (1, 40))
    ]
    return group_translator(*coded, width=width, raw_dtype=model.spec.dtype, producer=model.spec, consumer=model.spec)


class _Watched(ScdConnectorWorker):
    """Remembers the pool, and the blocks of the last iteration that was planned."""

    pool: Tensor
    block_ids: tuple[int, ...] = ()

    def register_kv_caches(self, kv_cache_tensor: Tensor) -> None:
        self.pool = kv_cache_tensor
        super().register_kv_caches(kv_cache_tensor)

    def bind_connector_meta(self, metadata: Any) -> None:
        for step in metadata.steps:
            self.block_ids = step.block_ids
        super().bind_connector_meta(metadata)


class _Served:
    """A prefill engine and a decode runtime, in one process."""

    def __init__(self, stack: ExitStack, model: LoadedModel, translator: Translator, config: PairConfig) -> None:
        self.config = config
        self.prefill, self.decode = (
            ConnectorRuntime.open_with(translator, config, role, listen="127.0.0.1:0") for role in ("prefill", "decode")
        )
        stack.callback(self.prefill.close)
        stack.callback(self.decode.close)
        self.worker = _Watched(self.prefill)
        self.engine = CpuEngine(model, config.engine, connector=(ScdConnectorScheduler(self.prefill), self.worker))
        stack.callback(self.engine.close)

    def hand_over(self, prompt: list[int]) -> list[Tensor]:
        """Serve a prompt; the codes of every group as the decode server holds them."""
        return asyncio.run(self._hand_over(prompt))

    async def _hand_over(self, prompt: list[int]) -> list[Tensor]:
        consumer, producer = self.decode.require_consumer(), self.prefill.require_producer()
        client, transfer_id = ControlClient(consumer.address, self.config.control), new_transfer_id()
        keys = self.decode.sent_block_keys(prompt, "")
        await client.expect(transfer_id, keys, producer=producer.address)
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        await asyncio.to_thread(lambda: list(self.engine.submit(prompt, sampling)))
        await client.wait(transfer_id, timeout_s=60.0)
        await client.close()
        with consumer.pin(keys) as pinned:
            assert pinned.num_blocks == len(keys)
            return [torch.from_numpy(pinned.codes(group)).clone() for group in range(2)]

    def offline(self, num_tokens: int) -> list[Tensor]:
        """Codes of the rows in the prefill engine's pool, each group in one call."""
        translator = self.prefill.translator
        encoder, view = Encoder(translator), self.prefill.view_pool(self.worker.pool)
        codes = []
        for group, layers in enumerate(translator.manifest.groups):
            rows = [gather_tokens(view, layer, self.worker.block_ids, 0, num_tokens) for layer in range(*layers)]
            codes.append(encoder.encode(group, [LayerInput(k, v) for k, v in rows], torch.arange(num_tokens)))
        return codes


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.mark.parametrize(("tokens_per_block", "max_num_tokens"), [(8, 1024), (8, 20), (32, 32), (32, 100)])
def test_served_codes_are_byte_identical_to_offline_ones(
    stack: ExitStack, model: LoadedModel, translator: Translator, tokens_per_block: int, max_num_tokens: int
) -> None:
    """Whatever chunks prefill computes and whatever blocks are ready after each."""
    config = loopback_config(tokens_per_block, engine={"max_num_tokens": max_num_tokens})
    prompt = random.Random(1).choices(range(4, VOCAB_SIZE), k=300)
    served = _Served(stack, model, translator, config)
    landed = served.hand_over(prompt)
    num_tokens = 299 // tokens_per_block * tokens_per_block
    assert [codes.shape for codes in landed] == [(num_tokens, size) for size in translator.manifest.bytes_per_token]
    for codes, expected in zip(landed, served.offline(num_tokens), strict=True):
        assert torch.equal(codes, expected)

"""The connector between two engines in one process: what is served equals the model library, whatever happens on the way."""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_pairs import loopback_config
from tiny_models import VOCAB_SIZE, save_perturbed_copy, save_tiny_model
from tiny_translators import group_translator, random_group

from scd_trt import models
from scd_trt import translator as translators
from scd_trt.bit_packing import unpack
from scd_trt.codec import Decoder, Encoder, LayerInput
from scd_trt.config import ConfigError, EngineConfig, PairConfig
from scd_trt.kv_cache import KvLayout, gather_tokens
from scd_trt.models import LoadedModel, decoder_layers, load_model
from scd_trt.serving import connector_api
from scd_trt.serving.connector import ScdConnectorScheduler, ScdConnectorWorker
from scd_trt.serving.connector_api import RequestData, SchedulerOutput
from scd_trt.serving.connector_runtime import (
    CONFIG_VARIABLE,
    ROLE_VARIABLE,
    ConnectorError,
    ConnectorOrderError,
    ConnectorRuntime,
    runtime_from_environment,
)
from scd_trt.serving.cpu_engine import CpuEngine, SamplingParams
from scd_trt.serving.decode_role import DecodeScheduler, DecodeWorker
from scd_trt.serving.paged_executor import PagedRequest
from scd_trt.serving.prefill_role import PrefillScheduler
from scd_trt.transfer.control import ControlClient
from scd_trt.transfer.messages import TransferReport
from scd_trt.transfer.wire import new_transfer_id
from scd_trt.translator import AffineMap, LayerMaps, PatchLayer, RawLayer, ReuseLayer, Translator

B = 8
NUM_LAYERS = 3
LOCAL = "127.0.0.1:0"
POISON = -7.0


@pytest.fixture(scope="module")
def model_a(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_tiny_model(tmp_path_factory.mktemp("a") / "model"))


@pytest.fixture(scope="module")
def model_b(model_a: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_perturbed_copy(model_a.path, tmp_path_factory.mktemp("b") / "model", scale=0.3))


def make_translator(
    producer: LoadedModel, consumer: LoadedModel, layers: Sequence[LayerMaps], **changed: Any
) -> Translator:
    manifest = {
        "name": "tiny",
        "policy": "paper",
        "code_dtype": "float32",
        "raw_dtype": "float32",
        "producer": producer.spec,
        "consumer": consumer.spec,
        "groups": tuple((layer, layer + 1) for layer in range(NUM_LAYERS)),
    }
    return translators.build(manifest | changed, tuple(layers))


def exact_translator(producer: LoadedModel, consumer: LoadedModel, **changed: Any) -> Translator:
    return make_translator(producer, consumer, [RawLayer()] * NUM_LAYERS, policy="exact", **changed)


def paper_translator(producer: LoadedModel, consumer: LoadedModel, **changed: Any) -> Translator:
    """Reuse, Patch, Reuse with random maps: nonsense for the model, a full workout for the plumbing."""
    generator = torch.Generator().manual_seed(0)

    def affine(size_in: int, size_out: int) -> AffineMap:
        weight = torch.randn(size_in, size_out, generator=generator) / size_in**0.5
        return AffineMap(weight, torch.randn(size_out, generator=generator))

    width, hidden = consumer.spec.kv_dim, producer.spec.hidden_size
    reuse = [ReuseLayer(affine(width, 6), affine(6, width), affine(width, 9), affine(9, width)) for _ in range(2)]
    patch = PatchLayer(encode_h=affine(hidden, 10), project=affine(10, 2 * width))
    return make_translator(producer, consumer, [reuse[0], patch, reuse[1]], **changed)


def pair_config(**sections: Any) -> PairConfig:
    return loopback_config(B, **sections)


@dataclass
class Server:
    """One role: runtime and engine."""

    runtime: ConnectorRuntime
    engine: CpuEngine

    @property
    def address(self) -> str:
        return (self.runtime.producer or self.runtime.require_consumer()).address

    @property
    def num_pinned(self) -> int:
        return self.runtime.store.statistics().num_pinned

    def keys(self, prompt: list[int], salt: str = "") -> list[bytes]:
        return self.runtime.sent_block_keys(prompt, salt)


StartServer = Callable[..., Server]


@pytest.fixture
def start() -> Iterator[StartServer]:
    with ExitStack() as stack:

        def start_server(role: Any, loaded: LoadedModel, translator: Translator, **sections: Any) -> Server:
            config = pair_config(**sections)
            runtime = ConnectorRuntime.open_with(translator, config, role, listen=LOCAL)
            stack.callback(runtime.close)
            connector = ScdConnectorScheduler(runtime), ScdConnectorWorker(runtime)
            engine = CpuEngine(loaded, config.engine, connector=connector)
            stack.callback(engine.close)
            return Server(runtime, engine)

        yield start_server


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def random_prompt(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(4, VOCAB_SIZE), k=num_tokens)


def generate(loaded: LoadedModel, prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy continuation by the model library itself, end tokens ignored."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = loaded.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=-1,
        )
    return out[0, len(prompt) :].tolist()


def run(server: Server, prompt: list[int], max_tokens: int = 1, **given: Any) -> list[int]:
    return [event.token_id for event in server.engine.submit(prompt, greedy(max_tokens), **given)]


def hand_over(
    prefill: Server,
    decode: Server,
    prompt: list[int],
    *,
    during: Callable[[], object] | None = None,
    salt: str = "",
    timeout_s: float = 20.0,
) -> TransferReport:
    """What the router does for one prompt, up to the landing; `during` replaces the prefill request."""

    async def talk() -> TransferReport:
        client = ControlClient(decode.address, pair_config().control)
        transfer_id = new_transfer_id()
        await client.expect(transfer_id, decode.keys(prompt, salt), producer=prefill.address)
        await asyncio.to_thread(during or (lambda: run(prefill, prompt, cache_salt=salt)))
        await client.wait(transfer_id, timeout_s=timeout_s)
        report = await client.report(transfer_id)
        await client.close()
        return report

    return asyncio.run(talk())


def report_of(decode: Server, transfer_id: str) -> TransferReport:
    async def ask() -> TransferReport:
        client = ControlClient(decode.address, pair_config().control)
        report = await client.report(transfer_id)
        await client.close()
        return report

    return asyncio.run(ask())


# ---- the interface ---------------------------------------------------------------------------------------------------


def arguments(method: Any) -> list[str]:
    return [name for name in inspect.signature(method).parameters if name != "self"]


@pytest.mark.parametrize("half", ["Worker", "Scheduler"])
def test_classes_have_the_recorded_methods_and_arguments(half: str) -> None:
    manifest = json.loads((Path(__file__).parent / "trtllm_connector_api.json").read_text())["1.2.x"]
    recorded = manifest[f"KvCacheConnector{half}"]
    base = getattr(connector_api, f"KvCacheConnector{half}")
    ours = {"Worker": ScdConnectorWorker, "Scheduler": ScdConnectorScheduler}[half]
    assert base.__abstractmethods__ == set(recorded["abstract"])
    for name, expected in (recorded["abstract"] | recorded["concrete"]).items():
        assert arguments(getattr(base, name)) == expected, name
        assert arguments(getattr(ours, name)) == expected, name
    assert not inspect.isabstract(ours)


def test_data_classes_have_the_recorded_fields() -> None:
    manifest = json.loads((Path(__file__).parent / "trtllm_connector_api.json").read_text())["1.2.x"]
    for cls in (RequestData, SchedulerOutput):
        assert [field.name for field in fields(cls)] == manifest[cls.__name__]


def test_the_environment_names_pair_and_role(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    with pytest.raises(ConnectorError, match="TLLM_SCD_CONFIG is not set"):
        runtime_from_environment()
    monkeypatch.setenv(CONFIG_VARIABLE, str(tmp_path / "none.yaml"))
    monkeypatch.setenv(ROLE_VARIABLE, "both")
    with pytest.raises(ConnectorError, match="'both'; it must be prefill or decode"):
        ScdConnectorWorker(llm_args=object())
    monkeypatch.setenv(ROLE_VARIABLE, "decode")
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        ScdConnectorScheduler(llm_args=object())


def test_a_role_refuses_the_other_roles_runtime(start: StartServer, model_a: LoadedModel) -> None:
    decode = start("decode", model_a, exact_translator(model_a, model_a))
    with pytest.raises(ConnectorError, match="role decode"):
        PrefillScheduler(decode.runtime)


def test_a_pool_of_another_shape_is_refused(start: StartServer, model_a: LoadedModel) -> None:
    decode = start("decode", model_a, exact_translator(model_a, model_a))
    with pytest.raises(ValueError, match="pool is"):
        ScdConnectorWorker(decode.runtime).register_kv_caches(torch.zeros(4, NUM_LAYERS, 2, 5))


# ---- served text -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [((0, 1), (1, 2), (2, 3)), ((0, 2), (2, 3)), ((0, 3),)], ids=str)
def test_exact_codes_give_the_librarys_text(start: StartServer, model_a: LoadedModel, groups: Any) -> None:
    translator = exact_translator(model_a, model_a, groups=groups)
    prefill, decode = start("prefill", model_a, translator), start("decode", model_a, translator)
    for seed in range(20 if len(groups) == NUM_LAYERS else 3):
        prompt = random_prompt(seed, random.Random(seed).randrange(2, 120))
        num_blocks = (len(prompt) - 1) // B
        hand_over(prefill, decode, prompt)
        generation = decode.engine.submit(prompt, greedy(12))
        assert [event.token_id for event in generation] == generate(model_a, prompt, 12)
        assert generation.cached_tokens == num_blocks * B
    assert decode.num_pinned == 0
    assert not prefill.runtime.unfinished_pushes
    assert not decode.runtime.promises


def test_the_consumers_own_kv_gives_its_text_and_anothers_does_not(
    start: StartServer, model_a: LoadedModel, model_b: LoadedModel
) -> None:
    # the oracle: B's own KV through the wire
    oracle = exact_translator(model_b, model_b)
    prefill, decode = start("prefill", model_b, oracle), start("decode", model_b, oracle)
    prompts = [random_prompt(seed, 50) for seed in range(5)]
    for prompt in prompts:
        hand_over(prefill, decode, prompt)
        assert run(decode, prompt, 12) == generate(model_b, prompt, 12)
    # the control: A's KV, taken as B's, changes the text, so text did depend on what came over the wire
    raw = exact_translator(model_a, model_b)
    prefill, decode = start("prefill", model_a, raw), start("decode", model_b, raw)
    answers = []
    for prompt in prompts:
        hand_over(prefill, decode, prompt)
        answers.append(run(decode, prompt, 12))
    assert answers != [generate(model_b, prompt, 12) for prompt in prompts]


def test_without_landed_codes_the_consumer_prefills(start: StartServer, model_b: LoadedModel) -> None:
    decode = start("decode", model_b, exact_translator(model_b, model_b))
    prompt = random_prompt(1, 50)
    generation = decode.engine.submit(prompt, greedy(12))
    assert [event.token_id for event in generation] == generate(model_b, prompt, 12)
    assert generation.cached_tokens == 0


def test_codes_of_one_salt_never_serve_another(start: StartServer, model_a: LoadedModel) -> None:
    translator = exact_translator(model_a, model_a)
    prefill, decode = start("prefill", model_a, translator), start("decode", model_a, translator)
    prompt = random_prompt(1, 50)
    hand_over(prefill, decode, prompt, salt="one")
    for salt, cached in (("two", 0), ("", 0), ("one", 48)):
        generation = decode.engine.submit(prompt, greedy(4), cache_salt=salt)
        assert [event.token_id for event in generation] == generate(model_a, prompt, 4)
        assert generation.cached_tokens == cached


def test_local_blocks_come_first_and_codes_fill_the_rest(start: StartServer, model_a: LoadedModel) -> None:
    translator = exact_translator(model_a, model_a)
    prefill, decode = start("prefill", model_a, translator), start("decode", model_a, translator)
    prompt = random_prompt(1, 50)
    run(decode, prompt[:25])  # 3 blocks, computed and kept by the decode engine itself
    report = hand_over(prefill, decode, prompt)
    generation = decode.engine.submit(prompt, greedy(8))
    assert [event.token_id for event in generation] == generate(model_a, prompt, 8)
    assert generation.cached_tokens == 48
    noted = report_of(decode, report.transfer_id)
    assert noted.matched_tokens == 24
    assert noted.decode_ms is not None
    assert noted.decode_ms > 0
    # decoded blocks are not the decode engine's own: what it may share are still only the first three
    assert decode.engine.stats().blocks_cached == 3


def test_a_match_of_nothing_is_noted(start: StartServer, model_a: LoadedModel) -> None:
    translator = exact_translator(model_a, model_a)
    prefill, decode = start("prefill", model_a, translator), start("decode", model_a, translator)
    prompt = random_prompt(1, 50)
    report = hand_over(prefill, decode, prompt, during=lambda: run(decode, prompt), timeout_s=0.0)
    assert report.matched_tokens == 0
    assert report.decode_ms is None


# ---- sending ---------------------------------------------------------------------------------------------------------


BLOCKS = [9, 2, 11, 4, 0, 15, 7]


@dataclass
class Sending:
    """A prefill connector driven by hand, without an engine."""

    server: Server
    scheduler: ScdConnectorScheduler
    worker: ScdConnectorWorker
    prompt: list[int]

    @property
    def request(self) -> PagedRequest:
        return PagedRequest(1, self.prompt, len(self.prompt), len(self.prompt))

    def begin(self, *, computed_position: int, num_scheduled: int | None = None) -> None:
        """The prompt's first iteration, up to the first layer."""
        self.scheduler.get_num_new_matched_tokens(self.request, computed_position)
        rest = len(self.prompt) - computed_position if num_scheduled is None else num_scheduled
        data = RequestData(1, self.prompt, BLOCKS, computed_position, rest)
        self.worker.bind_connector_meta(self.scheduler.build_connector_meta(SchedulerOutput(new_requests=[data])))
        self.worker.start_load_kv(None)


@contextmanager
def sending(loaded: LoadedModel, decode: Server) -> Iterator[Sending]:
    runtime = ConnectorRuntime.open_with(decode.runtime.translator, pair_config(), "prefill", listen=LOCAL)
    scheduler, worker = ScdConnectorScheduler(runtime), ScdConnectorWorker(runtime)
    spec = loaded.spec
    worker.register_kv_caches(KvLayout(NUM_LAYERS, spec.num_kv_heads, spec.head_dim, B, torch.float32).allocate(16))
    try:
        yield Sending(Server(runtime, decode.engine), scheduler, worker, random_prompt(1, 50))
    finally:
        runtime.close()


@pytest.mark.parametrize("make", [exact_translator, paper_translator], ids=["exact", "paper"])
@pytest.mark.parametrize("chunk", [5, 8, 12, 20])
def test_chunked_prefill_sends_the_same_codes(
    start: StartServer, model_a: LoadedModel, make: Callable[..., Translator], chunk: int
) -> None:
    translator = make(model_a, model_a)
    decode = start("decode", model_a, translator)
    prompt = random_prompt(1, 50)
    keys = decode.keys(prompt)
    codes = []
    for tokens in (1024, chunk):
        prefill = start("prefill", model_a, translator, engine={"max_num_tokens": tokens})
        assert hand_over(prefill, decode, prompt).num_landed == 6
        with decode.runtime.require_consumer().pin(keys) as pinned:
            codes.append([torch.from_numpy(pinned.codes(group)).view(torch.float32) for group in range(NUM_LAYERS)])
        decode = start("decode", model_a, translator)
    for whole, chunked in zip(*codes, strict=True):
        # float32 attention over other chunk sizes adds in another order
        torch.testing.assert_close(chunked, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [exact_translator, paper_translator], ids=["exact", "paper"])
def test_sent_codes_are_those_of_a_plain_trace(
    start: StartServer, model_a: LoadedModel, model_b: LoadedModel, make: Callable[..., Translator]
) -> None:
    translator = make(model_a, model_b)
    prefill, decode = start("prefill", model_a, translator), start("decode", model_b, translator)
    prompt = random_prompt(1, 50)
    hand_over(prefill, decode, prompt)
    traced = models.trace(model_a, prompt)
    kv = models.cache_layers(model_a, traced)
    encoder, positions = Encoder(translator), torch.arange(48)
    with decode.runtime.require_consumer().pin(decode.keys(prompt)) as pinned:
        for layer, (k_THD, v_THD) in enumerate(kv):
            given = LayerInput(k_THD[:48], v_THD[:48], traced.x_TM[layer][:48])
            expected = encoder.encode(layer, [given], positions).view(torch.float32)
            # float32 through other kernels
            torch.testing.assert_close(
                torch.from_numpy(pinned.codes(layer)).view(torch.float32), expected, rtol=1e-4, atol=1e-4
            )


def test_codes_of_a_layer_leave_before_the_next_layer_ends(start: StartServer, model_a: LoadedModel) -> None:
    translator = exact_translator(model_a, model_a)
    prefill, decode = start("prefill", model_a, translator), start("decode", model_a, translator)
    trace = prefill.runtime.require_producer().trace
    ended_s: list[float] = []

    def posted(group: int) -> list[float]:
        return [event.time_s for event in trace.events() if event.name == "posted" and event.group == group]

    def end_layer(layer: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            # layer l + 1 takes as long as the sender needs to post layer l; sent only at the end, this would not end
            deadline_s = time.monotonic() + 20
            while layer and not posted(layer - 1) and time.monotonic() < deadline_s:
                time.sleep(0.001)
            ended_s.append(time.monotonic())

        return hook

    handles = [layer.mlp.register_forward_hook(end_layer(i)) for i, layer in enumerate(decoder_layers(model_a.model))]
    try:
        hand_over(prefill, decode, random_prompt(1, 50))
    finally:
        for handle in handles:
            handle.remove()
    assert len(ended_s) == NUM_LAYERS
    for layer in range(NUM_LAYERS - 1):
        assert posted(layer)[0] < ended_s[layer + 1]


@pytest.mark.parametrize("make", [exact_translator, paper_translator], ids=["exact", "paper"])
def test_a_repeated_prompt_goes_to_a_new_consumer_from_the_store(
    start: StartServer, model_a: LoadedModel, make: Callable[..., Translator]
) -> None:
    translator = make(model_a, model_a)
    prefill = start("prefill", model_a, translator)
    prompt = random_prompt(1, 50)
    first, second = start("decode", model_a, translator), start("decode", model_a, translator)
    assert hand_over(prefill, first, prompt).num_landed == 6
    report = hand_over(prefill, second, prompt)
    assert (report.state, report.num_landed, report.encode_ms) == ("landed", 6, 0.0)
    longer = [*prompt, *random_prompt(2, 30)]
    assert hand_over(prefill, second, longer).num_landed == 3  # the first six are there
    with (
        first.runtime.require_consumer().pin(first.keys(prompt)) as one,
        second.runtime.require_consumer().pin(second.keys(prompt)) as two,
    ):
        assert all((one.codes(group) == two.codes(group)).all() for group in range(NUM_LAYERS))


def test_reused_blocks_without_stored_codes_are_encoded_from_the_pool(start: StartServer, model_a: LoadedModel) -> None:
    translator = exact_translator(model_a, model_a)
    prefill = start("prefill", model_a, translator)
    decode = start("decode", model_a, translator)
    prompt = random_prompt(1, 50)
    run(prefill, prompt[:33])  # nobody expects these: computed, kept in the pool, not encoded
    assert hand_over(prefill, decode, prompt).num_landed == 6
    assert run(decode, prompt, 8) == generate(model_a, prompt, 8)


def test_with_patch_layers_the_engine_computes_every_prompt_token(start: StartServer, model_a: LoadedModel) -> None:
    translator = paper_translator(model_a, model_a)
    prefill, decode = start("prefill", model_a, translator), start("decode", model_a, translator)
    prompt = random_prompt(1, 50)
    run(prefill, prompt[:33])
    assert hand_over(prefill, decode, prompt).num_landed == 6
    assert prefill.engine.stats().blocks_cached == 0


def test_reused_blocks_of_a_patch_layer_cannot_be_encoded(start: StartServer, model_a: LoadedModel) -> None:
    decode = start("decode", model_a, paper_translator(model_a, model_a))
    with sending(model_a, decode) as sender:
        report = hand_over(sender.server, decode, sender.prompt, during=lambda: sender.begin(computed_position=32))
        assert (report.state, report.reason, report.num_landed) == ("failed", "not_encoded", 0)
        assert not sender.server.runtime.unfinished_pushes
        sender.worker.save_kv_layer(0, None)  # the forward pass goes on
        sender.worker.wait_for_save(None)
    # and the consumer answers by itself
    assert run(decode, sender.prompt, 8) == generate(model_a, sender.prompt, 8)


def test_a_full_store_on_the_prefill_side_does_not_stop_a_push(start: StartServer, model_a: LoadedModel) -> None:
    translator = exact_translator(model_a, model_a)
    prefill = start("prefill", model_a, translator, store={"capacity_bytes": 1000})
    decode = start("decode", model_a, translator)
    assert hand_over(prefill, decode, random_prompt(1, 50)).num_landed == 6


def test_a_cancelled_prompt_aborts_its_push(start: StartServer, model_a: LoadedModel) -> None:
    translator = exact_translator(model_a, model_a)
    prefill = start("prefill", model_a, translator, engine={"max_num_tokens": 8})
    decode = start("decode", model_a, translator)
    prompt = random_prompt(1, 300)
    seen = 0

    def cancel_in_the_middle() -> None:
        generation = prefill.engine.submit(prompt, greedy(1))

        def hook(*_: Any) -> None:
            nonlocal seen
            seen += 1
            if seen == 5:
                generation.cancel()

        handle = decoder_layers(model_a.model)[0].register_forward_hook(hook)
        assert list(generation) == []
        run(prefill, random_prompt(2, 4))  # a whole request later the cancelled one is gone
        handle.remove()

    report = hand_over(prefill, decode, prompt, during=cancel_in_the_middle)
    assert (report.state, report.reason) == ("failed", "aborted")
    assert not prefill.runtime.unfinished_pushes
    assert prefill.engine.stats().blocks_free == 64
    assert prefill.num_pinned == 0


def test_a_consumer_that_left_does_not_disturb_the_prefill(start: StartServer, model_a: LoadedModel) -> None:
    translator = exact_translator(model_a, model_a)
    prefill, decode = start("prefill", model_a, translator), start("decode", model_a, translator)
    prompt = random_prompt(1, 50)

    async def expect() -> None:
        client = ControlClient(decode.address, pair_config().control)
        await client.expect(new_transfer_id(), decode.keys(prompt), producer=prefill.address)
        await client.close()

    asyncio.run(expect())
    decode.runtime.close()
    assert run(prefill, prompt, 4) == generate(model_a, prompt, 4)
    assert not prefill.runtime.unfinished_pushes


# ---- loading, call by call -------------------------------------------------------------------------------------------


@dataclass
class Loading:
    """A decode role driven by hand, over a pool of its own full of poison, with one prompt landed."""

    runtime: ConnectorRuntime
    scheduler: DecodeScheduler
    worker: DecodeWorker
    view: torch.Tensor
    prompt: list[int]
    translator: Translator

    def request(self, request_id: int = 1) -> PagedRequest:
        return PagedRequest(request_id, list(self.prompt), len(self.prompt), len(self.prompt))

    def run_layers(self, metadata: Any) -> None:
        self.worker.start_load_kv(metadata)
        for layer in range(NUM_LAYERS):
            self.worker.wait_for_layer_load(layer)
        self.worker.wait_for_save()

    @property
    def num_pinned(self) -> int:
        return self.runtime.store.statistics().num_pinned


@pytest.fixture
def loading(start: StartServer, model_a: LoadedModel, model_b: LoadedModel) -> Loading:
    translator = paper_translator(model_a, model_b)
    room_for_eight = {"capacity_bytes": 8 * B * sum(translator.manifest.bytes_per_token)}
    prefill, decode = start("prefill", model_a, translator), start("decode", model_b, translator, store=room_for_eight)
    prompt = random_prompt(1, 50)
    hand_over(prefill, decode, prompt)
    spec = model_b.spec
    layout = KvLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, B, torch.float32)
    pool = layout.allocate(16).fill_(POISON)
    worker = DecodeWorker(decode.runtime)
    worker.register_kv_caches(pool)
    return Loading(decode.runtime, DecodeScheduler(decode.runtime), worker, layout.view(pool), prompt, translator)


def test_decoded_pool_equals_the_decoder_and_neighbours_are_untouched(loading: Loading) -> None:
    request = loading.request()
    assert loading.scheduler.get_num_new_matched_tokens(request, 16) == (32, False)
    loading.scheduler.update_state_after_alloc(request, BLOCKS)
    loading.run_layers(loading.scheduler.build_connector_meta(SchedulerOutput()))
    decoder, positions = Decoder(loading.translator), torch.arange(16, 48)
    keys = loading.runtime.sent_block_keys(loading.prompt, "")
    with loading.runtime.require_consumer().pin(keys) as pinned:
        for layer in range(NUM_LAYERS):
            codes_TC = torch.from_numpy(pinned.codes(layer))[16:48]
            ((k_THD, v_THD),) = decoder.decode(layer, codes_TC, positions)
            k, v = gather_tokens(loading.view, layer, BLOCKS, 16, 48)
            assert torch.equal(k, k_THD)
            assert torch.equal(v, v_THD)
    untouched = [block for block in range(16) if block not in BLOCKS[2:6]]
    assert (loading.view[untouched] == POISON).all()
    assert loading.num_pinned == 0


def test_metadata_presented_twice_is_used_once(loading: Loading) -> None:
    request = loading.request()
    loading.scheduler.get_num_new_matched_tokens(request, 0)
    loading.scheduler.update_state_after_alloc(request, BLOCKS)
    metadata = loading.scheduler.build_connector_meta(SchedulerOutput())
    loading.run_layers(metadata)
    loading.view.fill_(POISON)
    loading.run_layers(metadata)
    assert (loading.view == POISON).all()
    assert loading.scheduler.build_connector_meta(SchedulerOutput()).loads == ()


@pytest.mark.parametrize(("num_local", "promised"), [(0, 48), (8, 40), (40, 8), (48, 0), (5, 0), (47, 0), (56, 0)])
def test_promises_are_whole_blocks_before_the_last_token(loading: Loading, num_local: int, promised: int) -> None:
    request = loading.request()
    assert loading.scheduler.get_num_new_matched_tokens(request, num_local) == (promised, False)
    assert loading.num_pinned == (6 if promised else 0)
    loading.scheduler.request_finished(request, [])
    assert loading.num_pinned == 0
    assert not loading.runtime.promises


def test_a_prompt_that_ends_with_a_block_keeps_that_block_for_the_engine(loading: Loading) -> None:
    loading.prompt = loading.prompt[:48]
    assert loading.scheduler.get_num_new_matched_tokens(loading.request(), 0) == (40, False)


def test_asking_again_replaces_the_promise(loading: Loading) -> None:
    request = loading.request()
    for num_local in (0, 16, 5, 0, 8):
        loading.scheduler.get_num_new_matched_tokens(request, num_local)
    assert len(loading.runtime.promises) == 1
    loading.scheduler.update_state_after_alloc(request, BLOCKS)
    (load,) = loading.scheduler.build_connector_meta(SchedulerOutput()).loads
    assert (load.first_block, load.stop_block) == (1, 6)
    loading.scheduler.request_finished(request, [])
    assert loading.num_pinned == 0


def test_promised_codes_survive_a_store_that_fills_up(loading: Loading) -> None:
    request = loading.request()
    loading.scheduler.get_num_new_matched_tokens(request, 0)
    store = loading.runtime.store
    entry = bytes(loading.runtime.layout.block_bytes)
    for index in range(20):
        store.put(bytes([index]) * 16, entry)
    assert loading.num_pinned == 6
    loading.scheduler.update_state_after_alloc(request, BLOCKS)
    loading.run_layers(loading.scheduler.build_connector_meta(SchedulerOutput()))
    assert not (loading.view[BLOCKS[:6]] == POISON).any()
    assert loading.num_pinned == 0


def test_a_forward_pass_that_broke_off_gives_its_pins_back(loading: Loading) -> None:
    request = loading.request()
    loading.scheduler.get_num_new_matched_tokens(request, 0)
    loading.scheduler.update_state_after_alloc(request, BLOCKS)
    loading.worker.start_load_kv(loading.scheduler.build_connector_meta(SchedulerOutput()))
    loading.worker.wait_for_layer_load(0)
    assert loading.num_pinned == 6
    # the engine fails the requests of a forward pass that broke off
    loading.scheduler.request_finished(request, BLOCKS)
    loading.worker.start_load_kv(loading.scheduler.build_connector_meta(SchedulerOutput()))
    assert loading.num_pinned == 0


def test_layers_that_ran_without_their_load_are_an_error(loading: Loading) -> None:
    request = loading.request()
    loading.scheduler.get_num_new_matched_tokens(request, 0)
    loading.scheduler.update_state_after_alloc(request, BLOCKS)
    loading.worker.start_load_kv(loading.scheduler.build_connector_meta(SchedulerOutput()))
    loading.worker.wait_for_layer_load(0)
    with pytest.raises(ConnectorOrderError, match="1 of 3 groups"):
        loading.worker.wait_for_save()
    assert loading.num_pinned == 0


def test_too_few_blocks_are_an_error(loading: Loading) -> None:
    request = loading.request()
    loading.scheduler.get_num_new_matched_tokens(request, 0)
    with pytest.raises(ConnectorOrderError, match="5 blocks"):
        loading.scheduler.update_state_after_alloc(request, BLOCKS[:5])
    with pytest.raises(ConnectorOrderError):
        loading.scheduler.update_state_after_alloc(loading.request(2), BLOCKS)


def test_matching_takes_microseconds(loading: Loading) -> None:
    request = loading.request()
    loading.scheduler.get_num_new_matched_tokens(request, 0)
    began_s = time.perf_counter()
    for _ in range(100):
        loading.scheduler.get_num_new_matched_tokens(request, 0)
    # about 20 us on a quiet core; a look-up that did I/O or hashed the prompt again would take milliseconds
    assert (time.perf_counter() - began_s) / 100 < 2e-3


def test_worker_needs_metadata_first(start: StartServer, model_a: LoadedModel) -> None:
    decode = start("decode", model_a, exact_translator(model_a, model_a))
    with pytest.raises(ConnectorOrderError, match="bind_connector_meta"):
        ScdConnectorWorker(decode.runtime).start_load_kv(None)


def test_a_patch_layer_without_its_attention_input_is_an_error(start: StartServer, model_a: LoadedModel) -> None:
    decode = start("decode", model_a, paper_translator(model_a, model_a))
    with sending(model_a, decode) as sender:

        def step() -> None:
            sender.begin(computed_position=0)
            sender.worker.save_kv_layer(0, None)
            with pytest.raises(ConnectorOrderError, match="Patch layer 1"):
                sender.worker.save_kv_layer(1, None)
            assert sender.scheduler.request_finished(sender.request, BLOCKS) is False

        assert hand_over(sender.server, decode, sender.prompt, during=step).reason == "aborted"


def test_an_iteration_presented_twice_counts_once(start: StartServer, model_a: LoadedModel) -> None:
    translator = paper_translator(model_a, model_a)
    decode = start("decode", model_a, translator)
    x_TM = torch.randn(50, model_a.spec.hidden_size)
    with sending(model_a, decode) as sender:

        def run_layers(start_token: int, stop_token: int) -> None:
            for layer in range(NUM_LAYERS):
                sender.worker.save_attention_input(layer, x_TM[start_token:stop_token])
                sender.worker.save_kv_layer(layer, None)
            sender.worker.wait_for_save(None)

        def steps() -> None:
            sender.begin(computed_position=0, num_scheduled=20)
            run_layers(0, 20)
            sender.worker.start_load_kv(None)
            run_layers(0, 20)
            rest = RequestData(1, [], [], 20, 30)
            metadata = sender.scheduler.build_connector_meta(SchedulerOutput(cached_requests=[rest]))
            sender.worker.bind_connector_meta(metadata)
            sender.worker.start_load_kv(None)
            run_layers(20, 50)

        assert hand_over(sender.server, decode, sender.prompt, during=steps).num_landed == 6
    patch = translator.layers[1]
    assert isinstance(patch, PatchLayer)
    with decode.runtime.require_consumer().pin(decode.keys(sender.prompt)) as pinned:
        codes = torch.from_numpy(pinned.codes(1)).view(torch.float32)
    # float32: products of other shapes add in another order
    torch.testing.assert_close(codes, patch.encode_h(x_TM[:48]), rtol=1e-5, atol=1e-5)


def test_layers_that_were_not_shown_end_the_push_and_not_the_engine(start: StartServer, model_a: LoadedModel) -> None:
    decode = start("decode", model_a, paper_translator(model_a, model_a))
    with sending(model_a, decode) as sender:

        def step() -> None:
            sender.begin(computed_position=0)
            sender.worker.save_kv_layer(0, None)
            sender.worker.wait_for_save(None)
            assert not sender.server.runtime.unfinished_pushes

        report = hand_over(sender.server, decode, sender.prompt, during=step)
        assert (report.state, report.reason, report.num_landed) == ("failed", "not_encoded", 0)
        assert sender.server.runtime.store.statistics().num_entries == 0


def test_engine_settings_of_a_pair_reach_the_code_layout(start: StartServer, model_a: LoadedModel) -> None:
    decode = start("decode", model_a, exact_translator(model_a, model_a), engine={"tokens_per_block": 16})
    assert decode.runtime.tokens_per_block == 16
    assert EngineConfig().tokens_per_block == 32


# ---- groups of layers that are coded together ------------------------------------------------------------------------


def rd_translator(producer: LoadedModel, consumer: LoadedModel) -> Translator:
    """A group of two layers and one of a single layer, with random maps; codes of 16 bytes each, of every width."""
    width = consumer.spec.kv_dim
    coded = random_group(2, width=width), random_group(1, width=width, seed=40)
    return group_translator(*coded, width=width, raw_dtype="float32", producer=producer.spec, consumer=consumer.spec)


def landed_codes(decode: Server, prompt: list[int]) -> list[torch.Tensor]:
    """Codes of every group, as the decode server holds them."""
    with decode.runtime.require_consumer().pin(decode.keys(prompt)) as pinned:
        return [
            torch.from_numpy(pinned.codes(group)).clone() for group in range(len(decode.runtime.translator.transforms))
        ]


def levels_of(translator: Translator, group: int, codes_TC: torch.Tensor) -> torch.Tensor:
    """All components of a group."""
    transform = translator.transform(group)
    assert transform is not None
    kinds = transform.keys.layout, transform.values.layout
    parts = codes_TC.split([layout.bytes_per_token for layout in kinds], dim=1)
    return torch.cat([unpack(part, layout) for part, layout in zip(parts, kinds, strict=True)], dim=1).int()


def test_decoded_groups_in_the_pool_equal_the_decoder(
    start: StartServer, model_a: LoadedModel, model_b: LoadedModel
) -> None:
    translator = rd_translator(model_a, model_b)
    prefill, decode = start("prefill", model_a, translator), start("decode", model_b, translator)
    prompt = random_prompt(1, 50)
    assert hand_over(prefill, decode, prompt).num_landed == 6
    codes = landed_codes(decode, prompt)
    spec = model_b.spec
    layout = KvLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, B, torch.float32)
    pool = layout.allocate(16).fill_(POISON)
    worker, scheduler = DecodeWorker(decode.runtime), DecodeScheduler(decode.runtime)
    worker.register_kv_caches(pool)
    request = PagedRequest(1, prompt, len(prompt), len(prompt))
    assert scheduler.get_num_new_matched_tokens(request, 16) == (32, False)
    scheduler.update_state_after_alloc(request, BLOCKS)
    worker.start_load_kv(scheduler.build_connector_meta(SchedulerOutput()))
    for layer, filled in enumerate(((0, 1), (0, 1), (0, 1, 2))):
        worker.wait_for_layer_load(layer)
        # a group arrives as a whole before its first layer runs, and not earlier
        done = [layer for layer in range(NUM_LAYERS) if not (layout.view(pool)[BLOCKS[2:6], layer] == POISON).any()]
        assert tuple(done) == filled
    worker.wait_for_save()
    decoder, positions = Decoder(translator), torch.arange(16, 48)
    decoded = [pair for group in range(2) for pair in decoder.decode(group, codes[group][16:48], positions)]
    for layer, (k_THD, v_THD) in enumerate(decoded):
        k, v = gather_tokens(layout.view(pool), layer, BLOCKS, 16, 48)
        assert torch.equal(k, k_THD)
        assert torch.equal(v, v_THD)
    assert (layout.view(pool)[[block for block in range(16) if block not in BLOCKS[2:6]]] == POISON).all()
    assert decode.num_pinned == 0


def test_the_engine_answers_over_decoded_groups_as_the_library_does(
    start: StartServer, model_a: LoadedModel, model_b: LoadedModel
) -> None:
    translator = rd_translator(model_a, model_b)
    prefill, decode = start("prefill", model_a, translator), start("decode", model_b, translator)
    prompt = random_prompt(1, 50)
    hand_over(prefill, decode, prompt)
    decoder, positions = Decoder(translator), torch.arange(48)
    codes = landed_codes(decode, prompt)
    cache = [pair for group in range(2) for pair in decoder.decode(group, codes[group], positions)]
    with torch.no_grad():
        logits = models.forward_with_cache(model_b, prompt[48:], cache, start_position=48)
    generation = decode.engine.submit(prompt, greedy(1))
    assert [event.token_id for event in generation] == [int(logits[-1].argmax())]
    assert generation.cached_tokens == 48


@pytest.mark.parametrize("chunks", [(50,), (8, 42), (20, 30), (5,) * 10, (13, 3, 1, 33)], ids=str)
def test_group_codes_of_any_chunking_are_those_of_the_pool(
    start: StartServer, model_a: LoadedModel, chunks: tuple[int, ...]
) -> None:
    """Same rows, same bytes, whatever blocks each iteration fills."""
    translator = rd_translator(model_a, model_a)
    decode = start("decode", model_a, translator)
    spec = model_a.spec
    layout = KvLayout(NUM_LAYERS, spec.num_kv_heads, spec.head_dim, B, torch.float32)
    pool = torch.randn(layout.allocate(16).shape, generator=torch.Generator().manual_seed(0))
    with sending(model_a, decode) as sender:
        sender.worker.register_kv_caches(pool)

        def iterate() -> None:
            sender.begin(computed_position=0, num_scheduled=chunks[0])
            stop = chunks[0]
            for following in (*chunks[1:], None):
                for layer in range(NUM_LAYERS):
                    sender.worker.save_kv_layer(layer, None)
                sender.worker.wait_for_save(None)
                if following is not None:
                    rest = RequestData(1, [], [], stop, following)
                    sender.worker.bind_connector_meta(
                        sender.scheduler.build_connector_meta(SchedulerOutput(cached_requests=[rest]))
                    )
                    sender.worker.start_load_kv(None)
                    stop += following

        assert hand_over(sender.server, decode, sender.prompt, during=iterate).num_landed == 6
        codes = landed_codes(decode, sender.prompt)
    encoder, positions = Encoder(translator), torch.arange(48)
    for group, (first, stop_layer) in enumerate(translator.manifest.groups):
        rows = [gather_tokens(layout.view(pool), layer, BLOCKS, 0, 48) for layer in range(first, stop_layer)]
        expected = encoder.encode(group, [LayerInput(k, v) for k, v in rows], positions)
        # products this narrow add up in one order, for whatever number of blocks at once (see test_codec)
        assert torch.equal(codes[group], expected)


@pytest.mark.parametrize("chunk", [5, 8, 12, 1024])
def test_served_group_codes_are_those_of_a_plain_trace(start: StartServer, model_a: LoadedModel, chunk: int) -> None:
    translator = rd_translator(model_a, model_a)
    prefill = start("prefill", model_a, translator, engine={"max_num_tokens": chunk})
    decode = start("decode", model_a, translator)
    prompt = random_prompt(1, 50)
    assert hand_over(prefill, decode, prompt).num_landed == 6
    kv = models.cache_layers(model_a, models.trace(model_a, prompt, capture={"kv"}))
    encoder, positions = Encoder(translator), torch.arange(48)
    for group, codes in enumerate(landed_codes(decode, prompt)):
        inputs = [LayerInput(k[:48], v[:48]) for k, v in kv[slice(*translator.manifest.groups[group])]]
        expected = levels_of(translator, group, encoder.encode(group, inputs, positions))
        differing = (levels_of(translator, group, codes) - expected).abs()
        # float32 attention over other chunk sizes adds in another order: a value at the edge of a cell may cross it
        assert int(differing.max()) <= 1
        assert float((differing > 0).double().mean()) < 1e-2


def test_group_codes_leave_when_the_last_layer_of_the_group_is_done(start: StartServer, model_a: LoadedModel) -> None:
    translator = rd_translator(model_a, model_a)
    decode = start("decode", model_a, translator)
    with sending(model_a, decode) as sender:
        encoded: list[list[int]] = []

        def step() -> None:
            sender.begin(computed_position=0)
            (progress,) = sender.worker._role._active
            for layer in range(NUM_LAYERS):
                sender.worker.save_kv_layer(layer, None)
                encoded.append([codes.shape[1] for codes in progress.codes])
            sender.worker.wait_for_save(None)

        assert hand_over(sender.server, decode, sender.prompt, during=step).num_landed == 6
    assert encoded == [[], [16], [16, 16]]

"""Each way in which TensorRT-LLM is known to stop a server or corrupt text because of a connector, and what prevents it.

A test is named after its trap; its docstring says what TensorRT-LLM does. Most drive the real order of calls
(`trtllm_harness`); none needs TensorRT-LLM.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from live_servers import free_port
from serving_pairs import loopback_config
from test_trtllm_harness import NUM_KV_HEADS, NUM_LAYERS, B, answer_of_nothing_loaded, exact, prefilled, prompt_of
from tiny_models import save_perturbed_copy, save_tiny_model
from tiny_translators import random_translator
from trtllm_harness import POISON, HostRequest, OneRank, Served, cached_rows, hand_over, serve, toy_rows

from scd_trt import translator as translators
from scd_trt.deploy import requirements
from scd_trt.kv_cache import KvLayout
from scd_trt.model_spec import ModelSpec
from scd_trt.serving import connector_api, connector_runtime, trtllm
from scd_trt.serving.connector import ScdConnectorScheduler, ScdConnectorWorker
from scd_trt.serving.connector_api import RequestData, SchedulerOutput
from scd_trt.serving.connector_runtime import (
    CONFIG_VARIABLE,
    ROLE_VARIABLE,
    ConnectorError,
    ConnectorOrderError,
    ConnectorRuntime,
    request_salt,
)
from scd_trt.serving.engine_settings import REFUSALS, EngineSettingsError, check_engine, check_same
from scd_trt.serving.pool_layout import PoolError, pool_of_layout
from scd_trt.serving.ranks import RanksError, heads_of_rank, join_heads
from scd_trt.translator import RawLayer, TranslatorError

ROOT = Path(__file__).parents[1]
ROLES: tuple[Any, ...] = ("prefill", "decode")

Start = Callable[..., Served]


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:

        def start_server(role: Any, **given: Any) -> Served:
            served = serve(role, given.pop("translator", None) or exact(), **given)
            stack.callback(served.runtime.close)
            return served

        yield start_server


@pytest.fixture
def pair(start: Start) -> tuple[Served, Served]:
    return start("prefill"), start("decode")


PROMPT = prompt_of(1, 50)


def landed(pair: tuple[Served, Served], prompt: list[int] = PROMPT) -> Served:
    """The decode server, with the codes of a prompt."""
    prefill, decode = pair
    report = hand_over(prefill, decode, prompt, prefilled(prefill, prompt))
    assert report.state == "landed"
    return decode


def is_exact(decode: Served, request: HostRequest, num_tokens: int = 48) -> bool:
    """Whether the pool holds what the producer computed."""
    blocks = decode.executor.blocks.true_indices(request)
    return all(
        torch.equal(
            cached_rows(decode.executor, blocks, layer, num_tokens),
            torch.stack(toy_rows(layer, PROMPT[:num_tokens], 0, num_heads=NUM_KV_HEADS, head_dim=8)),
        )
        for layer in range(NUM_LAYERS)
    )


# ---- promises --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 8, 9, 16, 17, 48, 49, 50])
def test_a_promise_leaves_the_last_prompt_token_to_the_engine(pair: tuple[Served, Served], num_tokens: int) -> None:
    """A prompt of which every token counts as computed has nothing to run, and ends the executor."""
    decode = landed(pair)
    request = HostRequest(7, PROMPT[:num_tokens])
    assert decode.scheduler is not None
    promised, is_async = decode.scheduler.get_num_new_matched_tokens(request, 0)
    assert promised == (num_tokens - 1) // B * B
    assert promised < num_tokens
    assert is_async is False


@pytest.mark.parametrize("role", ROLES)
def test_nothing_is_ever_promised_asynchronously(start: Start, role: Any) -> None:
    """`(0, True)` raises, and a request that loads asynchronously vanishes from the new requests of its iteration."""
    served = start(role)
    assert served.scheduler is not None
    for num_tokens in (1, 8, 50):
        assert served.scheduler.get_num_new_matched_tokens(HostRequest(1, PROMPT[:num_tokens]), 0) == (0, False)
    assert served.worker.get_finished([1], [2]) == ([], [])


@pytest.mark.parametrize("num_local", [1, 5, 7, 9, 47])
def test_a_local_prefix_inside_a_block_matches_nothing(pair: tuple[Served, Served], num_local: int) -> None:
    """With partial reuse the engine's own prefix may end inside a block; whole blocks cannot go on from there."""
    decode = landed(pair)
    assert decode.scheduler is not None
    assert decode.scheduler.get_num_new_matched_tokens(HostRequest(7, PROMPT), num_local) == (0, False)
    assert decode.num_pinned == 0


def test_only_what_has_landed_is_promised(start: Start) -> None:
    """There is no channel to report a load that failed: what was promised must be there."""
    prefill, decode = start("prefill", max_num_tokens=20), start("decode")
    seen: list[int] = []

    def in_the_middle() -> None:
        request = prefill.executor.submit(HostRequest(1, PROMPT))
        assert decode.scheduler is not None
        while request.state != "finished":
            prefill.executor.step()
            asked = HostRequest(100 + len(seen), PROMPT)
            promised, _ = decode.scheduler.get_num_new_matched_tokens(asked, 0)
            found = decode.runtime.require_consumer().match(decode.runtime.sent_block_keys(PROMPT, ""))
            decode.scheduler.request_finished(asked, [])
            seen.append(promised)
            assert promised <= found * B

    assert hand_over(prefill, decode, PROMPT, in_the_middle).state == "landed"
    assert len(seen) == 3
    assert seen[0] < 48


def test_what_is_promised_stays_until_it_is_loaded(pair: tuple[Served, Served]) -> None:
    """Between promise and load other requests run; their codes must not push out those that were promised."""
    decode = landed(pair)
    assert decode.scheduler is not None
    request = HostRequest(7, PROMPT)
    decode.scheduler.get_num_new_matched_tokens(request, 0)
    assert decode.num_pinned == 6
    decode.scheduler.request_finished(request, [])
    assert decode.num_pinned == 0


def test_a_batch_that_was_started_and_not_run_keeps_its_loads(pair: tuple[Served, Served]) -> None:
    """Once the connector was started, the executor votes again on whether to run; the promise counts still."""
    decode = landed(pair)
    decode.executor.skip_forwards = 2
    request = decode.executor.submit(HostRequest(7, PROMPT, max_new_tokens=5))
    for _ in range(3):
        decode.executor.step()
    assert is_exact(decode, request)
    decode.executor.run()
    assert request.answer == answer_of_nothing_loaded(PROMPT, 5)
    assert decode.num_pinned == 0


def test_a_request_that_starts_over_is_loaded_again(pair: tuple[Served, Served]) -> None:
    """The newest cache manager may take a request's blocks and replay it without asking what matches (`request_reset`)."""
    decode = landed(pair)
    scheduler, worker = decode.scheduler, decode.worker
    assert scheduler is not None
    request = HostRequest(7, PROMPT)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (48, False)
    for blocks in ([9, 8, 7, 6, 5, 4, 3], [20, 21, 22, 23, 24, 25, 26]):
        scheduler.update_state_after_alloc(request, blocks)
        worker.bind_connector_meta(scheduler.build_connector_meta(SchedulerOutput()))
        decode.executor.stale_iteration()
        assert not (decode.executor.blocks.view[blocks[:6]] == POISON).any()
        scheduler.request_reset(request)
    scheduler.request_finished(request, [])
    assert decode.num_pinned == 0


@pytest.mark.parametrize(
    ("start_token", "stop_token", "left"),
    [(0, 48, range(0)), (0, 16, range(2, 6)), (0, 17, range(3, 6)), (32, 48, range(4)), (30, 48, range(3))],
)
def test_a_cancelled_part_of_a_promise_is_not_loaded(
    pair: tuple[Served, Served], start_token: int, stop_token: int, left: range
) -> None:
    """The newest versions may take less than was promised (`cancel_load`); the blocks of the rest hold something else."""
    decode = landed(pair)
    scheduler = decode.scheduler
    assert scheduler is not None
    request = HostRequest(7, PROMPT)
    scheduler.get_num_new_matched_tokens(request, 0)
    scheduler.cancel_load(request, start_token, stop_token)
    scheduler.update_state_after_alloc(request, list(range(7)))
    decode.worker.bind_connector_meta(scheduler.build_connector_meta(SchedulerOutput()))
    decode.executor.stale_iteration()
    written = (decode.executor.blocks.view != POISON).flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert written == list(left)
    assert decode.num_pinned == 0


# ---- iterations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
def test_blocks_are_never_kept_after_the_end_of_a_request(start: Start, role: Any) -> None:
    """Saving asynchronously leaks pinned blocks in 1.2 when two saves end in one iteration."""
    served = start(role)
    assert served.scheduler is not None
    request = HostRequest(1, PROMPT)
    served.scheduler.get_num_new_matched_tokens(request, 0)
    for _ in range(2):  # newer versions may end a request twice
        assert served.scheduler.request_finished(request, [1, 2]) is False
    assert served.scheduler.request_finished_by_layer_group(request, [[1, 2]]) is False


def test_blocks_are_not_read_after_the_forward_pass(start: Start) -> None:
    """With the pass over the engine may give blocks to somebody else, while codes still wait to be sent."""
    prefill, decode = start("prefill"), start("decode")

    def run_and_overwrite() -> None:
        prefill.executor.submit(HostRequest(1, PROMPT))
        prefill.executor.step()
        prefill.executor.blocks.pool.fill_(POISON)

    assert hand_over(prefill, decode, PROMPT, run_and_overwrite).state == "landed"
    request = decode.executor.submit(HostRequest(7, PROMPT, max_new_tokens=2))
    decode.executor.step()
    assert is_exact(decode, request)


def test_a_replayed_graph_on_the_prefill_server_ends_the_push_and_not_the_server(start: Start) -> None:
    """Hooks do not fire while a CUDA graph is replayed; an exception would end the executor's loop."""
    prefill, decode = start("prefill"), start("decode")
    prefill.executor.replay = True
    report = hand_over(prefill, decode, PROMPT, prefilled(prefill, PROMPT))
    assert (report.state, report.reason) == ("failed", "not_encoded")
    prefill.executor.replay = False
    other = prompt_of(2, 40)
    assert hand_over(prefill, decode, other, prefilled(prefill, other, 2)).state == "landed"


def test_a_replayed_graph_over_promised_tokens_ends_the_server(pair: tuple[Served, Served]) -> None:
    """Hooks do not fire while a CUDA graph is replayed; what was promised is then not in the pool, and text is wrong."""
    decode = landed(pair)
    decode.executor.replay = True
    request = decode.executor.submit(HostRequest(7, PROMPT))
    with pytest.raises(ConnectorOrderError, match="0 of 3 groups"):
        decode.executor.step()
    assert request.answer == []
    assert decode.num_pinned == 0


def test_metadata_that_are_presented_twice_are_used_once(start: Start) -> None:
    """An iteration without a new scheduler output starts the connector with the metadata of the last one still bound."""
    prefill, decode = start("prefill", max_num_tokens=20), start("decode")

    def run() -> None:
        prefill.executor.submit(HostRequest(1, PROMPT))
        for _ in range(3):
            prefill.executor.step()
            prefill.executor.blocks.pool.fill_(POISON)  # what a repeated iteration would encode
            prefill.executor.stale_iteration()

    # each iteration reads only what it has itself computed, or its blocks would be poisoned here
    assert hand_over(prefill, decode, PROMPT, run).num_writes == NUM_LAYERS * 3
    request = decode.executor.submit(HostRequest(7, PROMPT, max_new_tokens=2))
    decode.executor.step()
    decode.executor.blocks.pool.fill_(POISON)
    decode.executor.stale_iteration()
    assert (decode.executor.blocks.pool == POISON).all()
    assert request.state == "generation"


class EchoingRank(OneRank):
    """Rank 0 of two, which finds its own heads on the other one too."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=2)
        self.__dict__["num_gathered"] = 0  # its base is frozen

    def all_gather(self, rows: torch.Tensor, /) -> list[torch.Tensor]:
        self.__dict__["num_gathered"] += 1
        return [rows, rows]


def test_metadata_that_are_presented_twice_gather_no_heads_again(start: Start) -> None:
    """A rank that calls a collective which another one does not call waits for ever."""
    group = EchoingRank()
    prefill, decode = start("prefill", group=group), start("decode")

    def run() -> None:
        prefill.executor.submit(HostRequest(1, PROMPT))
        prefill.executor.step()
        num_gathered = group.__dict__["num_gathered"]
        assert num_gathered >= NUM_LAYERS
        prefill.executor.stale_iteration()
        assert group.__dict__["num_gathered"] == num_gathered

    assert hand_over(prefill, decode, PROMPT, run).state == "landed"


def test_later_chunks_of_a_prompt_are_not_new_requests(start: Start) -> None:
    """With chunked prefill the first chunk comes in `new_requests`, later ones in `cached_requests`."""
    prefill, decode = start("prefill", max_num_tokens=13), start("decode")
    assert hand_over(prefill, decode, PROMPT, prefilled(prefill, PROMPT)).num_landed == 6
    assert prefill.executor.manager.calls.count("meta") == 4
    request = decode.executor.submit(HostRequest(7, PROMPT, max_new_tokens=2))
    decode.executor.step()
    assert is_exact(decode, request)


def test_a_block_that_the_engine_does_not_have_is_not_encoded(start: Start) -> None:
    """Block ids can be -1; as an index that reads the last block of the pool."""
    prefill, decode = start("prefill"), start("decode")
    prefill.executor.blocks.holes = {2}
    report = hand_over(prefill, decode, PROMPT, prefilled(prefill, PROMPT))
    assert (report.state, report.reason, report.num_landed) == ("failed", "not_encoded", 0)
    assert decode.runtime.store.statistics().num_entries == 0


def test_a_block_that_the_engine_does_not_have_is_not_filled(pair: tuple[Served, Served]) -> None:
    """Block ids can be -1; as an index that fills the last block of the pool, which is somebody else's."""
    decode = landed(pair)
    decode.executor.blocks.holes = {2}
    decode.executor.submit(HostRequest(7, PROMPT))
    with pytest.raises(ConnectorOrderError, match=r"-1.* were promised"):
        decode.executor.step()
    assert (decode.executor.blocks.pool == POISON).all()


def test_a_hole_behind_the_promise_does_not_matter(pair: tuple[Served, Served]) -> None:
    """Block ids can be -1 where nothing was promised."""
    decode = landed(pair)
    decode.executor.blocks.holes = {6}
    request = decode.executor.submit(HostRequest(7, PROMPT, max_new_tokens=2))
    decode.executor.step()
    assert is_exact(decode, request)


@pytest.mark.parametrize("role", ROLES)
def test_blocks_that_stop_growing_disable_codes_loudly(
    start: Start, role: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """An open report: with a connector, blocks stop being allocated while a request decodes (1.3.0rc11, #13320)."""
    served = start(role)
    served.executor.run(HostRequest(1, PROMPT, max_new_tokens=30))
    assert served.runtime.disabled is None
    served.executor.blocks.stops_growing = True
    served.executor.run(HostRequest(2, PROMPT, max_new_tokens=10))
    assert served.runtime.disabled is not None
    assert served.runtime.disabled.startswith("request 2 has 7 blocks for 57 tokens")
    assert [record.levelname for record in caplog.records if "SCD is disabled" in record.message] == ["ERROR"]


def test_a_disabled_server_sends_and_promises_nothing(pair: tuple[Served, Served]) -> None:
    """What follows from blocks that stop growing."""
    prefill, decode = pair
    landed(pair)
    decode.runtime.disable("a test")
    request = HostRequest(7, PROMPT, max_new_tokens=4)
    decode.executor.run(request)
    assert request.matched_tokens == 0
    assert request.answer == answer_of_nothing_loaded(PROMPT, 4)
    prefill.runtime.disable("a test")
    other = prompt_of(2, 40)

    def run() -> None:
        prefilled(prefill, other, 2)()
        found = prefill.runtime.require_producer().statistics()
        assert (found["granted"], found["planned"]) == (2, 1)
        raise LookupError("seen enough: nothing will land")

    with pytest.raises(LookupError):
        hand_over(prefill, decode, other, run)


def test_streams_are_opaque(pair: tuple[Served, Served]) -> None:
    """`torch.cuda` raises on a machine without a GPU, and a stream is whatever the engine passes."""
    decode = landed(pair)
    stream = object()
    decode.worker.bind_connector_meta(SimpleNamespace(iteration=0, fingerprint="", loads=(), withdrawn=()))
    decode.worker.start_load_kv(stream)
    for layer in range(NUM_LAYERS):
        decode.worker.wait_for_layer_load(layer, stream)
        decode.worker.save_kv_layer(layer, stream)
    decode.worker.wait_for_save(stream)
    for path in (ROOT / "scd_trt" / "serving").glob("*.py"):
        assert "torch.cuda" not in path.read_text(), path


# ---- whose cache -----------------------------------------------------------------------------------------------------


def test_codes_of_one_salt_never_serve_another(start: Start) -> None:
    """Decoded cache enters the radix tree as if it were exact; salts keep tenants apart, so codes must respect them."""
    prefill, decode = start("prefill"), start("decode")

    def run() -> None:
        prefill.executor.run(HostRequest(1, PROMPT, cache_salt_id=5))

    assert hand_over(prefill, decode, PROMPT, run, salt="5").state == "landed"
    for salt_id, matched in ((None, 0), (6, 0), (5, 48)):
        request = HostRequest(10 + (salt_id or 0), PROMPT, cache_salt_id=salt_id)
        decode.executor.run(request)
        assert request.matched_tokens == matched


def test_a_salt_is_taken_as_text_where_the_engine_keeps_it() -> None:
    """The matcher sees no HTTP extras: 1.2 keeps a number in place of the salt, newer versions the salt itself."""
    assert request_salt(HostRequest(1, [], cache_salt_id=None)) == ""
    assert request_salt(HostRequest(1, [], cache_salt_id=5)) == "5"
    newer: Any = SimpleNamespace(request_id=1, cache_salt_id=5, cache_salt="tenant")
    assert request_salt(newer) == "tenant"
    assert request_salt(SimpleNamespace(request_id=1, cache_salt_id=None, cache_salt=None)) == ""  # type: ignore[arg-type]


# ---- refused at construction -----------------------------------------------------------------------------------------

WRONG: dict[str, Any] = {
    "pipeline_parallel_size": 2,
    "context_parallel_size": 2,
    "max_beam_width": 2,
    "enable_attention_dp": True,
    "speculative_config": object(),
    "scheduler_config.capacity_scheduler_policy": "MAX_UTILIZATION",
    "kv_cache_config.enable_partial_reuse": True,
    "kv_cache_config.host_cache_size": 1 << 30,
    "kv_cache_config.max_attention_window": [4096, 1024],
    "kv_cache_config.dtype": "nvfp4",
    "kv_cache_config.enable_block_reuse": True,
    "disable_overlap_scheduler": False,
    "torch_compile_config.enable_piecewise_cuda_graph": True,
    "prefill_cuda_graph_backend": "piecewise",
    "enable_lora": True,
    "lora_config": object(),
    "sparse_attention_config": object(),
}


def good_args(**changed: Any) -> SimpleNamespace:
    """Arguments of TensorRT-LLM as the rendered files make them; `changed` by dotted names with __ for the dot."""
    args = SimpleNamespace(
        model="somewhere",
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        context_parallel_size=1,
        max_beam_width=1,
        enable_attention_dp=False,
        speculative_config=None,
        disable_overlap_scheduler=True,
        prefill_cuda_graph_backend="disabled",
        enable_lora=False,
        lora_config=None,
        sparse_attention_config=None,
        torch_compile_config=None,
        scheduler_config=SimpleNamespace(capacity_scheduler_policy="GUARANTEED_NO_EVICT"),
        kv_cache_config=SimpleNamespace(
            enable_partial_reuse=False,
            enable_block_reuse=False,
            host_cache_size=0,
            max_attention_window=[4096, 4096],
            dtype="auto",
            tokens_per_block=B,
        ),
    )
    for name, value in changed.items():
        section, _, key = name.rpartition("__")
        if section and getattr(args, section) is None:
            setattr(args, section, SimpleNamespace())
        setattr(getattr(args, section) if section else args, key, value)
    return args


@pytest.mark.parametrize("setting", WRONG)
def test_a_setting_that_would_break_later_is_refused_by_name(setting: str) -> None:
    """Exceptions of the constructor stop the server with a message, later ones without; corrupt text has none at all."""
    roles = next(refusal.roles for refusal in REFUSALS if refusal.setting == setting)
    bad = good_args(**{setting.replace(".", "__"): WRONG[setting]})
    for role in ROLES:
        check_engine(good_args(), role)
        if role in roles:
            with pytest.raises(EngineSettingsError, match=rf"(?m)^  {re.escape(setting)} is .*: set .*; otherwise "):
                check_engine(bad, role)
        else:
            check_engine(bad, role)


def test_every_refusal_is_tested_and_known_to_the_configuration_check() -> None:
    """What the connector refuses when it runs, `scd-trt config check` must refuse before."""
    assert {refusal.setting for refusal in REFUSALS} == set(WRONG)
    assert {refusal.setting for refusal in REFUSALS} <= {requirement.key for requirement in requirements.SERVER}


def test_all_wrong_settings_are_named_at_once_and_unknown_ones_are_passed() -> None:
    """Versions differ in what they know."""
    with pytest.raises(EngineSettingsError, match=r"(?s)max_beam_width.*enable_lora"):
        check_engine(good_args(max_beam_width=4, enable_lora=True), "decode")
    check_engine(object(), "prefill")


class Policy:
    """TensorRT-LLM's is an enumeration."""

    def __init__(self, value: str) -> None:
        self.value = value


def test_the_scheduler_policy_may_be_an_enumeration() -> None:
    """Any policy but GUARANTEED_NO_EVICT pauses requests, whose blocks are then gone."""
    name = "scheduler_config__capacity_scheduler_policy"
    check_engine(good_args(**{name: Policy("GUARANTEED_NO_EVICT")}), "decode")
    with pytest.raises(EngineSettingsError):
        check_engine(good_args(**{name: Policy("MAX_UTILIZATION")}), "decode")


def as_namespace(value: Any) -> Any:
    if isinstance(value, dict):
        return SimpleNamespace(**{key: as_namespace(each) for key, each in value.items()})
    return value


@pytest.mark.parametrize(
    "file", sorted(ROOT.glob("engine_configs/*/*/*.yaml")), ids=lambda path: "-".join(path.parts[-3:])
)
def test_committed_engine_files_are_not_refused(file: Path) -> None:
    """The settings that SCD needs are written into `engine_configs`."""
    if file.stem in ROLES:
        args = as_namespace(yaml.safe_load(file.read_text()))
        check_engine(args, file.stem)  # type: ignore[arg-type]
        assert args.kv_cache_config.use_kv_cache_manager_v2 is False
        assert args.return_perf_metrics is True


def test_attention_data_parallelism_is_declined_on_both_classes() -> None:
    """Newer versions run attention data parallelism only with connectors that say `supports_attention_dp`."""
    assert ScdConnectorScheduler.supports_attention_dp is False
    assert ScdConnectorWorker.supports_attention_dp is False


def test_numbers_of_engine_and_pair_must_be_equal() -> None:
    """Blocks of another size never match; ranks that MPI does not know cannot gather heads."""
    args = good_args(kv_cache_config__tokens_per_block=64, tensor_parallel_size=2)
    with pytest.raises(EngineSettingsError, match="tokens_per_block is 64 here and 32 in the pair"):
        check_same(args, "kv_cache_config.tokens_per_block", 32, source="the pair")
    check_same(args, "kv_cache_config.tokens_per_block", 64, source="the pair")
    with pytest.raises(EngineSettingsError, match="tensor_parallel_size is 2 here and 1"):
        check_same(args, "tensor_parallel_size", 1, source="the MPI world")


# ---- built by TensorRT-LLM -------------------------------------------------------------------------------------------


@dataclass
class Environment:
    """What a rank of TensorRT-LLM is started with."""

    root: Path
    monkeypatch: pytest.MonkeyPatch

    def give(self, role: str, translator: Any = None) -> None:
        """Pair file, artifact and variables of a role."""
        given = translator or exact()
        translators.save(given, self.root / "translator")
        config = loopback_config(B)
        data = config.model_dump(mode="json", exclude_unset=True)
        data["translator"] = str(self.root / "translator")
        data["servers"] = {each: {"port": free_port(), "control_port": free_port()} for each in ROLES}
        (self.root / "pair.yaml").write_text(yaml.safe_dump(data))
        self.monkeypatch.setenv(CONFIG_VARIABLE, str(self.root / "pair.yaml"))
        self.monkeypatch.setenv(ROLE_VARIABLE, role)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Environment]:
    opened: list[ConnectorRuntime] = []
    monkeypatch.setattr(connector_runtime, "_process_runtime", opened)
    yield Environment(tmp_path, monkeypatch)
    for runtime in opened:
        runtime.close()


def test_variables_reach_the_ranks() -> None:
    """Only variables that begin with TLLM or TRTLLM are handed to the MPI workers."""
    assert CONFIG_VARIABLE.startswith("TLLM")
    assert ROLE_VARIABLE.startswith("TLLM")


def test_settings_are_refused_before_a_session_is_opened(environment: Environment) -> None:
    """Exceptions of the constructor stop the server with a message."""
    environment.give("decode")
    for connector in (ScdConnectorScheduler, ScdConnectorWorker):
        with pytest.raises(EngineSettingsError, match="max_beam_width"):
            connector(good_args(max_beam_width=2))
    assert connector_runtime._process_runtime == []


def test_halves_that_are_built_at_the_same_time_share_one_session(environment: Environment) -> None:
    """Scheduler and worker of rank 0 are built concurrently, in two threads."""
    environment.give("decode")
    with ThreadPoolExecutor(2) as threads:
        halves = [threads.submit(half, good_args()) for half in (ScdConnectorWorker, ScdConnectorScheduler)]
        assert [type(half.result()) for half in halves] == [ScdConnectorWorker, ScdConnectorScheduler]
    assert len(connector_runtime._process_runtime) == 1


def test_patch_layers_are_refused_inside_tensorrt_llm(environment: Environment) -> None:
    """A connector sees no attention inputs there; the first prompt would end the executor."""
    environment.give("prefill", random_translator())
    with pytest.raises(ConnectorError, match="Patch layers"):
        ScdConnectorWorker(good_args())


def test_layers_of_several_windows_are_refused(environment: Environment) -> None:
    """One pool per attention window (VSWA): a block id means something else in each."""
    environment.give("decode", exact(sliding_windows=(None, 16, None)))
    with pytest.raises(ConnectorError, match="different windows"):
        ScdConnectorWorker(good_args())


def test_a_model_that_the_translator_was_not_fitted_for_is_refused(environment: Environment) -> None:
    """Codes of another model's cache decode into fluent nonsense."""
    fitted = save_tiny_model(environment.root / "fitted")
    other = save_perturbed_copy(fitted, environment.root / "other")
    spec = ModelSpec.from_directory(fitted)
    groups = tuple((layer, layer + 1) for layer in range(spec.num_layers))
    fields = {"name": "tiny", "policy": "exact", "code_dtype": "float32", "raw_dtype": "float32", "groups": groups}
    layers = (RawLayer(),) * spec.num_layers
    environment.give("decode", translators.build(fields | {"producer": spec, "consumer": spec}, layers))
    ScdConnectorWorker(good_args(model=str(fitted)))
    with pytest.raises(TranslatorError, match="weights"):
        ScdConnectorWorker(good_args(model=str(other)))


def test_no_shutdown_call_is_needed(tmp_path: Path, environment: Environment) -> None:
    """Connectors get no call when the server ends (1.2): a thread that is not a daemon would keep a dead server's process."""
    environment.give("decode")
    program = """
        import logging
        from scd_trt.serving.connector import ScdConnectorScheduler, ScdConnectorWorker
        halves = ScdConnectorWorker(object()), ScdConnectorScheduler(object())
        print("built", flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "built\n"), done.stderr


# ---- versions --------------------------------------------------------------------------------------------------------


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Writes a package that stands for TensorRT-LLM, with its connector interface at a path."""

    def write(
        path: str, *, body: str = "class KvCacheConnectorScheduler: ...\nclass KvCacheConnectorWorker: ...\n"
    ) -> Path:
        root = tmp_path / "host"
        file = root.joinpath(*path.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True)
        for directory in (file.parent, *file.parent.parents):
            if directory == root:
                break
            (directory / "__init__.py").touch()
        (root / "tensorrt_llm" / "__init__.py").write_text("__version__ = '9.9'\n")
        file.write_text(body)
        monkeypatch.syspath_prepend(str(root))
        return root

    yield write
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


@pytest.mark.parametrize("path", trtllm.API_PATHS)
def test_the_interface_is_found_where_either_line_has_it(host: Callable[..., Path], path: str) -> None:
    """The module moved between 1.3.0rc11 and 1.3.0rc22."""
    host(path)
    assert trtllm.connector_bases() == (
        connector_api.KvCacheConnectorScheduler,
        connector_api.KvCacheConnectorWorker,
    )  # installed, but this process is not one of its own
    __import__("tensorrt_llm")
    scheduler, worker = trtllm.connector_bases()
    assert (scheduler.__module__, worker.__module__) == (path, path)


def test_an_interface_in_neither_place_is_an_error(host: Callable[..., Path]) -> None:
    """A version that moves it again must not run with classes that it does not know."""
    host("tensorrt_llm.elsewhere")
    __import__("tensorrt_llm")
    with pytest.raises(trtllm.HostError, match=r"TensorRT-LLM 9\.9 has its connector interface in none"):
        trtllm.connector_bases()


def test_a_broken_host_is_not_taken_for_another_version(host: Callable[..., Path]) -> None:
    """An import that fails inside the interface's own module says more than any guess."""
    host(trtllm.API_PATHS[0], body="import a_module_that_is_missing\n")
    __import__("tensorrt_llm")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_missing"):
        trtllm.connector_bases()


def test_inside_the_host_the_classes_derive_from_its_own(host: Callable[..., Path]) -> None:
    """Newer versions call methods that ours do not define, and bring their defaults in their base classes."""
    body = """
    class KvCacheConnectorScheduler:
        def __init__(self, llm_args): ...
        def try_abort_request(self, request_id, reason): return "default"
    class KvCacheConnectorWorker:
        def __init__(self, llm_args): ...
        def take_failed_load_request_ids(self): return "default"
    """
    root = host(trtllm.API_PATHS[1], body=textwrap.dedent(body))
    program = """
        import tensorrt_llm
        from scd_trt.serving.connector import ScdConnectorScheduler, ScdConnectorWorker
        make = object.__new__
        print(make(ScdConnectorScheduler).try_abort_request(1, ""), make(ScdConnectorWorker).take_failed_load_request_ids())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )
    assert done.stdout == "default default\n", done.stderr


def real_api() -> Any:
    """TensorRT-LLM's own module where it can be imported."""
    pytest.importorskip("tensorrt_llm", reason="TensorRT-LLM is not installed")
    return trtllm.load_api()


@pytest.mark.parametrize("half", ["Scheduler", "Worker"])
def test_the_real_classes_have_no_abstract_method_that_ours_lack(half: str) -> None:
    """A method that a newer version makes abstract stops the server at construction."""
    ours = {"Scheduler": ScdConnectorScheduler, "Worker": ScdConnectorWorker}[half]
    base = getattr(real_api(), f"KvCacheConnector{half}")
    assert {name for name in base.__abstractmethods__ if not hasattr(ours, name)} == set()


# ---- the pool --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (torch.zeros(4, NUM_LAYERS, 1, NUM_KV_HEADS * B * 8), "MLA"),
        (
            torch.zeros(4, NUM_LAYERS, 2, NUM_KV_HEADS * B * 8).to(torch.float8_e4m3fn),
            "float8_e4m3fn: a quantised cache",
        ),
        (torch.zeros(4, NUM_LAYERS, 2, NUM_KV_HEADS * B * 4, dtype=torch.uint8), "uint8: a quantised cache"),
        (torch.zeros(4, 77), "recurrent state"),
        (torch.zeros(4, NUM_LAYERS + 1, 2, NUM_KV_HEADS * B * 8), "tokens_per_block"),
        (torch.zeros(4, NUM_LAYERS, 2, NUM_KV_HEADS * 2 * B * 8), "tokens_per_block"),
    ],
    ids=["mla", "fp8", "nvfp4", "hybrid", "layers", "block-size"],
)
def test_a_pool_of_anything_but_plain_keys_and_values_is_refused(
    start: Start, pool: torch.Tensor, message: str
) -> None:
    """MLA, recurrent state and quantised caches have pools in which no rows of keys and values lie."""
    served = start("decode")
    with pytest.raises(PoolError, match=message):
        served.worker.register_kv_caches(pool)


@dataclass
class Region:
    """A byte range that repeats once for each page, as TensorRT-LLM 1.4 describes it."""

    rows: torch.Tensor
    buffers: tuple[Any, ...]

    def as_tensor(self, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return self.rows.view(dtype)


def layout_of(pool: torch.Tensor, **changed: Any) -> Any:
    """The description of a pool."""
    buffers = tuple(
        SimpleNamespace(layer_id=layer, role=role, expansion=1)
        for layer in range(pool.shape[1])
        for role in ("key", "value")
    )
    region = Region(pool.flatten(1), changed.pop("buffers", buffers))
    group = SimpleNamespace(layer_group_id=0, window_size=None, regions=(region,), replicated_regions=())
    return SimpleNamespace(**{"tokens_per_block": B, "groups": (group,)} | changed)


def test_a_pool_described_as_a_layout_is_the_same_pool(pair: tuple[Served, Served]) -> None:
    """The second cache manager hands over byte regions (`register_kv_cache_layout`) in place of one tensor."""
    decode = landed(pair)
    decode.executor.blocks.pool.fill_(POISON)
    decode.worker._llm_args = good_args(kv_cache_config__dtype="float32")
    decode.worker.register_kv_cache_layout(layout_of(decode.executor.blocks.pool))
    request = decode.executor.submit(HostRequest(7, PROMPT, max_new_tokens=2))
    decode.executor.step()
    assert is_exact(decode, request)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layout_of_bytes_is_read_in_the_pools_dtype(dtype: torch.dtype) -> None:
    """A region of the newest layouts is bytes; older ones had an element type."""
    pool = torch.randn(5, NUM_LAYERS, 2, 32).to(dtype)
    for stated in ({}, {"dtype": dtype}):
        found = pool_of_layout(layout_of(pool, **stated), num_layers=NUM_LAYERS, tokens_per_block=B, dtype=dtype)
        assert torch.equal(found, pool)
        assert found.data_ptr() == pool.data_ptr()


def _swapped() -> tuple[Any, ...]:
    return tuple(
        SimpleNamespace(layer_id=layer, role=role, expansion=1)
        for role in ("key", "value")
        for layer in range(NUM_LAYERS)
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens_per_block": 64}, "64 tokens per block, the pair 8"),
        ({"groups": (1, 2)}, "2 layer groups"),
        ({"buffers": ()}, "expected key and value"),
        ({"buffers": _swapped()}, "expected key and value"),
    ],
    ids=["block-size", "windows", "mla", "order"],
)
def test_a_layout_that_is_not_one_pool_is_refused(changed: dict[str, Any], message: str) -> None:
    """Several attention windows, scales beside the rows, another order: offsets would be those of something else."""
    pool = torch.zeros(5, NUM_LAYERS, 2, 32)
    with pytest.raises(PoolError, match=message):
        pool_of_layout(layout_of(pool, **changed), num_layers=NUM_LAYERS, tokens_per_block=B, dtype=torch.float32)


def test_block_scales_beside_the_rows_are_refused() -> None:
    """NVFP4 keeps scales in a region of its own."""
    layout = layout_of(torch.zeros(5, NUM_LAYERS, 2, 32))
    (group,) = layout.groups
    group.regions = group.regions * 2
    with pytest.raises(PoolError, match="2 regions"):
        pool_of_layout(layout, num_layers=NUM_LAYERS, tokens_per_block=B, dtype=torch.float32)


def test_blocks_named_by_layer_group_are_those_of_the_only_group(pair: tuple[Served, Served]) -> None:
    """1.4 calls `..._by_layer_group` where the cache reports pages by group, and may leave the flat lists empty."""
    decode = landed(pair)
    scheduler = decode.scheduler
    assert scheduler is not None
    request = HostRequest(7, PROMPT)
    scheduler.get_num_new_matched_tokens(request, 0)
    scheduler.update_state_after_alloc_by_layer_group(request, [list(range(7))])
    data: Any = RequestData(7, PROMPT, [], 0, 2)
    data.new_block_ids_by_layer_group = [list(range(7))]
    (load,) = scheduler.build_connector_meta(SchedulerOutput(new_requests=[data])).loads
    assert load.block_ids == tuple(range(7))
    assert decode.runtime.disabled is None
    with pytest.raises(ConnectorOrderError, match="2 layer groups"):
        scheduler.update_state_after_alloc_by_layer_group(request, [[1], [2]])


# ---- ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_heads", "size"), [(8, 1), (8, 2), (8, 8), (2, 4), (1, 8), (4, 4)])
def test_every_head_is_on_some_rank_and_joins_in_order(num_heads: int, size: int) -> None:
    """Each rank of a tensor-parallel server holds its own heads; with more ranks than heads, copies."""
    rows = torch.randn(3, num_heads, 5)
    ranges = [heads_of_rank(num_heads, rank=rank, size=size) for rank in range(size)]
    assert torch.equal(join_heads([rows[:, heads.start : heads.stop] for heads in ranges], num_heads), rows)


def test_ranks_that_do_not_fit_the_heads_are_refused() -> None:
    """Heads cannot be cut."""
    with pytest.raises(RanksError, match="tensor_parallel_size 3 does not fit 8 kv heads"):
        heads_of_rank(8, rank=0, size=3)


class LonelyRank(OneRank):
    """Rank 0 of two, as far as promises go: the other one does not answer."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=2)


def test_what_is_promised_is_at_hand_on_every_rank(start: Start) -> None:
    """A promise made on rank 0 holds for ranks that have no store: the codes travel with the broadcast metadata."""
    prefill = start("prefill")
    decode = start("decode", group=LonelyRank())
    assert hand_over(prefill, decode, PROMPT, prefilled(prefill, PROMPT)).state == "landed"
    scheduler = decode.scheduler
    assert scheduler is not None
    request = HostRequest(7, PROMPT)
    assert scheduler.get_num_new_matched_tokens(request, 16) == (32, False)
    scheduler.update_state_after_alloc(request, list(range(7)))
    (load,) = scheduler.build_connector_meta(SchedulerOutput()).loads
    layout = decode.runtime.layout
    assert [len(codes) for codes in load.codes] == [32 * size for size in layout.bytes_per_token]
    with decode.runtime.require_consumer().pin(load.keys) as pinned:
        for group, codes in enumerate(load.codes):
            assert codes == pinned.codes(group)[16:48].tobytes()


@pytest.mark.parametrize("role", ROLES)
def test_a_rank_with_another_translator_is_refused(start: Start, role: Any) -> None:
    """Ranks on two hosts may have been given two artifacts; every rank decodes for itself."""
    leader = start(role)
    follower = serve(role, exact(norm_eps=1e-3), group=FollowingRank())
    assert leader.scheduler is not None
    follower.worker.bind_connector_meta(leader.scheduler.build_connector_meta(SchedulerOutput()))
    with pytest.raises(ConnectorError, match="rank 1 has translator"):
        follower.worker.start_load_kv(None)


class FollowingRank(OneRank):
    """Rank 1 of two."""

    def __init__(self) -> None:
        super().__init__(rank=1, size=2)


def test_a_rank_without_a_session_opens_no_port() -> None:
    """Every rank imports the connector and builds a worker; the control port is rank 0's."""
    layout = KvLayout(NUM_LAYERS, NUM_KV_HEADS // 2, 8, B, torch.float32)
    served = serve("decode", exact(), group=FollowingRank())
    assert served.scheduler is None
    assert (served.runtime.producer, served.runtime.consumer) == (None, None)
    assert served.runtime.role == "decode"
    assert served.executor.blocks.pool.shape == layout.allocate(64).shape
    with pytest.raises(ConnectorError, match="rank 1, which has no session"):
        served.runtime.require_consumer()

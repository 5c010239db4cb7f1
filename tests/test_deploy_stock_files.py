"""The mirror of TensorRT-LLM's files: what loads, what is a typo, and what is left to TensorRT-LLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scd_trt.config import ConfigError
from scd_trt.deploy.stock_files import DisaggStockFile, StockFile, load_disagg, load_server_options
from scd_trt.deploy.stock_schema import DisaggFile, KvConnectorConfig, ServerOptions, Stock

SCD = """\
scd:
  pair: demo
  producer: {model: package:smollm2-135m-instruct}
  consumer: {model: ../b, adapter: adapter}
  translator: translators/demo
  control: {secret_file: secret}
"""


def options(tmp_path: Path, text: str, allow: frozenset[str] = frozenset()) -> StockFile:
    path = tmp_path / "prefill.yaml"
    path.write_text(text)
    return load_server_options(path, allow=allow)


def disagg(tmp_path: Path, text: str) -> DisaggStockFile:
    path = tmp_path / "disagg.yaml"
    path.write_text(text)
    return load_disagg(path)


def test_stock_file_with_urls_loads(tmp_path: Path) -> None:
    file = disagg(
        tmp_path,
        """\
hostname: localhost
port: 8333
backend: pytorch
max_retries: 2
conditional_disagg_config: {max_local_prefill_length: 100}
context_servers:
  num_instances: 2
  router: {type: kv_cache_aware}
  tensor_parallel_size: 1
  kv_cache_config: {free_gpu_memory_fraction: 0.2, enable_partial_reuse: false}
  cache_transceiver_config: {backend: NIXL}
  urls: ["localhost:8001", "[::1]:8002"]
generation_servers:
  num_instances: 1
  urls: ["localhost:8003"]
""",
    )
    assert file.options.context_servers.urls == ("localhost:8001", "[::1]:8002")
    assert file.options.conditional_disagg_config is not None
    assert file.passed == ()
    assert file.options.scd is None


def test_stock_file_with_discovery_loads(tmp_path: Path) -> None:
    file = disagg(
        tmp_path,
        """\
port: 8000
disagg_cluster:
  cluster_uri: http://localhost:8000
  cluster_name: test
  minimal_instances: {context_servers: 1, generation_servers: 2}
  heartbeat_interval_sec: 5
  inactive_timeout_sec: 10
""",
    )
    assert file.options.disagg_cluster is not None
    assert file.options.disagg_cluster.cluster_uri == "http://localhost:8000"


@pytest.mark.parametrize(
    ("text", "line", "meant"),
    [
        ("kv_cache_config:\n  enable_partial_resue: false\n", 2, "enable_partial_reuse"),
        ("kv_cache_config:\n  host_cache_sise: 0\n", 2, "host_cache_size"),
        ("max_batch_size: 8\ndisable_overlap_schedular: true\n", 2, "disable_overlap_scheduler"),
        ("kv_connector_config: {connector_modul: x}\n", 1, "connector_module"),
        ("tp_size: 2\n", 1, "tensor_parallel_size"),
        ("kv_cache_free_gpu_memory_fraction: 0.5\n", 1, "kv_cache_config.free_gpu_memory_fraction"),
        ("stream_intervall: 1\n", 1, "stream_interval"),
    ],
)
def test_typo_of_a_stock_key_names_line_and_key(tmp_path: Path, text: str, line: int, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"prefill\.yaml:{line}: .*unknown key; did you mean '{meant}'\?"):
        options(tmp_path, text)


def test_every_mistake_is_told_typos_and_values_alike(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        options(tmp_path, "tensor_paralel_size: 2\nmax_batch_size: 0\nkv_cache_config: {tokens_per_block: x}\n")
    assert len(str(caught.value).splitlines()) == 3
    assert "prefill.yaml:2: max_batch_size: Input should be greater than 0; found 0" in str(caught.value)


def test_key_of_a_newer_release_passes_through_and_is_reported(tmp_path: Path) -> None:
    file = options(tmp_path, "max_batch_size: 4\nquantum_scheduler:\n  depth: 3\nkv_cache_config:\n  warp_drive: 1\n")
    assert [(passed.line, passed.key) for passed in file.passed] == [
        (2, "quantum_scheduler"),
        (5, "kv_cache_config.warp_drive"),
    ]
    assert file.options.max_batch_size == 4


def test_key_that_only_looks_like_a_typo_can_be_allowed(tmp_path: Path) -> None:
    text = "kv_cache_config: {enable_partial_reuse2: 1}\n"
    with pytest.raises(ConfigError, match=r"allow kv_cache_config\.enable_partial_reuse2"):
        options(tmp_path, text)
    file = options(tmp_path, text, frozenset({"kv_cache_config.enable_partial_reuse2"}))
    assert [passed.key for passed in file.passed] == ["kv_cache_config.enable_partial_reuse2"]
    allowed = disagg(tmp_path, "max_retriez: 1\n" + SCD + "  allow_keys: [max_retriez]\n")
    assert [passed.key for passed in allowed.passed] == ["max_retriez"]


LONG_KEYS = sorted(key for key in ServerOptions.model_fields if len(key) >= 8)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(LONG_KEYS), st.data())
def test_a_lost_or_swapped_letter_is_always_a_typo(tmp_path: Path, key: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(key) - 2))
    wrong = data.draw(st.sampled_from([key[:at] + key[at + 1 :], key[:at] + key[at + 1] + key[at] + key[at + 2 :]]))
    if wrong in ServerOptions.model_fields.keys() | ServerOptions.other_keys:
        return
    with pytest.raises(ConfigError, match="did you mean"):
        options(tmp_path, f"{wrong}: 1\n")


def all_sections(model: type[Stock] = Stock) -> list[type[Stock]]:
    return [model, *(found for child in model.__subclasses__() for found in all_sections(child))]


@pytest.mark.parametrize("section", all_sections(), ids=lambda section: section.__name__)
def test_a_key_is_known_once_and_mistaken_names_are_no_keys(section: type[Stock]) -> None:
    typed = section.model_fields.keys() - {"perf_metrics_max_requests", "perf_metrics_output_dir"}
    assert not typed & section.other_keys
    assert not section.mistaken_keys.keys() & (section.model_fields.keys() | section.other_keys)


def test_connector_section_has_every_field_of_the_api_manifest() -> None:
    manifest = json.loads((Path(__file__).parent / "trtllm_connector_api.json").read_text())
    known = KvConnectorConfig.model_fields.keys() | KvConnectorConfig.other_keys
    assert manifest["1.2.x"]["KvCacheConnectorConfig"]["fields"].keys() <= known
    assert manifest["main~1.4"]["KvCacheConnectorConfig_added"].keys() <= known


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("context_servers: {urls: ['http://a:1']}", "'http://a:1' must be host:port; leave out 'http://'"),
        ("context_servers: {urls: [a]}", "context_servers.urls.0"),
        ("context_servers: {num_instances: 2, urls: ['a:1']}", "num_instances is 2 for 1 urls; make them equal"),
        ("context_servers: {num_instances: 2, urls: ['a:1', 'a:1']}", "the same url twice"),
        (
            "context_servers: {urls: ['a:1']}\ngeneration_servers: {urls: ['a:1']}",
            "a:1 in both server sections; a worker plays one role",
        ),
        (
            "max_batch_size: 4\ncontext_servers: {max_batch_size: 8}",
            "max_batch_size is 4 at the top and 8 in context_servers",
        ),
        ("prefill_servers: {}", "did you mean 'context_servers'?"),
        ("disagg_cluster: {cluster_name: x}", "disagg_cluster.cluster_uri: missing"),
        ("schedule_style: contxt_first", "found 'contxt_first'; did you mean 'context_first'?"),
        ("hostname: a\nhostname: b", "disagg.yaml:2: hostname: key given twice; keep one"),
        ("kv_cache_config: {dtype: fp8, dtype: auto}", "disagg.yaml:1: kv_cache_config.dtype: key given twice"),
    ],
)
def test_what_the_stock_parser_would_trip_over_is_told_with_its_line(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        disagg(tmp_path, text + "\n")
    assert expected in str(caught.value)


def test_top_level_values_may_repeat_in_the_sections(tmp_path: Path) -> None:
    file = disagg(tmp_path, "max_batch_size: 4\ncontext_servers: {max_batch_size: 4}\n")
    assert file.options.context_servers.max_batch_size == 4


@pytest.mark.parametrize(
    ("addition", "expected"),
    [
        ("  transports: {}\n", r"scd\.transports: unknown key; did you mean 'transport'\?"),
        ("  wholly_new: 1\n", r"scd\.wholly_new: unknown key;"),
        ("  transport: {lane: ib}\n", r"scd\.transport\.lane: Input should be 'auto', 'tcp' or 'shm'; found 'ib'"),
        ("  router: {port: 9}\n", r"scd\.router: port belongs to port, in the stock part of the file"),
        ("  workers: {prefill: {control_urls: ['http://a:1']}}\n", r"scd\.workers\.prefill\.control_urls\.0"),
    ],
)
def test_our_own_section_is_strict(tmp_path: Path, addition: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=r"disagg\.yaml:7: " + expected):
        disagg(tmp_path, SCD + addition)


def test_paths_of_the_scd_section_are_relative_to_the_file(tmp_path: Path) -> None:
    section = disagg(tmp_path, SCD).options.scd
    assert section is not None
    assert section.producer.model == "package:smollm2-135m-instruct"
    assert section.consumer.model == str((tmp_path / ".." / "b").resolve())
    assert section.consumer.adapter == tmp_path / "adapter"
    assert section.translator_path() == tmp_path / "translators" / "demo"
    assert section.control.secret_file == tmp_path / "secret"


@pytest.mark.parametrize("text", ["", "[]", "a: [", "1", "kv_cache_config: []", "scd: 3", "context_servers: x"])
def test_content_of_another_kind_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"disagg\.yaml"):
        disagg(tmp_path, text)


def test_missing_file_says_which(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read"):
        load_disagg(tmp_path / "nowhere.yaml")


def test_lines_of_present_and_absent_keys(tmp_path: Path) -> None:
    file = options(tmp_path, "max_batch_size: 4\nkv_cache_config:\n  tokens_per_block: 32\n")
    assert file.line_of("kv_cache_config.tokens_per_block") == 3
    assert file.line_of("kv_cache_config.dtype") == 2
    assert file.line_of("attn_backend") == 1
    assert DisaggFile().context_servers.num_instances == 1

"""What SCD needs of TensorRT-LLM: every requirement can fail, says why, and is told apart from advice."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from scd_trt.deploy import requirements, scd_section
from scd_trt.deploy.check import FileReport, check_files
from scd_trt.deploy.render import render, write

ROOT = Path(__file__).parents[1]
PAIR = ROOT / "engine_configs" / "llama-3.1-8b-instruct" / "pair.yaml"


@pytest.fixture
def rendered(tmp_path: Path) -> Path:
    write(render(PAIR, "h200-ib", tmp_path))
    return tmp_path


def with_setting(path: Path, key: str, value: object) -> Path:
    """The file with one dotted key set."""
    data = yaml.safe_load(path.read_text())
    section = data
    *sections, last = key.split(".")
    for name in sections:
        section[name] = section.get(name) or {}
        section = section[name]
    section[last] = value
    path.write_text(yaml.safe_dump(data))
    return path


def without_setting(path: Path, key: str) -> Path:
    """The file without one dotted key."""
    data = yaml.safe_load(path.read_text())
    section = data
    *sections, last = key.split(".")
    for name in sections:
        section = section[name]
    del section[last]
    path.write_text(yaml.safe_dump(data))
    return path


def wrong_keys(report: FileReport) -> set[str]:
    assert not report.mistakes
    return {finding.key for finding in report.findings if not finding.ok}


WRONG_SERVER_SETTINGS: list[tuple[str, object]] = [
    ("kv_connector_config.connector_module", "lmcache"),
    ("kv_connector_config.connector_scheduler_class", "Other"),
    ("kv_connector_config.connector_worker_class", "Other"),
    ("kv_connector_config.connector", "lmcache"),
    ("kv_cache_config.enable_partial_reuse", True),
    ("kv_cache_config.host_cache_size", 1 << 30),
    ("kv_cache_config.disk_cache_size", 1 << 30),
    ("kv_cache_config.use_kv_cache_manager_v2", "auto"),
    ("kv_cache_config.tokens_per_block", None),
    ("kv_cache_config.dtype", "nvfp4"),
    ("kv_cache_config.dtype", "fp8"),
    ("kv_cache_config.max_attention_window", [512, 4096]),
    ("pipeline_parallel_size", 2),
    ("context_parallel_size", 2),
    ("max_beam_width", 4),
    ("enable_attention_dp", True),
    ("speculative_config", {"decoding_type": "NGram"}),
    ("sparse_attention_config", {"algorithm": "rocket"}),
    ("kv_cache_compression_config", {"algorithm": "triattention"}),
    ("enable_lora", True),
    ("lora_config", {"lora_dir": ["x"]}),
    ("attn_backend", "FLASHINFER"),
    ("scheduler_config.capacity_scheduler_policy", "MAX_UTILIZATION"),
    ("cache_transceiver_config.backend", "NIXL"),
    ("prefill_cuda_graph_backend", "piecewise"),
    ("torch_compile_config.enable_piecewise_cuda_graph", True),
    ("return_perf_metrics", False),
]


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(("key", "value"), WRONG_SERVER_SETTINGS, ids=lambda value: str(value)[:40])
def test_wrong_setting_is_found_alone(rendered: Path, role: str, key: str, value: object) -> None:
    (report,) = check_files([with_setting(rendered / f"{role}.yaml", key, value)])
    assert wrong_keys(report) == {key}
    assert not report.ok


@pytest.mark.parametrize(
    ("role", "key", "value", "ok"),
    [
        ("prefill", "disable_overlap_scheduler", False, False),
        ("prefill", "cuda_graph_config", {"max_batch_size": 8}, True),
        ("decode", "kv_cache_config.enable_block_reuse", True, False),
    ],
)
def test_settings_of_one_role(rendered: Path, role: str, key: str, value: object, ok: bool) -> None:
    (report,) = check_files([with_setting(rendered / f"{role}.yaml", key, value)])
    assert wrong_keys(report) == {key}
    assert report.ok == ok
    other = "decode" if role == "prefill" else "prefill"
    (report,) = check_files([with_setting(rendered / f"{other}.yaml", key, value)])
    assert wrong_keys(report) == set()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_is_written_must_stand_there(rendered: Path, role: str) -> None:
    """A default that happens to be right is not enough: it differs between versions."""
    path = rendered / f"{role}.yaml"
    original = path.read_text()
    for item in requirements.SERVER:
        if item.value is not requirements.UNSET and role in item.roles:
            (report,) = check_files([without_setting(path, item.key)])
            assert wrong_keys(report) == {item.key}
            path.write_text(original)


def test_every_requirement_was_seen_to_fail() -> None:
    one_role = {"disable_overlap_scheduler", "cuda_graph_config", "kv_cache_config.enable_block_reuse"}
    tried = {key for key, _ in WRONG_SERVER_SETTINGS} | one_role
    assert {item.key for item in requirements.SERVER} == tried
    assert {item.key for item in requirements.DISAGG} == {key for key, _, _ in WRONG_DISAGG_SETTINGS}
    assert {item.key for item in requirements.GROUP} == {key for key, *_ in WRONG_GROUPS}


WRONG_DISAGG_SETTINGS: list[tuple[str, str, object]] = [
    ("scd", "scd", None),
    ("context_servers.urls", "context_servers", {"num_instances": 1}),
    ("schedule_style", "schedule_style", "generation_first"),
    ("scd.workers", "scd.workers.prefill.control_urls", []),
    ("scd.workers", "scd.workers.prefill.control_urls", ["elsewhere:8101"]),
    ("scd.transport.backend", "scd.transport.backend", "loopback"),
    ("scd.control.secret_file", "scd.control", {}),
    ("scd.transport.device", "scd.transport.device", None),
]


@pytest.mark.parametrize(
    ("key", "changed", "value"), WRONG_DISAGG_SETTINGS, ids=[row[0] for row in WRONG_DISAGG_SETTINGS]
)
def test_wrong_setting_of_the_disaggregated_file(rendered: Path, key: str, changed: str, value: object) -> None:
    path = with_setting(rendered / "disagg.yaml", "scd.transport.device", "mlx5_0:1")
    assert wrong_keys(check_files([path])[0]) == set()
    (report,) = check_files([with_setting(path, changed, value)])
    assert key in wrong_keys(report)
    assert report.ok == (key == "scd.transport.device")


def test_loopback_needs_neither_secret_nor_device(tmp_path: Path) -> None:
    write(render(ROOT / "engine_configs" / "smollm2-qa" / "pair.yaml", "tcp", tmp_path))
    (report,) = check_files([tmp_path / "disagg.yaml"])
    assert wrong_keys(report) == set()


def test_discovery_takes_the_place_of_urls(rendered: Path) -> None:
    path = with_setting(rendered / "disagg.yaml", "disagg_cluster", {"cluster_uri": "etcd://etcd:2379"})
    for section in ("context_servers", "generation_servers"):
        with_setting(path, section, {})
    with_setting(path, "scd.workers", {})
    (report,) = check_files([path])
    assert wrong_keys(report) == {"scd.transport.device"}


WRONG_GROUPS: list[tuple[str, str, str, object, str]] = [
    ("scd.tokens_per_block", "decode", "kv_cache_config.tokens_per_block", 64, "prefill 32, decode 64, scd 32"),
    ("generation_servers.tensor_parallel_size", "prefill", "tensor_parallel_size", 2, "prefill 2, decode 1"),
    ("scd.consumer.dtype", "decode", "dtype", "float16", "bfloat16 for bfloat16, float16 for bfloat16"),
]


@pytest.mark.parametrize(
    ("key", "role", "changed", "value", "shown"), WRONG_GROUPS, ids=[row[0] for row in WRONG_GROUPS]
)
def test_files_that_do_not_fit_together(
    rendered: Path, key: str, role: str, changed: str, value: object, shown: str
) -> None:
    with_setting(rendered / f"{role}.yaml", changed, value)
    reports = check_files(sorted(rendered.glob("*.yaml")))
    (disagg,) = [report for report in reports if report.kind == "disagg"]
    assert not disagg.ok
    assert [finding.found for finding in disagg.findings if finding.key == key] == [shown]
    alone = check_files([rendered / "disagg.yaml"])[0]
    assert alone.ok, "one file cannot contradict itself"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("prefill.yaml", "prefill"),
        ("ctx_extra.yaml", "prefill"),
        ("decode-2.yaml", "decode"),
        ("gen-config.yaml", "decode"),
    ],
)
def test_role_is_in_the_name(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / name
    path.write_text("max_batch_size: 4\n")
    (report,) = check_files([path])
    assert report.kind == kind
    assert not report.ok


@pytest.mark.parametrize("name", ["worker.yaml", "generic.yaml", "prefill-decode.yaml"])
def test_role_that_cannot_be_told_is_asked_for(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("max_batch_size: 4\n")
    (report,) = check_files([path])
    assert report.kind == "unknown"
    assert "options of which worker?" in report.mistakes[0]
    (report,) = check_files([path], role="decode")
    assert report.kind == "decode"


def test_one_malformed_file_does_not_hide_another(rendered: Path) -> None:
    (rendered / "prefill.yaml").write_text("kv_cache_config: {enable_partial_resue: false}\n")
    reports = check_files([rendered / "prefill.yaml", rendered / "nowhere.yaml", rendered / "decode.yaml", PAIR])
    assert [report.ok for report in reports] == [False, False, True, True]
    assert "did you mean 'enable_partial_reuse'?" in reports[0].mistakes[0]
    assert "cannot be read" in reports[1].mistakes[0]
    assert reports[3].kind == "pair"


def test_connector_classes_exist_under_the_names_that_are_rendered() -> None:
    # read, not imported: importing the connector takes the time of importing torch
    spec = importlib.util.find_spec(requirements.CONNECTOR_MODULE)
    assert spec is not None
    assert spec.origin is not None
    classes = {node.name for node in ast.parse(Path(spec.origin).read_text()).body if isinstance(node, ast.ClassDef)}
    assert {requirements.SCHEDULER_CLASS, requirements.WORKER_CLASS} <= classes


def test_names_of_environment_variables_stand_in_one_place() -> None:
    names = [value for name, value in vars(scd_section).items() if name.endswith("_VARIABLE")]
    for file in (ROOT / "scd_trt").rglob("*.py"):
        strings = {node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)}
        assert file.name == "scd_section.py" or not strings & set(names), file


def test_reasons_read_as_clauses() -> None:
    for item in (*requirements.SERVER, *requirements.DISAGG, *requirements.GROUP):
        assert not item.why.endswith(".")
        assert item.why[0].islower() or item.why.startswith(("TensorRT-LLM", "UCX")), item.why


def run(*arguments: str, status: int) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "scd_trt.cli", "config", "check", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"COLUMNS": "200"},
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_command_explains_and_exits_with_two_on_violations(rendered: Path) -> None:
    files = [str(rendered / name) for name in ("prefill.yaml", "decode.yaml", "disagg.yaml")]
    text = run(*files, status=0)
    assert "  ok       kv_cache_config.enable_partial_reuse: false (needs false)" in text
    assert "otherwise a prompt may start in the middle of a block" in text
    with_setting(rendered / "decode.yaml", "attn_backend", "VANILLA")
    brief = run("--brief", *files, status=2)
    assert f"  WRONG    {rendered}/decode.yaml:1: attn_backend: VANILLA; needs left out or TRTLLM" in brief
    assert "  ok " not in brief
    report = json.loads(run("--json", *files, status=2))
    assert not report["ok"]
    assert [file["ok"] for file in report["files"]] == [True, False, True]
    (wrong,) = [item for item in report["files"][1]["findings"] if not item["ok"]]
    assert wrong["key"] == "attn_backend"
    assert wrong["line"] == 1

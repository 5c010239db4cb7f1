"""Rendered files: the committed ones are fresh, the same input gives the same bytes, nobody's edits are lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from scd_trt.config import ConfigError, load_pair
from scd_trt.deploy import requirements
from scd_trt.deploy.check import check_files
from scd_trt.deploy.commented_yaml import Entry, comment_lines, dump
from scd_trt.deploy.profiles import PROFILES, ProfileError
from scd_trt.deploy.render import RenderedFile, RenderError, is_untouched, render, write
from scd_trt.deploy.stock_files import load_disagg

CONFIGS = Path(__file__).parents[1] / "engine_configs"
DEMO = CONFIGS / "smollm2-qa" / "pair.yaml"
PRODUCTION = ("llama-3.1-8b-instruct", "mistral-7b-lite", "qwen2.5-coder-7b-instruct")
COMMITTED = sorted([(pair, profile) for pair in PRODUCTION for profile in PROFILES] + [("smollm2-qa", "tcp")])


@pytest.mark.parametrize(("pair", "profile"), COMMITTED)
def test_committed_files_equal_a_fresh_render(pair: str, profile: str) -> None:
    for file in render(CONFIGS / pair / "pair.yaml", profile):
        fresh = f"scd-trt config render engine_configs/{pair}/pair.yaml --profile {profile}"
        assert file.path.read_text(encoding="utf-8") == file.text, f"run: {fresh}"


def test_every_committed_profile_is_rendered_by_these_tests() -> None:
    found = {path.relative_to(CONFIGS).parts for path in CONFIGS.glob("*/*/*")}
    expected = {(*which, f"{name}.yaml") for which in COMMITTED for name in ("prefill", "decode", "disagg")}
    assert found == expected


def test_the_page_for_operators_names_what_is_committed() -> None:
    page = (CONFIGS.parent / "docs" / "tensorrt-llm.md").read_text()
    for pair, profile in COMMITTED:
        assert pair in page
        assert profile in page


def test_every_file_in_engine_configs_loads_and_suits_scd() -> None:
    reports = check_files(sorted(CONFIGS.rglob("*.yaml")))
    assert [(str(report.path), report.mistakes) for report in reports if not report.ok] == []
    assert [report.path for report in reports if report.passed] == []
    assert {report.kind for report in reports} == {"pair", "prefill", "decode", "disagg"}


def test_scd_section_says_what_the_pair_file_says() -> None:
    for pair, profile in COMMITTED:
        config = load_pair(CONFIGS / pair / "pair.yaml")
        section = load_disagg(CONFIGS / pair / profile / "disagg.yaml").options.scd
        assert section is not None
        assert (section.producer, section.consumer) == (config.producer, config.consumer)
        assert section.translator_path() == config.translator_path()
        assert section.control == config.control
        assert section.tokens_per_block == config.engine.tokens_per_block
        assert section.transport.lane == PROFILES[profile].lane


def test_every_setting_that_is_written_for_scd_carries_its_reason() -> None:
    texts = {
        role: (CONFIGS / "llama-3.1-8b-instruct" / "tcp" / f"{role}.yaml").read_text() for role in requirements.ROLES
    }
    said_once = {"kv_connector_config.connector_scheduler_class", "kv_connector_config.connector_worker_class"}
    for item in requirements.SERVER:
        for role in item.roles:
            written = item.value is not requirements.UNSET or item.key == "kv_cache_config.tokens_per_block"
            if written and item.key not in said_once:
                key = item.key.split(".")[-1]
                above = re.search(rf"((?:^ *# .*\n)+) *{key}: ", texts[role], re.M)
                assert above, f"{role}: {item.key}"
                assert item.why in re.sub(r"\n *# ", " ", above.group(1)), f"{role}: {item.key}"


def test_same_input_in_two_places_gives_the_same_bytes(tmp_path: Path) -> None:
    texts = []
    for place in ("a", "b"):
        shutil.copytree(CONFIGS / "smollm2-qa", tmp_path / place / "configs")
        texts.append([file.text for file in render(tmp_path / place / "configs" / "pair.yaml", "tcp")])
    assert texts[0] == texts[1]
    assert str(tmp_path) not in "".join(texts[0])


def test_relative_paths_lead_to_the_same_files_from_the_new_place(tmp_path: Path) -> None:
    write(render(DEMO, "tcp", tmp_path / "deep" / "er"))
    section = load_disagg(tmp_path / "deep" / "er" / "disagg.yaml").options.scd
    assert section is not None
    assert section.consumer.adapter == load_pair(DEMO).consumer.adapter


def pair_with(tmp_path: Path, addition: str) -> Path:
    path = tmp_path / "pair.yaml"
    text = re.sub(r"^(transport|servers|store|control|method):\n(?:  .*\n)+", "", DEMO.read_text(), flags=re.M)
    path.write_text(text + addition)
    return path


def test_pair_file_wins_over_the_profile_except_for_the_lane(tmp_path: Path) -> None:
    pair = pair_with(
        tmp_path,
        """\
transport: {lane: shm, device: eth7, window: 3, write_timeout_s: 9.5}
store: {capacity_bytes: 1000, ttl_s: 5}
control: {lease_s: 12, secret_file: keys/secret}
servers: {router: {port: 9000, decision: {objective: latency}}}
translator: ../fitted
""",
    )
    write(render(pair, "h200-ib"))
    file = load_disagg(tmp_path / "h200-ib" / "disagg.yaml")
    section = file.options.scd
    assert section is not None
    assert (section.transport.lane, section.transport.device, section.transport.window) == ("auto", "eth7", 3)
    assert section.transport.write_timeout_s == 9.5
    assert section.transport.arena_bytes == PROFILES["h200-ib"].arena_bytes
    assert (section.store.capacity_bytes, section.store.ttl_s, section.control.lease_s) == (1000, 5, 12)
    assert section.control.secret_file == tmp_path / "keys" / "secret"
    assert section.translator_path() == tmp_path.parent / "fitted"
    assert (file.options.port, section.router.decision.objective) == (9000, "latency")


@pytest.mark.parametrize(
    ("method", "reuse"),
    [("policy: rd", True), ("policy: paper", False), ("policy: rd, modes: [transform, patch]", False)],
)
def test_prefill_reuses_no_blocks_where_patch_layers_need_their_input(tmp_path: Path, method: str, reuse: bool) -> None:
    prefill, *_ = render(pair_with(tmp_path, f"method: {{{method}}}\n"), "tcp")
    assert yaml.safe_load(prefill.text)["kv_cache_config"]["enable_block_reuse"] is reuse


def test_what_cannot_be_rendered_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="profile 'h100': unknown; known profiles: h200-ib, tcp, gb200"):
        render(DEMO, "h100")
    with pytest.raises(RenderError, match=r"transport\.backend is loopback"):
        render(pair_with(tmp_path, "transport: {backend: loopback}\n"), "tcp")
    everywhere = "servers: {decode: {host: 0.0.0.0, port: 8002, control_port: 8102}}\n"
    with pytest.raises(RenderError, match=r"servers\.decode\.host is 0\.0\.0\.0; give the name"):
        render(pair_with(tmp_path, everywhere), "tcp")
    with pytest.raises(ConfigError, match="cannot be read"):
        render(tmp_path / "nowhere.yaml", "tcp")


def test_edited_files_are_kept_all_or_nothing(tmp_path: Path) -> None:
    files = render(DEMO, "tcp", tmp_path)
    assert [file.state for file in write(files)] == ["written"] * 3
    assert [file.state for file in write(files)] == ["unchanged"] * 3
    edited = tmp_path / "decode.yaml"
    edited.write_text(edited.read_text().replace("max_batch_size: 128", "max_batch_size: 64"))
    before = {path: path.read_text() for path in tmp_path.iterdir()}
    other = render(DEMO, "h200-ib", tmp_path)
    with pytest.raises(RenderError, match=r"decode\.yaml: edited since it was rendered.*--force"):
        write(other)
    assert {path: path.read_text() for path in tmp_path.iterdir()} == before
    assert [file.state for file in write(other, force=True)] == ["replaced"] * 3
    assert edited.read_text() == other[1].text


def test_untouched_older_files_are_replaced_and_foreign_ones_kept(tmp_path: Path) -> None:
    write(render(DEMO, "tcp", tmp_path))
    assert [file.state for file in write(render(DEMO, "gb200", tmp_path))] == ["replaced"] * 3
    (tmp_path / "prefill.yaml").write_text("max_batch_size: 4\n")
    with pytest.raises(RenderError, match=r"prefill\.yaml"):
        write(render(DEMO, "gb200", tmp_path))
    (tmp_path / "prefill.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(RenderError, match="cannot be read"):
        write(render(DEMO, "gb200", tmp_path), force=True)


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RenderError, match="choose another --out"):
        write([RenderedFile(tmp_path / "file" / "decode.yaml", "x")])


@settings(deadline=None)
@given(st.text(alphabet="ab: #\n'", max_size=30))
def test_any_edit_of_a_rendered_file_is_noticed(edit: str) -> None:
    text = (CONFIGS / "smollm2-qa" / "tcp" / "prefill.yaml").read_text()
    assert is_untouched(text)
    assert not edit or not is_untouched(text + edit)
    assert not is_untouched(edit)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12)
keys = st.text(alphabet="abcdefg_", min_size=1, max_size=6)
documents = st.recursive(
    scalars | st.lists(scalars, max_size=3),
    lambda inner: st.dictionaries(keys, inner, min_size=1, max_size=3),
    max_leaves=8,
)


def entries(data: dict[str, object]) -> tuple[Entry, ...]:
    def value(item: object) -> object:
        if isinstance(item, dict):
            return entries(item)
        return tuple(item) if isinstance(item, list) else item

    return tuple(Entry(key, value(item), "why: # it is\nso") for key, item in data.items())  # type: ignore[arg-type]


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(keys, documents, min_size=1, max_size=4))
def test_commented_yaml_means_what_its_entries_say(data: dict[str, object]) -> None:
    assert yaml.safe_load(dump(entries(data))) == data


def test_ipv6_addresses_are_bracketed(tmp_path: Path) -> None:
    pair = pair_with(tmp_path, 'servers: {prefill: {host: "fd00::7", port: 8001, control_port: 8101}}\n')
    write(render(pair, "tcp"))
    options = load_disagg(tmp_path / "tcp" / "disagg.yaml").options
    assert options.context_servers.urls == ("[fd00::7]:8001",)
    assert options.scd is not None
    assert options.scd.workers.prefill.control_urls == ("[fd00::7]:8101",)


def test_commands_in_headings_are_never_wrapped(tmp_path: Path) -> None:
    long = "/models/" + "x" * 150
    pair = pair_with(tmp_path, "")
    pair.write_text(re.sub(r"consumer:\n(  .*\n)+", f"consumer: {{model: {long}}}\n", pair.read_text()))
    command = f"#   trtllm-serve {long} --host 127.0.0.1 --port 8002 --extra_llm_api_options decode.yaml\n"
    assert command in render(pair, "tcp")[1].text


def test_comments_are_wrapped_and_never_become_content() -> None:
    lines = comment_lines("word " * 60 + "\n\nnext", "  ")
    assert all(line.startswith("  #") and len(line) <= 118 for line in lines)
    assert lines[-2:] == ["  #", "  # next"]


def run(command: str, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "scd_trt.cli", "config", command, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"COLUMNS": "200"},
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def test_command_renders_refuses_and_forces(tmp_path: Path) -> None:
    out = ["--profile", "tcp", "--out", str(tmp_path / "new")]
    dry = run("render", str(DEMO), *out, "--dry-run")
    assert not (tmp_path / "new").exists()
    assert "SCD needs this; otherwise" in dry.stdout
    assert f"# ---- {tmp_path}/new/decode.yaml" in dry.stdout
    write(render(DEMO, "tcp", tmp_path / "new"))
    (tmp_path / "new" / "disagg.yaml").write_text("port: 1\n")
    assert "--force" in run("render", str(DEMO), *out, status=2).stderr
    states = json.loads(run("render", str(DEMO), *out, "--force", "--json").stdout)
    assert states[str(tmp_path / "new" / "disagg.yaml")] == "replaced"
    assert states[str(tmp_path / "new" / "decode.yaml")] == "unchanged"


def test_command_names_the_directories_that_trtllm_serve_can_load(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    pair = tmp_path / "pair.yaml"
    pair.write_text(
        "name: demo\nproducer: {model: a}\nconsumer: {model: b}\ncalibration: {source: t}\nheldout: {source: t}\n"
    )
    assert json.loads(run("models", str(pair), "--json").stdout) == {
        "producer": str(tmp_path / "a"),
        "consumer": str(tmp_path / "b"),
    }
    # the rendered file asks for a directory, or says how to get one
    assert "trtllm-serve ../a --host" in render(pair, "tcp")[0].text
    assert "scd-trt config models ../pair.yaml" in render(DEMO, "tcp")[0].text

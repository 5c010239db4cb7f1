"""The command line: what it prints, in which form, and with which exit code."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from serving_pairs import TinyPair, complete, write_pair

from scd_trt import translator as translators
from scd_trt.deploy.scd_section import CONFIG_VARIABLE
from scd_trt.deploy.served_pair import load_served_pair
from scd_trt.model_spec import ModelSpec
from scd_trt.serving.launcher import serving_group
from scd_trt.translator import TENSORS_FILE, RawLayer


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return write_pair(tmp_path_factory.mktemp("cli"), policy="paper")


@pytest.fixture(scope="module")
def distilled(pair: TinyPair) -> TinyPair:
    run("distill", str(pair.file))
    return pair


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """A pair whose artifact sends the cache as it is: made here, not distilled."""
    pair = write_pair(tmp_path_factory.mktemp("exact"), policy="exact", same_model=True)
    spec = ModelSpec.from_directory(pair.producer)
    manifest = {
        "name": pair.config.name,
        "policy": "exact",
        "code_dtype": "float32",
        "raw_dtype": "float32",
        "producer": spec,
        "consumer": spec,
        "groups": tuple((layer, layer + 1) for layer in range(spec.num_layers)),
    }
    translators.save(translators.build(manifest, (RawLayer(),) * spec.num_layers), pair.config.translator_path())
    return pair


def run(
    *arguments: str, status: int = 0, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, as a user runs it; the exit status is part of the contract."""
    done = subprocess.run(
        [sys.executable, "-m", "scd_trt.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"COLUMNS": "200"} | (environment or {}),
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def test_help_teaches_and_names_every_command() -> None:
    text = run("--help").stdout
    for command in ("distill", "evaluate", "serve", "inspect", "check", "demo"):
        assert command in text


def test_check_explains_and_exits_with_two(pair: TinyPair, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(pair.file.read_text().replace("policy: paper", "policy: papr"))
    assert "pair.yaml: ok" in run("check", str(pair.file)).stdout
    report = json.loads(run("check", "--json", str(pair.file), str(wrong), status=2).stdout)
    assert report[str(pair.file)] == {"ok": True, "errors": []}
    assert "did you mean 'paper'?" in report[str(wrong)]["errors"][0]


def test_dry_run_says_what_would_be_done_and_writes_nothing(pair: TinyPair, tmp_path: Path) -> None:
    elsewhere = tmp_path / "pair.yaml"
    elsewhere.write_text(pair.file.read_text().replace(str(pair.config.translator), str(tmp_path / "translator")))
    planned = json.loads(run("distill", str(elsewhere), "--dry-run", "--json").stdout)
    assert planned["forward_tokens"] > 0
    assert list(tmp_path.iterdir()) == [elsewhere]


def test_distil_then_inspect(distilled: TinyPair) -> None:
    shown = json.loads(run("inspect", str(distilled.config.translator), "--json").stdout)
    assert shown["bytes_per_token"] < shown["dense_bytes_per_token"]
    assert [layer["mode"] for layer in shown["layers"]].count("patch") <= 1
    again = json.loads(run("distill", str(distilled.file), "--json").stdout)
    assert again["fingerprint"] == shown["fingerprint"]
    assert "bytes per token" in run("inspect", str(distilled.config.translator)).stdout


def test_evaluate_measures_what_its_dry_run_says(distilled: TinyPair, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--task", "text", "--items", "2", "--controls", "scd,raw", "--out"]
    words = ["evaluate", str(distilled.file), *options, str(out)]
    expected = json.loads(run(*words, "--dry-run", "--json").stdout)
    assert [(row["name"], row["num_items"]) for row in expected["rows"]] == [("text@64", 2)]
    assert not out.exists()
    found = json.loads(run(*words, "--json").stdout)
    assert list(found["tables"]["text@64"]) == ["oracle", "raw", "scd", "no_cache"]
    assert found["tables"]["text@64"]["scd"]["bytes_per_token"] == expected["bytes_per_token"]
    assert (out / "results.md").exists()
    shown = run(*words).stdout
    assert "KL to oracle" in shown
    assert str(out / "results.md") in shown


@pytest.mark.parametrize(
    ("option", "value", "cure"),
    [
        ("--task", "txt", "did you mean 'text'?"),
        ("--items", "text=none", "whole number of at least 2"),
        ("--controls", "scdd", "did you mean 'scd'?"),
    ],
)
def test_evaluate_explains_wrong_words(distilled: TinyPair, tmp_path: Path, option: str, value: str, cure: str) -> None:
    done = run("evaluate", str(distilled.file), option, value, "--out", str(tmp_path / "out"), status=2)
    assert cure in done.stderr
    assert "Traceback" not in done.stderr


def test_frontier_is_printed_and_modes_are_shown(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, policy="rd", method={"group_layers": 2, "fisher_tokens": 64})
    planned = json.loads(run("distill", str(pair.file), "--frontier", "--dry-run", "--json").stdout)
    assert planned["weighing_tokens"] == 128
    assert planned["estimated_s"] > 0
    shown = run("distill", str(pair.file), "--frontier").stdout
    assert "Loss by size of the codes" in shown
    assert "64x" in shown
    assert "limit: no limit was stated; a tenth of the cache, 76 bytes, is kept: 76 bytes per token" in shown
    again = json.loads(run("distill", str(pair.file), "--frontier", "--json").stdout)
    assert [point["ratio"] for point in again["frontier"]] == [4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64]
    assert again["quality"]["limit"]["bytes_per_token"] == 76
    artifact = run("inspect", str(pair.config.translator)).stdout
    assert "Modes (predicted nats per token" in artifact
    assert "Transforms everywhere were predicted to cost least." in artifact


def test_inspect_model(pair: TinyPair) -> None:
    assert json.loads(run("inspect", str(pair.consumer), "--json").stdout)["num_layers"] == 3


@pytest.mark.parametrize("target", ["/nowhere/at/all", "package:no-such-model"])
def test_wrong_targets_are_named_without_a_trace(target: str) -> None:
    done = run("inspect", target, status=2)
    assert target.removeprefix("package:") in done.stderr
    assert "Traceback" not in done.stderr


def test_port_in_use_is_named(distilled: TinyPair) -> None:
    port = distilled.config.servers.router.port
    with socket.create_server(("127.0.0.1", port)):
        done = run("serve", "router", str(distilled.file), status=2)
    assert f"127.0.0.1:{port}" in done.stderr
    assert "servers.router.port" in done.stderr


def test_the_disaggregated_file_alone_serves_a_pair(exact: TinyPair, tmp_path: Path) -> None:
    run("config", "render", str(exact.file), "--profile", "tcp", "--out", str(tmp_path))
    disagg = tmp_path / "disagg.yaml"
    config = load_served_pair(disagg)
    with serving_group(disagg, config, log_directory=tmp_path / "logs") as children:
        answer = complete(children["router"].url, list(range(4, 68)), model=config.name, max_tokens=4)
    assert answer["usage"]["scd"]["fallback"] is None
    assert answer["usage"]["scd"]["bytes_sent"] > 0


def test_serving_takes_the_file_that_the_environment_names(exact: TinyPair, tmp_path: Path) -> None:
    run("config", "render", str(exact.file), "--profile", "tcp", "--out", str(tmp_path))
    port = exact.config.servers.router.port
    for file in (exact.file, tmp_path / "disagg.yaml"):
        with socket.create_server(("127.0.0.1", port)):
            done = run("serve", "router", status=2, environment={CONFIG_VARIABLE: str(file)})
        assert f"cannot listen on 127.0.0.1:{port}" in done.stderr


def test_serving_without_a_translator_says_how_to_make_one(pair: TinyPair, tmp_path: Path) -> None:
    elsewhere = tmp_path / "pair.yaml"
    elsewhere.write_text(pair.file.read_text().replace(str(pair.config.translator), str(tmp_path / "translator")))
    assert "scd-trt distill" in run("serve", "decode", str(elsewhere), status=2).stderr


def test_truncated_artifact_is_refused(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, policy="paper")
    run("distill", str(pair.file))
    tensors = pair.config.translator_path() / TENSORS_FILE
    tensors.write_bytes(tensors.read_bytes()[:-1])
    done = run("serve", "prefill", str(pair.file), status=2)
    assert "truncated or edited" in done.stderr
    assert "Traceback" not in done.stderr


def test_translator_of_another_pair_is_refused(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, policy="paper")
    run("distill", str(pair.file))
    swapped = tmp_path / "swapped.yaml"
    text = pair.file.read_text()
    swapped.write_text(
        text.replace(str(pair.producer), "X")
        .replace(str(pair.consumer), str(pair.producer))
        .replace("X", str(pair.consumer))
    )
    done = run("serve", "prefill", str(swapped), status=2)
    assert "translator of another producer" in done.stderr


def test_pair_of_different_shape_is_refused(tmp_path: Path) -> None:
    from tiny_models import save_tiny_model

    pair = write_pair(tmp_path, policy="paper")
    save_tiny_model(tmp_path / "deeper", num_hidden_layers=4)
    other = tmp_path / "other.yaml"
    other.write_text(pair.file.read_text().replace(str(pair.consumer), str(tmp_path / "deeper")))
    done = run("distill", str(other), status=2)
    assert "num_layers" in done.stderr
    assert "3" in done.stderr
    assert "4" in done.stderr


def test_empty_calibration_text_is_refused(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, policy="paper")
    for file in (tmp_path / "texts").iterdir():
        file.write_text("")
    done = run("distill", str(pair.file), status=2)
    assert "0 tokens" in done.stderr or "no " in done.stderr
    assert "Traceback" not in done.stderr

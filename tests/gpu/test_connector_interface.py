"""The installed TensorRT-LLM against the recorded connector interface and against our classes."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from gpu_host import missing_for_api

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(missing_for_api()), reason=missing_for_api()),
    # TensorRT-LLM and what it imports warn of their own deprecations
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
]
MANIFEST = json.loads((Path(__file__).parents[1] / "trtllm_connector_api.json").read_text())
RECORDED = MANIFEST["1.2.x"]
HALVES = {"Worker": "KvCacheConnectorWorker", "Scheduler": "KvCacheConnectorScheduler"}


@pytest.fixture(scope="module")
def api() -> ModuleType:
    import tensorrt_llm  # noqa: F401 - what makes this process a host

    from scd_trt.serving.trtllm import load_api

    return load_api()


def arguments(method: Any) -> list[str]:
    return [name for name in inspect.signature(method).parameters if name != "self"]


def added(half: str) -> set[str]:
    """Methods that newer lines are known to have beside the recorded ones."""
    found = MANIFEST["main~1.4"][f"{half.lower()}_added"]
    documented = {text.partition("(")[0] for text in found.get("documented_in_newer_doc_only", [])}
    return documented | (found.keys() - {"documented_in_newer_doc_only"})


@pytest.mark.parametrize("half", HALVES)
def test_recorded_methods_are_there_with_their_arguments(api: ModuleType, half: str) -> None:
    theirs, recorded = getattr(api, HALVES[half]), RECORDED[HALVES[half]]
    differing = {
        name: (arguments(getattr(theirs, name)) if hasattr(theirs, name) else "missing", expected)
        for name, expected in (recorded["abstract"] | recorded["concrete"]).items()
        if not hasattr(theirs, name) or arguments(getattr(theirs, name)) != expected
    }
    assert not differing, f"TensorRT-LLM {importlib.metadata.version('tensorrt_llm')}: name -> (found, recorded)"


@pytest.mark.parametrize("half", HALVES)
def test_no_method_must_be_implemented_that_we_do_not_know(api: ModuleType, half: str) -> None:
    theirs = getattr(api, HALVES[half])
    assert set(theirs.__abstractmethods__) <= RECORDED[HALVES[half]]["abstract"].keys() | added(half)


@pytest.mark.parametrize("half", HALVES)
def test_our_classes_derive_from_theirs_and_can_be_built(api: ModuleType, half: str) -> None:
    from scd_trt.serving import connector

    ours = getattr(connector, f"ScdConnector{half}")
    assert issubclass(ours, getattr(api, HALVES[half]))
    assert not inspect.isabstract(ours)


@pytest.mark.parametrize("name", ["RequestData", "SchedulerOutput"])
def test_data_classes_have_the_recorded_fields(api: ModuleType, name: str) -> None:
    found = {field.name for field in dataclasses.fields(getattr(api, name))}
    assert set(RECORDED[name]) <= found
    unknown = found - set(RECORDED[name]) - set(MANIFEST["main~1.4"].get(f"{name}_added", []))
    assert not unknown, "fields that are not recorded: read what they mean before serving with this version"


def test_the_configuration_has_the_recorded_keys() -> None:
    from tensorrt_llm.llmapi.llm_args import KvCacheConnectorConfig

    recorded = RECORDED["KvCacheConnectorConfig"]["fields"].keys()
    assert recorded <= KvCacheConnectorConfig.model_fields.keys()


def test_rendered_options_are_accepted(tmp_path: Path) -> None:
    """TensorRT-LLM refuses unknown engine options itself: the committed files must get past that."""
    import yaml
    from tensorrt_llm.llmapi.llm_args import TorchLlmArgs

    root = Path(__file__).parents[2] / "engine_configs"
    for file in sorted(root.glob("*/*/prefill.yaml")) + sorted(root.glob("*/*/decode.yaml")):
        TorchLlmArgs(model="model", **yaml.safe_load(file.read_text()))
